"""Counters, gauges and histograms in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping

_LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServerMetrics:
    """What a server counts. Safe to use from several threads."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Args:
        gauges: read at each scrape; the engine's own numbers.
        """
        self._lock = threading.Lock()
        self._gauges = gauges
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
            lines.append(f"rollwright_{name}_total{{{labels}}} {value:g}" if labels else f"rollwright_{name}_total {value:g}")
        lines.append("# TYPE rollwright_request_seconds histogram")
        seen = 0
        for bound, amount in zip((*_LATENCY_BOUNDS, float("inf")), buckets, strict=True):
            seen += amount
            lines.append(
                f'rollwright_request_seconds_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {seen}'
            )
        lines += [f"rollwright_request_seconds_sum {total:g}", f"rollwright_request_seconds_count {seen}"]
        for name, value in sorted((self._gauges() if self._gauges else {}).items()):
            lines += [f"# TYPE rollwright_{name} gauge", f"rollwright_{name} {float(value):g}"]
        return "\n".join(lines) + "\n"
