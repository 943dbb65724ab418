"""A task of Inspect: two questions, a tool, and whether the answer has the number."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return execute


@task
def sums():
    samples = [Sample(input="What is 17 + 25?", target="42")]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())
