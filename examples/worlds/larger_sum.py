"""Which of two sums is larger? A question that two paths answer side by side and a conclusion decides.

tasks(size=2)      # the dataset larger_sums: {"messages": [user: "47+25 31+49"], "answer": "80", "query_id"}
episode(task)      # the worked episode of a task, in the form of ``ParallelGenerationWorkflow``
conclusion_reward  # 1 where the conclusion is the larger sum, and nothing else
"""

from __future__ import annotations

import random
from typing import Any

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import SPLIT_SHARES, check_split, split_of
from rollwright.errors import DataError
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.rewards.text import last_tagged

_USER, _ASSISTANT, _END = "<|user|>", "<|assistant|>", "<|end|>"
_LARGEST = 50_000
_SHARE = 0.5  # of a split: random draws soon find that many


@DATASET_REGISTRY.register("larger_sums")
def tasks(
    split: str = "train", size: int = 2000, seed: int = 1, worked: bool = False, isolated: bool = True, digits: int = 2
) -> list[dict[str, Any]]:
    """A taskset of distinct pairs of sums of two numbers.

    Args:
        split: train, valid or test; no two share a task.
        size: number of tasks.
        seed: which tasks, and in which order.
        worked: add ``segments``, the worked episode, for supervised training.
        isolated: worked episodes have the layout of ``branch_attention="isolated"``; else they are plain text.
        digits: of each number, 1 to 9. With 1 a model learns in a fraction of the time.

    Raises:
        DataError: there is no such split, or the size or the number of digits is out of range.
    """
    check_split("larger_sum", split)
    if not 1 <= digits <= 9:
        raise DataError(f"larger_sum: digits is {digits}; it is between 1 and 9.")
    low, high = 10 ** (digits - 1), 10**digits - 1
    largest = min(_LARGEST, int(_SHARE * SPLIT_SHARES[split] / 100 * (high - low + 1) ** 4))
    if not 1 <= size <= largest:
        raise DataError(f"larger_sum: size is {size}; with {digits} digits, {split} has 1 to {largest} tasks.")
    generator = random.Random(f"{split} {seed}")
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    while len(found) < size:
        numbers = tuple(generator.randint(low, high) for _ in range(4))
        task = _task(*numbers)
        if numbers[0] + numbers[1] != numbers[2] + numbers[3] and split_of(task["query_id"]) == split:
            found[numbers] = task
    rows = list(found.values())
    if worked:
        rows = [{**row, "segments": episode(row, isolated)} for row in rows]
    return rows


def _task(a: int, b: int, c: int, d: int) -> dict[str, Any]:
    question = f"{a}+{b} {c}+{d}"
    return {
        "messages": [{"role": "user", "content": question}],
        "answer": str(max(a + b, c + d)),
        "query_id": question,
    }


def episode(task: dict[str, Any], isolated: bool = True) -> list[dict[str, Any]]:
    """The worked episode of a task as ``segments``: ``[{"text", "train", "branch"}]``.

    The goal names a sum in each of its two outlines, a path adds digit by digit from the right, the conclusion is the larger
    sum. Tags and numbers that the workflow puts there are not trained; closing tags are, so that parts end.
    """
    question = task["messages"][0]["content"]
    sums = question.split()
    outlines = "\n".join(f"<Outline>{number}. {one}</Outline>" for number, one in enumerate(sums, 1))
    parts = [(0, "<Goal>\n", f"{outlines}</Goal>")]
    parts += [(number, f"<Path>\n{number}.", f" {_worked(one)}</Path>") for number, one in enumerate(sums, 1)]
    parts += [(0, "<Conclusion>\n", f"{task['answer']}</Conclusion>")]
    segments: list[dict[str, Any]] = [{"text": f"{_USER}{question}{_END}{_ASSISTANT}", "train": False}]
    for branch, opening, text in parts:
        place = {"branch": branch} if isolated and branch else {}
        segments += [
            {"text": opening, "train": False, **place},
            {"text": text, "train": True, **place},
            {"text": "\n", "train": False, **place},
        ]
    return segments


def _worked(one: str) -> str:
    """``47+25``: ``47+25 7+5=12 4+2+1=7 72``."""
    left, right = one.split("+")
    columns, carried = [], 0
    for a, b in zip(reversed(left), reversed(right), strict=True):
        total = int(a) + int(b) + carried
        columns.append(f"{a}+{b}{'+1' * carried}={total}")
        carried = total // 10
    return " ".join([one, *columns, str(int(left) + int(right))])


@REWARD_FUNCTIONS.register("conclusion_reward", runs_inline=True)
def conclusion_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: str, **_: Any
) -> float:
    """1 where what stands between the conclusion's tags is the answer, else 0."""
    return float(last_tagged(completion, "Conclusion") == answer)
