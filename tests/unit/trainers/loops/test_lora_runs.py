"""Runs that train an adapter: sampled with it, published, saved and resumed without its base."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rollwright import GRPOConfig
from rollwright.config.experiment import EvalConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.loading import build_stages
from rollwright.config.sections import (
    ClusterConfig,
    EvaluatorConfig,
    LoraConfig,
    OptimizerConfig,
    PPOActorConfig,
    RecoverConfig,
    RolloutConfig,
    StatsLoggerConfig,
)
from rollwright.config.source import parse_yaml
from rollwright.config.tasksets import DatasetConfig
from rollwright.data.arithmetic import arithmetic
from rollwright.trainers.loops.evaluation import evaluate_model
from rollwright.trainers.loops.rl import PPOTrainer
from rollwright.trainers.stages import run_config

peft = pytest.importorskip("peft")

ROWS = arithmetic(split="train", digits=1, size=16)


def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def config_of(tiny_model, root, steps, mode="auto", **keys):
    return GRPOConfig(
        experiment_name="lora",
        total_train_steps=steps,
        actor=PPOActorConfig(path=str(tiny_model), lora=LoraConfig(rank=4), optimizer=OptimizerConfig(lr=1e-2), kl_ctl=0.01),
        gconfig=GenerationHyperparameters(n_samples=4, max_new_tokens=6, temperature=0.7),
        train_dataset=DatasetConfig(path="arithmetic", batch_size=2),
        workflow="rollwright.workflows.rlvr.RLVRWorkflow",
        cluster=ClusterConfig(fileroot=str(root)),
        recover=RecoverConfig(mode=mode, every_steps=1),
        stats_logger=StatsLoggerConfig(display="none", dump_rollouts=0),
        **keys,
    )


def trained(config):
    with PPOTrainer(config, ROWS, ROWS[:2] if config.evaluator.every_steps else None) as trainer:
        result = trainer.train(workflow_kwargs={"reward_fn": share_of_digits})
        records = [json.loads(line) for line in trainer.directory.metrics_file.read_text().splitlines()]
    return result, [record for record in records if "actor/loss" in record]


@pytest.mark.slow
def test_each_version_samples_as_it_is_trained_and_a_resumed_run_is_the_same(tiny_model, tmp_path):
    result, steps = trained(config_of(tiny_model, tmp_path / "whole", 4, deterministic=True))
    for step in steps:  # version 0 is the base
        assert step["actor/logprob_difference/max"] < 1e-4
    assert steps[-1]["actor/kl"] > 0
    trained(config_of(tiny_model, tmp_path / "parts", 2, deterministic=True))
    again, _ = trained(config_of(tiny_model, tmp_path / "parts", 4, mode="resume", deterministic=True))
    files = [load_file(f"{each['checkpoint']}/adapter_model.safetensors") for each in (result, again)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert any(tensor.any() for name, tensor in files[0].items() if "lora_B" in name)


def test_samples_of_several_versions_train_together(tiny_model, tmp_path):
    rollout = RolloutConfig(max_head_offpolicyness=2)
    _, steps = trained(config_of(tiny_model, tmp_path, 4, rollout=rollout, evaluator=EvaluatorConfig(every_steps=2)))
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step.get("actor/logprob_difference/max", 0.0) < 1e-4


def test_a_warm_up_is_evaluated_with_its_adapter_and_so_is_its_checkpoint(tiny_model, tmp_path):
    text = f"""
kind: sft
experiment_name: warm
trial_name: up
model: {{path: {tiny_model}, lora: {{rank: 8}}, optimizer: {{lr: 3.0e-2}}}}
train_dataset: {{path: arithmetic, kwargs: {{digits: 1, size: 4}}, batch_size: 4}}
valid_dataset: {{path: arithmetic, kwargs: {{digits: 1, size: 4}}}}
workflow: rlvr
reward_fn: numeric_reward
evaluator: {{every_steps: 20, gconfig: {{max_new_tokens: 6}}}}
total_train_steps: 40
cluster: {{fileroot: {tmp_path}, threads: 1}}
stats_logger: {{display: none}}
"""
    (stage,) = build_stages(parse_yaml(text), [])
    assert run_config([stage]) == 0
    final = tmp_path / "warm" / "up" / "checkpoints" / "final"
    assert (final / "adapter_config.json").exists()
    assert not (final / "config.json").exists()
    records = [json.loads(line) for line in (tmp_path / "warm" / "up" / "metrics.jsonl").read_text().splitlines()]
    found = [record["eval/reward"] for record in records if "eval/reward" in record]
    config = EvalConfig(
        path=str(final),
        workflow="rlvr",
        reward_fn="numeric_reward",
        dataset=DatasetConfig(path="arithmetic", kwargs={"digits": 1, "size": 4}),
        gconfig=GenerationHyperparameters(max_new_tokens=6),
    )
    assert evaluate_model(config)["greedy"] == pytest.approx(found[-1])


@pytest.mark.slow
def test_a_server_samples_with_each_published_adapter(tiny_model, tmp_path):
    rollout = RolloutConfig(backend="builtin_process", max_head_offpolicyness=1)
    config = config_of(tiny_model, tmp_path, 3, rollout=rollout)
    result, steps = trained(config)
    compared = [step["actor/logprob_difference/max"] for step in steps if "actor/logprob_difference/max" in step]
    assert compared
    assert max(compared) < 1e-4
    assert sum(file.nbytes for file in load_file(f"{result['checkpoint']}/adapter_model.safetensors").values()) < 1e6
