"""Reports of a training loop: metrics, times, rollout dumps, the display, and each step's journal records."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollwright.config.experiment import BaseExperimentConfig
from rollwright.config.loading import config_to_dict, save_config
from rollwright.experience.journal.records import Phase, Published, Trained
from rollwright.experience.journal.writing import Journal
from rollwright.experience.packed import unpacked
from rollwright.experience.players import rows_by_role, trainable_rows
from rollwright.experience.trajectory import Trajectory, row_lengths, sampled_tokens
from rollwright.placement.ranks import trained_rows
from rollwright.tracking import logging
from rollwright.tracking.metrics import get_tracker, start_timer
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.plots import plot_reward_curve
from rollwright.tracking.progress import ProgressDisplay
from rollwright.tracking.rollout_dumps import RolloutDumper
from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.sinks import MetricsLogger
from rollwright.training.publish_and_audit import Publication

logger = logging.getLogger("trainer")


@dataclass
class EvaluationResult:
    """Result of an evaluation. Rewards are per sample."""

    reward: float  # mean over samples
    tasks: int
    samples: int
    truncated: float  # share of samples cut by a length limit
    response_tokens: float  # mean number of sampled tokens per sample
    trajectory: Trajectory  # rows in the order of the tasks; a packed batch on a Ray cluster
    by_taskset: Mapping[str, float] = field(default_factory=dict)  # mean over the samples of each taskset, if there are several


class StageRun:
    """Writes the metrics, logs, rollout dumps and display of one stage of a run.

    Args:
        config: config of the stage.
        directory: directory of the stage, claimed by the caller.
        total_steps: steps of the stage, for the display.
        resume_step: number of steps made before the stage was resumed. None if the stage is new.
        tokenizer: decodes the rollout dumps.
        value_name: metric of the main curve, ``reward`` or ``loss``.
        journal: receives a record of what each step trained on. If None, no such records are written.

    Attributes:
        metrics: writes ``metrics.jsonl`` and the other sinks.
        dumper: writes a few readable rows of a batch.
    """

    def __init__(
        self,
        config: BaseExperimentConfig,
        directory: RunDirectory,
        *,
        total_steps: int,
        resume_step: int | None,
        tokenizer: Any,
        value_name: str = "reward",
        journal: Journal | None = None,
    ) -> None:
        self.journal = journal
        self.config = config
        self.directory = directory
        self.timer = start_timer()
        self.tracker = get_tracker()
        self.tracker.export(reset=True)  # drop what an earlier stage of this process left
        self.value_name = value_name
        self._exit = ExitStack()
        logger_config = config.stats_logger
        name = f"{config.experiment_name}/{config.trial_name}"
        self._exit.callback(logging.detach_file, logging.attach_file(directory.logs / "run.log"))
        self.metrics = self._exit.enter_context(
            MetricsLogger(
                directory.metrics_file,
                logger_config.sinks,
                project=logger_config.project or config.experiment_name,
                run_name=name,
                config=config_to_dict(config),
                resume_step=resume_step,
            )
        )
        self.display = ProgressDisplay(
            total_steps,
            title=name,
            mode=logger_config.display,
            value_name=value_name,
            start_step=resume_step or 0,
            timer=self.timer,
        )
        rollouts = logger_config.dump_rollouts
        self.dumper = RolloutDumper(directory.rollouts, tokenizer, rollouts, for_programs=journal is None)
        save_config(config, directory.path / "config.yaml")

    def __enter__(self) -> StageRun:
        self._exit.enter_context(self.display)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.timer.write_chrome_trace(self.directory.trace_file)
        except OSError as failed:  # nothing depends on the trace, and the error that ended the run matters more
            logger.warning("%s cannot be written: %s", self.directory.trace_file, failed)
        self._exit.close()

    def facts(self, metrics: Mapping[str, float]) -> dict[str, float | str]:
        """Return the metrics that ``stats_logger.show`` adds to the display."""
        return {name: metrics.get(name, "–") for name in self.config.stats_logger.show}

    def report_evaluation(self, step: int, result: EvaluationResult, reported: Mapping[str, float] | None = None) -> None:
        """Log and show an evaluation, together with the metrics ``reported`` while it ran."""
        scores = {f"eval/{name}": getattr(result, name) for name in ("reward", "truncated", "response_tokens")}
        scores |= {f"eval/reward/{name}": value for name, value in result.by_taskset.items()}
        scores |= {f"eval/{name}": value for name, value in role_metrics(result.trajectory).items()}
        self.metrics.log(step, {**(reported or {}), **scores})
        self.display.evaluation(step, result.reward)
        self.dumper.dump(step, result.trajectory, "eval", unpacked)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the ``(step, value)`` pairs of one metric that have been written so far."""
        records = read_metrics(self.directory.metrics_file)
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    def plot(self, title: str) -> Path | None:
        """Plot reward and evaluations to ``reward.png``. Returns None if matplotlib is not installed."""
        return plot_reward_curve(
            self.directory.path / "reward.png",
            self.curve(self.value_name),
            self.curve("eval/reward"),
            title=title,
        )


def report_step(
    run: StageRun,
    step: int,
    batch: Trajectory,
    stats: Mapping[str, float],
    version: int,
    sampling: Sequence[str],
    publication: Publication | None = None,
    ended: Mapping[str, float] | None = None,
) -> float:
    """Log, journal and display a step, and return the mean reward of the batch's samples.

    Args:
        run: records of the stage.
        step: number of the step, counted from 1.
        batch: the batch that was trained on.
        stats: metrics of ``ppo_update``.
        version: version of the weights after the step.
        sampling: phases of a step in which tokens are sampled; their seconds give the sampling rate.
        publication: transfer of ``version`` to the engines. None if the version was not published.
        ended: how samples and groups ended since the last step, by name of the metric.
    """
    rewards = sample_means(batch, batch["rewards"])
    sampled = float(sampled_tokens(batch).sum())
    lengths = row_lengths(batch).float()
    seconds, began = run.timer.export(), run.timer.beginnings()
    reward = float(rewards.mean())
    generating = sum(seconds.get(phase, 0.0) for phase in sampling)
    generation = sampled / generating if generating else 0.0
    training = float(lengths.sum()) / seconds["train"] if seconds.get("train") else 0.0
    metrics = {
        "reward": reward,
        "reward/std": float(rewards.std(unbiased=False)),
        "samples": float(len(rewards)),
        "response_tokens": sampled / len(rewards),
        "sequence_tokens": float(lengths.mean()),
        "truncated": float(sample_means(batch, batch["truncated"].float()).mean()),
        **role_metrics(batch),
        "version": float(version),
        "tokens_per_second/generate": generation,
        "tokens_per_second/train": training,
        **{f"seconds/{name}": value for name, value in seconds.items()},
        **{name if name.startswith("critic/") else f"actor/{name}": value for name, value in stats.items()},
        **{f"workflow/{name}": value for name, value in workflow_metrics(batch).items()},
        **(ended or {}),
        **run.tracker.export(reset=True),
    }
    run.metrics.log(step, metrics)
    if run.journal is not None:
        journal_step(run.journal, step, batch, stats, version, publication)
        for name, taken in seconds.items():
            run.journal.write(Phase(step, name, taken, began.get(name, 0.0)), may_hold_secrets=False)
    run.dumper.dump(step, batch, "step", unpacked)
    run.display.step(
        step,
        reward,
        generate_tokens_per_second=generation,
        train_tokens_per_second=training,
        staleness=stats.get("staleness/mean"),
        seconds=seconds,
        facts=run.facts(metrics),
    )
    return reward


def journal_step(
    journal: Journal,
    step: int,
    batch: Trajectory,
    stats: Mapping[str, float],
    version: int,
    publication: Publication | None = None,
) -> None:
    """Write the rows of a step, the trainer's scores of their tokens, and the publication after the step to the journal."""
    of_row = (batch[key].tolist() for key in ("group_ids", "sample_ids", "rewards"))
    for *row, trained in zip(*of_row, trained_rows(batch), strict=True):
        journal.write(Trained(step, *row, *trained), may_hold_secrets=False)
    audit = {name: float(value) for name, value in stats.items() if name.startswith("logprob_difference/")}
    record = Published(step, version, audit, time.time())
    if publication is not None:
        record.way, record.seconds, record.bytes = publication.way, publication.seconds, publication.size
        record.engines = publication.engines
    journal.write(record, may_hold_secrets=False)


def workflow_metrics(batch: Trajectory) -> dict[str, float]:
    """Average each of the experiences' ``metrics`` over the rows that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in batch.get("details", ()):
        for name, value in row.get("metrics", {}).items():
            values[name].append(float(value))
    return {name: sum(each) / len(each) for name, each in sorted(values.items())}


def sample_means(trajectory: Trajectory, values_B: Tensor) -> Tensor:
    """Average a per-row value within each sample, over the rows of players that are trained (of all, if none of the sample's is).

    Returns shape ``[samples]``: a sample counts once, however many rows it has.
    """
    keys = torch.stack([trajectory["group_ids"], trajectory["sample_ids"]], dim=1)
    _, index_B = keys.unique(dim=0, return_inverse=True)
    count = int(index_B.max()) + 1
    weights_B = trainable_rows(trajectory).double()
    has_none = torch.zeros(count, dtype=torch.float64).index_add_(0, index_B, weights_B) == 0
    weights_B = torch.where(has_none[index_B], torch.ones_like(weights_B), weights_B)
    totals, weights = (
        torch.zeros(count, dtype=torch.float64).index_add_(0, index_B, each)
        for each in (values_B.double() * weights_B, weights_B)
    )
    return totals / weights


def role_metrics(batch: Trajectory) -> dict[str, float]:
    """Return the mean reward, the sampled tokens and the number of rows of each role that is trained; empty without roles."""
    tokens, metrics = sampled_tokens(batch), dict[str, float]()
    for name, rows in rows_by_role(batch).items():
        metrics[f"reward/{name}"] = float(batch["rewards"][rows].mean())
        metrics[f"response_tokens/{name}"] = float(tokens[rows].float().mean())
        metrics[f"rows/{name}"] = float(len(rows))
    return metrics
