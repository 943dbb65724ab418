"""From a row as it stands in a file to a task: ``messages`` that the model is asked, and the ``answer`` it is scored by.

A row keeps its own columns beside those. With a ``format`` the columns are named; without one, a row that has ``messages``
is a task already, and the usual pairs of a question and its answer are known by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rollwright.config.tasksets import FormatConfig
from rollwright.data.gsm8k import is_worked_answer, task_of
from rollwright.data.preferences import preference_task
from rollwright.errors import DataError

Row = dict[str, Any]

#: Columns that hold the user's text and the reference answer, where no format says so; the first pair present is taken.
KNOWN_PAIRS = (
    ("question", "answer"),
    ("prompt", "answer"),
    ("problem", "answer"),
    ("prompt", "response"),
    ("question", "response"),
    ("instruction", "output"),
    ("problem", "solution"),
)

#: What a ``format`` of a dataset cannot say: these belong to tasksets, whose rows choose their workflow.
_TASKSET_ONLY = ("workflow_key", "reward_fn_key", "reply_prefix", "enable_thinking", "chat_template")

#: What it can say only where rows are preference pairs.
_PAIRS_ONLY = ("chosen_key", "rejected_key")


def to_tasks(rows: Sequence[Row], layout: FormatConfig | None, source: str, kind: str = "rl") -> list[Row]:
    """Make tasks of rows.

    Args:
        rows: as they were read.
        layout: which columns hold what; None: known by their names.
        source: name of the dataset, for messages.
        kind: ``sft``: rows must have a worked ``completion`` to train on; where there is none, the answer is it.
            ``preference``: they must have a ``chosen`` and a ``rejected`` reply.

    Returns:
        Rows with ``messages`` and ``answer`` (and ``completion``, or ``chosen`` and ``rejected``), and all that they had.

    Raises:
        DataError: a column is missing or is not what it should be; the message names the row.
    """
    if layout is not None:
        _refuse_what_a_dataset_cannot_do(layout, source, kind)
    places = getattr(rows, "places", None) or [f"{source}: row {index}" for index in range(len(rows))]
    tasks = []
    for row, where in zip(rows, places, strict=True):
        prompted = partial(_by_names, where=where) if layout is None else partial(_by_layout, layout=layout, where=where)
        task = preference_task(row, layout, where, prompted) if kind == "preference" else prompted(row)
        _check_messages(task["messages"], where)
        if kind == "sft" and "segments" not in task and "input_ids" not in task:  # worked episodes need no completion
            task = {**task, "completion": _completion(task, where)}
        tasks.append(task)
    return tasks


def _refuse_what_a_dataset_cannot_do(layout: FormatConfig, source: str, kind: str) -> None:
    default = FormatConfig()
    for key in _TASKSET_ONLY + (() if kind == "preference" else _PAIRS_ONLY):
        if getattr(layout, key, None) != getattr(default, key, None):
            use = "datasets of type preference" if key in _PAIRS_ONLY else "tasksets"
            raise DataError(f"{source}: format.{key} means nothing for a dataset of {kind} rows; it is for {use}.")


def _by_layout(row: Row, layout: FormatConfig, where: str) -> Row:
    if layout.prompt_type == "messages":
        messages = [dict(message) for message in _column(row, layout.messages_key, "messages_key", where)]
    else:
        text = _column(row, layout.prompt_key, "prompt_key", where)
        if not isinstance(text, str):
            raise DataError(f"{where}: column {layout.prompt_key!r} is a {type(text).__name__}, not the user's text.")
        messages = [{"role": "user", "content": text}]
    system = (row.get(layout.system_prompt_key) if layout.system_prompt_key else None) or layout.system_prompt
    if system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    task = {**row, "messages": messages}
    if layout.response_key in row:
        task["answer"] = row[layout.response_key]
    elif layout.response_key != FormatConfig().response_key:
        _column(row, layout.response_key, "response_key", where)
    if layout.tools_key:
        task["tools"] = _column(row, layout.tools_key, "tools_key", where)
    if layout.image_key:
        images = _column(row, layout.image_key, "image_key", where)
        task["images"] = images if isinstance(images, list) else [images]
    return task


def _by_names(row: Row, where: str) -> Row:
    if "messages" in row:
        return row
    if "chosen" in row and "rejected" in row:
        for prompt_key in ("prompt", "question", "instruction"):
            if isinstance(row.get(prompt_key), str):
                return {**row, "messages": [{"role": "user", "content": row[prompt_key]}]}
    for prompt_key, answer_key in KNOWN_PAIRS:
        if prompt_key in row and answer_key in row:
            if is_worked_answer(row[answer_key]):
                return {**row, **task_of(row[prompt_key], row[answer_key], where)}
            return {**row, "messages": [{"role": "user", "content": str(row[prompt_key])}], "answer": row[answer_key]}
    raise DataError(
        f"{where}: which column is the prompt? It has {', '.join(map(str, row)) or 'none'}. Name them in the dataset's format: "
        "prompt_key and response_key, or prompt_type: messages and messages_key."
    )


def _column(row: Row, key: str, name: str, where: str) -> Any:
    if key not in row or row[key] is None:
        raise DataError(f"{where} has no column {key!r} (it has {', '.join(map(str, row)) or 'none'}); set format.{name}.")
    return row[key]


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list of at least one message, not {messages!r:.80}.")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise DataError(f"{where}: a message needs role and content, this is {message!r:.80}.")


def _completion(task: Row, where: str) -> str:
    for key in ("completion", "response", "answer"):
        if isinstance(task.get(key), str):
            return task[key]
    last = task["messages"][-1]
    hint = " Take the last assistant message out of messages and give it as completion." if last["role"] == "assistant" else ""
    raise DataError(f"{where}: supervised training needs the text to train on in a column completion (or response).{hint}")
