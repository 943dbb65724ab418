"""Operators of the config stand between sampling and training in mode both, and batches stay full."""

from __future__ import annotations

import json
import time

import pytest

from rollwright import GRPOConfig
from rollwright.config.modes import OperatorConfig, StoreConfig
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.experience.operators import OPERATORS, ExperienceOperator
from rollwright.trainers.loops.rl import PPOTrainer

pytestmark = pytest.mark.slow


@OPERATORS.register_module("test_every_second_task")
class EverySecondTask(ExperienceOperator):
    """Drops whole tasks, so that others have to be drawn."""

    def __init__(self) -> None:
        self.tasks = 0

    def process(self, experiences):
        self.tasks += 1
        return ([] if self.tasks % 2 else experiences), {"tasks": 1.0}


def digits(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data) -> float:
    return float(sum(character.isdigit() for character in completion))


digits.runs_inline = True


def test_groups_that_operators_drop_are_replaced(tiny_model, tmp_path):
    config = GRPOConfig(
        experiment_name="operators",
        total_train_steps=1,
        train_dataset=DatasetConfig(batch_size=2),
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3)),
        store=StoreConfig(
            operators=[
                OperatorConfig("test_every_second_task", {}),
                OperatorConfig("overlong_shaping", {"max_length": 4, "buffer": 4, "penalty": 100.0}),
            ]
        ),
        workflow="rollwright.workflows.rlvr.RLVRWorkflow",
    )
    config.gconfig = config.gconfig.new(n_samples=2, max_new_tokens=4)
    config.cluster.fileroot = str(tmp_path)
    config.stats_logger.display = "none"
    tasks = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    with PPOTrainer(config, tasks) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": digits})
    (line,) = (json.loads(line) for line in (tmp_path / "operators" / "trial" / "metrics.jsonl").read_text().splitlines())
    assert line["samples"] == 4.0
    assert line["operators/dropped/test_every_second_task"] >= 4.0  # the rows of at least two tasks
    assert line["reward"] < 0.0  # nobody is rewarded below 0 but by the punishment


def test_an_explorer_tells_what_they_did(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy")
    from rollwright.trainers.modes.explore import Explorer
    from rollwright.trainers.modes.shared_run import claim_part

    config = GRPOConfig(
        experiment_name="operators",
        trial_name="explored",
        mode="explore",
        total_train_steps=1,
        train_dataset=DatasetConfig(path="arithmetic", batch_size=2, kwargs={"digits": 1}),
        actor=PPOActorConfig(path=str(tiny_model)),
        store=StoreConfig(
            operators=[
                OperatorConfig("test_every_second_task", {}),
                OperatorConfig("overlong_shaping", {"max_length": 4, "buffer": 4, "penalty": 100.0}),
            ]
        ),
        workflow="rollwright.workflows.rlvr.RLVRWorkflow",
        reward_fn="numeric_reward",
    )
    config.gconfig = config.gconfig.new(n_samples=2, max_new_tokens=4)
    config.cluster.fileroot = str(tmp_path)
    config.stats_logger.display = "none"
    with claim_part(config) as directory, Explorer(config, directory) as explorer:
        finish = explorer.store.tasks.finish

        def finish_slowly(*task, **told):  # the store has the last group a while before it is counted
            kept = finish(*task, **told)
            time.sleep(1.0)
            return kept

        monkeypatch.setattr(explorer.store.tasks, "finish", finish_slowly)
        assert explorer.explore()["groups"] >= 2  # no trainer: it ends when the groups of the one step are stored
    (line,) = (json.loads(line) for line in directory.metrics_file.read_text().splitlines())
    assert line["operators/dropped/test_every_second_task"] >= 2.0
    assert line["operators/overlong_shaping/punished_share"] == 1.0
