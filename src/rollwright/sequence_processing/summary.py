"""One row for each prompt of an experiment on disk."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.sequence_processing.shards import ShardedExperiment


def prompt_table(experiment: ShardedExperiment) -> list[dict[str, Any]]:
    """Means over each prompt's responses.

    Returns:
        Rows with the prompt's number and text, how many responses it has, their mean length in tokens, the share that a limit
        cut, the mean of the token entropies and the variance between the responses' mean entropies, and the mean
        log-probability of a token and of a response, in nats.
    """
    rows = []
    for index, group in itertools.groupby(experiment.rows(), key=lambda row: row["prompt_index"]):
        responses = list(group)
        lengths = np.array([len(row["response_ids"]) for row in responses], dtype=float)
        totals = np.array([row["sequence_logprob"] for row in responses])
        entropies = np.array([float(np.sum(row["entropies"])) for row in responses])
        tokens = max(1.0, float(lengths.sum()))
        rows.append(
            {
                "index": index,
                "prompt": responses[0]["prompt"],
                "responses": len(responses),
                "length": float(lengths.mean()),
                "truncated": sum(row["stop_reason"] == "length" for row in responses) / len(responses),
                "entropy": float(entropies.sum()) / tokens,
                "entropy_variance": float(np.var(entropies / np.maximum(lengths, 1.0))),
                "token_logprob": float(totals.sum()) / tokens,
                "sequence_logprob": float(totals.mean()),
            }
        )
    return rows


def write_prompt_table(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write what ``prompt_table`` gave as CSV; returns the file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
