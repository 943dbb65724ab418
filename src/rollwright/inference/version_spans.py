"""``weight_versions``: which output tokens each version of the weights sampled, as servers write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollwright.errors import EngineError


def version_spans(versions: list[int]) -> list[dict[str, Any]]:
    """``weight_versions`` spans over output tokens: each run of one version, labels as text."""
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans


def versions_of_spans(spans: Sequence[dict[str, Any]], count: int, number: Callable[[Any], int]) -> list[int]:
    """One version for each of ``count`` output tokens from ``weight_versions`` spans.

    Args:
        spans: ``{"version", "start", "end"}`` over the output tokens, in order.
        count: output tokens.
        number: turns a server's version label into a number.

    Raises:
        EngineError: the spans do not cover the tokens exactly once.
    """
    versions: list[int] = []
    for span in spans:
        start, end = int(span["start"]), min(int(span["end"]), count)
        if start != len(versions) or (end < start):
            raise EngineError(f"weight_versions {list(spans)} do not cover {count} output tokens exactly once.")
        versions.extend([number(span["version"])] * (end - start))
    if len(versions) != count:
        raise EngineError(f"weight_versions {list(spans)} cover {len(versions)} of {count} output tokens.")
    return versions
