"""The registry of datasets, and the conversion of a config's dataset section to rows.

A builder takes a split and its own arguments, and returns rows or ``Example`` objects::

    @DATASET_REGISTRY.register("riddles")
    def riddles(split="train", path="riddles.jsonl"):
        return [Example(prompt=row["riddle"], answer=row["solution"]) for row in read_rows(path, split)]

An installed package offers datasets as entry points of the group ``rollwright.datasets``: ``name = "module:builder"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.chat_template import prompt_ids
from rollwright.data.formats import Example, Row, to_tasks
from rollwright.data.rows import read_rows
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import DataError
from rollwright.registry import Registry, nearest
from rollwright.tracking import logging

logger = logging.getLogger("data")

Builder = Callable[..., Sequence[Row | Example]]


class DatasetRegistry(Registry[Builder]):
    """Registry of datasets: a builder takes a split and its own arguments, and returns rows or examples."""

    def build(self, name: str, split: str = "train", **kwargs: Any) -> list[Row | Example]:
        """Call the builder of a name, or of an import path.

        Raises:
            DataError: there is no such dataset, its builder does not accept the arguments, or it has no rows.
        """
        items = list(super().build(name, split=split, **kwargs))
        if not items:
            raise DataError(f"dataset {name!r} gave no rows for split {split!r}.")
        return items

    def rows(self, name: str, split: str = "train", **kwargs: Any) -> list[Row]:
        """Build the dataset as rows."""
        return [item.to_row() if isinstance(item, Example) else item for item in self.build(name, split, **kwargs)]

    def examples(self, name: str, split: str = "train", **kwargs: Any) -> list[Example]:
        """Build the dataset as examples in text."""
        return [item if isinstance(item, Example) else Example.from_row(item) for item in self.build(name, split, **kwargs)]


#: The project's one registry of datasets.
DATASET_REGISTRY = DatasetRegistry(
    "dataset",
    DataError,
    variable="DATASET_REGISTRY",
    entry_points="rollwright.datasets",
    built_in={
        "arithmetic": "rollwright.data.arithmetic:arithmetic",
        "gsm8k": "rollwright.data.gsm8k:gsm8k",
        "gsm8k_r1_template": "rollwright.data.gsm8k:gsm8k_r1_template",
        "seeds": "rollwright.environments.text_environment:seeds",
        "games": "rollwright.environments.games.tasks:games",
        "harbor": "rollwright.environments.harbor.tasks:harbor",
        "verifiers": "rollwright.environments.verifiers_hub:verifiers",
    },
)


def get_dataset(config: DatasetConfig, tokenizer: Any = None, enable_thinking: bool | None = None) -> list[Row]:
    """Load the rows of a ``train_dataset`` or ``valid_dataset`` section.

    Args:
        config: ``path`` is a registered name, ``reasoning_gym:NAME``, the import path of a builder
            (``my.module:builder``), or what ``read_rows`` reads.
        tokenizer: tokenizer (or its directory or name) that counts the tokens of a prompt; required if ``max_length`` is set.
        enable_thinking: template variable for the prompts that are counted. Default: the value in ``format``.

    Returns:
        Tasks that have ``messages`` and ``answer``, and ``completion`` if ``type`` is sft, or ``chosen`` and ``rejected`` if preference.

    Raises:
        DataError: the dataset or one of its rows is invalid; the message names it.
    """
    source, max_length = config.source, config.max_length
    tasks = to_tasks(dataset_rows(config), config.format, source, config.type)
    if max_length is None:
        return tasks
    if tokenizer is None:
        raise DataError(f"{source}: max_length counts tokens, so get_dataset needs the tokenizer.")
    tokenizer = load_tokenizer(tokenizer)
    variables = config.columns.template_variables
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    if any("messages" not in task for task in tasks):
        raise DataError(f"{source}: max_length counts the tokens of messages, and rows have none; leave it out.")
    kept = [
        task
        for task in tasks
        if len(prompt_ids(tokenizer, task["messages"], task.get("tools") if config.type != "rl" else None, **variables))
        <= max_length
    ]
    if not kept:
        raise DataError(f"{source}: every prompt has more than max_length={max_length} tokens; raise it.")
    if left_out := len(tasks) - len(kept):
        logger.warning("%s: left out %d of %d tasks, longer than %d tokens.", source, left_out, len(tasks), max_length)
    return kept


def dataset_rows(config: DatasetConfig) -> list[Row]:
    """Load the rows that ``config`` refers to, unchanged and at most ``limit``.

    Raises:
        DataError: there is nothing at ``path``, or its builder does not accept ``kwargs``.
    """
    path, kwargs = config.path, config.kwargs
    if not path:
        raise DataError("the dataset has no path: name a file, a directory, a registered dataset or a Hugging Face name.")
    module, colon, attribute = path.partition(":")
    if config.kind is not None:
        rows = DATASET_REGISTRY.rows(config.kind, config.split, path=path, **kwargs)
    elif module == "reasoning_gym" and colon:
        from rollwright.data.reasoning_gym import reasoning_gym_tasks

        rows = reasoning_gym_tasks(attribute, config.split, **kwargs)
    elif _is_built(path):
        rows = DATASET_REGISTRY.rows(path, config.split, **kwargs)
    elif kwargs:
        raise DataError(
            f"{path} is read from files, which take no kwargs ({', '.join(kwargs)}); {nearest(path, DATASET_REGISTRY)}"
        )
    else:
        return read_rows(path, config.split, config.subset, config.limit)
    return rows[: config.limit]


def has_subsets(config: DatasetConfig) -> bool:
    """Return True if ``config.subset`` applies, which is so for a directory or a Hugging Face dataset."""
    return config.kind is None and not _is_built(config.path) and not Path(config.path).expanduser().is_file()


def _is_built(path: str) -> bool:
    """Return True if rows come from a builder: registered, from reasoning_gym, or an import path."""
    _, colon, attribute = path.partition(":")
    return path in DATASET_REGISTRY or bool(colon and "/" not in path and attribute.isidentifier())
