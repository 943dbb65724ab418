"""Config of tasks: where rows come from, how they are read, what runs on them, and in which order they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollwright.config import key, key_from
from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError


@dataclass
class FormatConfig:
    """Roles of a row's columns. If nothing is set, columns are recognised by their names."""

    prompt_type: str = key(
        "plaintext",
        "plaintext: prompt_key is the user's text; messages: messages_key is a conversation.",
        choices=["plaintext", "messages"],
    )
    prompt_key: str = key("prompt", "Column of the user's text.")
    response_key: str = key("response", "Column of the reference answer.")
    messages_key: str = key("message", "Column of the conversation.")
    system_prompt: str | None = key(None, "System message of rows whose conversation does not begin with one.")
    system_prompt_key: str | None = key(None, "Column of a row's own system message.")
    tools_key: str | None = key(None, "Column of the tools offered to the model.")
    image_key: str | None = key(None, "Column of images (datasets; task-style workflows read their row).")
    reply_prefix: str | None = key(None, "Text that the assistant's reply begins with.")
    workflow_key: str | None = key(None, "Column that names a row's own workflow.")
    reward_fn_key: str | None = key(None, "Column that names a row's own reward function.")
    chosen_key: str = key("chosen", "Column of the preferred reply (datasets of type preference).")
    rejected_key: str = key("rejected", "Column of the other reply (datasets of type preference).")
    enable_thinking: bool = key(
        False, "Given to chat templates that know it (tasksets, and datasets of type sft and preference)."
    )
    chat_template: str | None = key(
        None, "Chat template in place of the tokenizer's (tasksets, and datasets of type sft and preference)."
    )

    @property
    def video_key(self) -> None:
        """Always None, because videos are not supported; ported workflows read this attribute."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, by name."""
        own = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {"enable_thinking": self.enable_thinking, **own}


#: Where a key is read: in train_dataset and valid_dataset, or in tasksets and eval_tasksets. Other keys are read in both.
_DATASETS, _TASKSETS = {"read_in": "datasets"}, {"read_in": "tasksets"}


@dataclass
class TasksetConfig:
    """A taskset: rows, their format, the workflow and reward that they are run with, and the order of drawing.

    The same class is a ``train_dataset`` or ``valid_dataset``, whose workflow, reward and generation arguments are the run's.
    """

    name: str = key("taskset", "Name in metrics.", public=True, **_TASKSETS)
    path: str = key(
        "", "File (jsonl, json, parquet), directory, registered dataset, module:builder or Hugging Face name.", public=True
    )
    kind: str | None = key(
        None,
        "Reader of path: a registered dataset that takes a path, such as harbor (docs/tasks.md). Default: by what path is.",
    )
    split: str = key("train", "Split of the dataset.", public=True)
    subset: str | None = key(None, "Subset (configuration) of a Hugging Face dataset.")
    kwargs: dict[str, Any] = key_from(dict, "Arguments of a registered or procedural dataset, such as size, seed, digits.")
    limit: int | None = key(None, "Use only the first rows.", ge=1)
    type: str = key(
        "rl",
        "rl: tasks with messages and an answer; sft: rows with a worked completion; preference: with a chosen and a rejected one.",
        choices=["rl", "sft", "preference"],
        **_DATASETS,
    )
    format: FormatConfig | str | None = key(
        None, "Roles of the columns, or a registered format; default: recognised by their names (docs/datasets.md)."
    )
    max_length: int | None = key(None, "Leave out, and count, tasks whose prompt has more tokens.", ge=1, **_DATASETS)
    batch_size: int = key(8, "Tasks in a batch.", ge=1, **_DATASETS)
    shuffle: bool = key(True, "Draw in a new seeded order every epoch.", **_DATASETS)
    drop_last: bool = key(True, "Leave out the last batch of an epoch if it is not full.", **_DATASETS)
    workflow: str | None = key(None, "Workflow of rows that name none.", **_TASKSETS)
    workflow_args: dict[str, Any] = key_from(dict, "Arguments that every task's workflow sees.", **_TASKSETS)
    reward_fn: str | None = key(None, "Reward function of rows that name none.", **_TASKSETS)
    reward_fn_args: dict[str, Any] = key_from(dict, "Keyword arguments of the reward function.", **_TASKSETS)
    gconfig: GenerationHyperparameters | None = key(
        None, "Generation arguments of these tasks; default: the run's.", **_TASKSETS
    )
    group_size: int | None = key(None, "Samples of each task; default: the run's gconfig.n_samples.", ge=1, **_TASKSETS)
    isolation: str = key(
        "thread",
        "Where run() runs: thread, beside the others, which a time limit cannot end; process, which it kills "
        "(run_async is awaited on the event loop, or on that of the process).",
        choices=["thread", "process"],
        **_TASKSETS,
    )
    isolated_processes: int | None = key(
        None, "Processes that run at once if isolation is process; default: one for each CPU.", ge=1, **_TASKSETS
    )
    selector: str = key(
        "shuffle",
        "Order in which tasks are drawn: sequential, shuffle, random, difficulty, or a registered selector.",
        **_TASKSETS,
    )
    selector_args: dict[str, Any] = key_from(dict, "Arguments of the selector, such as seed or target_reward.", **_TASKSETS)
    ratio: float = key(1.0, "Weight of this taskset among several.", gt=0.0, **_TASKSETS)

    def __post_init__(self) -> None:
        if isinstance(self.format, dict):
            raise ConfigError(
                f"format is a dict; give FormatConfig({', '.join(f'{k}={v!r}' for k, v in self.format.items())})."
            )

    @property
    def source(self) -> str:
        """Name of the rows in messages: path and split."""
        return f"{self.path or 'the dataset'} ({self.split})"

    @property
    def columns(self) -> FormatConfig:
        """The format's columns; the default ones if there is no format or a registered function reads the rows."""
        return self.format if isinstance(self.format, FormatConfig) else FormatConfig()


#: The same class under the name that it has in ``train_dataset``.
DatasetConfig = TasksetConfig
