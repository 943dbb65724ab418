"""Rollout dumps: the trajectories of a step as files for people and programs.

Each dumped step has a readable file ``<run>/rollouts/step-000012.txt``. If no journal has the same data (separate evaluations),
``step-000012.jsonl`` also has the tokens, masks, log-probabilities and versions, one row per line, for programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rollwright.atomic import write_text

_RULE = "─" * 100

#: Columns with the names of the player of each row.
PLAYER = ("environment", "role", "agent")


def trajectory_records(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the rows of a trajectory, without padding, to plain lists and numbers.

    Each record has ``row``, ``input_ids``, ``loss_mask``, ``logprobs``, ``versions``, counts, ``stop_reason``, the ``[B]`` keys and the
    names of the row's player.
    """
    lists = {key: value.tolist() for key, value in batch.items() if hasattr(value, "tolist")}
    width = len(lists["input_ids"][0]) if lists["input_ids"] else 0
    records = []
    for row, keep in enumerate(lists["attention_mask"]):
        record: dict[str, Any] = {"row": row, **{key: batch[key][row] for key in PLAYER if batch.get(key)}}
        for key, value in lists.items():
            if key == "attention_mask":
                continue
            item = value[row]
            if isinstance(item, list):
                if len(item) != width or any(isinstance(inner, list) for inner in item):
                    continue  # image features and the like
                item = [inner for inner, kept in zip(item, keep, strict=True) if kept]
                if key == "logprobs":
                    item = [round(inner, 6) for inner in item]
                elif key == "loss_mask":
                    item = [int(bool(inner)) for inner in item]
            record[key] = item
        mask = record["loss_mask"]
        record["total_tokens"] = len(mask)
        record["sampled_tokens"] = sum(mask)
        record["prompt_tokens"] = mask.index(1) if 1 in mask else len(mask)
        record["stop_reason"] = "length" if record.get("truncated") else "stop"
        records.append(record)
    return records


def format_record(record: Mapping[str, Any], tokenizer: Any) -> str:
    """Format a record of :func:`trajectory_records` as text: the prompt, then the completion.

    Text that the policy did not sample (tool results, environment text) is between ``⟦`` and ``⟧``.
    """
    prompt_tokens = record["prompt_tokens"]
    ids, mask = record["input_ids"], record["loss_mask"]
    versions = sorted({version for version, sampled in zip(record.get("versions", []), mask, strict=False) if sampled})
    logprobs = [value for value, sampled in zip(record.get("logprobs", []), mask, strict=False) if sampled]
    facts = [f"row {record['row']}"]
    for key in ("group_ids", "sample_ids", "ordinal"):
        facts.append(f"{key.removesuffix('_ids')} {record[key]}" if record.get(key) is not None else "")
    facts += [f"{key} {record[key]}" if record.get(key) else "" for key in PLAYER]
    facts += [
        "" if record.get("trainable", True) else "not trained",
        f"reward {record['rewards']:g}" if "rewards" in record else "",
        f"{prompt_tokens} prompt + {record['sampled_tokens']} sampled tokens of {record['total_tokens']}",
        f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]}–{versions[-1]}" if versions else "",
        f"ended by {record['stop_reason']}",
        f"mean logprob {sum(logprobs) / len(logprobs):.3f}" if logprobs else "",
    ]
    completion = marked_text(ids[prompt_tokens:], mask[prompt_tokens:], tokenizer)
    prompt = str(tokenizer.decode(ids[:prompt_tokens], skip_special_tokens=False))
    return f"{_RULE}\n{' · '.join(filter(None, facts))}\n── prompt\n{prompt}\n── completion\n{completion}\n"


def marked_text(ids: Sequence[int], loss_mask: Sequence[int], tokenizer: Any) -> str:
    """Decode token ids, with text that the policy did not sample between ``⟦`` and ``⟧``."""
    parts = []
    for sampled, run in groupby(zip(loss_mask, ids, strict=True), key=lambda pair: pair[0]):
        text = str(tokenizer.decode([token for _, token in run], skip_special_tokens=False))
        parts.append(text if sampled else f"⟦{text}⟧")
    return "".join(parts)


class RolloutDumper:
    """Writes trajectories of each step to a directory.

    Args:
        directory: ``RunDirectory.rollouts``.
        tokenizer: decodes the tokens.
        limit: number of rows for each step, spread evenly over the batch so that several groups are included. 0 disables dumps,
            -1 writes all rows.
        for_programs: also write JSON lines, which are not needed if the run has a journal (see ``rollwright.Run``).
    """

    def __init__(self, directory: str | Path, tokenizer: Any, limit: int = 4, *, for_programs: bool = True) -> None:
        self._for_programs = for_programs
        self._directory = Path(directory)
        self._tokenizer = tokenizer
        self._limit = limit

    def dump(
        self,
        step: int,
        batch: Mapping[str, Any],
        name: str = "step",
        fetch: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> Path | None:
        """Write rows of a batch to ``<name>-<step>.txt`` (and ``.jsonl``); returns the first path, or None if nothing is dumped.

        An earlier dump of the same step (before a resume) is replaced.

        Args:
            step: number of the step.
            batch: a trajectory, whose tokens may be stored elsewhere.
            name: beginning of the file names.
            fetch: takes the chosen rows and returns them with their tokens.
        """
        count = len(batch["input_ids"])
        chosen_count = count if self._limit < 0 else min(self._limit, count)
        if not chosen_count:
            return None
        rows = [index * count // chosen_count for index in range(chosen_count)]
        chosen = {
            key: [value[row] for row in rows] if isinstance(value, list) else value[rows]
            for key, value in batch.items()
            if (isinstance(value, list) or hasattr(value, "tolist")) and len(value) == count
        }
        records = trajectory_records(fetch(chosen))
        for record, row in zip(records, rows, strict=True):
            record["row"] = row
            record["step"] = step
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = self._directory / f"{name}-{step:06d}"
        readable = f"{name} {step}: {len(rows)} of {count} rows; ⟦…⟧ is text that the policy did not sample\n"
        readable += "".join(format_record(record, self._tokenizer) for record in records)
        if self._for_programs:
            write_text(stem.with_suffix(".jsonl"), "".join(json.dumps(record) + "\n" for record in records))
        write_text(stem.with_suffix(".txt"), readable)
        return stem.with_suffix(".txt")
