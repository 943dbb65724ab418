"""`examples/own_loop.py` makes the numbers of the trainer, step by step."""

import dataclasses

import own_loop

from rollwright import PPOTrainer, get_dataset
from rollwright.config.sections import ClusterConfig, StatsLoggerConfig
from rollwright.tracking.metrics_file import read_metrics


def small(model, root):
    """The example's settings with fewer and shorter samples; random weights still differ between them, so rewards are lengths."""
    config = own_loop.settings(str(model), steps=3)
    return dataclasses.replace(
        config,
        reward_fn=longer_is_better,
        workflow_kwargs={"reward_fn": longer_is_better},
        cluster=ClusterConfig(fileroot=str(root)),
        stats_logger=StatsLoggerConfig(display="none", dump_rollouts=0),
        train_dataset=dataclasses.replace(config.train_dataset, batch_size=3),
        gconfig=dataclasses.replace(config.gconfig, n_samples=2, max_new_tokens=6),
    )


def longer_is_better(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / 6


def test_its_metrics_are_the_trainers(tmp_path, tiny_model):
    config = small(tiny_model, tmp_path / "runs")
    with PPOTrainer(config, get_dataset(config.train_dataset, str(tiny_model))) as trainer:
        trainer.train(workflow="rollwright.workflows.rlvr.RLVRWorkflow", workflow_kwargs={"reward_fn": longer_is_better})
    theirs = read_metrics(tmp_path / "runs/experiment/trial/metrics.jsonl")
    ours = list(own_loop.train(small(tiny_model, tmp_path), save_to=str(tmp_path / "model")))
    assert len(theirs) == len(ours) == 3
    assert any(each["advantage/abs_mean"] > 0 for each in ours)
    for their, our in zip(theirs, ours, strict=True):
        assert our.pop("reward") == their["reward"]
        metrics = {name.removeprefix("actor/"): value for name, value in their.items() if name.startswith("actor/")}
        assert metrics.pop("optimizer_steps") == 1.0
        assert our == metrics
    final = trainer_weights(tmp_path / "runs/experiment/trial/checkpoints/final")
    assert final == trainer_weights(tmp_path / "model")


def trainer_weights(directory):
    return (directory / "model.safetensors").read_bytes()
