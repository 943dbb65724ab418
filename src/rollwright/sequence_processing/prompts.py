"""Prompts: from datasets, and as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.datasets import DATASET_REGISTRY, get_dataset
from rollwright.data.formats import Example
from rollwright.data.rows import ENDINGS
from rollwright.errors import ConfigError, DataError

#: Text, token ids, or the messages of a conversation (which the tokenizer's chat template turns into text).
Prompt = str | list[int] | list[dict[str, Any]]


def dataset_prompts(name: str, split: str = "train", **kwargs: Any) -> list[str]:
    """The prompts of a dataset, in its order.

    Args:
        name: registered name, local file or directory, ``reasoning_gym:NAME``, ``module:builder``, or ``owner/name`` at
            Hugging Face.
        split: its split.
        **kwargs: arguments of a registered builder, such as ``path`` of ``gsm8k_r1_template``.

    Raises:
        DataError: no such dataset (with the known names), split or file.
    """
    if name in DATASET_REGISTRY:
        return [example.prompt for example in DATASET_REGISTRY.examples(name, split, **kwargs)]
    if not (Path(name).expanduser().exists() or Path(name).suffix in ENDINGS or any(mark in name for mark in "/:~")):
        raise DataError(
            f"no dataset is registered as {name!r}, and there is no file of that name; registered: "
            f"{', '.join(sorted(DATASET_REGISTRY))}. Add yours with DATASET_REGISTRY.register(name), or give a file's path."
        )
    rows = get_dataset(DatasetConfig(path=name, split=split, kwargs=kwargs))
    return [Example.from_row(row).prompt for row in rows]


def sampled(prompts: Sequence[str], count: int | None, seed: int | None, source: str) -> list[str]:
    """``count`` prompts drawn without replacement; None: all, in their order.

    Args:
        prompts: to draw from.
        count: how many.
        seed: of the draw; None: another draw each time.
        source: name of the dataset, for the message.

    Raises:
        ConfigError: more are asked for than there are, or fewer than one.
    """
    if count is None:
        return list(prompts)
    if not 1 <= count <= len(prompts):
        raise ConfigError(f"num_prompts is {count}, and {source} has {len(prompts)} prompts: give 1 to {len(prompts)}.")
    return [prompts[index] for index in random.Random(seed).sample(range(len(prompts)), count)]


def encoded(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt; text gets the tokenizer's own special tokens.

    Raises:
        ConfigError: one text instead of a list of them, nothing at all, or a prompt without tokens.
    """
    if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
        raise ConfigError(f"prompts is one {type(prompts).__name__}: give a list of prompts, [prompt] for a single one.")
    if not prompts:
        raise ConfigError("prompts is empty: give at least one prompt.")
    ids = [_ids_of(prompt, tokenizer) for prompt in prompts]
    for index, tokens in enumerate(ids):
        if not tokens:
            raise ConfigError(f"Prompt {index} has no tokens ({prompts[index]!r}): give text, or the begin token.")
    return ids


def _ids_of(prompt: Prompt, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if prompt and isinstance(prompt[0], dict):
        return list(tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=False))
    return [int(token) for token in prompt]  # type: ignore[arg-type]
