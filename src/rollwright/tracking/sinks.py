"""Sinks: where the metrics of a step are written.

``metrics.jsonl`` in the run directory is always written; plots and resume read it. TensorBoard, Weights & Biases, Trackio, MLflow
and sinks that users register in ``SINKS`` receive the same numbers.
"""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollwright.atomic import line_with_checksum, remedy_of, write_text
from rollwright.errors import CheckpointError, ConfigError
from rollwright.registry import Registry
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics_file import read_metrics

logger = getLogger("metrics")


class MetricsSink(Protocol):
    """The interface of a sink, which receives the metrics of each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step. A step may be written several times, because evaluation adds to it."""
        ...

    def close(self) -> None:
        """Flush and release resources."""
        ...


@dataclass(frozen=True)
class SinkRun:
    """The facts about a run that a sink needs to start."""

    directory: Path  # of the run or stage
    project: str
    name: str  # usually ``<experiment>/<trial>``
    config: Mapping[str, Any]  # resolved
    resume_step: int | None  # last step of the resumed checkpoint; None for a new run


class JSONLSink:
    """Writes ``metrics.jsonl``: JSON lines with ``step``, ``time`` (seconds since the run began), ``unix_time`` and the metrics.

    Each line is flushed as it is written. Numbers that are not finite become null, which every JSON reader accepts.

    Args:
        path: the file.
        resume_step: last step of the resumed checkpoint. Lines of later steps are removed, so that a resumed run has one
            continuous curve. If None, a new file is started.

    Raises:
        CheckpointError: a new file was requested, but the file already has content.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier, self._lines, self._last = 0.0, 0, 0
        if self.path.exists() and self.path.stat().st_size:
            if resume_step is None:
                raise CheckpointError(
                    f"{self.path} already holds metrics of a run: resume that run (recover.mode=resume) or choose another trial_name."
                )
            earlier = self._cut_after(resume_step)
        if resume_step and self._last < resume_step:
            logger.warning(
                "%s %s, and the run continues after step %d: the curves lack the steps between.",
                self.path,
                f"ends with step {self._last}" if self._last else "is missing or empty",
                resume_step,
            )
        self._started = time.time() - earlier
        self._file = self.path.open("ab", buffering=0)  # unbuffered, so close() has nothing left to write

    def _cut_after(self, resume_step: int) -> float:
        kept = [record for record in read_metrics(self.path) if record["step"] <= resume_step]
        write_text(
            self.path, "".join(line_with_checksum(record, number) for number, record in enumerate(kept, 1)), durable=True
        )
        self._lines, self._last = len(kept), max((record["step"] for record in kept), default=0)
        return max((record.get("time", 0.0) for record in kept), default=0.0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            CheckpointError: the file cannot be written.
        """
        now = time.time()
        record: dict[str, Any] = {"step": step, "time": round(now - self._started, 3), "unix_time": round(now, 3)}
        for name, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            record[name] = number if math.isfinite(number) else None
        line = line_with_checksum(record, self._lines + 1).encode()
        try:
            written = self._file.write(line)
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written ({error}): {remedy_of(error)}, then start the run again, which goes on from its last checkpoint."
            ) from error
        self._lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Writes event files to ``<run>/tensorboard``; on resume, later points are purged."""

    def __init__(self, run: SinkRun) -> None:
        _require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(log_dir=str(run.directory / "tensorboard"), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class _SteppedRun:
    """A sink for trackers whose runs have ``log(metrics, step=...)``."""

    def __init__(self, run: Any, finish: Callable[[], Any]) -> None:
        self._run, self._finish = run, finish

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._finish()


def wandb_sink(run: SinkRun) -> MetricsSink:
    """Start a Weights & Biases run, named after the trial; a resumed trial continues the same run.

    W&B keeps the first value it receives for a step, so values of steps that a resumed run repeats do not change.
    """
    opened = _require("wandb", "wandb").init(
        project=run.project,
        name=run.name,
        id=run.name.replace("/", "-"),
        dir=str(run.directory),
        config=dict(run.config),
        resume=None if run.resume_step is None else "allow",
    )
    return _SteppedRun(opened, opened.finish)


def trackio_sink(run: SinkRun) -> MetricsSink:
    """Start a run of Trackio, Hugging Face's local tracker; view it with ``trackio show``."""
    trackio = _require("trackio", "trackio")
    resume = "never" if run.resume_step is None else "allow"
    opened = trackio.init(project=run.project, name=run.name, config=dict(run.config), resume=resume)
    return _SteppedRun(opened, trackio.finish)


class MLflowSink:
    """Writes to an MLflow run, in the experiment ``project``; a resumed trial continues the same run.

    ``MLFLOW_TRACKING_URI`` sets the destination; by default it is the database ``mlflow.db`` in the working directory.
    """

    def __init__(self, run: SinkRun) -> None:
        mlflow = _require("mlflow", "mlflow")
        self._client = client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project)
        found = []
        if run.resume_step is not None:
            wanted = f"attributes.run_name = '{run.name}'"
            found = client.search_runs([experiment_id], wanted, order_by=["attributes.start_time DESC"], max_results=1)
        if found:
            self.run_id = found[0].info.run_id
            client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = client.create_run(experiment_id, run_name=run.name).info.run_id
            client.log_dict(self.run_id, dict(run.config), "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        now = int(time.time() * 1000)
        # MLflow does not allow other characters in names
        points = [self._metric(re.sub(r"[^\w\-. :/]", "_", name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=points)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"stats_logger.sinks names {extra!r}, but the package {error.name!r} is not installed: "
            f"pip install 'rollwright[{extra}]', or take {extra!r} out of stats_logger.sinks."
        ) from None


#: Sinks by name: callables that take a :class:`SinkRun` and return a :class:`MetricsSink`.
SINKS: Registry[Callable[[SinkRun], MetricsSink]] = Registry(
    "metric sink",
    ConfigError,
    variable="SINKS",
    built_in={
        "tensorboard": "rollwright.tracking.sinks:TensorBoardSink",
        "wandb": "rollwright.tracking.sinks:wandb_sink",
        "trackio": "rollwright.tracking.sinks:trackio_sink",
        "mlflow": "rollwright.tracking.sinks:MLflowSink",
    },
)


class MetricsLogger:
    """Writes every step to ``metrics.jsonl`` and to the sinks that the config names.

    Args:
        sinks: names registered in ``SINKS``, or import paths.
        project, run_name: project and run names that the sinks use; the run name is usually ``<experiment>/<trial>``.
        config: the resolved config, for the sinks.
        resume_step: see :class:`JSONLSink`.

    Raises:
        ConfigError: a sink is unknown, or its package is not installed.
    """

    def __init__(
        self,
        metrics_file: str | Path,
        sinks: Iterable[str] = (),
        *,
        project: str = "rollwright",
        run_name: str = "run",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        run = SinkRun(Path(metrics_file).parent, project, run_name, config or {}, resume_step)
        makers = [SINKS.get(name) for name in sinks]
        self._sinks: list[MetricsSink] = []
        try:
            for make in makers:
                self._sinks.append(make(run))
            self._sinks.insert(0, JSONLSink(metrics_file, resume_step))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to all sinks."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
