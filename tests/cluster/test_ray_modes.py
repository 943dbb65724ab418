"""What a run on a Ray cluster can be told beside the plain one: sampling that runs ahead, and evaluation on the way."""

from __future__ import annotations

import pytest
from ranks_runs import metrics, run, trial

from rollwright.experience.journal.files import read_records
from rollwright.experience.journal.records import Begin, GroupEnd

pytest.importorskip("ray", reason="the extra `ray` is not installed")

PLACED = ("cluster.kind=ray", "cluster.workers=2", "rollout.backend=builtin_process")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sampling_runs_ahead_and_evaluates_on_the_way(grpo, cluster):
    steps, ahead = 4, 2
    held_out = "valid_dataset={path: arithmetic, split: test, limit: 6, kwargs: {digits: 2}}"
    run(
        *(grpo, "grpo.yaml", *PLACED, f"cluster.address={cluster}", f"total_train_steps={steps}"),
        *(
            f"rollout.max_head_offpolicyness={ahead}",
            held_out,
            "evaluator={every_steps: 2, at_start: true, gconfig: {max_new_tokens: 8}}",
        ),
    )
    directory = trial(grpo, "trial")
    made = metrics(directory)
    assert 0 < max(made[step]["actor/staleness/max"] for step in range(1, steps + 1)) <= ahead
    assert [step for step, values in made.items() if "eval/reward" in values] == [0, 2, 4]
    ends, begun = [], {}
    for place, record in read_records(directory / "journal"):
        if isinstance(record, GroupEnd):
            ends.append(record)
        elif isinstance(record, Begin):
            begun.setdefault(record.is_eval, set()).add(place.writer)
    assert sorted(end.ordinal for end in ends if end.state == "delivered" and not end.is_eval) == list(range(5 * steps))
    assert sorted(end.ordinal for end in ends if end.is_eval) == sorted([*range(6)] * 3)
    assert len(begun[False]) == 2  # both workers
    assert not begun[True] & begun[False]  # held-out tasks are run by the process that decides
