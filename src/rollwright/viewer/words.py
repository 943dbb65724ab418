"""What people call a task, what it expects, and what the model answered: short texts for rows and titles, instead of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Characters that the index keeps of each text.
LONGEST = 300
_IN_TITLE = 80
_READ = 20_000  # characters that are looked at of a longer text

#: Columns of a task with its words alone, in order of preference. A prompt in ``messages`` may be a template around them.
_WORDS = ("question", "problem", "query", "instruction", "task", "prompt", "text", "input", "goal")
#: Columns with the answer that is right.
_EXPECTED = ("answer", "expected_answer", "ground_truth", "truth", "expected", "target", "label", "solution", "reference")
_EXPECTED += ("answers", "golden_answers", "targets", "reward_model")
_REASONING_ENDS = ("</think>", "</thinking>")


def words_of_task(task: Mapping[str, Any]) -> str:
    """Return a task's own words on one line: its question, or else the last message of its user; empty if it has neither."""
    for name in _WORDS:
        if isinstance(found := task.get(name), str) and found.strip():
            return one_line(found)
    messages = task.get("messages") or task.get("prompt")  # some datasets have messages in ``prompt``
    if isinstance(messages, list):
        for message in reversed(messages):
            if isinstance(message, Mapping) and message.get("role") == "user" and (text := one_line(_content(message))):
                return text
    return ""


def expected_of_task(task: Mapping[str, Any]) -> str:
    """Return the right answer of a task on one line; several are joined by "or". Empty if the task names none."""
    return one_line(whole_answer_of_task(task))


def whole_answer_of_task(task: Mapping[str, Any]) -> str:
    """Return the right answer of a task as it stands there; several are joined by "or". Empty if the task names none."""
    for name in _EXPECTED:
        found = task.get(name)
        if isinstance(found, Mapping):
            found = whole_answer_of_task(found)
        if isinstance(found, list):
            found = " or ".join(str(each) for each in found if isinstance(each, str | int | float))
        if found is not None and (text := str(found)).strip():
            return text
    return ""


def answer_of_text(text: str, special: Sequence[str] = ()) -> str:
    """Return the answer in a model's last output on one line, without reasoning that ended, and without ``special`` tokens at its end."""
    while (text := text.rstrip()) and (closing := next((each for each in special if text.endswith(each)), None)):
        text = text.removesuffix(closing)
    answer = text[max(text.rfind(end) + len(end) if end in text else 0 for end in _REASONING_ENDS) :]
    return one_line(answer if answer.strip() else text, keep_end=True)


def one_line(text: str, *, keep_end: bool = False, limit: int = LONGEST) -> str:
    """Return text on one line, at most ``limit`` characters of it: of the beginning, or of the beginning and the end."""
    if len(text) > _READ:
        text = f"{text[: _READ // 2]}{text[-_READ // 2 :]}"  # splitting megabytes takes long
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    kept = limit // 3 if keep_end else limit - 1
    return f"{text[:kept].rstrip()}…{text[len(text) - (limit - 1 - kept) :].lstrip() if keep_end else ''}"


def title_of(words: str | None, key: str) -> str:
    """Return the title of a group: the task's words and, of an evaluation, the version of its weights; without words, its number.

    Args:
        words: the task's words, if known.
        key: key of the group, such as ``12`` or ``eval:5@v4``.
    """
    ordinal, _, version = key.removeprefix("eval:").partition("@")
    name = (
        one_line(words, limit=_IN_TITLE) if words else f"Held-out task {ordinal}" if key.startswith("eval:") else f"Task {key}"
    )
    if words and key.startswith("eval:"):
        return f"{name} · held out" + (f", {version}" if version else "")
    return name + (f", {version}" if version else "")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts: text and images
        return " ".join(
            str(part["text"]) for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""
