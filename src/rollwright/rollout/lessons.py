"""What the draws of workflows learn from finished groups (``TaskDraws``), and when.

Invariants:

* a result is learned once, when a batch is delivered that has its task or a later one;
* results are learned in the order of their tasks, also those of groups that were refused or dropped. In deterministic mode a draw therefore
  depends on the tasks before it and not on timing;
* a checkpoint has what was learned, and the results that wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from rollwright.workflows.base import TaskDraws

#: The ordinal of a training group, the name of its workflow, and its result; None if there is nothing to learn.
Lesson = tuple[int, str, Any]


def draws_of(workflow: Any) -> TaskDraws | None:
    """Return the draws of a workflow's instance, or None if its tasks are complete as they are."""
    return getattr(workflow, "draws", None)


class Lessons:
    """Completes tasks, and passes the results of training groups to the draws of their workflows. Thread-safe.

    Args:
        version: returns the version of the policy.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._draws: dict[str, TaskDraws] = {}  # of training, by the workflow's name
        self._restored: dict[str, Any] = {}  # states of workflows that are not in use yet, by name
        self._waiting: list[Lesson] = []  # not learned yet
        self._newest = -1  # newest ordinal that was delivered
        self._lock = threading.Lock()

    def complete(self, data: dict[str, Any], name: str, draws: TaskDraws, is_eval: bool) -> dict[str, Any]:
        """Return a task with what is drawn for it.

        Args:
            data: the task.
            name: name of its workflow.
            draws: draws of its workflow.
            is_eval: the task is for evaluation; nothing is learned from it.
        """
        with self._lock:
            if not is_eval and self._draws.get(name) is not draws:
                self._draws[name] = draws
                if name in self._restored:
                    draws.load_state_dict(self._restored.pop(name))
                self._learn()
            return draws.complete(data, self._version())

    def ended(self, lesson: Lesson) -> None:
        """Keep the lesson of a group that is not delivered."""
        with self._lock:
            self._waiting.append(lesson)

    def delivered(self, lessons: Iterable[Lesson]) -> None:
        """Learn from delivered groups, and from earlier groups that were not delivered."""
        with self._lock:
            for lesson in lessons:
                self._waiting.append(lesson)
                self._newest = max(self._newest, lesson[0])
            self._learn()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned and what waits."""
        with self._lock:
            states = {name: draws.state_dict() for name, draws in self._draws.items()}
            return {"states": self._restored | states, "waiting": list(map(list, self._waiting)), "newest": self._newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of ``state_dict``; call this before the first task."""
        with self._lock:
            self._restored = dict(state["states"])
            self._waiting = [(ordinal, name, result) for ordinal, name, result in state["waiting"]]
            self._newest = state["newest"]

    def _learn(self) -> None:
        later = []
        for ordinal, name, result in sorted((each for each in self._waiting if each[2] is not None), key=lambda each: each[0]):
            if ordinal <= self._newest and name in self._draws:
                self._draws[name].learn(result)
            else:
                later.append((ordinal, name, result))
        self._waiting = later
