"""Counters, gauges and histograms in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping

_LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


#: Numbers of the engine that only grow; its others are gauges.
_ENGINE_COUNTERS = frozenset(
    {"steps", "prefill_tokens", "generated_tokens", "finished", "aborted", "preemptions", "reused_tokens"}
)


class ServerMetrics:
    """What a server counts. Safe to use from several threads."""

    def __init__(self, engine_stats: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Args:
        engine_stats: read at each scrape; the engine's own numbers.
        """
        self._lock = threading.Lock()
        self._engine_stats = engine_stats
        self._counters: dict[tuple[str, str], float] = defaultdict(float)
        self._latency_buckets = [0] * (len(_LATENCY_BOUNDS) + 1)
        self._latency_sum = 0.0

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        with self._lock:
            self._counters[name, text] += amount

    def observe_latency(self, seconds: float) -> None:
        """Add one request to the latency histogram."""
        with self._lock:
            self._latency_buckets[bisect_left(_LATENCY_BOUNDS, seconds)] += 1
            self._latency_sum += seconds

    def text(self) -> str:
        """All metrics in Prometheus' exposition format."""
        lines: list[str] = []
        with self._lock:
            counters = sorted(self._counters.items())
            buckets, total = list(self._latency_buckets), self._latency_sum
        previous = ""
        for (name, labels), value in counters:
            if name != previous:
                lines.append(f"# TYPE rollwright_{name}_total counter")
                previous = name
            lines.append(
                f"rollwright_{name}_total{{{labels}}} {_number(value)}"
                if labels
                else f"rollwright_{name}_total {_number(value)}"
            )
        lines.append("# TYPE rollwright_request_seconds histogram")
        seen = 0
        for bound, amount in zip((*_LATENCY_BOUNDS, float("inf")), buckets, strict=True):
            seen += amount
            lines.append(
                f'rollwright_request_seconds_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {seen}'
            )
        lines += [f"rollwright_request_seconds_sum {_number(total)}", f"rollwright_request_seconds_count {seen}"]
        for name, value in sorted((self._engine_stats() if self._engine_stats else {}).items()):
            is_counter = name in _ENGINE_COUNTERS
            full = f"rollwright_{name}_total" if is_counter else f"rollwright_{name}"
            lines += [f"# TYPE {full} {'counter' if is_counter else 'gauge'}", f"{full} {_number(value)}"]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """All digits: a counter that is rounded stands still."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
