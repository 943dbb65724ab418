"""The runs below some directories."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollwright.errors import DataError
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import MARKER
from rollwright.viewer.run import Run
from rollwright.viewer.run_parts import is_part
from rollwright.viewer.whole_run import WholeRun

logger = getLogger("viewer")

_WALKED_FOR = 1.0  # seconds for which the directories that were found are taken as those that there are
#: Files of a run, in its directory and in that of the whole run, on which its info depends.
_INFORMING = ("metrics.jsonl", "journal", "config.yaml", "stages.json", MARKER)
#: Info of a run that is not read yet.
_UNREAD: dict[str, Any] = {
    **dict.fromkeys(("kind", "state", "curve"), ""),
    **dict.fromkeys(("began", "last_step", "total_steps", "reward", "eval", "sparkline", "loss", "samples")),
    "has_journal": False,
    "is_read": False,
}
_DEEPEST = 5  # levels of directories below a root that are searched for runs
#: Directories of a run that are not stages.
_NOT_STAGES = frozenset(("attempts", "checkpoints", "journal", "logs", "recover", "rollouts", "weights"))


class Runs:
    """The runs below some directories, each opened once. Thread-safe.

    Args:
        roots: directories of runs, or directories above them.
    """

    def __init__(self, roots: str | Path | Iterable[str | Path] = "runs") -> None:
        given = [roots] if isinstance(roots, str | Path) else list(roots)
        self.roots = [Path(root).resolve() for root in given]
        for root in self.roots:
            if not root.is_dir():
                raise DataError(f"{root} is no directory: give that of a run, or one that runs are below.")
        self._runs: dict[str, Run] = {}
        self._infos: dict[
            str, tuple[Any, dict[str, Any]]
        ] = {}  # by id: the state of the files that it was read from, and the info
        self._walked: tuple[float, dict[str, Path], dict[str, Path]] | None = None
        self._reading: threading.Thread | None = None
        self._lock = threading.Lock()

    def list(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Return ``Run.info`` of each run with its ``id``, the most recently written run first.

        What is known is read again only if the run's files have changed, or if it is running.

        Args:
            seconds: time after which no further run is read. The others have ``is_read`` False, and of their info only what their
                directories tell.
        """
        began = time.monotonic()
        states = {name: (path, *_written(path)) for name, path in self._names().items()}
        found = []
        for name, (path, updated, state) in sorted(states.items(), key=lambda item: -item[1][1]):
            with self._lock:
                opened = self._runs.get(name)
            files = (state, opened.grown if opened else 0)
            known = self._infos.get(name)
            if known is None or known[0] != files or known[1]["state"] == "running":
                if seconds is not None and time.monotonic() - began > seconds:
                    found.append(
                        {
                            "id": name,
                            **_UNREAD,
                            **(known[1] if known else {"path": str(path), "name": name, "updated": updated}),
                        }
                    )
                    continue
                try:
                    info = self._open(name, path).info()
                except (OSError, DataError) as error:  # removed meanwhile
                    logger.info("%s is left out: %s", path, error)
                    continue
                known = self._infos[name] = files, {**info, "is_read": True}
            found.append({"id": name, **known[1]})
        return sorted(found, key=lambda info: -(info["updated"] or 0.0))

    def read_in_background(self) -> None:
        """Read the runs that are not known yet in a thread, unless one does so already."""
        with self._lock:
            if self._reading is None or not self._reading.is_alive():
                self._reading = threading.Thread(target=self.list, name="rollwright-runs", daemon=True)
                self._reading.start()

    @property
    def stamp(self) -> str:
        """A value that changes when further runs are read."""
        return hashlib.sha256(
            repr(sorted((name, hash(files)) for name, (files, _) in self._infos.items())).encode()
        ).hexdigest()[:16]

    def get(self, name: str) -> Run:
        """Return the run with the id ``name``.

        Raises:
            DataError: there is no such run below the roots.
        """
        with self._lock:
            if name in self._runs:
                return self._runs[name]
        path = self._names().get(name) or self._names(is_fresh=True).get(name)
        if path is None:
            raise DataError(f"there is no run {name} below {', '.join(map(str, self.roots))}.")
        return self._open(name, path)

    def _open(self, name: str, path: Path) -> Run:
        with self._lock:
            if name not in self._runs:
                self._runs[name] = Run(path)
            return self._runs[name]

    def whole(self, name: str) -> WholeRun | None:
        """Return the run of several stages with the id ``name``; None if there is none, or if it is a run of one stage."""
        path = self.wholes().get(name)
        if path is None:
            return None
        below = sorted(
            (part.relative_to(path).as_posix(), own) for own, part in self._names().items() if part.is_relative_to(path)
        )
        return WholeRun(path, {inside: self.get(own) for inside, own in below}, dict(below))

    def wholes(self) -> dict[str, Path]:
        """Return the directories of runs of several stages by id."""
        return self._walk()[1]

    def _names(self, *, is_fresh: bool = False) -> dict[str, Path]:
        """Return the directories of runs by id, which is the path below the root."""
        return self._walk(is_fresh=is_fresh)[0]

    def _walk(self, *, is_fresh: bool = False) -> tuple[dict[str, Path], dict[str, Path]]:
        """Return the directories of runs and of runs of several stages by id, as they were at most a second ago."""
        walked = self._walked
        if walked is None or is_fresh or time.monotonic() - walked[0] > _WALKED_FOR:
            parts: dict[str, Path] = {}
            wholes: dict[str, Path] = {}
            for root in self.roots:
                for path in _directories(root):
                    names = parts if is_part(path) else wholes if (path / MARKER).exists() else None
                    if names is not None:
                        inside = path.relative_to(root).as_posix()
                        name = inside if inside != "." else path.name
                        names.setdefault(name if name not in names else f"{root.name}/{name}", path)
            walked = self._walked = time.monotonic(), parts, wholes
        return walked[1], walked[2]

    def close(self) -> None:
        """Close all opened runs."""
        with self._lock:
            for run in self._runs.values():
                run.close()
            self._runs.clear()


def parts_below(root: Path) -> Iterator[Path]:
    """Yield the directories that have metrics or a journal; links are not followed."""
    return (path for path in _directories(root) if is_part(path))


def _directories(root: str | Path, depth: int = 0) -> Iterator[Path]:
    """Yield the directories in which runs may be, ``root`` first; links are not followed."""
    try:
        with os.scandir(root) as entries:
            below = sorted(each.path for each in entries if depth < _DEEPEST and _may_have_runs(each))
    except OSError as error:  # not readable, or removed meanwhile
        logger.info("%s is left out: %s", root, error)
        return
    yield Path(root)
    for path in below:
        yield from _directories(path, depth + 1)


def _may_have_runs(entry: os.DirEntry[str]) -> bool:
    return entry.name not in _NOT_STAGES and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def _written(path: Path) -> tuple[float, tuple[Any, ...]]:
    """Return when a run was written last, and a value that changes with the files on which its info depends."""
    found: list[tuple[int, int] | None] = []
    for place, names in ((str(path), _INFORMING), (str(path.parent), _INFORMING[3:])):
        for name in names:
            try:
                stat = os.stat(f"{place}/{name}")
                found.append((stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append(None)
    return max((each[0] for each in found[:2] if each), default=0) / 1e9, tuple(found)


def config_difference(first: Run, second: Run) -> list[tuple[str, Any, Any]]:
    """Return the keys whose values differ between two configs, each with both values (None if a config lacks the key)."""
    before, after = first.config, second.config
    keys = sorted({*before, *after})
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
