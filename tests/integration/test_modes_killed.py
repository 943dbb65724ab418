"""A trainer that takes the freshest first, killed with SIGKILL and started again; tests/faults kills those that take the oldest."""

from __future__ import annotations

from collections import defaultdict

import pytest

pytest.importorskip("sqlalchemy")

from mode_processes import BATCH, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def run_of(warm, tmp_path, tiny_model):
    runs = []

    def make(steps: int) -> Run:
        runs.append(Run(warm, tmp_path, tiny_model, steps))
        return runs[-1]

    yield make
    for run in runs:
        run.stop()


def trained_groups(run: Run) -> dict[int, list[int]]:
    """Ordinals of each batch that was trained on."""
    batches = defaultdict(list)
    for batch, ordinal in run.rows("select uses.batch, groups.ordinal from uses join groups on groups.id = uses.group_id"):
        batches[batch].append(ordinal)
    return {batch: sorted(ordinals) for batch, ordinals in sorted(batches.items())}


def test_a_restart_that_trains_the_freshest_first(run_of):
    """What was used after the checkpoint competes again, and some of it was sampled by weights that a restart took back."""
    run = run_of(10)
    run.let_tasks(0)
    settings = (
        "store={order: freshest, lease_seconds: 4.0}",
        "rollout.max_head_offpolicyness=3",
        "rollout.weight_update_every_steps=2",
        "recover.every_steps=3",
    )
    explorers = [run.start("mode=explore", *settings) for _ in range(2)]
    trainer = run.start("mode=train", *settings)
    uncommitted = "select group_id from uses where checkpoint is null"
    run.kill_while(trainer, lambda: run.rows("select 1 from checkpoints") and len(run.rows(uncommitted)) >= 2 * BATCH)
    undone = run.rows(uncommitted)
    trainer = run.start("mode=train", *settings)
    run.finished(trainer, *explorers)

    assert f"{len(undone)} uses of experiences are made again" in run.log(trainer)
    ordinals = [ordinal for batch in trained_groups(run).values() for ordinal in batch]
    assert len(ordinals) == len(set(ordinals)) == 10 * BATCH
    (ends,) = run.rows(
        "select count(*), sum(state = 1 and uses in (0, 1)), sum(state = 2 and dropped_by = 'stale') from groups"
    )
    assert ends[0] == ends[1] + (ends[2] or 0)  # used once, waiting, or dropped for its age and counted
    steps = run.metrics("trainer")
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert max(step["actor/staleness/max"] for step in steps) <= 3
    published = [version for (version,) in run.rows("select version from versions order by version")]
    assert published[0] == 0
    assert published[-1] == 10
    assert set(published) <= {0, 2, 3, 4, 6, 8, 9, 10}  # every second, and where the trainer began again
