"""What is told of a training step, whichever loop made it: metrics, a dump of rollouts, a line on the display."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from rollwright.config.experiment import PPOConfig
from rollwright.errors import WeightUpdateError
from rollwright.experience.trajectory import Trajectory
from rollwright.trainers.evaluation import sample_means
from rollwright.trainers.stage_run import StageRun
from rollwright.training.actor import FSDPPPOActor


def report_step(
    run: StageRun, step: int, batch: Trajectory, stats: Mapping[str, float], version: int, waiting: str = "generate"
) -> float:
    """Log a step that was made, and show it.

    Args:
        run: the stage's records.
        step: its number, from 1.
        batch: what was trained on.
        stats: of ``ppo_update``.
        version: published after the step.
        waiting: the phase in which the batch came, by which sampled tokens are counted.

    Returns:
        The mean reward of the batch's samples.
    """
    rewards = sample_means(batch, batch["rewards"])
    sampled = float(batch["loss_mask"].sum())
    lengths = batch["attention_mask"].sum(1).float()
    seconds = run.timer.export()
    versions = batch["versions"][batch["loss_mask"].bool()]
    staleness = float((version - 1 - versions).float().mean()) if len(versions) else 0.0
    reward = float(rewards.mean())
    generation = sampled / seconds[waiting] if seconds.get(waiting) else 0.0
    training = float(lengths.sum()) / seconds["train"] if seconds.get("train") else 0.0
    run.log(
        step,
        {
            "reward": reward,
            "reward/std": float(rewards.std(unbiased=False)),
            "samples": float(len(rewards)),
            "response_tokens": sampled / len(rewards),
            "sequence_tokens": float(lengths.mean()),
            "truncated": float(sample_means(batch, batch["truncated"].float()).mean()),
            "staleness": staleness,
            "version": float(version),
            "tokens_per_second/generate": generation,
            "tokens_per_second/train": training,
            **{f"seconds/{name}": value for name, value in seconds.items()},
            **{f"actor/{name}": value for name, value in stats.items()},
            **{f"workflow/{name}": value for name, value in workflow_metrics(batch).items()},
            **run.tracker.export(reset=True),
        },
    )
    run.dumper.dump(step, batch)
    run.display.step(
        step,
        reward,
        generate_tokens_per_second=generation,
        train_tokens_per_second=training,
        staleness=staleness,
        seconds=seconds,
    )
    return reward


def workflow_metrics(batch: Trajectory) -> dict[str, float]:
    """Means of the numbers that experiences carry as ``metrics``, each over the rows that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in batch.get("details", ()):
        for name, value in row.get("metrics", {}).items():
            values[name].append(float(value))
    return {name: sum(each) / len(each) for name, each in sorted(values.items())}


def check_agreement(config: PPOConfig, actor: FSDPPPOActor, step: int, stats: Mapping[str, float]) -> None:
    """Refuse to go on with an engine that does not compute with the published weights.

    Raises:
        WeightUpdateError: its log-probabilities of tokens of the current version differ by more than the limit.
    """
    difference = stats.get("logprob_difference/mean")
    limit = config.rollout.logprob_tolerance or (1e-3 if actor.compute_dtype == torch.float32 else 5e-2)
    if difference is not None and difference > limit:
        raise WeightUpdateError(
            f"step {step}: the {config.rollout.backend} engine's log-probabilities differ from the trainer's by "
            f"{difference:.2e} on average for tokens of the current version (limit {limit:.0e}): it does not compute with "
            "the published weights. Check the engine's dtype and weight update; rollout.logprob_tolerance sets the limit."
        )
