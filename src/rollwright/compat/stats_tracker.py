"""The metrics of this process under the names of AReaL's interface: ``stats_tracker.get("rollout").scalar(reward=1.0)``.

``get()`` is a view of ``get_tracker()``: metrics reported through either are exported, logged and shown together. Metrics of an
evaluation always begin with ``eval/``, so an evaluation also uses the scope ``rollout``.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollwright.tracking.metrics import MetricError, MetricsTracker, get_tracker


class ReduceType(enum.Enum):
    """Reductions that ``stat`` reports for a tensor: by default mean, minimum and maximum, each under its own name."""

    AVG_MIN_MAX = enum.auto()
    AVG = enum.auto()
    SUM = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    SCALAR = enum.auto()


class StatsTracker(MetricsTracker):
    """A view of a tracker that also averages tensors over masks, and times blocks."""

    def __init__(self, tracker: MetricsTracker) -> None:
        vars(self).update(vars(tracker))
        self._masks: dict[str, Any] = {}

    def denominator(self, **masks: Any) -> None:
        """Set the masks that ``stat`` averages over: bool tensors, kept by name until replaced. Also reports the count of each as a sum."""
        for name, mask in masks.items():
            if str(getattr(mask, "dtype", "")) != "torch.bool" or mask.numel() == 0:
                raise MetricError(
                    f"denominator {name!r} is no bool tensor with elements: give the mask itself, such as {name}=mask.bool()."
                )
            self._masks[self.full_name(name)] = mask.detach()
            self.sum(**{name: mask.sum()})

    def stat(self, denominator: str, reduce_type: ReduceType | None = None, **values: Any) -> None:
        """Report tensors over a mask.

        Args:
            denominator: name of the mask, as passed to ``denominator`` in this scope.
            reduce_type: the reduction. If None, ``name/avg``, ``name/min`` and ``name/max`` are reported.
            **values: float tensors of the mask's shape.

        Raises:
            MetricError: there is no such mask, or the shapes differ.
        """
        mask = self._masks.get(self.full_name(denominator))
        for name, value in values.items():
            if mask is None or value.shape != mask.shape:
                has = "there is no such denominator" if mask is None else f"its shape is {list(mask.shape)}"
                raise MetricError(
                    f"stat({denominator=}, {name}={list(value.shape)}): {has}; call denominator({denominator}=mask) first."
                )
            self._reduce(name, value.detach()[mask].float(), reduce_type or ReduceType.AVG_MIN_MAX)

    def _reduce(self, name: str, chosen: Any, reduce_type: ReduceType) -> None:
        if reduce_type is ReduceType.SCALAR:
            raise MetricError(f"stat({name}): a tensor is no scalar; use scalar(), or another reduce_type.")
        if reduce_type is ReduceType.SUM:
            self.sum(**{name: chosen.sum()})
        elif chosen.numel() > 0:
            several = reduce_type is ReduceType.AVG_MIN_MAX
            if several or reduce_type is ReduceType.AVG:
                self.weighted(float(chosen.numel()), **{f"{name}/avg" if several else name: chosen.mean()})
            if several or reduce_type is ReduceType.MIN:
                self.minimum(**{f"{name}/min" if several else name: chosen.min()})
            if several or reduce_type is ReduceType.MAX:
                self.maximum(**{f"{name}/max" if several else name: chosen.max()})

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Report the seconds inside as the mean ``timeperf/<key>``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            get_tracker("timeperf").scalar(**{key: time.perf_counter() - started})

    #: As a decorator: prefixes the function's reports with ``name/``.
    scope_func_wrapper = MetricsTracker.scope

    def export(self, reset: bool = True, reduce_group: Any = None) -> dict[str, float]:
        """Export as ``MetricsTracker.export`` does. A ``reduce_group`` may have only one member, because trainers reduce over ranks."""
        if reduce_group is not None:
            import torch.distributed

            if (size := torch.distributed.get_world_size(reduce_group)) > 1:
                raise MetricError(
                    f"export(reduce_group=…) over {size} ranks: export each rank's own, or report what was reduced already."
                )
        if reset:
            self._masks.clear()
        return super().export(reset)


_default = StatsTracker(get_tracker())
get = _default.get
scalar, stat, denominator = _default.scalar, _default.stat, _default.denominator
scope, scope_func_wrapper, record_timing = _default.scope, _default.scope_func_wrapper, _default.record_timing
export = export_all = _default.export
