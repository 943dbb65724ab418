"""The facts about a run that need no index: its identity, config, progress and curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rollwright.atomic import read_json
from rollwright.config.loading import is_as_written
from rollwright.errors import DataError
from rollwright.experience.journal.reading import journal_files
from rollwright.tracking.learning_signs import signs_of
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import MARKER, flattened, is_claimed
from rollwright.viewer.curves import Curves, groups_of

logger = getLogger("viewer")

_POINTS_OF_SPARKLINE = 40


class RunFiles:
    """A run as described by its marker, config and metrics.

    Args:
        path: the directory. For a run of several stages or processes, the one with a journal (or else metrics) is used.

    Raises:
        DataError: it is not a run, or several of its stages or processes could be meant.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_part(Path(path))
        self.curves = Curves(self.path / "metrics.jsonl")
        self._config: tuple[int, dict[str, Any]] = (-1, {})  # when the file was written, and what it says
        self._config_problem = ""

    @cached_property
    def name(self) -> str:
        """Experiment and trial, and the stage or process."""
        root = self.path if (self.path / MARKER).exists() else self.path.parent
        marker = _read_json(root / MARKER)
        names = [str(marker.get("experiment", "")), str(marker.get("trial", ""))] if marker else []
        return "/".join([*names, *([self.path.name] if root != self.path else [])]) or self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """Its flattened config: ``{"actor.optimizer.lr": 1e-5, …}``. Secrets are already hidden in the file."""
        file = self.path / "config.yaml"
        if not file.exists():
            return flattened(self._marker.get("config") or {})
        written = file.stat().st_mtime_ns
        if self._config[0] != written:
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            text = file.read_text(encoding="utf-8", errors="replace")
            self._config_problem = (
                ""
                if is_as_written(text, has_checksum=self._has_checksums())
                else "it is not as the run wrote it: it was changed or damaged"
            )
            try:
                found = yaml.load(text, loader)
            except yaml.YAMLError as error:
                logger.warning("%s cannot be read, so its values are not shown: %s", file, error)
                self._config_problem = f"it cannot be read, so its values are not shown ({str(error).splitlines()[0]})"
                found = None
            self._config = written, flattened(found) if isinstance(found, dict) else {}
        return dict(self._config[1])

    @property
    def _marker(self) -> dict[str, Any]:
        return _read_json(self.path / MARKER) or _read_json(self.path.parent / MARKER)

    @property
    def is_running(self) -> bool:
        """True if a process owns its directory."""
        return is_claimed(self.path) or is_claimed(self.path.parent)

    def info(self) -> dict[str, Any]:
        """Summary for lists of runs: state, dates, last step and values, and the curve of its reward (or loss)."""
        marker, results = self._marker, self._results()
        curve = "reward" if self.curves.points("reward") else "loss"
        points = self.curves.series([curve], _POINTS_OF_SPARKLINE, 0.0)[curve]
        finished = bool(results) or bool(marker.get("finished"))
        times = self.curves.times
        return {
            "path": str(self.path),
            "name": self.name,
            "kind": results.get("kind") or self._stage().get("kind") or ("rl" if self.has_journal else "sft"),
            "state": "finished" if finished else "running" if self.is_running else "stopped",
            "began": _unix_time(marker.get("began")),
            "updated": self._updated(),
            "last_step": times[-1][0] if times else 0,
            "total_steps": self._total_steps(results),
            "reward": self.curves.last("reward"),
            "eval": self.curves.last("eval/reward"),
            "sparkline": [value for _, value in points],
            "curve": curve,
            "has_journal": self.has_journal,
        }

    def _updated(self) -> float | None:
        """Time of its last write. For a run that has ended it comes from the metrics, because a copy's files are newer."""
        times = self.curves.times
        if times and times[-1][1] and not self.is_running:
            return times[-1][1]
        return max((path.stat().st_mtime for path in self._files()), default=None)

    def _results(self) -> dict[str, Any]:
        """The stage's final results; empty before its end."""
        for place, name in ((self.path.parent, self.path.name), (self.path, None)):
            stages = _read_json(place / "stages.json")
            if name in stages or (name is None and len(stages) == 1):
                return stages[name] if name is not None else next(iter(stages.values()))
        return {}

    def _stage(self) -> dict[str, Any]:
        stages = (self._marker.get("config") or {}).get("stages") or []
        return next((stage for stage in stages if stage.get("name") == self.path.name), stages[0] if len(stages) == 1 else {})

    def _total_steps(self, results: Mapping[str, Any]) -> int | None:
        said = results.get("steps") or self.config.get("total_train_steps")
        return int(said) if said else None

    @property
    def has_journal(self) -> bool:
        """True if episodes were recorded."""
        return bool(journal_files(self.path / "journal"))

    def _files(self) -> list[Path]:
        return [*([self.curves.path] if self.curves.path.exists() else []), *journal_files(self.path / "journal")[-1:]]

    def metrics(self, names: Iterable[str] | None = None, points: int = 600, smoothing: float = 0.0) -> dict[str, Any]:
        """Curves: ``{"series": {name: [[step, value], …]}, "groups": {title: [name, …]}}``.

        Args:
            names: metrics; None for all.
            points: most points of each curve; peaks are kept.
            smoothing: weight of the past in a moving average, from 0 to below 1.
        """
        return {"series": self.curves.series(names, points, smoothing), "groups": groups_of(self.curves.names())}

    def missing(self) -> list[dict[str, Any]]:
        """Damaged, truncated or missing parts of the run's files; empty if all are intact.

        Returns:
            For each part its ``file`` (relative to the run's directory), the bytes ``begin`` to ``end`` and the ``steps`` before and after
            it, if known, and a ``message`` with all of these.
        """
        found = [self._lacks(self.curves.path, each) for each in self.curves.missing()]
        if not self.curves.path.exists() and self._wrote_metrics():
            found.append(self._lacks(self.curves.path, "it is missing: there are no curves"))
        elif self.curves.path.exists() and not self.curves.path.stat().st_size and self._wrote_metrics():
            found.append(self._lacks(self.curves.path, "it is empty: there are no curves"))
        elif self._last_known_step() > (last := max((step for step, _ in self.curves.times), default=0)):
            steps = last + 1, self._last_known_step()
            said = f"it ends with step {last}, but the run reached step {steps[1]}"
            found.append(self._lacks(self.curves.path, said, steps=steps))
        for root in dict.fromkeys((self._root, self.path)):
            for name in (MARKER, "stages.json"):
                problem = _problem_of(root / name)
                if problem is None and name == MARKER and root == self._root and not (root / name).exists():
                    problem = "it is missing: the run cannot be resumed"
                if problem:
                    found.append(self._lacks(root / name, problem))
        _ = self.config
        if not (self.path / "config.yaml").exists() and self.curves.times and self._has_checksums():
            found.append(self._lacks(self.path / "config.yaml", "it is gone"))
        elif self._config_problem:
            found.append(self._lacks(self.path / "config.yaml", self._config_problem))
        return found

    def _has_checksums(self) -> bool:
        """True if the run wrote checksums; version 0.1.0 did not."""
        marker = self._root / MARKER
        return marker.exists() and '"checksum"' in marker.read_text(encoding="utf-8", errors="replace")

    def _wrote_metrics(self) -> bool:
        """True if a step or an evaluation has completed."""
        return self._last_known_step() > 0

    def _last_known_step(self) -> int:
        """The last step according to a recover checkpoint or the stage's results."""
        made = [int(path.name.rpartition("_")[2]) for path in self.path.glob("recover/step_*") if path.name[5:].isdecimal()]
        steps = self._results().get("steps")
        return max([*made, steps if isinstance(steps, int) else 0], default=0)

    @property
    def _root(self) -> Path:
        """The directory of the whole run."""
        return self.path if (self.path / MARKER).exists() or not (self.path.parent / MARKER).exists() else self.path.parent

    def _lacks(
        self,
        path: Path,
        message: str,
        begin: int | None = None,
        end: int | None = None,
        steps: Sequence[int | None] = (None, None),
    ) -> dict[str, Any]:
        name = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else path.name
        return {"file": name, "begin": begin, "end": end, "steps": list(steps), "message": f"{name}: {message}"}

    def diagnosis(self) -> list[dict[str, Any]]:
        """Detected problems and the settings that fix them: ``rule``, ``level`` (bad, warn or info), ``message``, ``setting`` and ``step``."""
        return [sign.plain() for sign in signs_of(self.curves.points, self.config)]


def find_part(path: Path) -> Path:
    """The directory itself, or the stage or process of a run that has a journal, or else metrics.

    Raises:
        DataError: there is none, or there are several.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no directory: give that of a run, such as runs/quickstart/trial.")
    if is_part(path):
        return path
    parts = [child for child in sorted(path.iterdir()) if child.is_dir() and is_part(child)]
    journaled = [part for part in parts if journal_files(part / "journal")]
    for some in (journaled, parts):
        if len(some) == 1:
            return some[0]
    if not parts:
        raise DataError(f"{path} is no run: it has neither metrics.jsonl nor a journal.")
    raise DataError(f"{path} has several stages or processes: give one of {', '.join(map(str, journaled or parts))}.")


def is_part(path: Path) -> bool:
    """True for a directory with metrics or episodes of a run, a stage or a process."""
    return (path / "metrics.jsonl").exists() or bool(journal_files(path / "journal"))


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing, damaged or being written."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _problem_of(path: Path) -> str | None:
    """Why a JSON file cannot be read; None if it can or does not exist."""
    try:
        read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error}), so it is not shown"
    return None


def _unix_time(text: Any) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
