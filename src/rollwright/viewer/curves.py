"""The curves of a run, from its ``metrics.jsonl``, which may still be growing."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path

from rollwright.tracking.metrics_file import LineReader
from rollwright.tracking.plots import smoothed

#: Titles of groups of metrics, and the prefixes of their metrics; the first match counts.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward", "eval/reward", "workflow/reward", "rollout/reward", "actor/reward")),
    ("Held out", ("eval/",)),
    ("Length", ("response_tokens", "sequence_tokens", "truncated", "actor/tokens_per_row", "actor/masked_share")),
    (
        "Loss",
        (
            "loss",
            "actor/loss",
            "actor/policy_loss",
            "actor/grad_norm",
            "model/",
            "actor/lr",
            "actor/optimizer",
            "actor/skipped",
        ),
    ),
    ("Entropy and KL", ("actor/entropy", "actor/kl", "actor/teacher/kl")),
    ("Engine against trainer", ("actor/logprob_difference", "actor/mismatch", "actor/context_mismatch")),
    ("Policy ratio", ("actor/ratio", "actor/clip_share", "actor/effective", "actor/behaviour")),
    ("Advantage", ("actor/advantage", "actor/groups_without")),
    ("Critic", ("critic/",)),
    ("Staleness", ("actor/staleness", "version")),
    ("How samples ended", ("samples/", "groups/")),
    ("Throughput", ("tokens_per_second", "samples")),
    ("Seconds", ("seconds/",)),
    ("Memory", ("memory/",)),
)
_NO_METRICS = ("step", "time", "unix_time")


class Curves:
    """The metrics of a ``metrics.jsonl`` as columns. Thread-safe.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._read, self._inode = 0, -1
        self._columns: dict[str, tuple[array[float], array[float]]] = {}  # steps and values
        self.times: list[tuple[int, float]] = []  # step and seconds since the epoch
        self.elapsed: list[tuple[int, float]] = []  # step and seconds of training
        self._reader = LineReader()
        self._damaged: list[str] = []

    def update(self) -> None:
        """Read new lines. A file that a resume has truncated is read from the beginning. Damaged lines are skipped; see ``missing``."""
        with self._lock:
            if not self.path.exists():
                return
            found = self.path.stat()
            if found.st_ino != self._inode or found.st_size < self._read:
                self._forget()
                self._inode = found.st_ino
            if found.st_size == self._read:
                return
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read += whole
            for line in data[:whole].split(b"\n"):
                if line.strip():
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = self._reader.record(line)
        except ValueError as error:
            behind = f", after that of step {self.times[-1][0]}" if self.times else ""
            self._damaged.append(f"a line is damaged ({error}) and skipped{behind}: {line[:60]!r}")
            return
        step = record["step"]
        self.times.append((step, record.get("unix_time") or 0.0))
        if isinstance(elapsed := record.get("time"), int | float):
            self.elapsed.append((step, elapsed))
        for name, value in record.items():
            if name in _NO_METRICS or not isinstance(value, int | float):
                continue
            steps, values = self._columns.setdefault(name, (array("d"), array("d")))
            steps.append(step)
            values.append(value)

    def missing(self) -> list[str]:
        """Return messages about lost or damaged lines."""
        self.update()
        with self._lock:
            left = self.path.stat().st_size - self._read if self.path.exists() else 0
            lost = [
                f"line {first} is missing" if first == last else f"lines {first} to {last} are missing"
                for first, last in self._reader.lost
            ]
            return [*self._damaged, *lost, *([f"the last {left} bytes are an incomplete line"] if left > 0 else [])]

    def names(self) -> list[str]:
        """Return the sorted names of all metrics."""
        self.update()
        return sorted(self._columns)

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return all points of a metric; empty if there is no such metric."""
        self.update()
        with self._lock:
            steps, values = self._columns.get(name, ((), ()))
            return [(int(step), value) for step, value in zip(steps, values, strict=True)]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, or None if it has none."""
        points = self.points(name)
        return points[-1][1] if points else None

    def series(self, names: Iterable[str] | None, points: int, smoothing: float) -> dict[str, list[list[float]]]:
        """Return curves of about ``points`` points at most, smoothed by an exponential moving average.

        Longer curves keep the lowest and highest point of each bin of steps, so that no peak is lost.

        Args:
            names: names of the metrics; all if None.
            points: approximate limit for each curve.
            smoothing: weight of the past, from 0 to below 1.
        """
        chosen = self.names() if names is None else list(names)
        return {name: thinned(_smoothed(self.points(name), smoothing), points) for name in chosen}


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of metrics by the titles of ``GROUPS``, and the others by the first part of their names."""
    groups: dict[str, list[str]] = {title: [] for title, _ in GROUPS}
    for name in sorted(names):
        title = next((title for title, beginnings in GROUPS if name.startswith(beginnings)), None)
        groups.setdefault(title or name.partition("/")[0].capitalize(), []).append(name)
    return {title: own for title, own in groups.items() if own}


def _smoothed(points: list[tuple[int, float]], weight: float) -> list[tuple[int, float]]:
    if weight <= 0:
        return points
    finite = [point for point in points if math.isfinite(point[1])]
    return list(zip([step for step, _ in finite], smoothed([value for _, value in finite], weight), strict=True))


def thinned(points: list[tuple[int, float]], limit: int) -> list[list[float]]:
    """Return about ``limit`` points at most: the lowest and the highest of each bin of steps."""
    if len(points) <= limit:
        return [list(point) for point in points]
    size = max(2, -(-2 * len(points) // limit))
    kept: list[list[float]] = []
    for begin in range(0, len(points), size):
        some = points[begin : begin + size]
        low, high = min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])
        kept += [list(point) for point in sorted({low, high})]
    return kept
