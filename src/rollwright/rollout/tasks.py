"""From what a caller gives to a group that can run: the workflow's instance, the ordinal, the size."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

from rollwright.errors import RolloutError
from rollwright.rollout.group import AcceptFunction, Group
from rollwright.tracking.logging import getLogger
from rollwright.workflows.registry import resolve_function, resolve_workflow, workflow_name

logger = getLogger("rollout")

WORKFLOWS_KEPT = 8  # instances that are used again for the same arguments


class GroupFactory:
    """Makes groups, and numbers their tasks. Safe to use from several threads."""

    def __init__(self) -> None:
        self.next_ordinal = 0  # of training tasks that carry none
        self._task_ids = itertools.count()
        self._eval_ordinals = itertools.count()
        self._instances: list[tuple[Any, dict[str, Any] | None, Any]] = []
        self._lock = threading.Lock()
        self._warned = False

    def make(
        self,
        data: dict[str, Any],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None,
        should_accept_fn: AcceptFunction | str | None,
        group_size: int,
        is_eval: bool,
        place: int | None = None,
    ) -> Group:
        """A group of ``group_size`` samples of the task ``data``.

        A workflow that has a method ``group_size(data)`` says itself how often each task is repeated.

        Args:
            place: ordinal of an evaluation task that carries none; None: counted.
        """
        instance = self._instance(workflow, workflow_kwargs)
        if callable(getattr(instance, "group_size", None)):
            group_size = int(instance.group_size(data))
        if group_size < 1:
            raise RolloutError(f"group_size={group_size}: a group has at least one sample.")
        if group_size > 1 and not is_eval:
            self._warn_of_groups_of_groups(instance, group_size)
        return Group(
            task_id=next(self._task_ids),
            ordinal=self._ordinal(data, is_eval, place),
            data=data,
            workflow=_repeated(instance) if group_size > 1 else instance,
            workflow_name=workflow_name(instance),
            size=group_size,
            is_eval=is_eval,
            should_accept=None if should_accept_fn is None else resolve_function(should_accept_fn, "should_accept_fn"),
        )

    def restored(self, entry: dict[str, Any]) -> Group:
        """A complete group from a checkpoint."""
        group = Group(next(self._task_ids), entry["task"]["ordinal"], entry["task"], None, "", entry["size"])
        group.admitted, group.trajectory = entry["admitted"], entry["trajectory"]
        return group

    def _warn_of_groups_of_groups(self, workflow: Any, group_size: int) -> None:
        own = getattr(workflow, "group_size", None)
        if isinstance(own, int) and own > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "%s makes groups of %d itself, and each task is repeated %d times besides: %d episodes a task. Set n_samples to 1 "
                "(gconfig.n_samples in a config) to have groups of %d.",
                workflow_name(workflow),
                own,
                group_size,
                own * group_size,
                own,
            )

    def _ordinal(self, data: dict[str, Any], is_eval: bool, place: int | None) -> int:
        ordinal = data.get("ordinal")
        if not isinstance(ordinal, int) or isinstance(ordinal, bool):
            ordinal = None
        if is_eval:  # a space of their own: evaluation must not shift the seeds of training
            if ordinal is not None:
                return ordinal
            return place if place is not None else next(self._eval_ordinals)
        with self._lock:
            if ordinal is None:
                ordinal = self.next_ordinal
            self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        return ordinal

    def _instance(self, workflow: Any, kwargs: dict[str, Any] | None) -> Any:
        """The workflow's instance; the same one for equal arguments, since building one may load a tokenizer."""
        with self._lock:
            for known, known_kwargs, instance in self._instances:
                if known is workflow and known_kwargs == kwargs:
                    return instance
        instance = resolve_workflow(workflow, kwargs)
        kept = None if kwargs is None else {name: _snapshot(value) for name, value in kwargs.items()}
        with self._lock:
            self._instances = [(workflow, kept, instance), *self._instances[: WORKFLOWS_KEPT - 1]]
        return instance


def _snapshot(value: Any) -> Any:
    """Arguments that their owner may change later are compared with what they were."""
    return copy.copy(value) if hasattr(value, "__dataclass_fields__") or isinstance(value, dict | list) else value


def _repeated(workflow: Any) -> Any:
    """The workflow as the executor repeats it: it must not make ``n_samples`` samples itself."""
    gconfig = getattr(workflow, "gconfig", None)
    if gconfig is None or getattr(gconfig, "n_samples", 1) == 1:
        return workflow
    single = copy.copy(workflow)
    single.gconfig = gconfig.new(n_samples=1)
    return single
