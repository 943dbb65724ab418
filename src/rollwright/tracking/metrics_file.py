"""Reads ``metrics.jsonl``, the metrics of each step, for plots, resume, model cards and the viewer. ``sinks`` writes it.

Each line ends with a ``checksum`` of its content and line number, which reveals damaged digits and lost lines. Lines that older
versions wrote have none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollwright.atomic import number_of_line
from rollwright.errors import CheckpointError
from rollwright.tracking.logging import getLogger

logger = getLogger("metrics")


_MOST_LOST = 10_000  # consecutive lines


class LineReader:
    """Reads the lines of a metrics file in order.

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
    """Read the records of a ``metrics.jsonl``. An incomplete last line, left by a killed process, is skipped; missing lines cause a warning.

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
