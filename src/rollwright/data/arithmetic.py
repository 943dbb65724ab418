"""Procedural tasks: arithmetic with worked solutions.

A hash of the task decides whether it belongs to train, valid or test, so splits never share a task, whatever their
sizes and seeds; ``37+58`` and ``58+37`` count as the same task.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rollwright.data.splits import SPLIT_SHARES, check_split, split_of
from rollwright.errors import DataError

#: Maximum number of tasks that are listed and shuffled; of more tasks, a split is drawn one by one.
LISTABLE = 200_000


def arithmetic(
    split: str = "train",
    size: int | None = None,
    digits: int = 2,
    min_digits: int | None = None,
    operation: str = "+",
    worked: bool = True,
    answer_format: str = "<answer>{answer}</answer>",
    carries: float | None = None,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Make sums, differences and products of whole numbers, with solutions worked digit by digit from the right.

    Args:
        split: train, valid or test.
        size: number of tasks. Default: all tasks of the split, at most 10,000.
        digits: maximum number of digits of the operands.
        min_digits: minimum number of digits of the operands; by default ``digits``.
        operation: ``+``, ``-``, ``*`` or several of them, such as ``+-``.
        worked: True for completions that show the steps; False for the answer alone.
        answer_format: format of the answer at the end of the completion; ``{answer}`` is the number.
        carries: share of the sums in which a column carries into the next one. If None, it is left to chance (about half of two-digit
            sums). Surplus tasks of the more frequent kind are left out.
        seed: seed of the choice and order of tasks.

    Returns:
        Rows ``{"messages": [user: "37+58="], "answer": "95", "completion": "7+8=15 3+5+1=9 <answer>95</answer>",
        "query_id": "37+58"}``; no task appears twice.

    Raises:
        DataError: an argument is out of range, or the split has fewer tasks than ``size``.
    """
    check_split("arithmetic", split)
    low = digits if min_digits is None else min_digits
    rules = {
        f"min_digits {low} and digits {digits} must be 1 ≤ min_digits ≤ digits ≤ 18": 1 <= low <= digits <= 18,
        f"operation {operation!r} must be made of +, - and *": operation and set(operation) <= set("+-*"),
        f"size is {size}; ask for at least one task": size is None or size >= 1,
        f"answer_format {answer_format!r} must hold {{answer}}": "{answer}" in answer_format,
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise DataError(f"arithmetic: {broken[0]}.")
    first, last = (0 if low == 1 else 10 ** (low - 1)), 10**digits - 1
    numbers = last - first + 1
    count = sum(numbers * (numbers + 1) // 2 if symbol == "-" else numbers * numbers for symbol in operation)
    wanted = min(10_000, count) if size is None else size
    generator = random.Random(seed)
    if count <= LISTABLE:
        tasks = [
            (a, symbol, b)
            for symbol in dict.fromkeys(operation)
            for a in range(first, last + 1)
            for b in range(first, (a if symbol == "-" else last) + 1)
            if split_of(_canonical(a, symbol, b)) == split
        ]
        generator.shuffle(tasks)
        if size is not None and size > len(tasks):
            raise DataError(
                f"arithmetic: {size} tasks of split {split!r} were asked for, but there are {len(tasks)} with operation "
                f"{operation!r} and {low} to {digits} digits; lower size or raise digits."
            )
        tasks = (tasks if carries is None else _with_carries(tasks, carries))[:wanted]
    else:
        tasks = _drawn(split, min(wanted, count), first, last, operation, generator)
    return [_row(task, worked, answer_format) for task in tasks]


Task = tuple[int, str, int]


def _with_carries(tasks: list[Task], share: float) -> list[Task]:
    """Select as many tasks as possible with this share of carries, spread evenly and otherwise in order."""
    if not 0 <= share <= 1 or any(symbol != "+" for _, symbol, _ in tasks):
        raise DataError(f"arithmetic: carries is {share!r}; it is a share from 0 to 1, and for operation '+' alone.")
    kinds: dict[bool, list[Task]] = {True: [], False: []}
    for task in tasks:  # a sum carries if a column other than the highest reaches ten
        kinds["+1=" in " ".join(_worked_sum(task[0], task[2]))].append(task)
    chosen: list[Task] = []
    taken = {True: 0, False: 0}
    while True:
        kind = (len(chosen) + 1) * share >= taken[True] + 1
        if taken[kind] == len(kinds[kind]):
            return chosen
        chosen.append(kinds[kind][taken[kind]])
        taken[kind] += 1


def _drawn(split: str, size: int, first: int, last: int, operation: str, generator: random.Random) -> list[Task]:
    """Draw distinct tasks of a split if there are too many to list; terminates because ``size`` is far smaller than their number."""
    if size > LISTABLE * SPLIT_SHARES[split] // 200:
        raise DataError(f"arithmetic: size {size} is more than a list in memory is good for; use a smaller size.")
    seen: dict[Task, None] = {}
    while len(seen) < size:
        symbol = generator.choice(operation)
        a, b = generator.randint(first, last), generator.randint(first, last)
        if symbol == "-" and a < b:
            a, b = b, a
        if split_of(_canonical(a, symbol, b)) == split:
            seen[a, symbol, b] = None
    return list(seen)


def _canonical(a: int, symbol: str, b: int) -> str:
    return f"{min(a, b)}{symbol}{max(a, b)}"


def _row(task: Task, worked: bool, answer_format: str) -> dict[str, Any]:
    a, symbol, b = task
    answer = str({"+": a + b, "-": a - b, "*": a * b}[symbol])
    steps = WORKED[symbol](a, b) if worked else []
    return {
        "messages": [{"role": "user", "content": f"{a}{symbol}{b}="}],
        "answer": answer,
        "completion": " ".join([*steps, answer_format.replace("{answer}", answer)]),
        "query_id": f"{a}{symbol}{b}",
    }


def _worked_sum(a: int, b: int) -> list[str]:
    """Work a sum digit by digit from the right, with the carry as ``+1``: ``37+58`` gives ``7+8=15``, ``3+5+1=9``."""
    steps, carry = [], 0
    for position in range(len(str(max(a, b)))):
        x, y = a // 10**position % 10, b // 10**position % 10
        steps.append(f"{x}+{y}{'+1' if carry else ''}={x + y + carry}")
        carry = (x + y + carry) // 10
    return steps


def _worked_difference(a: int, b: int) -> list[str]:
    """Work a difference digit by digit from the right, with the borrow as ``-1``: ``52-38`` gives ``12-8=4``, ``5-3-1=1``."""
    steps, borrow = [], 0
    for position in range(len(str(a))):
        x, y = a // 10**position % 10, b // 10**position % 10
        borrowed = x - y - borrow < 0
        x += 10 * borrowed
        steps.append(f"{x}-{y}{'-1' if borrow else ''}={x - y - borrow}")
        borrow = int(borrowed)
    return steps


def _worked_product(a: int, b: int) -> list[str]:
    """Work a product by the second factor's digits, then add up: ``37*58`` gives ``37*8=296``, ``37*50=1850``, ``296+1850=2146``."""
    parts = [(b // 10**position % 10) * 10**position for position in range(len(str(b)))]
    steps = [f"{a}*{part}={a * part}" for part in parts]
    total = a * parts[0]
    for part in parts[1:]:
        steps.append(f"{total}+{a * part}={total + a * part}")
        total += a * part
    return steps


WORKED: dict[str, Callable[[int, int], list[str]]] = {"+": _worked_sum, "-": _worked_difference, "*": _worked_product}
