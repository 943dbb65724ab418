"""Preference pairs: a prompt, the reply that is preferred, and the other one.

Two forms are known. In one the columns hold the two replies as text, beside a prompt in the columns that any task has it in. In
the other each holds a whole conversation, equal up to the last message, which is the reply; a prompt of its own is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollwright.config.tasksets import FormatConfig
from rollwright.errors import DataError

Row = dict[str, Any]


def preference_task(row: Row, layout: FormatConfig | None, where: str, prompted: Callable[[Row], Row]) -> Row:
    """A row as a preference task: ``messages``, and the texts ``chosen`` and ``rejected``.

    Args:
        row: as it was read.
        layout: names the columns; None: ``chosen`` and ``rejected``.
        where: place of the row, for messages.
        prompted: makes ``messages`` of a row whose prompt stands in a column of its own.

    Raises:
        DataError: a column is missing, is neither text nor a conversation, or the two do not answer the same prompt.
    """
    names = layout or FormatConfig()
    chosen, rejected = (_column(row, key, where) for key in (names.chosen_key, names.rejected_key))
    if isinstance(chosen, str) and isinstance(rejected, str):
        task = prompted(row)
    else:
        chosen_prompt, chosen = _split(chosen, names.chosen_key, where)
        rejected_prompt, rejected = _split(rejected, names.rejected_key, where)
        if chosen_prompt != rejected_prompt:
            raise DataError(
                f"{where}: {names.chosen_key} and {names.rejected_key} differ before their last message; a pair is two replies to "
                "the same conversation."
            )
        task = {**row, "messages": chosen_prompt} if chosen_prompt else prompted(row)
        if chosen_prompt and layout is not None and layout.system_prompt and chosen_prompt[0].get("role") != "system":
            task["messages"] = [{"role": "system", "content": layout.system_prompt}, *chosen_prompt]
    if chosen == rejected:
        raise DataError(f"{where}: {names.chosen_key} and {names.rejected_key} are the same reply, which prefers nothing.")
    return {**task, "chosen": chosen, "rejected": rejected}


def _column(row: Row, key: str, where: str) -> Any:
    if row.get(key) is None:
        raise DataError(
            f"{where} has no column {key!r} (it has {', '.join(map(str, row)) or 'none'}); name the columns of the two replies in "
            "format.chosen_key and format.rejected_key."
        )
    return row[key]


def _split(value: Any, key: str, where: str) -> tuple[list[Row], str]:
    """The messages of a conversation before its last one, and the text of that."""
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) and "content" in each for each in value):
        raise DataError(f"{where}: {key} is neither a text nor a list of messages (as the other column is): {value!r:.80}.")
    *before, last = value
    if last.get("role") != "assistant" or not isinstance(last["content"], str):
        raise DataError(f"{where}: the last message of {key} is not the assistant's text, which would be the reply.")
    return [dict(message) for message in before], last["content"]
