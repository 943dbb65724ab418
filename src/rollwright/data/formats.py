"""Converts a row of a file to a task: ``messages`` for the model, and the ``answer`` for the reward.

The row keeps its other columns. A format names the columns. Without a format, or if it names neither prompt nor answer, columns are
recognised by their names (``docs/datasets.md`` lists them). It is an error if two columns could be the prompt, or if a column that
belongs to the prompt would be left out. Datasets are converted when they are loaded, tasksets when a task's ``messages()`` is called.

A format may also be a user's function from a row to its messages, to an ``Example`` or to a row with ``messages``::

    @FORMATS.register("riddles")
    def riddles(row):
        return Example(prompt=row["riddle"], answer=row["solution"])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollwright.config.tasksets import FormatConfig
from rollwright.data.gsm8k import is_worked_answer, task_of
from rollwright.data.rows import Row
from rollwright.errors import DataError
from rollwright.registry import Registry


@dataclass
class Example:
    """One example of a dataset, as text.

    Attributes:
        prompt: text that the model reads, including any template.
        answer: the reference answer.
        question: the bare question, if the prompt puts a template around it.
        completion: a worked solution, if there is one.
        extras: further columns for the reward function.
    """

    prompt: str
    answer: Any = None
    question: str | None = None
    completion: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> Row:
        """Convert the example to a task, whose user message is the prompt."""
        optional = {"question": self.question, "completion": self.completion}
        return {
            **self.extras,
            "messages": [{"role": "user", "content": self.prompt}],
            "answer": self.answer,
            **{key: value for key, value in optional.items() if value is not None},
        }

    @classmethod
    def from_row(cls, row: Row) -> Example:
        """Convert a task to text: the contents of its messages, joined by line breaks."""
        if not row.get("messages"):
            raise DataError(f"a row without messages cannot become an Example; it has {', '.join(map(str, row))}.")
        prompt = "\n".join(str(message["content"]) for message in row["messages"])
        known = ("messages", "answer", "question", "completion")
        extras = {key: value for key, value in row.items() if key not in known}
        return cls(prompt, row.get("answer"), row.get("question"), row.get("completion"), extras)


#: Formats by name, for ``format: NAME``.
FORMATS: Registry[Callable[[Row], Any]] = Registry("format", DataError, variable="FORMATS", entry_points="rollwright.formats")

_PLAIN = FormatConfig()
#: Keys that name the columns of prompt and answer. If a format sets none of them, the columns are recognised by their names.
_NAMING = ("prompt_type", "prompt_key", "response_key", "messages_key")
#: Keys of a format that (some types of) datasets do not read, and what to use instead.
_TASKSET_ONLY: dict[str, str] = dict.fromkeys(("workflow_key", "reward_fn_key", "reply_prefix"), "it is for tasksets")
_PAIRS_ONLY = ("chosen_key", "rejected_key")
_OF_TYPES: dict[str, dict[str, str]] = {
    "preference": _TASKSET_ONLY,
    "sft": {**_TASKSET_ONLY, **dict.fromkeys(_PAIRS_ONLY, "it is for datasets of type preference")},
}
_OF_TYPES["rl"] = _OF_TYPES["sft"] | {
    "enable_thinking": "the run's workflow takes it: workflow_kwargs: {enable_thinking: true}",
    "chat_template": "it is for tasksets, and for datasets of type sft and preference",
}


def read_rows_by(name: str, rows: Sequence[Row], source: str) -> list[Row]:
    """Convert rows with a registered format; each result has ``messages`` and the row's own columns."""
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
    """Convert a dataset's rows to tasks.

    Args:
        rows: the rows as read.
        layout: roles of the columns, or the name of a registered format. By default they are recognised by their names.
        source: name of the dataset, for messages.
        kind: ``rl``; ``sft``, for rows with a worked ``completion`` to train on (by default, the answer); or ``preference``, for
            rows with a ``chosen`` and a ``rejected`` reply.

    Returns:
        Rows with ``messages`` and ``answer`` (and ``completion``, or ``chosen`` and ``rejected``), and their own columns.

    Raises:
        DataError: a column is missing or has the wrong type; the message names the row.
    """
    places = _places(rows, source)
    if isinstance(layout, str):
        rows, layout = read_rows_by(layout, rows, source), None
    for key, use in _OF_TYPES[kind].items():
        if layout is not None and getattr(layout, key) != getattr(_PLAIN, key):
            raise DataError(f"{source}: format.{key} means nothing for a dataset of {kind} rows; {use}.")
    read = {"rl": to_task, "sft": _worked, "preference": _pair}[kind]
    return [read(row, layout, where) for row, where in zip(rows, places, strict=True)]


def to_task(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """Add ``messages`` to a row, and ``answer``, ``tools`` and ``images`` if the row has them.

    Args:
        row: the row as read.
        layout: format that names the columns. If it is None or names none, columns are recognised by their names.
        where: location of the row, for messages.

    Raises:
        DataError: a column is missing or has the wrong type, or the conversation ends with a reply.
    """
    task = _read(row, layout, where)
    _check_is_asked(task["messages"], where)
    return task


def messages_of(row: Row, layout: FormatConfig | None, where: str) -> list[Row]:
    """Return the prompt conversation of a row. Arguments and errors are as in ``to_task``, but no answer is required."""
    messages = _with_messages(row, layout, where)["messages"]
    _check_is_asked(messages, where)
    return messages


def _read(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """Convert a row as ``to_task`` does, but allow a conversation that ends with a reply."""
    task, names = _with_messages(row, layout, where), layout or _PLAIN
    if not _is_by_names(names):
        if names.response_key in row:
            task["answer"] = row[names.response_key]
        elif names.response_key != _PLAIN.response_key:
            _column(row, names.response_key, "response_key", where)
    if names.tools_key:
        task["tools"] = _column(row, names.tools_key, "tools_key", where)
    if names.image_key:
        images = _column(row, names.image_key, "image_key", where)
        task["images"] = images if isinstance(images, list) else [images]
    return task


def _is_by_names(names: FormatConfig) -> bool:
    return all(getattr(names, key) == getattr(_PLAIN, key) for key in _NAMING)


def _with_messages(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """Add ``messages`` to a row, and its answer if columns are recognised by their names.

    A system message in the row takes precedence over ``system_prompt_key``, and that over ``system_prompt``; only one is used.
    """
    names = layout or _PLAIN
    if _is_by_names(names):
        task = _by_names(row, layout, where)
    elif names.prompt_type == "messages":
        task = {**row, "messages": _column(row, names.messages_key, "messages_key", where)}
    else:
        text = _prompt_text_of(row, names.prompt_key, "prompt_key", where)
        task = {**row, "messages": [{"role": "user", "content": text}]}
    return {**task, "messages": with_system(_conversation(task["messages"], "messages", where), _system_prompt(row, names))}


def _conversation(messages: Any, name: str, where: str) -> list[Row]:
    """Return messages without keys whose value is None (columnar files give every message the union of all keys)."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: {name} must be a list of at least one message, not {messages!r:.80}.")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or not ("content" in message or message.get("tool_calls")):
            raise DataError(f"{where}: a message needs role and content, this is {message!r:.80}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{where}: a message has no content: {message!r:.80}.")
    bare = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return [message if "content" in message else {**message, "content": ""} for message in bare]


def _check_is_asked(messages: list[Row], where: str) -> None:
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the conversation ends with the assistant's reply, so there is nothing to ask. To train on the reply, give the dataset "
            "type: sft; to sample one, let messages end with the user's, and keep the reply in another column."
        )


def with_system(messages: list[Row], prompt: str | None) -> list[Row]:
    """Prepend a system message with ``prompt``, unless that is empty or the messages begin with a system message."""
    if prompt and messages[0].get("role") != "system":
        return [{"role": "system", "content": prompt}, *messages]
    return messages


def _system_prompt(row: Row, layout: FormatConfig) -> str | None:
    return (layout.system_prompt_key and row.get(layout.system_prompt_key)) or layout.system_prompt


def _worked(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """Make a row for supervised training: ``messages`` and the ``completion`` that follows, a string or a list of messages.

    If a conversation ends with the assistant, all its replies are trained. Rows that have ``segments``, or ``input_ids`` and
    ``loss_mask``, get no ``completion``.
    """
    if "segments" in row or ("input_ids" in row and "loss_mask" in row):
        return row if row.get("messages") is None else _read(row, layout, where)
    task = _read(row, layout, where)
    messages, given = task["messages"], task.get("completion")
    if isinstance(task.get("label"), bool) and given is not None:
        raise DataError(
            f"{where}: the column label says whether the completion is a good one (unpaired preferences), which supervised training "
            "ignores: keep the rows to train on, and drop the column."
        )
    if messages[-1]["role"] != "assistant":
        return {**task, "completion": _completion(task, layout, where)}
    if given is not None:
        raise DataError(
            f"{where}: the text to train on is both in the column completion and in the last message; let messages end with the user's, or "
            "drop the column."
        )
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    if first == 0:
        raise DataError(f"{where}: the conversation begins with the assistant; begin it with the user's or a system message.")
    return {**task, "messages": messages[:first], "completion": _as_text(messages[first:])}


def _completion(task: Row, layout: FormatConfig | None, where: str) -> Any:
    if layout is not None and layout.response_key != _PLAIN.response_key and isinstance(task["answer"], str):
        return task["answer"]
    for key in COMPLETIONS:
        if isinstance(task.get(key), str):
            return task[key]
        if isinstance(task.get(key), list) and all(isinstance(each, dict) for each in task[key]):
            replies = _conversation(task[key], key, where)
            if replies[0]["role"] != "assistant" or replies[-1]["role"] != "assistant":
                raise DataError(f"{where}: the messages of {key} must begin and end with the assistant's.")
            return _as_text(replies)
    raise DataError(f"{where}: supervised training needs the text to train on in a column completion (or response).")


def _as_text(replies: list[Row]) -> Any:
    """Return the text of a single text-only reply, or other replies unchanged."""
    single = len(replies) == 1 and not replies[0].keys() - {"role", "content"} and isinstance(replies[0]["content"], str)
    return replies[0]["content"] if single else replies


def _pair(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """Make a preference pair: ``messages``, and the strings ``chosen`` and ``rejected``.

    Either both columns contain a reply (a string, or a list of one message) and another column contains the prompt; or both contain a
    whole conversation, and the two are equal up to the last message, which is the reply.
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
        if prompt:
            _check_same_prompt(row.get(names.prompt_key), prompt, names.prompt_key, where)
            _check_is_asked(prompt, where)
            task = {**row, "messages": with_system(prompt, _system_prompt(row, names))}
        else:
            task = to_task(row, layout, where)
    if chosen == rejected:
        raise DataError(f"{where}: {names.chosen_key} and {names.rejected_key} are the same reply, which prefers nothing.")
    return {**task, "chosen": chosen, "rejected": rejected}


def _split(value: Any, key: str, where: str) -> tuple[list[Row], str]:
    """Split a conversation into the messages before the last one, and the text of the last one."""
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) and "content" in each for each in value):
        raise DataError(f"{where}: {key} is neither a text nor a list of messages (as the other column is): {value!r:.80}.")
    *before, last = value
    if last.get("role") != "assistant" or not isinstance(last["content"], str):
        raise DataError(f"{where}: the last message of {key} is not the assistant's text, which would be the reply.")
    if last.get("tool_calls"):
        raise DataError(f"{where}: the reply in {key} calls tools; write the calls as the model does, in its content.")
    return (_conversation(before, key, where) if before else []), last["content"]


def _check_same_prompt(given: Any, prompt: list[Row], key: str, where: str) -> None:
    """Raise an error if the prompt column differs from the prompt of the two conversations."""
    if isinstance(given, list):
        same = given == prompt or _conversation(given, key, where) == prompt
    else:
        same = not isinstance(given, str) or any(given == message["content"] for message in prompt)
    if not same:
        raise DataError(
            f"{where}: the column {key!r} is not the conversation before the replies in chosen and rejected. Let these hold the replies "
            f"alone, one message each, or drop {key!r}."
        )


# --- columns recognised by their names

#: Columns that hold the prompt, as text or as a conversation.
PROMPTS = ("question", "prompt", "problem", "instruction")
#: Columns that hold the reference answer; the first one present is used. Some rows have it in ``reward_model``.
ANSWERS = ("answer", "response", "output", "solution", "ground_truth")
#: Columns that hold text to train on; the first one present is used.
COMPLETIONS = ("completion", "response", "output", "solution", "answer")

#: Columns that are part of the prompt in datasets that have them; Alpaca's ``input`` is read together with ``instruction``.
_PARTS_OF_PROMPTS = ("input", "context", "passage", "choices", "options", "history", "system", "system_prompt")

_FUNCTION = "a format function (docs/datasets.md, From row to task)"
#: Advice for rows that have none of the known columns but one of these.
_ADVICE = {
    "conversations": f"ShareGPT's conversations (from, value) become messages (role, content) in {_FUNCTION}",
    "conversation": "name it: format: {prompt_type: messages, messages_key: conversation}",
    "text": 'text that is trained as it is goes into segments: [{"text": …, "train": true}] (docs/supervised.md)',
    "query": "name it: format: {prompt_key: query}, and response_key if there is a reference answer",
}


def _by_names(row: Row, layout: FormatConfig | None, where: str) -> Row:
    """Add ``messages`` to a row, ``answer`` if it has one, and ``completion`` if the answer is GSM8K's.

    Args:
        row: the row as read.
        layout: a format that names no columns; its ``prompt_key`` decides between several prompts. None if there is no format.
        where: location of the row, for messages.

    Raises:
        DataError: no column is known as the prompt, several could be, or one that belongs to the prompt would be left out.
    """
    answer = answer_of(row, where)
    if row.get("messages") is not None:
        return {**row, **answer, "messages": row["messages"]}
    key = _prompt_key(row, layout, where)
    if isinstance(row[key], list):
        return {**row, **answer, "messages": row[key]}
    text = _prompt_text_of(row, key, "prompt_key", where)
    if key == "instruction" and row.get("input"):
        text = f"{text}\n\n{_prompt_text_of(row, 'input', 'prompt_key', where)}"
    parts = [name for name in _PARTS_OF_PROMPTS if row.get(name) and not (key == "instruction" and name == "input")]
    if parts and layout is None:
        named = "system_prompt_key: " + parts[0] if parts[0].startswith("system") else f"prompt_key: {key}"
        raise DataError(
            f"{where}: the column {parts[0]!r} seems to belong to the prompt, which would be {key!r} alone. Put both into the prompt by "
            f"{_FUNCTION}; or name the columns that are meant: format: {{{named}, …}} (with prompt_key and response_key)."
        )
    if is_worked_answer(answer.get("answer")):
        return {**row, **task_of(text, answer["answer"], where)}
    return {**row, **answer, "messages": [{"role": "user", "content": text}]}


def _prompt_key(row: Row, layout: FormatConfig | None, where: str) -> str:
    present = [name for name in PROMPTS if row.get(name) is not None]
    if conversations := [name for name in present if isinstance(row[name], list)]:
        present = conversations
    if layout is not None and layout.prompt_key in present:
        return layout.prompt_key
    if len({str(row[name]) for name in present}) > 1:
        raise DataError(
            f"{where}: which column is the prompt, {' or '.join(present)}? Name it: format: {{prompt_key: {present[0]}}} (and response_key "
            "if there is a reference answer)."
        )
    if present:
        return present[0]
    if empty := [name for name in PROMPTS if name in row]:
        raise DataError(f"{where}: column {empty[0]!r} is empty; fill it, or leave the row out.")
    advice = next((_ADVICE[name] for name in row if name in _ADVICE), None)
    raise DataError(
        f"{where}: which column is the prompt? It has {', '.join(map(str, row)) or 'none'}. "
        + (f"{advice[0].upper()}{advice[1:]}. " if advice else "")
        + "Name it in the dataset's format: prompt_key, or prompt_type: messages and messages_key (and response_key if there is a reference "
        "answer)."
    )


def _prompt_text_of(row: Row, key: str, name: str, where: str) -> str:
    """Return the user's text in the column that ``format.NAME`` selects."""
    text = _column(row, key, name, where)
    if not isinstance(text, str):
        hint = "; for a conversation set prompt_type: messages and messages_key" if isinstance(text, list) else ""
        raise DataError(f"{where}: column {key!r} is a {type(text).__name__}, not the user's text{hint}.")
    return text


def _column(row: Row, key: str, name: str, where: str) -> Any:
    """Return the value of the column that ``format.NAME`` selects.

    Raises:
        DataError: there is no such column, or it is empty.
    """
    if key in row and row[key] is None:
        raise DataError(f"{where}: column {key!r} is empty; fill it, or leave the row out.")
    if key not in row:
        raise DataError(f"{where} has no column {key!r} (it has {', '.join(map(str, row)) or 'none'}); set format.{name}.")
    return row[key]


def answer_of(row: Row, where: str) -> dict[str, Any]:
    """Return ``{"answer": …}`` with the reference answer; empty if there is none.

    Raises:
        DataError: the row has two different answers.
    """
    found = next(({"answer": row[name]} for name in ANSWERS if row.get(name) is not None), {})
    rule = row.get("reward_model")
    if not isinstance(rule, Mapping) or rule.get("ground_truth") is None:
        return found
    if "answer" in row and row["answer"] != rule["ground_truth"]:
        raise DataError(
            f"{where}: the reference answer is {row['answer']!r:.40} in the column answer and {rule['ground_truth']!r:.40} in "
            "reward_model.ground_truth; keep one of the two columns."
        )
    return {"answer": rule["ground_truth"]}
