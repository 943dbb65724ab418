"""Samples as files that a person can read, written without holding up the event loop."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from rollwright.tracking.logging import getLogger
from rollwright.tracking.rollout_dumps import marked_text
from rollwright.workflows.token_sequence import TokenSequence

logger = getLogger("workflows")

_RULE = "-" * 100


async def dump_sample(
    dump_dir: str | Path, *, version: int, task: Any, sections: dict[str, str], facts: dict[str, Any] | None = None
) -> Path | None:
    """Write one sample to ``dump_dir/<version>/<task>-<unique>.txt``.

    A dump is for reading: where the disk fails, the sample does not; the log says so.

    Args:
        dump_dir: created where it is missing.
        version: of the weights that sampled it (of the first token).
        task: names the task: its ``query_id``, ``id`` or ordinal.
        sections: heading to text, in order.
        facts: written in the first lines, such as the reward.

    Returns:
        The file, or None where it could not be written.
    """
    name = "".join(character if character.isalnum() or character in "-_" else "_" for character in str(task))[:80]
    path = Path(dump_dir) / str(version) / f"{name}-{uuid.uuid4().hex[:8]}.txt"
    lines = [f"{key}: {value}" for key, value in (facts or {}).items()]
    for heading, text in sections.items():
        lines += [_RULE, heading, _RULE, text]
    try:
        await aiofiles.os.makedirs(path.parent, exist_ok=True)
        async with aiofiles.open(path, "w", encoding="utf-8") as file:
            await file.write("\n".join(lines) + "\n")
    except OSError as error:
        logger.warning("the sample of task %s was not dumped to %s: %s", task, path, error)
        return None
    return path


async def dump_sequence(
    dump_dir: str | Path, sequence: TokenSequence, tokenizer: Any, data: dict[str, Any], facts: dict[str, Any]
) -> Path | None:
    """Write an episode that is one sequence: its prompt, and all that followed; see ``dump_sample``.

    What the policy did not sample stands between ``⟦`` and ``⟧``, as in the rollouts of the run directory.
    """
    sampled = sum(sequence.loss_mask)
    return await dump_sample(
        dump_dir,
        version=next((version for version in sequence.versions if version >= 0), 0),
        task=task_name(data),
        sections={
            "prompt": tokenizer.decode(sequence.input_ids[: sequence.prompt_length]),
            "episode": marked_text(sequence.completion_ids, sequence.loss_mask[sequence.prompt_length :], tokenizer),
        },
        facts={**facts, "tokens": f"{len(sequence)}, {sampled} of them sampled"},
    )


def task_name(data: dict[str, Any]) -> Any:
    """What a task calls itself: its ``query_id``, its ``id``, else the ordinal of its draw."""
    for key in ("query_id", "id", "ordinal"):
        if data.get(key) is not None:
            return data[key]
    return "task"
