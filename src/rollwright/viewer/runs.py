"""The runs below some directories."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rollwright.errors import DataError
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import MARKER
from rollwright.viewer.run import Run
from rollwright.viewer.run_parts import is_part
from rollwright.viewer.whole_run import WholeRun

logger = getLogger("viewer")

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
        self._lock = threading.Lock()

    def list(self) -> list[dict[str, Any]]:
        """Return ``Run.info`` of each run with its ``id``, the most recently written run first."""
        found = [{"id": name, **self.get(name).info()} for name in self._names()]
        return sorted(found, key=lambda info: -(info["updated"] or 0.0))

    def get(self, name: str) -> Run:
        """Return the run with the id ``name``.

        Raises:
            DataError: there is no such run below the roots.
        """
        with self._lock:
            if name not in self._runs:
                path = self._names().get(name)
                if path is None:
                    raise DataError(f"there is no run {name} below {', '.join(map(str, self.roots))}.")
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
        return self._by_id(wholes_below)

    def _names(self) -> dict[str, Path]:
        """Return the directories of runs by id, which is the path below the root."""
        return self._by_id(parts_below)

    def _by_id(self, below: Callable[[Path], Iterator[Path]]) -> dict[str, Path]:
        names: dict[str, Path] = {}
        for root in self.roots:
            for path in below(root):
                inside = path.relative_to(root).as_posix()
                name = inside if inside != "." else path.name
                names.setdefault(name if name not in names else f"{root.name}/{name}", path)
        return names

    def close(self) -> None:
        """Close all opened runs."""
        with self._lock:
            for run in self._runs.values():
                run.close()
            self._runs.clear()


def parts_below(root: Path) -> Iterator[Path]:
    """Yield the directories that have metrics or a journal; links are not followed."""
    return (path for path in _directories(root) if is_part(path))


def wholes_below(root: Path) -> Iterator[Path]:
    """Yield the directories of runs of several stages."""
    return (path for path in _directories(root) if (path / MARKER).exists() and not is_part(path))


def _directories(root: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the directories in which runs may be, ``root`` first; links are not followed."""
    try:
        children = sorted(root.iterdir()) if depth < _DEEPEST else []
    except OSError as error:  # not readable, or removed meanwhile
        logger.info("%s is left out: %s", root, error)
        return
    yield root
    for child in children:
        if child.is_dir() and not child.is_symlink() and child.name not in _NOT_STAGES and not child.name.startswith("."):
            yield from _directories(child, depth + 1)


def config_difference(first: Run, second: Run) -> list[tuple[str, Any, Any]]:
    """Return the keys whose values differ between two configs, each with both values (None if a config lacks the key)."""
    before, after = first.config, second.config
    keys = sorted({*before, *after})
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
