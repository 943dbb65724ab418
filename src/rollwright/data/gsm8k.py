"""GSM8K: school mathematics in words (Cobbe et al., 2021, arXiv 2110.14168), as tasks and as prompts with a template.

Its answers are worked in prose, with calculator notes in ``<<…>>`` and the result after ``####``.
"""

from __future__ import annotations

import re
from typing import Any

from rollwright.data.rows import read_rows
from rollwright.errors import DataError

#: Name and subset of the dataset on Hugging Face.
HUB_NAME, HUB_SUBSET = "openai/gsm8k", "main"
SPLITS = ("train", "test")

#: A prompt for base models that asks for reasoning and answer in tags.
R1_TEMPLATE = (
    "Below, a user brings a question and an assistant solves it. The assistant first reasons step by step between <think> "
    "and </think>, then gives the final result alone between <answer> and </answer>.\n\n"
    "User: {question}\nAssistant: <think>"
)

_NOTES = re.compile(r"<<[^<>]*>>")
_RESULT = re.compile(r"^####\s*(.+?)\s*$", re.MULTILINE)


def is_worked_answer(answer: Any) -> bool:
    """Return True for a string with a result after ``####``."""
    return isinstance(answer, str) and bool(_RESULT.search(answer))


def final_answer(answer: str, where: str = "the row") -> str:
    """Return the result after ``####``, without thousands separators and dollar signs.

    Raises:
        DataError: there is no result.
    """
    found = _RESULT.findall(answer)
    if not found:
        raise DataError(f"{where}: the answer has no result after '####': {answer[-80:]!r}.")
    return found[-1].replace(",", "").replace("$", "")


def task_of(question: str, answer: str, where: str = "the row") -> dict[str, Any]:
    """Make a task: the question as the user's message, the result as ``answer``, the worked solution as ``completion``."""
    return {
        "messages": [{"role": "user", "content": question}],
        "answer": final_answer(answer, where),
        "completion": _NOTES.sub("", answer),
    }


def read_gsm8k(split: str, path: str | None = None) -> list[dict[str, Any]]:
    """Read the rows ``{"question", "answer"}`` of a split, from a local file or directory, or from Hugging Face.

    Raises:
        DataError: the split is unknown, there is nothing at ``path``, or a row lacks one of the columns.
    """
    if path is None and split not in SPLITS:
        raise DataError(f"gsm8k has no split {split!r}; it has {', '.join(SPLITS)}. Take a slice of train for validation.")
    rows = read_rows(path or HUB_NAME, split, None if path else HUB_SUBSET)
    for index, row in enumerate(rows):
        if not isinstance(row.get("question"), str) or not isinstance(row.get("answer"), str):
            raise DataError(f"{path or HUB_NAME}: row {index} has no text in question and answer; it has {', '.join(row)}.")
    return rows


def gsm8k(split: str = "train", path: str | None = None) -> list[dict[str, Any]]:
    """Read GSM8K as tasks: ``messages``, ``answer`` (the number after ``####``), ``completion`` (the worked solution), ``query_id``."""
    return [
        {**task_of(row["question"], row["answer"], f"gsm8k {split}: row {index}"), "query_id": f"gsm8k/{split}/{index}"}
        for index, row in enumerate(read_gsm8k(split, path))
    ]


def gsm8k_r1_template(split: str = "train", path: str | None = None) -> list[dict[str, Any]]:
    """Read GSM8K with a prompt that opens ``<think>`` and asks for the result in ``<answer>`` tags, for base models."""
    return [
        {
            "messages": [{"role": "user", "content": R1_TEMPLATE.format(question=row["question"])}],
            "answer": final_answer(row["answer"], f"gsm8k {split}: row {index}"),
            "question": row["question"],
            "query_id": f"gsm8k/{split}/{index}",
        }
        for index, row in enumerate(read_gsm8k(split, path))
    ]
