"""An explorer whose tokens come from a server that runs already: a real process of ``rollwright serve-model``."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sqlalchemy")

from mode_processes import BATCH, Run
from real_servers import served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, SAMPLES = 6, 4


@pytest.fixture
def run(warm, tmp_path, tiny_model):
    made = Run(warm, tmp_path, tiny_model, STEPS)
    yield made
    made.stop()


def test_experiences_of_a_server_have_its_versions_and_it_follows_the_trainer(run, tiny_model, tmp_path):
    """Also when the trainer is killed and goes back: each batch is sampled with the weights of the step before."""
    with served_model(tiny_model, tmp_path / "logs") as (servers, client):
        explore = "mode=explore", "store={}", "rollout.backend=sglang", f"rollout.addresses=[{servers.addresses[0]}]"
        run.let_tasks(3 * BATCH + 1)  # the fourth step, and the checkpoint after it, have to wait
        explorer, trainer = run.start(*explore), run.start("mode=train", "store={}")
        ahead = "select 1 from groups, checkpoints where groups.version = 3 and checkpoints.version = 2"
        run.kill_while(trainer, lambda: run.rows(ahead) and not run.rows("select 1 from checkpoints where version > 2"))
        trainer = run.start("mode=train", "store={}")
        run.finished(explorer, trainer)
        # At 2, or at 3 made anew where the explorer came late to look.
        assert re.search("the trainer went back behind version 3, and is at [23]", run.log(explorer))
        (server,) = client.servers.router.servers
        assert client.backend.read_version(server) == str(STEPS)  # the last weights are there, too

    stored = run.rows(
        "select uses.batch, min(experiences.version), max(experiences.version), count(*) from uses "
        "join experiences on experiences.group_id = uses.group_id group by uses.batch order by uses.batch"
    )
    assert stored == [(batch, batch, batch, BATCH * SAMPLES) for batch in range(STEPS)]
    steps = run.metrics("trainer")
    assert [step["actor/staleness/max"] for step in steps] == [0] * STEPS
    # Log-probabilities of the server's tokens are those of the trainer's weights: it does compute with each version.
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert steps[-1]["actor/grad_norm"] > 0


def test_an_explorer_does_not_begin_with_the_weights_of_another_run(run, tiny_model, tmp_path):
    with served_model(tiny_model, tmp_path / "logs") as (servers, client):
        (server,) = client.servers.router.servers
        client.backend.label_version(server, 7)  # what another run left behind
        explorer = run.start(
            "mode=explore", "store={}", "rollout.backend=sglang", f"rollout.addresses=[{servers.addresses[0]}]"
        )
        run.until(lambda: "waiting for the trainer's first weights" in run.log(explorer), explorer)
        assert run.rows("select * from tasks") == []
        trainer = run.start("mode=train", "store={}", "total_train_steps=1")
        run.until((run.trial / "trainer" / "checkpoints" / "final").exists)
        trainer.wait()
        assert trainer.returncode == 0, run.log(trainer)
    versions = run.rows("select distinct version from experiences where group_id in (select group_id from uses)")
    assert versions == [(0,)]
