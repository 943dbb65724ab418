"""A tool that tests name by its import path."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
