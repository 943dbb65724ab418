"""The one registry of datasets, and how a config's dataset section becomes rows.

A builder takes a split and arguments of its own, and returns rows or ``Example`` objects::

    @DATASET_REGISTRY.register("riddles")
    def riddles(split="train", path="riddles.jsonl"):
        return [Example(prompt=row["riddle"], answer=row["solution"]) for row in read_rows(path, split)]
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.counting import counting_squares
from rollwright.data.formats import to_tasks
from rollwright.data.gsm8k import R1_TEMPLATE, final_answer, gsm8k, read_gsm8k
from rollwright.data.procedural import arithmetic
from rollwright.data.rows import Rows, read_rows
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import DataError
from rollwright.registry import nearest

Row = dict[str, Any]

#: Group under which installed packages offer datasets: ``name = "module:builder"``.
ENTRY_POINTS = "rollwright.datasets"


@dataclass
class Example:
    """One example of a dataset that is given as text.

    Attributes:
        prompt: what the model reads, template and all.
        answer: the reference answer.
        question: the bare question, where the prompt has a template around it.
        completion: a worked solution, where there is one.
        extras: whatever else a reward function needs.
    """

    prompt: str
    answer: Any = None
    question: str | None = None
    completion: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> Row:
        """The example as a task: the prompt is the user's message."""
        row: Row = {**self.extras, "messages": [{"role": "user", "content": self.prompt}], "answer": self.answer}
        if self.question is not None:
            row["question"] = self.question
        if self.completion is not None:
            row["completion"] = self.completion
        return row

    @classmethod
    def from_row(cls, row: Row) -> Example:
        """A task as text: its messages' contents, one below the other."""
        if not row.get("messages"):
            raise DataError(f"a row without messages cannot become an Example; it has {', '.join(map(str, row))}.")
        prompt = "\n".join(str(message["content"]) for message in row["messages"])
        known = ("messages", "answer", "question", "completion")
        extras = {key: value for key, value in row.items() if key not in known}
        return cls(prompt, row.get("answer"), row.get("question"), row.get("completion"), extras)


Builder = Callable[..., Sequence[Row | Example]]


class DatasetRegistry(MutableMapping[str, Builder]):
    """Datasets by name. ``register`` adds one; so does assignment."""

    def __init__(self) -> None:
        self._builders: dict[str, Builder] = {}
        self._looked_for_plugins = False

    def register(self, name: str) -> Callable[[Builder], Builder]:
        """Decorator that registers a builder: ``builder(split=…, **kwargs)`` returns rows or examples.

        Raises:
            DataError: the name is taken by a builder of another module or name.
        """

        def add(builder: Builder) -> Builder:
            self[name] = builder
            return builder

        return add

    def __getitem__(self, name: str) -> Builder:
        if name not in self:
            raise DataError(f"no dataset is registered as {name!r}; {nearest(name, self._builders)}")
        return self._builders[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._builders and not self._looked_for_plugins:
            self._looked_for_plugins = True
            for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
                self._builders.setdefault(point.name, point.load())
        return name in self._builders

    def __setitem__(self, name: str, builder: Builder) -> None:
        old = self._builders.get(name)
        if old is not None and _identity(old) != _identity(builder):
            raise DataError(f"the dataset name {name!r} is taken by {'.'.join(_identity(old))}; choose another.")
        self._builders[name] = builder

    def __delitem__(self, name: str) -> None:
        del self._builders[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)

    def build(self, name: str, split: str = "train", **kwargs: Any) -> list[Row | Example]:
        """Call the builder of ``name``.

        Raises:
            DataError: no such dataset, arguments that the builder does not take, or no rows.
        """
        builder = self[name]
        try:
            inspect.signature(builder).bind(split=split, **kwargs)
        except TypeError as error:
            known = [parameter for parameter in inspect.signature(builder).parameters if parameter != "split"]
            raise DataError(f"dataset {name!r}: {error}; its arguments are {', '.join(known) or 'none'}.") from error
        items = list(builder(split=split, **kwargs))
        if not items:
            raise DataError(f"dataset {name!r} gave no rows for split {split!r}.")
        return items

    def rows(self, name: str, split: str = "train", **kwargs: Any) -> list[Row]:
        """The dataset as rows."""
        return [item.to_row() if isinstance(item, Example) else item for item in self.build(name, split, **kwargs)]

    def examples(self, name: str, split: str = "train", **kwargs: Any) -> list[Example]:
        """The dataset as examples in text."""
        return [item if isinstance(item, Example) else Example.from_row(item) for item in self.build(name, split, **kwargs)]


def _identity(builder: Builder) -> tuple[str, str]:
    return getattr(builder, "__module__", ""), getattr(builder, "__qualname__", repr(builder))


#: The project's one registry of datasets.
DATASET_REGISTRY = DatasetRegistry()
DATASET_REGISTRY["arithmetic"] = arithmetic
DATASET_REGISTRY["gsm8k"] = gsm8k
DATASET_REGISTRY["counting_squares"] = counting_squares


@DATASET_REGISTRY.register("gsm8k_r1_template")
def gsm8k_r1_template(split: str = "train", path: str | None = None) -> list[Example]:
    """GSM8K with a prompt that opens ``<think>`` and asks for the result in ``<answer>`` tags, for base models."""
    return [
        Example(
            prompt=R1_TEMPLATE.format(question=row["question"]),
            answer=final_answer(row["answer"], f"gsm8k {split}: row {index}"),
            question=row["question"],
            extras={"query_id": f"gsm8k/{split}/{index}"},
        )
        for index, row in enumerate(read_gsm8k(split, path))
    ]


def get_dataset(config: DatasetConfig, tokenizer: Any = None) -> list[Row]:
    """The rows of a ``train_dataset`` or ``valid_dataset`` section.

    Args:
        config: ``path`` is a registered name, ``reasoning_gym:NAME``, the import path of a builder
            (``my.module:builder``), or what ``read_rows`` reads.
        tokenizer: counts a prompt's tokens where ``max_length`` is set; an object, or the directory or name of one.

    Returns:
        Tasks with ``messages`` and ``answer``, ``completion`` where ``type`` is sft, ``chosen`` and ``rejected`` where it is preference.

    Raises:
        DataError: with the dataset, and the row where it is a row's fault.
    """
    if not config.path:
        raise DataError("the dataset has no path: name a file, a directory, a registered dataset or a Hugging Face name.")
    tasks = to_tasks(read_taskset_rows(config), config.format, config.source, config.type)
    return tasks if config.max_length is None else _short_enough(tasks, config.max_length, tokenizer, config.source)


def read_taskset_rows(config: DatasetConfig) -> list[Row]:
    """The rows that ``config`` names, at most ``limit``, as they are, without making tasks of them."""
    rows = _read(config)
    if config.limit is None:
        return rows
    return rows.first(config.limit) if isinstance(rows, Rows) else rows[: config.limit]


def _read(config: DatasetConfig) -> list[Row]:
    path, kwargs = config.path, config.kwargs
    if path in DATASET_REGISTRY:
        return DATASET_REGISTRY.rows(path, config.split, **kwargs)
    if path.startswith("reasoning_gym:"):
        from rollwright.data.reasoning_gym import reasoning_gym_tasks

        return reasoning_gym_tasks(path.removeprefix("reasoning_gym:"), config.split, **kwargs)
    module, colon, attribute = path.partition(":")
    if colon and "/" not in path and attribute.isidentifier():
        return _imported(module, attribute, path, config)
    if kwargs:
        raise DataError(
            f"{path} is read from files, which take no kwargs ({', '.join(kwargs)}); {nearest(path, DATASET_REGISTRY)}"
        )
    return read_rows(path, config.split, config.subset, config.limit)


def _imported(module: str, attribute: str, path: str, config: DatasetConfig) -> list[Row]:
    try:
        builder = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(f"the dataset builder {path} cannot be imported: {error}.") from error
    registry = DatasetRegistry()
    registry[path] = builder
    return registry.rows(path, config.split, **config.kwargs)


def _short_enough(tasks: list[Row], max_length: int, tokenizer: Any, source: str) -> list[Row]:
    """Leave out, and tell, tasks whose prompt has more tokens than ``max_length``."""
    from rollwright.tracking import logging

    if tokenizer is None:
        raise DataError(f"{source}: max_length counts tokens, so get_dataset needs the tokenizer.")
    tokenizer = load_tokenizer(tokenizer)
    kept = [
        task
        for task in tasks
        if len(tokenizer.apply_chat_template(task["messages"], tokenize=True, add_generation_prompt=True)) <= max_length
    ]
    if not kept:
        raise DataError(f"{source}: every prompt has more than max_length={max_length} tokens; raise it.")
    if left_out := len(tasks) - len(kept):
        logging.getLogger("data").warning(
            "%s: left out %d of %d tasks, longer than %d tokens.", source, left_out, len(tasks), max_length
        )
    return kept
