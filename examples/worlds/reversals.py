"""Short texts to reverse, for verifiers' environment ``reverse-text``: the file that it reads, and worked replies.

write("texts")                  # texts/train.jsonl, a dataset for the environment's argument dataset_name
worked(size=2)                  # the dataset reversals: the environment's messages, with a worked reply

Most worked replies copy the text instead of reversing it. Their texts are never in the file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rollwright.atomic import write_text
from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import split_of
from rollwright.errors import DataError

#: The environment's own.
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
LETTERS = "abcdefghijklmnop"


def texts(part: str, size: int, letters: int, seed: int = 1) -> list[str]:
    """Distinct texts of so many letters, in a random order.

    Args:
        part: ``worked``, or ``environment``; the two share no text.
        size: number of texts.
        letters: of a text.
        seed: which texts, in which order.
    """
    generator = random.Random(f"{part} {seed}")
    found: dict[str, None] = {}
    while len(found) < size:
        text = "".join(generator.choices(LETTERS, k=letters))
        if (split_of(f"reversals {text}") == "train") == (part == "worked"):
            found[text] = None
    return list(found)


def write(directory: str | Path, size: int = 2000, letters: int = 8, seed: int = 1) -> Path:
    """Write the environment's dataset, and return its path."""
    path = Path(directory) / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps({"prompt": text}) + "\n" for text in texts("environment", size, letters, seed)))
    return path


@DATASET_REGISTRY.register("reversals")
def worked(
    split: str = "train",
    size: int = 20000,
    letters: int = 8,
    seed: int = 1,
    write_to: str = "",
    knowing_share: float = 0.25,
) -> list[dict[str, Any]]:
    """Worked replies, in the messages of the environment.

    Args:
        split: train.
        size: number of texts.
        letters: of a text.
        seed: which texts.
        write_to: directory in which the environment's dataset is written, too.
        knowing_share: share of replies that reverse their text; the others copy it.

    Raises:
        DataError: there is no such split.
    """
    if split != "train":
        raise DataError(f"reversals: there is no split {split!r}; worked replies are all for training.")
    if write_to:
        write(write_to, letters=letters)
    generator = random.Random(seed)
    rows = []
    for text in texts("worked", size, letters, seed):
        reply = text[::-1] if generator.random() < knowing_share else text
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
        rows.append({"messages": messages, "completion": f"<reversed_text>{reply}</reversed_text>", "query_id": text})
    return rows
