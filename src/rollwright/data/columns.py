"""Rows recognised by their column names: questions with answers, Alpaca's format, and those of common training frameworks.

The columns must be unambiguous: two columns that could both be the prompt, or a column that belongs to the prompt but would be left
out, are refused with advice. ``docs/datasets.md`` lists the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.config.tasksets import FormatConfig
from rollwright.data.gsm8k import is_worked_answer, task_of
from rollwright.data.rows import Row
from rollwright.errors import DataError

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


def by_names(row: Row, layout: FormatConfig | None, where: str) -> Row:
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
    text = prompt_text_of(row, key, "prompt_key", where)
    if key == "instruction" and row.get("input"):
        text = f"{text}\n\n{prompt_text_of(row, 'input', 'prompt_key', where)}"
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


def prompt_text_of(row: Row, key: str, name: str, where: str) -> str:
    """The user's text in the column that ``format.NAME`` selects."""
    text = column(row, key, name, where)
    if not isinstance(text, str):
        hint = "; for a conversation set prompt_type: messages and messages_key" if isinstance(text, list) else ""
        raise DataError(f"{where}: column {key!r} is a {type(text).__name__}, not the user's text{hint}.")
    return text


def column(row: Row, key: str, name: str, where: str) -> Any:
    """The value of the column that ``format.NAME`` selects.

    Raises:
        DataError: there is no such column, or it is empty.
    """
    if key in row and row[key] is None:
        raise DataError(f"{where}: column {key!r} is empty; fill it, or leave the row out.")
    if key not in row:
        raise DataError(f"{where} has no column {key!r} (it has {', '.join(map(str, row)) or 'none'}); set format.{name}.")
    return row[key]


def answer_of(row: Row, where: str) -> dict[str, Any]:
    """The reference answer under the name ``answer``; empty if there is none.

    Raises:
        DataError: the row has two.
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
