"""Products that a small model cannot compute itself, but can copy into a line of Python.

products(size=2)   # the dataset products: tasks: {"question": "347*286=", "answer": "99242", "messages", "query_id"}
episode(task)      # a worked episode with a script; ``episode(task, script=False)`` answers outright
"""

from __future__ import annotations

from typing import Any

from rollwright.data.arithmetic import arithmetic
from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.errors import DataError
from rollwright.workflows.registry import FUNCTIONS

OUTPUT_TEMPLATE = "<output>{output}</output>"


@DATASET_REGISTRY.register("products")
def products(
    split: str = "train",
    size: int = 2000,
    digits: int = 3,
    seed: int = 1,
    worked: bool = False,
    script_share: float = 0.5,
    full_length: bool = False,
) -> list[dict[str, Any]]:
    """A taskset of distinct products; a product belongs to one split, whatever the order of its factors.

    Args:
        split: train, valid or test.
        size: number of tasks.
        digits: of both factors.
        seed: which products, and in which order.
        worked: add ``segments``, a worked episode, for supervised training.
        script_share: share of the worked episodes that write a script, spread evenly; the others answer outright.
        full_length: only products with as many digits as both factors together. A small model copies by position, and learns
            to copy one length long before it learns to copy two.

    Raises:
        DataError: an argument is out of range, or the split has fewer tasks than ``size``.
    """
    if not 0.0 <= script_share <= 1.0:
        raise DataError(f"products: script_share is {script_share}; it is between 0 and 1.")
    drawn = arithmetic(split, 2 * size if full_length else size, digits=digits, operation="*", worked=False, seed=seed)
    tasks = [
        {"question": row["messages"][0]["content"], **{key: row[key] for key in ("answer", "messages", "query_id")}}
        for row in drawn
        if not full_length or len(row["answer"]) == 2 * digits
    ][:size]
    if len(tasks) < size:
        raise DataError(
            f"products: {size} products of full length were asked for; split {split!r} has fewer with {digits} digits."
        )
    if worked:
        for index, task in enumerate(tasks):
            task["segments"] = episode(task, script=int((index + 1) * script_share) > int(index * script_share))
    return tasks


@FUNCTIONS.register("product_question")
def question(task: dict[str, Any]) -> str:
    """The prompt of a task: its question, without a chat template."""
    return task["question"]


def episode(task: dict[str, Any], script: bool = True) -> list[dict[str, Any]]:
    """A worked episode as ``segments``, ``[{"text", "train"}]``, in the form that ``ToolIntegratedWorkflow`` runs.

    Args:
        task: one of ``products``.
        script: copy the question into a script and its output into the answer; else answer outright.
    """
    answer = {"text": f"<answer>{task['answer']}</answer>", "train": True}
    asked = {"text": task["question"], "train": False}
    if not script:
        return [asked, answer]
    return [
        asked,
        {"text": f"<python>print({task['question'].removesuffix('=')})</python>", "train": True},
        {"text": OUTPUT_TEMPLATE.format(output=task["answer"]), "train": False},
        answer,
    ]
