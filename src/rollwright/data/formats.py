"""The one way from a row as a file has it to a task: ``messages`` that the model is asked, and the ``answer`` it is scored by.

A row keeps its own columns beside those. A format names the columns. Without one (or with one that sets nothing) a row that has
``messages`` is a task already, and the usual pairs of a question and its answer are known by their names. Datasets are read this way
when they are loaded, tasksets when a task's ``messages()`` are asked for.

A format may also be a function of the user's, from a row to its messages, to an ``Example`` or to a row that has ``messages``::

    @FORMATS.register("riddles")
    def riddles(row):
        return Example(prompt=row["riddle"], answer=row["solution"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollwright.config.tasksets import FormatConfig
from rollwright.data.gsm8k import is_worked_answer, task_of
from rollwright.data.rows import Row
from rollwright.errors import DataError
from rollwright.registry import Registry


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
        optional = {"question": self.question, "completion": self.completion}
        return {
            **self.extras,
            "messages": [{"role": "user", "content": self.prompt}],
            "answer": self.answer,
            **{key: value for key, value in optional.items() if value is not None},
        }

    @classmethod
    def from_row(cls, row: Row) -> Example:
        """A task as text: its messages' contents, one below the other."""
        if not row.get("messages"):
            raise DataError(f"a row without messages cannot become an Example; it has {', '.join(map(str, row))}.")
        prompt = "\n".join(str(message["content"]) for message in row["messages"])
        known = ("messages", "answer", "question", "completion")
        extras = {key: value for key, value in row.items() if key not in known}
        return cls(prompt, row.get("answer"), row.get("question"), row.get("completion"), extras)


#: Formats by name, for ``format: NAME``.
FORMATS: Registry[Callable[[Row], Any]] = Registry("format", DataError, variable="FORMATS", entry_points="rollwright.formats")

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

_PLAIN = FormatConfig()
#: Keys of a format that datasets do not read, whose rows do not choose their workflow; and those that only preference pairs have.
_TASKSET_ONLY = ("workflow_key", "reward_fn_key", "reply_prefix", "enable_thinking", "chat_template")
_PAIRS_ONLY = ("chosen_key", "rejected_key")


def read_rows_by(name: str, rows: Sequence[Row], source: str) -> list[Row]:
    """Rows as a registered format reads them: with ``messages``, and what they had."""
    function = FORMATS.get(name)
    read = []
    for row, where in zip(rows, _places(rows, source), strict=True):
        try:
            made = function(dict(row))
        except Exception as error:  # a user's function can fail in any way
            raise DataError(f"{where}: format {name!r} failed: {type(error).__name__}: {error}") from error
        if isinstance(made, Example):
            made = made.to_row()
        elif isinstance(made, list):
            made = {"messages": made}
        if not isinstance(made, dict) or "messages" not in made:
            raise DataError(
                f"{where}: format {name!r} gave {made!r:.80}; return messages, an Example, or a row that has messages."
            )
        read.append({**row, **made})
    return read


def _places(rows: Sequence[Row], source: str) -> list[str]:
    return getattr(rows, "places", None) or [f"{source}: row {index}" for index in range(len(rows))]


def to_tasks(rows: Sequence[Row], layout: FormatConfig | str | None, source: str, kind: str = "rl") -> list[Row]:
    """Make tasks of a dataset's rows.

    Args:
        rows: as they were read.
        layout: which columns hold what, or the name of a registered format; None: known by their names.
        source: name of the dataset, for messages.
        kind: ``sft``: rows must have a worked ``completion`` to train on; where there is none, the answer is it.
            ``preference``: they must have a ``chosen`` and a ``rejected`` reply.

    Returns:
        Rows with ``messages`` and ``answer`` (and ``completion``, or ``chosen`` and ``rejected``), and all that they had.

    Raises:
        DataError: a column is missing or is not what it should be; the message names the row.
    """
    places = _places(rows, source)
    if isinstance(layout, str):
        rows, layout = read_rows_by(layout, rows, source), None
    for key in _TASKSET_ONLY + (() if kind == "preference" else _PAIRS_ONLY):
        if layout is not None and getattr(layout, key) != getattr(_PLAIN, key):
            use = "datasets of type preference" if key in _PAIRS_ONLY else "tasksets"
            raise DataError(f"{source}: format.{key} means nothing for a dataset of {kind} rows; it is for {use}.")
    tasks = []
    for row, where in zip(rows, places, strict=True):
        task = _pair(row, layout, where) if kind == "preference" else to_task(row, layout, where)
        if kind == "sft" and "segments" not in task and "input_ids" not in task:  # worked episodes need no completion
            task = {**task, "completion": _completion(task, where)}
        tasks.append(task)
    return tasks


def to_task(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """The row with its ``messages``, and ``answer``, ``tools`` and ``images`` where it has them.

    Args:
        row: as it was read.
        layout: which columns hold what; None, or one that sets nothing: known by their names.
        where: place of the row, for messages.

    Raises:
        DataError: a column is missing or is not what it should be.
    """
    messages = messages_of(row, layout, where)
    if layout is None or layout == _PLAIN:
        return {**_by_names(row, where), "messages": messages}
    task = {**row, "messages": messages}
    if layout.response_key in row:
        task["answer"] = row[layout.response_key]
    elif layout.response_key != _PLAIN.response_key:
        _column(row, layout.response_key, "response_key", where)
    if layout.tools_key:
        task["tools"] = _column(row, layout.tools_key, "tools_key", where)
    if layout.image_key:
        images = _column(row, layout.image_key, "image_key", where)
        task["images"] = images if isinstance(images, list) else [images]
    return task


def messages_of(row: Row, layout: FormatConfig | None, where: str) -> list[Row]:
    """The conversation that a row begins with; arguments and errors as of ``to_task``.

    A system message of the row's own wins over ``system_prompt_key``, and that over ``system_prompt``: there is never a second.
    """
    if layout is None or layout == _PLAIN:
        messages = _by_names(row, where)["messages"]
    elif layout.prompt_type == "messages":
        messages = _column(row, layout.messages_key, "messages_key", where)
    else:
        text = _column(row, layout.prompt_key, "prompt_key", where)
        if not isinstance(text, str):
            raise DataError(f"{where}: column {layout.prompt_key!r} is a {type(text).__name__}, not the user's text.")
        messages = [{"role": "user", "content": text}]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list of at least one message, not {messages!r:.80}.")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise DataError(f"{where}: a message needs role and content, this is {message!r:.80}.")
    return with_system([dict(message) for message in messages], _system_prompt(row, layout or _PLAIN))


def with_system(messages: list[Row], prompt: str | None) -> list[Row]:
    """The messages with a system message of ``prompt`` first, where there is a prompt and they have none of their own."""
    if prompt and messages[0].get("role") != "system":
        return [{"role": "system", "content": prompt}, *messages]
    return messages


def _system_prompt(row: Row, layout: FormatConfig) -> str | None:
    return (layout.system_prompt_key and row.get(layout.system_prompt_key)) or layout.system_prompt


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
            text = str(_column(row, prompt_key, "prompt_key", where))
            return {**row, "messages": [{"role": "user", "content": text}], "answer": row[answer_key]}
    if isinstance(row.get(_PLAIN.prompt_key), str):  # a reward may need no reference answer
        return {**row, "messages": [{"role": "user", "content": row[_PLAIN.prompt_key]}]}
    raise DataError(
        f"{where}: which column is the prompt? It has {', '.join(map(str, row)) or 'none'}. Name it in the dataset's format: "
        "prompt_key, or prompt_type: messages and messages_key (and response_key where there is a reference answer)."
    )


def _column(row: Row, key: str, name: str, where: str) -> Any:
    if key in row and row[key] is None:
        raise DataError(f"{where}: column {key!r} is empty; fill it, or leave the row out.")
    if key not in row:
        raise DataError(f"{where} has no column {key!r} (it has {', '.join(map(str, row)) or 'none'}); set format.{name}.")
    return row[key]


def _completion(task: Row, where: str) -> str:
    for key in ("completion", "response", "answer"):
        if isinstance(task.get(key), str):
            return task[key]
    last = task["messages"][-1]
    hint = " Take the last assistant message out of messages and give it as completion." if last["role"] == "assistant" else ""
    raise DataError(f"{where}: supervised training needs the text to train on in a column completion (or response).{hint}")


def _pair(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """A preference pair: ``messages``, and the texts ``chosen`` and ``rejected``.

    Either both columns hold a reply as text, beside a prompt in a column of its own; or both hold a whole conversation, equal up to
    the last message, which is the reply.
    """
    names = layout or _PLAIN
    chosen, rejected = (_column(row, getattr(names, name), name, where) for name in _PAIRS_ONLY)
    if isinstance(chosen, str) and isinstance(rejected, str):
        task = to_task(row, layout, where)
    else:
        prompt, chosen = _split(chosen, names.chosen_key, where)
        rejected_prompt, rejected = _split(rejected, names.rejected_key, where)
        if prompt != rejected_prompt:
            raise DataError(
                f"{where}: {names.chosen_key} and {names.rejected_key} differ before their last message; a pair is two replies to "
                "the same conversation."
            )
        task = {**row, "messages": with_system(prompt, _system_prompt(row, names))} if prompt else to_task(row, layout, where)
    if chosen == rejected:
        raise DataError(f"{where}: {names.chosen_key} and {names.rejected_key} are the same reply, which prefers nothing.")
    return {**task, "chosen": chosen, "rejected": rejected}


def _split(value: Any, key: str, where: str) -> tuple[list[Row], str]:
    """The messages of a conversation before its last one, and the text of that."""
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) and "content" in each for each in value):
        raise DataError(f"{where}: {key} is neither a text nor a list of messages (as the other column is): {value!r:.80}.")
    *before, last = value
    if last.get("role") != "assistant" or not isinstance(last["content"], str):
        raise DataError(f"{where}: the last message of {key} is not the assistant's text, which would be the reply.")
    return [dict(message) for message in before], last["content"]
