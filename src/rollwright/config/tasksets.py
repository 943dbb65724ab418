"""Tasksets of the second way to write a workflow: how a row becomes a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.config.generation import GenerationHyperparameters


@dataclass
class FormatConfig:
    """Which columns of a row hold what."""

    prompt_type: str = field(
        default="plaintext",
        metadata={
            "help": "plaintext: prompt_key is the user's text; messages: messages_key is a conversation.",
            "choices": ["plaintext", "messages"],
        },
    )
    prompt_key: str = field(default="prompt", metadata={"help": "Column of the user's text."})
    response_key: str = field(default="response", metadata={"help": "Column of the reference answer."})
    messages_key: str = field(default="message", metadata={"help": "Column of the conversation."})
    system_prompt: str | None = field(default=None, metadata={"help": "System message of every task."})
    system_prompt_key: str | None = field(default=None, metadata={"help": "Column of a row's own system message."})
    tools_key: str | None = field(default=None, metadata={"help": "Column of the tools offered to the model."})
    image_key: str | None = field(
        default=None, metadata={"help": "Column of images (datasets; task-style workflows read their row)."}
    )
    reply_prefix: str | None = field(default=None, metadata={"help": "Text that the assistant's reply begins with."})
    workflow_key: str | None = field(default=None, metadata={"help": "Column that names a row's own workflow."})
    reward_fn_key: str | None = field(default=None, metadata={"help": "Column that names a row's own reward function."})
    chosen_key: str = field(default="chosen", metadata={"help": "Column of the preferred reply (datasets of type preference)."})
    rejected_key: str = field(default="rejected", metadata={"help": "Column of the other reply (datasets of type preference)."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "Passed to the chat template where set."})
    chat_template: str | None = field(default=None, metadata={"help": "Chat template in place of the tokenizer's."})


@dataclass
class TasksetConfig:
    """A taskset: rows, their format, and the workflow and reward they are run with."""

    name: str = field(default="taskset", metadata={"help": "Name in metrics."})
    path: str = field(default="", metadata={"help": "File, directory, registered taskset or Hugging Face dataset name."})
    split: str = field(default="train", metadata={"help": "Split of the dataset."})
    subset_name: str | None = field(default=None, metadata={"help": "Subset of a Hugging Face dataset."})
    format: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    workflow_args: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments that every task's workflow sees."})
    reward_fn_args: dict[str, Any] = field(default_factory=dict, metadata={"help": "Keyword arguments of the reward function."})
    default_workflow_type: str | None = field(default=None, metadata={"help": "Workflow of rows that name none."})
    default_reward_fn_type: str | None = field(default=None, metadata={"help": "Reward function of rows that name none."})
    repeat_times: int | None = field(
        default=None, metadata={"help": "Samples of each task; None: the run's group size.", "ge": 1}
    )
    isolation: str = field(
        default="thread",
        metadata={
            "help": "Where run() runs: thread, beside the others, which a time limit cannot end; process, which it kills "
            "(run_async is awaited on the event loop, or on that of the process).",
            "choices": ["thread", "process"],
        },
    )
    isolated_processes: int | None = field(
        default=None,
        metadata={"help": "Processes that run at once where isolation is process; None: one for each CPU.", "ge": 1},
    )
    selector: str = field(
        default="shuffle",
        metadata={"help": "Order in which tasks are drawn.", "choices": ["sequential", "shuffle", "random", "difficulty"]},
    )
    selector_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Arguments of the selector, such as seed or target_reward."}
    )
    ratio: float = field(default=1.0, metadata={"help": "Weight of this taskset among several.", "gt": 0.0})
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of a registered or procedural taskset."})
