"""Operators on groups in tensor form, and the store's batches as trajectories."""

from __future__ import annotations

import torch

from rollwright.config.modes import OperatorConfig
from rollwright.experience.contract import check_trajectory
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.experience.operators import OPERATORS, ExperienceOperator, GroupOperators, joined_samples, samples_of
from rollwright.rollout.task_group import SAMPLE_BITS
from rollwright.store import Batch, StoredGroup
from rollwright.tracking.metrics import MetricsTracker
from rollwright.trainers.loops.reporting import workflow_metrics
from rollwright.trainers.modes.train_from_store import trajectory_of


def experience(reward: float, length: int = 3, **fields) -> Experience:
    response = list(range(10, 10 + length))
    return Experience(
        tokens=[1, 2, *response],
        prompt_length=2,
        reward=reward,
        logprobs=[-0.5] * length,
        versions=[4] * length,
        temperature=0.7,
        truncated=False,
        **fields,
    )


def group_of(*samples: list[Experience]):
    return joined_samples(samples, group_id=7, first_sample=100)


def test_a_group_survives_the_way_through_experiences():
    before = group_of([experience(1.0), experience(0.5, 5)], [experience(0.0, 2)])
    check_trajectory(before)
    assert before["sample_ids"].tolist() == [100, 100, 101]
    after = joined_samples(samples_of(before, 3), 7, 100)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key], key


def test_operators_change_rewards_and_drop_rows_in_place():
    tracker = MetricsTracker()
    shape = {"reward_shaping_configs": [{"stats_key": "speed", "op_type": "ADD", "weight": 2.0}]}
    operators = GroupOperators(
        [OperatorConfig("reward_shaping", shape), OperatorConfig("reward_filter", {"threshold": 1.0})], tracker
    )
    group = group_of([experience(1.0, info={"speed": 1.5})], [experience(0.0, info={"speed": 0.0})])
    assert operators(group)
    check_trajectory(group)
    assert group["rewards"].tolist() == [4.0]
    assert group["sample_ids"].tolist() == [100]
    assert group["group_ids"].tolist() == [7]
    assert tracker.export()["operators/dropped/reward_filter"] == 1.0


def test_a_group_with_nothing_left_is_refused():
    operators = GroupOperators([OperatorConfig("no_variance_filter", {})], MetricsTracker())
    assert not operators(group_of([experience(1.0)], [experience(1.0)]))
    assert operators(group_of([experience(1.0)], [experience(0.0)]))


def test_a_users_operator_sees_what_the_workflow_noted():
    seen = []

    @OPERATORS.register_module("test_noting")
    class Noting(ExperienceOperator):
        def process(self, experiences):
            seen.extend(each.info["note"] for each in experiences)
            return experiences, {}

    assert GroupOperators([OperatorConfig("test_noting", {})], MetricsTracker())(
        group_of([experience(1.0, info={"note": "x"})])
    )
    assert seen == ["x"]


def test_metrics_of_workflows_are_averaged_over_the_rows_that_have_them():
    group = group_of([experience(1.0, metrics={"steps": 2.0})], [experience(1.0, metrics={"steps": 4.0, "bought": 1.0})])
    assert workflow_metrics(group) == {"bought": 1.0, "steps": 3.0}


def test_a_batch_of_the_store_numbers_groups_and_samples():
    def stored(number: int, *runs: int) -> StoredGroup:
        rows = [experience(float(run), eid=ExperienceId(task=number, run=run)) for run in runs]
        return StoredGroup(number, f"task/{number}", number, 0, 4, 1, True, rows)

    batch = trajectory_of(Batch(0, [stored(5, 0, 0, 1), stored(9, 0, 1)]))
    check_trajectory(batch)
    assert batch["group_ids"].tolist() == [5, 5, 5, 9, 9]  # as in the store: no other batch has them, before a resume or after
    five, nine = 5 << SAMPLE_BITS, 9 << SAMPLE_BITS
    assert batch["sample_ids"].tolist() == [five, five, five + 1, nine, nine + 1]
