"""Failures of samples: kept, reported with task and traceback, and counted against a budget.

A failed sample is data, not a crash; too many failed samples are a broken run.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from dataclasses import dataclass

from rollwright.errors import RolloutError
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

WINDOW = 64  # samples that the failure budget looks back on
KEPT = 32  # failures whose tracebacks are kept
LOGGED_IN_FULL = 3  # tracebacks of one cause that the log shows


@dataclass(frozen=True)
class Failure:
    """One attempt of one sample that raised, timed out or broke the data contract."""

    sample: str
    task: str
    workflow: str
    cause: str  # the last line of the traceback
    traceback: str
    is_final: bool  # no attempt is left

    def describe(self) -> str:
        """In words, with the traceback."""
        return f"First cause: {self.cause} in {self.workflow}, {self.sample}, {self.task}.\n{self.traceback}"


class FailureLog:
    """Failures so far, and whether they are too many.

    Args:
        max_share: share of the last 64 samples that may fail after their retries.
    """

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.recent: deque[Failure] = deque(maxlen=KEPT)
        self.first: Failure | None = None
        self.outcomes: deque[bool] = deque(maxlen=WINDOW)  # of samples, after their retries: True where it failed
        self._logged: Counter[tuple[str, str]] = Counter()

    def record(self, error: BaseException, *, sample: str, task: str, workflow: str, is_final: bool) -> Failure:
        """Keep and report a failed attempt."""
        failure = Failure(
            sample=sample,
            task=task,
            workflow=workflow,
            cause=traceback.format_exception_only(error)[-1].strip(),
            traceback="".join(traceback.format_exception(error)),
            is_final=is_final,
        )
        self.recent.append(failure)
        self.first = self.first or failure
        key = (type(error).__name__, workflow)
        self._logged[key] += 1
        report, then = (logger.error, "given up") if is_final else (logger.warning, "run again")
        detail = f"\n{failure.traceback}" if self._logged[key] <= LOGGED_IN_FULL else f": {failure.cause}"
        report("%s failed in %s and is %s: %s%s", sample, workflow, then, task, detail)
        return failure

    def too_many(self) -> RolloutError | None:
        """The error that stops the run, with the first cause, where more of the last 64 samples failed than may."""
        failed = sum(self.outcomes)
        if failed <= self.max_share * WINDOW:
            return None
        return RolloutError(
            f"{failed} of the last {len(self.outcomes)} samples failed after their retries; "
            f"rollout.max_failed_share={self.max_share} allows {int(self.max_share * WINDOW)} of {WINDOW}. {self.describe_first()}"
        )

    def describe_first(self) -> str:
        """The first failure in words, with its traceback; empty where nothing failed."""
        return "" if self.first is None else self.first.describe()
