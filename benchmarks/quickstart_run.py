"""A training run of the quickstart's size, which several benchmarks look at: two-digit sums, 64 tasks × 8 samples a step."""

from __future__ import annotations

from typing import Any

SAMPLES = 64 * 8  # of a step


def quickstart_run(root: str, steps: int, **settings: Any) -> Any:
    """Its trainer, with a new model; the run is ``root/quickstart/run``.

    Args:
        root: a directory.
        steps: to train.
        settings: further keys of the config.
    """
    from rollwright.config.experiment import GRPOConfig, NewModelConfig
    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.config.sections import ClusterConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig, StatsLoggerConfig
    from rollwright.config.tasksets import DatasetConfig
    from rollwright.data.datasets import get_dataset
    from rollwright.trainers.loops.rl import PPOTrainer
    from rollwright.trainers.stages import make_model

    model = NewModelConfig(
        path=f"{root}/model",
        kv_heads=2,
        max_position_embeddings=128,
        characters="0123456789+-*= ",
        pieces=["<answer>", "</answer>"],
    )
    make_model(model)
    config = GRPOConfig(
        experiment_name="quickstart",
        trial_name="run",
        cluster=ClusterConfig(fileroot=root),
        stats_logger=StatsLoggerConfig(display="none"),
        workflow="rollwright.workflows.rlvr.RLVRWorkflow",
        reward_fn="numeric_reward",
        gconfig=GenerationHyperparameters(n_samples=8, max_new_tokens=32, temperature=0.7),
        actor=PPOActorConfig(path=model.path, optimizer=OptimizerConfig(), mb_spec=MicroBatchSpec(), ppo_n_minibatches=4),
        train_dataset=DatasetConfig(path="arithmetic", split="train", batch_size=64, kwargs={"digits": 2}),
        total_train_steps=steps,
        **settings,
    )
    return PPOTrainer(config, get_dataset(config.train_dataset, model.path))


def share_of_digits(prompt, completions, prompt_ids, completion_ids, **row) -> float:
    """Another reward than the run's, for a replay."""
    return sum(character.isdigit() for character in completions) / max(1, len(completions))
