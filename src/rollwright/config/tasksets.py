"""The one description of tasks: where rows come from, how a row is read, what runs on it, and how it is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from rollwright.config.generation import GenerationHyperparameters


def _help(text: str, **more: Any) -> dict[str, Any]:
    return {"help": text, **more}


@dataclass
class FormatConfig:
    """Which columns of a row hold what. One that sets nothing is no format: columns are known by their names."""

    prompt_type: str = field(
        default="plaintext",
        metadata=_help(
            "plaintext: prompt_key is the user's text; messages: messages_key is a conversation.",
            choices=["plaintext", "messages"],
        ),
    )
    prompt_key: str = field(default="prompt", metadata=_help("Column of the user's text."))
    response_key: str = field(default="response", metadata=_help("Column of the reference answer."))
    messages_key: str = field(default="message", metadata=_help("Column of the conversation."))
    system_prompt: str | None = field(
        default=None, metadata=_help("System message of rows whose conversation does not begin with one.")
    )
    system_prompt_key: str | None = field(default=None, metadata=_help("Column of a row's own system message."))
    tools_key: str | None = field(default=None, metadata=_help("Column of the tools offered to the model."))
    image_key: str | None = field(
        default=None, metadata=_help("Column of images (datasets; task-style workflows read their row).")
    )
    reply_prefix: str | None = field(default=None, metadata=_help("Text that the assistant's reply begins with."))
    workflow_key: str | None = field(default=None, metadata=_help("Column that names a row's own workflow."))
    reward_fn_key: str | None = field(default=None, metadata=_help("Column that names a row's own reward function."))
    chosen_key: str = field(default="chosen", metadata=_help("Column of the preferred reply (datasets of type preference)."))
    rejected_key: str = field(default="rejected", metadata=_help("Column of the other reply (datasets of type preference)."))
    enable_thinking: bool | None = field(default=None, metadata=_help("Passed to the chat template where set."))
    chat_template: str | None = field(default=None, metadata=_help("Chat template in place of the tokenizer's."))


#: Where a key is read: in train_dataset and valid_dataset, or in tasksets and eval_tasksets. The others are read in both.
_DATASETS, _TASKSETS = {"read_in": "datasets"}, {"read_in": "tasksets"}


@dataclass
class TasksetConfig:
    """A taskset: rows, their format, the workflow and reward that they are run with, and the order of drawing.

    The same class is a ``train_dataset`` or ``valid_dataset``, whose workflow, reward and generation arguments are the run's.
    """

    name: str = field(default="taskset", metadata=_help("Name in metrics.", **_TASKSETS))
    path: str = field(
        default="",
        metadata=_help("File (jsonl, json, parquet), directory, registered dataset, module:builder or Hugging Face name."),
    )
    split: str = field(default="train", metadata=_help("Split of the dataset."))
    subset: str | None = field(default=None, metadata=_help("Subset (configuration) of a Hugging Face dataset."))
    kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=_help("Arguments of a registered or procedural dataset, such as size, seed, digits.")
    )
    limit: int | None = field(default=None, metadata=_help("Use only the first rows.", ge=1))
    type: str = field(
        default="rl",
        metadata=_help(
            "rl: tasks with messages and an answer; sft: rows with a worked completion; preference: with a chosen and a rejected one.",
            choices=["rl", "sft", "preference"],
            **_DATASETS,
        ),
    )
    format: FormatConfig | str | None = field(
        default=None,
        metadata=_help("Which columns hold what, or a registered format; null: known by their names (docs/datasets.md)."),
    )
    max_length: int | None = field(
        default=None, metadata=_help("Leave out, and count, tasks whose prompt has more tokens.", ge=1, **_DATASETS)
    )
    batch_size: int = field(default=8, metadata=_help("Tasks in a batch.", ge=1, **_DATASETS))
    shuffle: bool = field(default=True, metadata=_help("Draw in a new seeded order every epoch.", **_DATASETS))
    drop_last: bool = field(
        default=True, metadata=_help("Leave out the last batch of an epoch where it is not full.", **_DATASETS)
    )
    workflow: str | None = field(default=None, metadata=_help("Workflow of rows that name none.", **_TASKSETS))
    workflow_args: dict[str, Any] = field(
        default_factory=dict, metadata=_help("Arguments that every task's workflow sees.", **_TASKSETS)
    )
    reward_fn: str | None = field(default=None, metadata=_help("Reward function of rows that name none.", **_TASKSETS))
    reward_fn_args: dict[str, Any] = field(
        default_factory=dict, metadata=_help("Keyword arguments of the reward function.", **_TASKSETS)
    )
    gconfig: GenerationHyperparameters | None = field(
        default=None, metadata=_help("Generation arguments of these tasks; null: the run's.", **_TASKSETS)
    )
    group_size: int | None = field(
        default=None, metadata=_help("Samples of each task; null: the run's gconfig.n_samples.", ge=1, **_TASKSETS)
    )
    isolation: str = field(
        default="thread",
        metadata=_help(
            "Where run() runs: thread, beside the others, which a time limit cannot end; process, which it kills "
            "(run_async is awaited on the event loop, or on that of the process).",
            choices=["thread", "process"],
            **_TASKSETS,
        ),
    )
    isolated_processes: int | None = field(
        default=None,
        metadata=_help("Processes that run at once where isolation is process; null: one for each CPU.", ge=1, **_TASKSETS),
    )
    selector: str = field(
        default="shuffle",
        metadata=_help(
            "Order in which tasks are drawn: sequential, shuffle, random, difficulty, or a registered selector.", **_TASKSETS
        ),
    )
    selector_args: dict[str, Any] = field(
        default_factory=dict, metadata=_help("Arguments of the selector, such as seed or target_reward.", **_TASKSETS)
    )
    ratio: float = field(default=1.0, metadata=_help("Weight of this taskset among several.", gt=0.0, **_TASKSETS))

    @property
    def source(self) -> str:
        """How messages name the rows: path and split."""
        return f"{self.path or 'the dataset'} ({self.split})"

    @property
    def columns(self) -> FormatConfig:
        """The format as columns: the default one where there is none, or a registered function has read the row."""
        return self.format if isinstance(self.format, FormatConfig) else FormatConfig()


#: The same class under the name that it has in ``train_dataset``.
DatasetConfig = TasksetConfig


def unread_keys(taskset: TasksetConfig, read_in: str) -> Iterator[tuple[str, str]]:
    """Keys that are set and not read where a taskset stands, each with what to do.

    Args:
        taskset: the section.
        read_in: ``datasets`` (``train_dataset``, ``valid_dataset``) or ``tasksets`` (``tasksets``, ``eval_tasksets``).
    """
    for each in fields(taskset):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.metadata.get("read_in", read_in) == read_in or getattr(taskset, each.name) == default:
            continue
        if read_in == "tasksets":
            yield each.name, "is read in train_dataset and valid_dataset, not in a taskset; take it out"
        elif each.name == "name":
            yield each.name, "is a taskset's name in metrics; the subset of a Hugging Face dataset is called subset"
        else:
            yield each.name, "is read in tasksets, not in a dataset, which takes it from the run's own keys; take it out"
