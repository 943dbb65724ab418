"""What workflows that call tools are tested with."""

from __future__ import annotations

import asyncio

from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName


def sampled(engine) -> SampleEngine:
    """The engine bound to a sample on this loop."""
    return SampleEngine(engine, SampleName(0, 0), run_seed=1, loop=asyncio.get_running_loop())


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
