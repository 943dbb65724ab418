"""``metrics.jsonl``: the metrics of each step, read by plots, resume and model cards.

Each line ends with a ``checksum`` of its content and its line number, which reveals damaged digits and lost lines. Lines of older
versions have none.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.atomic import line_with_checksum, number_of_line, remedy_of, write_text
from rollwright.errors import CheckpointError
from rollwright.tracking.logging import getLogger

logger = getLogger("metrics")


def _json_number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


_MOST_LOST = 10_000  # consecutive lines


class LineReader:
    """Reads lines in order.

    Attributes:
        number: number of the last line read.
        lost: missing lines, as inclusive ranges (first, last).
    """

    def __init__(self) -> None:
        self.number = 0
        self.lost: list[tuple[int, int]] = []
        self._damaged = 0  # lines since the last intact one
        self._has_checksums = False

    def record(self, line: bytes) -> dict[str, Any]:
        """Parse the next line, without its checksum.

        Raises:
            ValueError: the line is damaged.
        """
        try:
            record, number = self._read(line)
        except ValueError:
            self._damaged += 1
            raise
        gone = number - self.number - 1 - self._damaged
        if gone > 0 and (self._has_checksums or not self.number):
            self.lost.append((number - gone, number - 1))
        self.number, self._damaged = number, 0
        return record

    def _read(self, line: bytes) -> tuple[dict[str, Any], int]:
        record = json.loads(line)
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError("no JSON object with a step")
        number = number_of_line(line, range(self.number + 1, self.number + _MOST_LOST))
        if number is None:
            if self._has_checksums:
                raise ValueError("its checksum is missing")
            return record, self.number + self._damaged + 1
        self._has_checksums = True
        del record["checksum"]
        return record, number


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``. A last line cut off by a kill is skipped; missing lines cause a warning.

    Raises:
        CheckpointError: a line in the middle of the file is damaged.
    """
    lines = Path(path).read_bytes().split(b"\n")
    reader = LineReader()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(reader.record(line))
        except ValueError as error:
            if number == len(lines):  # no newline after it
                logger.warning("the last line of %s was cut off while it was written and is left out: %r", path, line[:80])
                break
            raise CheckpointError(
                f"line {number} of {path} is damaged ({error}): fix or delete that line; the rest is not touched."
            ) from None
    for first, last in reader.lost:
        logger.warning("%s lacks its original lines %d to %d; they are skipped.", path, first, last)
    return records


class JSONLSink:
    """One JSON object a line: ``step``, ``time`` (seconds since the run began), ``unix_time``, then the metrics.

    Each line is flushed as it is written. Numbers that are not finite become null, which every JSON reader takes.

    Args:
        path: the file.
        resume_step: the last step that the resumed checkpoint contains. Lines of later steps are cut off, so that a
            resumed run leaves one curve; None begins a new file.

    Raises:
        CheckpointError: a new file is asked for where one with content exists.
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
        record = {"step": step, "time": round(now - self._started, 3), "unix_time": round(now, 3)}
        record.update({name: _json_number(value) for name, value in metrics.items()})
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
        """Closes the file."""
        self._file.close()
