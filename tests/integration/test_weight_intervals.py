"""Weights that move every few steps, in one process: versions and ages of what is trained, and what is put off until then."""

from __future__ import annotations

import json

import pytest

from rollwright.config.experiment import GRPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import (
    ClusterConfig,
    EvaluatorConfig,
    OptimizerConfig,
    PPOActorConfig,
    RecoverConfig,
    RolloutConfig,
    StatsLoggerConfig,
)
from rollwright.config.tasksets import DatasetConfig
from rollwright.data.arithmetic import arithmetic
from rollwright.trainers.loops.rl import PPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH = 2


def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def trained(
    tmp_path, tiny_model, *, every: int, offset: int = 0, steps: int = 5, backend: str = "builtin", **keys
) -> PPOTrainer:
    config = GRPOConfig(
        experiment_name="intervals",
        total_train_steps=steps,
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3)),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=4),
        train_dataset=DatasetConfig(path="arithmetic", batch_size=BATCH),
        workflow="rollwright.workflows.rlvr.RLVRWorkflow",
        rollout=RolloutConfig(
            backend=backend, weight_update_every_steps=every, max_head_offpolicyness=every - 1 + offset, max_sample_retries=0
        ),
        cluster=ClusterConfig(fileroot=str(tmp_path)),
        stats_logger=StatsLoggerConfig(display="none", dump_rollouts=0),
        **keys,
    )
    rows = arithmetic(split="train", digits=1, size=32)
    with PPOTrainer(config, rows, rows[:2]) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": share_of_digits})
        return trainer


def steps_of(trainer: PPOTrainer) -> list[dict[str, float]]:
    records = map(json.loads, trainer.directory.metrics_file.read_text().splitlines())
    return [record for record in records if "actor/loss" in record]


@pytest.mark.parametrize("backend", ["builtin", "builtin_process"])
def test_the_steps_up_to_a_publication_train_on_what_one_version_sampled(tmp_path, tiny_model, backend):
    trainer = trained(
        tmp_path,
        tiny_model,
        every=2,
        backend=backend,
        recover=RecoverConfig(every_steps=1, keep=9),
        evaluator=EvaluatorConfig(every_steps=3, gconfig=GenerationHyperparameters(max_new_tokens=4)),
    )
    steps = steps_of(trainer)
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["actor/staleness/mean"] for step in steps] == [0, 1, 0, 1, 0]  # versions 0, 0, 2, 2, 4
    assert all("actor/logprob_difference/mean" in step for step in steps[::2])  # on policy: compared with the engine
    assert trainer.recover.steps() == [2, 4, 5]  # a checkpoint holds no batch that is half trained
    records = map(json.loads, trainer.directory.metrics_file.read_text().splitlines())
    assert [record["step"] for record in records if "eval/reward" in record] == [4, 5]  # due at 3, by the weights of 4


def test_sampling_ahead_stays_within_its_bound(tmp_path, tiny_model):
    steps = steps_of(trained(tmp_path, tiny_model, every=2, offset=1, steps=8))
    ages = [step["actor/staleness/max"] for step in steps]
    assert max(ages) <= 2
    assert ages[1] == 1
