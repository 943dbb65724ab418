"""One task over a run: each group of samples that evaluated it or trained on it, in order, with the answers."""

from __future__ import annotations

import statistics
from typing import Any

from rollwright.tracking.readable import clipped
from rollwright.viewer.run import Run
from rollwright.viewer.samples import NOT_UNDONE, select

_LONGEST_ANSWER = 4_000  # characters
_MOST_SAMPLES = 5_000


def history_of(run: Run, task: str) -> list[dict[str, Any]]:
    """Return the groups of a task in the order in which they ended.

    Args:
        run: the run.
        task: identity of the task, see ``collector.identity_of_task``.

    Returns:
        For each group its key ``group``, ``is_eval``, the ``version`` of the weights that were evaluated, the ``step`` that trained on it,
        its mean ``reward`` and its ``samples``, each with the text that the model ``said``.
    """
    said = f"substr(texts.said, 1, {_LONGEST_ANSWER}) AS said"
    query = (
        f"{select('samples.version AS evaluated', said)} WHERE samples.task = ? AND {NOT_UNDONE} ORDER BY samples.id LIMIT ?"
    )
    groups: dict[str, dict[str, Any]] = {}
    samples = run.samples
    for row in run.index.rows(query, task, _MOST_SAMPLES):
        sample = {**samples.plain(row), "said": clipped(row["said"] or "", _LONGEST_ANSWER)}
        version = row["evaluated"] if row["is_eval"] else None
        nothing = {
            "group": sample["group"],
            "is_eval": sample["is_eval"],
            "version": version,
            "step": sample["step"],
            "samples": [],
        }
        groups.setdefault(sample["group"], nothing)["samples"].append(sample)
    for group in groups.values():
        group["samples"].sort(key=lambda sample: (sample["index"], sample["attempt"]))
        rewards = [sample["reward"] for sample in group["samples"] if sample["reward"] is not None]
        group["reward"] = statistics.fmean(rewards) if rewards else None
    return list(groups.values())
