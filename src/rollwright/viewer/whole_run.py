"""A run of several stages as a whole: its stages in order, what they reached, its config, software, log, and why it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rollwright.config.experiment import STAGE_CLASSES
from rollwright.config.loading import config_to_dict, is_default
from rollwright.tracking.run_directory import MARKER, flattened, is_claimed
from rollwright.viewer.ending import ending_of, last_lines
from rollwright.viewer.evaluations import Evaluation, evaluations_of
from rollwright.viewer.run import Run
from rollwright.viewer.run_parts import read_file, stages_of, unix_time

#: Keys of a stage that say which stage it is.
_NAMES = ("kind", "name")


@dataclass
class StageOfRun:
    """A stage of a run, or one of the runs in a stage: a benchmark has one for each checkpoint.

    Args:
        name: name of the stage, and of the run in it.
        id: id of that run among the viewer's runs; empty if there is none.
        kind: model, sft, dpo, rl or eval.
        run: what it recorded; None if it records nothing, or has not begun.
        results: what ``stages.json`` says of the stage; empty if it has not finished.
        state: finished, running, stopped, or waiting if its turn has not come.
    """

    name: str
    id: str
    kind: str
    run: Run | None
    results: Mapping[str, Any]
    state: str

    def evaluations(self) -> list[Evaluation]:
        """Return the stage's evaluations, the first version first; none if it has no journal."""
        if self.run is None or not self.run.has_journal:
            return []
        return evaluations_of(self.run.index, self.name, is_one=self.kind == "eval")


class WholeRun:
    """The directory of a run of several stages.

    Args:
        path: the directory, which has a ``run.json`` and the directories of the stages.
        runs: the runs below it, by path relative to it.
        ids: their ids, by the same path.
    """

    def __init__(self, path: Path, runs: Mapping[str, Run], ids: Mapping[str, str]) -> None:
        self.path = path
        self.marker = read_file(path / MARKER)
        self._runs, self._ids = runs, ids

    @property
    def state(self) -> str:
        """``finished``, ``running`` or ``stopped``."""
        if self.marker.get("finished"):
            return "finished"
        return "running" if is_claimed(self.path) else "stopped"

    @property
    def began(self) -> float | None:
        """Unix time at which the run began."""
        return unix_time(self.marker.get("began"))

    @property
    def updated(self) -> float | None:
        """Unix time of the last write of any stage."""
        return max((when for part in self.parts() if part.run and (when := part.run.info()["updated"])), default=None)

    @property
    def stamp(self) -> str:
        """A value that changes when a stage writes or ends."""
        return f"{hash((self.state, *(run.stamp for run in self._runs.values()))) & (2**64 - 1):016x}"

    def parts(self) -> list[StageOfRun]:
        """Return the stages in the order in which they run; directories that belong to no stage come last."""
        results = read_file(self.path / "stages.json")
        stages = [(str(each.get("name")), str(each.get("kind"))) for each in stages_of(self.marker)]
        found: list[StageOfRun] = []
        is_next = True  # the first unfinished stage is the one that runs, or that stopped the run
        for name, kind in stages:
            done = results.get(name) or {}
            state = "finished" if done else self.state if is_next else "waiting"
            is_next = is_next and bool(done)
            own = [(key, run) for key, run in self._runs.items() if key.partition("/")[0] == name]
            state = own[0][1].state if own and state == "waiting" else state
            found += [StageOfRun(key, self._ids[key], run.kind, run, done, state) for key, run in own]
            found += [] if own else [StageOfRun(name, "", kind, None, done, state)]
        known = {name for name, _ in stages}
        others = [(key, run) for key, run in self._runs.items() if key.partition("/")[0] not in known]
        return found + [StageOfRun(key, self._ids[key], run.kind, run, run.results, run.state) for key, run in others]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations of all stages, in order."""
        return [each for part in self.parts() for each in part.evaluations()]

    def ending(self) -> dict[str, Any] | None:
        """Say why the run stopped, as ``Run.ending`` does, with the ``part`` that stopped; None if it did not stop."""
        if self.state != "stopped":
            return None
        last = next((part for part in self.parts() if part.state == "stopped"), None)
        found = last.run.ending() if last is not None and last.run is not None else None
        return {**(found or ending_of(self.path, self.path, 0.0, ())), "part": last}

    def log(self, lines: int) -> dict[str, list[str]]:
        """Return the last lines of each log file, by its path relative to the run; the newest file is the last."""
        return {name: last_lines(self.path / name, lines) for name in self.logs()}

    def logs(self) -> list[str]:
        """Return the paths of the log files relative to the run, the newest last."""
        files = []
        for file in (self.path / "logs" / "run.log", *(run.path / "logs" / "run.log" for run in self._runs.values())):
            with contextlib.suppress(OSError):
                files.append((file.stat().st_mtime, file.relative_to(self.path).as_posix()))
        return [name for _, name in sorted(files)]


def changed_keys(stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the config keys that differ from their defaults.

    Args:
        stages: the configs of a run's stages, each with its kind and name.

    Returns:
        ``key``, ``value``, ``default`` (None if the key is in a section that is empty by default) and the names of the ``stages`` with that
        value; first the keys that most stages have, each stage's own ones last, in the order of the config.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for stage in stages:
        cls = STAGE_CLASSES.get(str(stage.get("kind")))
        if cls is None:
            continue
        defaults = _defaults(cls)
        for key, value in flattened(stage).items():
            if key in _NAMES or (key in defaults and defaults[key] == value):
                continue
            if key not in defaults and is_default(cls, [part for part in key.split(".") if not part.isdecimal()], value):
                continue
            row = found.setdefault((key, repr(value)), {"key": key, "value": value, "default": defaults.get(key), "stages": []})
            row["stages"].append(str(stage.get("name") or stage.get("kind")))
    return sorted(found.values(), key=lambda row: -len(row["stages"]))


@cache
def _defaults(cls: type) -> dict[str, Any]:
    return flattened(config_to_dict(cls()))
