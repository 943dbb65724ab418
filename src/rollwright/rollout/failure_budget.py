"""Failures of samples: each is kept, logged in one line (the run's log has the traceback) and counted against a budget.

A failed sample is data, not a crash. Too many failed samples mean a broken run.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollwright
from rollwright.errors import RewardError, RolloutError
from rollwright.tracking.logging import attached_file, getLogger

logger = getLogger("rollout")

WINDOW = 64  # number of latest samples that the failure budget counts
IN_A_ROW = 512  # consecutive samples that may fail, whatever share of failures is allowed
KEPT = 32  # failures whose tracebacks are kept
SHOWN = 160  # characters of a task's row in a message
#: Parts of the paths of files that are not the user's: installed packages, ours, the standard library.
_NOT_USERS = ("site-packages", str(Path(rollwright.__file__).parent), os.path.dirname(os.__file__), "<frozen ")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """One attempt of one sample that raised, timed out or broke the data contract."""

    sample: str
    task: str  # its row, shortened
    workflow: str
    cause: str  # one line, including file and line of the workflow's own code
    traceback: str
    is_final: bool  # no attempt is left


def with_cause(message: str, failure: Failure | None) -> RolloutError:
    """Make an error whose message includes a failure's cause; the traceback is added as a note."""
    if failure is None:
        return RolloutError(message)
    error = RolloutError(f"{message} First cause: {failure.cause} in {failure.workflow}, {failure.sample}: {failure.task}.")
    error.add_note(failure.traceback)
    return error


class FailureLog:
    """Counts failures and decides when they are too many.

    Args:
        max_share: share of the last 64 samples that may fail after their retries.

    Attributes:
        is_hurried: the run was asked to end, so 64 consecutive failures are enough to give up. Any thread may set it.
    """

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.recent: deque[Failure] = deque(maxlen=KEPT)
        self.first: Failure | None = None
        self.outcomes: deque[bool] = deque(maxlen=WINDOW)  # True for each sample that failed after its retries
        self._logged: set[tuple[str, str]] = set()
        self._in_a_row = 0
        self.is_hurried = False

    def note(self, failed: bool) -> None:
        """Record that a sample has ended, after its retries."""
        self.outcomes.append(failed)
        self._in_a_row = self._in_a_row + 1 if failed else 0

    def record(self, error: BaseException, *, sample: str, task: Mapping[str, Any], workflow: str, is_final: bool) -> Failure:
        """Store and log a failed attempt."""
        row = repr(task)
        failure = Failure(
            sample=sample,
            task=row if len(row) <= SHOWN else f"{row[: SHOWN - 1]}…",
            workflow=workflow,
            cause=_cause(error),
            traceback="".join(traceback.format_exception(error)),
            is_final=is_final,
        )
        self.recent.append(failure)
        self.first = self.first or failure
        key, file = (type(error).__name__, workflow), attached_file()
        where = (
            f"traceback and further failures of this kind: {file}" if file else "further failures of this kind are not shown"
        )
        logger.log(
            logging.DEBUG if key in self._logged else logging.WARNING,
            "%s failed in %s and is %s: %s%s",
            sample,
            workflow,
            "given up" if is_final else "run again",
            failure.cause,
            "" if key in self._logged else f" (the task: {failure.task}; {where})",
        )
        self._logged.add(key)
        logger.debug("%s", failure.traceback)
        return failure

    def too_many(self) -> RolloutError | None:
        """Return the error that stops the run if too many of the last 64 samples failed, or too many in a row; otherwise None."""
        failed = sum(self.outcomes)
        if self._in_a_row >= (WINDOW if self.is_hurried else IN_A_ROW):
            return with_cause(
                f"the last {self._in_a_row} samples all failed after their retries, so no batch will be complete, though "
                f"rollout.max_failed_share={self.max_share} allows it{' (and the run was asked to end)' if self.is_hurried else ''}.",
                self.first,
            )
        if failed <= self.max_share * WINDOW:
            return None
        return with_cause(
            f"{failed} of the last {len(self.outcomes)} samples failed after their retries; rollout.max_failed_share="
            f"{self.max_share} allows {int(self.max_share * WINDOW)} of {WINDOW}.",
            self.first,
        )


#: Matches the error for using an un-awaited call of an async function.
_COROUTINE = re.compile(r"'?\bcoroutine\b'?")


def _cause(error: BaseException) -> str:
    """Describe an exception in one line, including the innermost line of the user's code.

    If the message ends with the traceback of another process, such as a reward function's, the line is taken from that traceback. The
    messages of other reward errors name the function already, so no line is added.
    """
    message = "".join(traceback.format_exception_only(error))
    lines = message.removeprefix("rollwright.errors.").strip().splitlines() or [type(error).__name__]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"
    frames = _FRAME.findall(message)
    if not frames and not isinstance(error, RewardError):
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, AttributeError | TypeError) and _COROUTINE.search(text):
        text += " (the call that made it was not awaited: write await before it)"
    users = [(file, line) for file, line in frames if not any(part in file for part in _NOT_USERS)]
    return f"{text} at {users[-1][0]}:{users[-1][1]}" if users else text
