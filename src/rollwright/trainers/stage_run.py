"""What a training loop writes while it runs: its directory, metrics, times, dumps and display, opened and closed together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollwright.config.experiment import BaseExperimentConfig
from rollwright.config.loading import config_to_dict, save_config
from rollwright.tracking import logging
from rollwright.tracking.metrics import get_tracker
from rollwright.tracking.plots import plot_reward_curve
from rollwright.tracking.progress import ProgressDisplay
from rollwright.tracking.rollout_dumps import RolloutDumper
from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.sinks import MetricsLogger, read_metrics
from rollwright.tracking.timers import PhaseTimer


class StageRun:
    """The records of one stage of a run.

    Args:
        config: the stage's config.
        directory: where it writes; None: ``<fileroot>/<experiment>/<trial>``, claimed here and released at the end.
        total_steps: steps of the stage, for the display.
        resume_step: steps that were done before, where the stage is resumed; None: it begins.
        tokenizer: decodes the rollout dumps.
        value_name: what the main curve is: ``reward`` or ``loss``.
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
    ) -> None:
        self.config = config
        self.directory = directory
        self.timer = PhaseTimer()
        self.tracker = get_tracker()
        self.tracker.export(reset=True)  # what an earlier stage of this process reported and nobody took
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
        self.dumper = RolloutDumper(directory.rollouts, tokenizer, logger_config.dump_rollouts)
        save_config(config, directory.path / "config.yaml")

    def __enter__(self) -> StageRun:
        self._exit.enter_context(self.display)
        return self

    def __exit__(self, *error: object) -> None:
        self.timer.write_chrome_trace(self.directory.trace_file)
        self._exit.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write numbers of a step to ``metrics.jsonl`` and the sinks."""
        self.metrics.log(step, metrics)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of one metric, as written so far."""
        records = read_metrics(self.directory.metrics_file)
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    def plot(self, title: str) -> Path:
        """Draw reward and held-out evaluations into ``reward.png``."""
        return plot_reward_curve(
            self.directory.path / "reward.png",
            self.curve(self.value_name),
            self.curve("eval/reward"),
            title=title,
            evaluation_label=self.display.evaluation_label,
        )
