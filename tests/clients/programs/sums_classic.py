"""Sums, as a classic environment of verifiers: a question, a tool that adds, and reward functions of which some can raise."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


async def right(completion, answer) -> float:
    """Whether the last reply has the number."""
    return float(answer in str(completion[-1]["content"]))


def polite(completion, info, **columns) -> float:
    """Raises for rude replies."""
    if "stupid" in (completion[-1]["content"] or ""):
        raise LookupError(f"no such word in the book of sum {info['number']}")
    return 0.5


def inverse(completion) -> float:
    """A metric that replies without numbers do not have."""
    return 1 / int(completion[-1]["content"])


def best(completions, answers) -> list[float]:
    """A score of a whole group."""
    return [1.0 for _ in completions]


def sums(first: int, count: int) -> Dataset:
    rows = [
        {"question": f"What is {n} + 25?", "answer": str(n + 25), "info": {"number": n}} for n in range(first, first + count)
    ]
    return Dataset.from_list(rows)


def load_environment(tasks: int = 40, held_out: int = 0, group: bool = False) -> vf.Environment:
    scores = vf.Rubric(funcs=[best if group else right, polite], weights=[2.0, 1.0])
    return vf.ToolEnv(
        tools=[add],
        max_turns=3,
        dataset=sums(17, tasks),
        eval_dataset=sums(1000, held_out) if held_out else None,
        rubric=vf.RubricGroup([scores, vf.Rubric(funcs=[inverse], weights=[0.0])]),
    )
