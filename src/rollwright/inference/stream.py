"""Several responses at once, and responses as they grow, from any engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from rollwright.inference.request import ModelRequest, ModelResponse


async def stream_response(engine: Any, request: ModelRequest) -> AsyncGenerator[ModelResponse, None]:
    """The response of ``engine`` as it grows.

    Args:
        engine: an ``InferenceEngine``; one that has ``astream(request)`` gives tokens as it samples them, another gives its
            whole response at once.
        request: what is asked.

    Yields:
        The response so far: each holds all tokens of the one before it, and the last is complete.
    """
    if hasattr(engine, "astream"):
        async for partial in engine.astream(request):
            yield partial
    else:
        yield await engine.agenerate(request)


async def generate_all(engine: Any, requests: list[ModelRequest]) -> list[ModelResponse]:
    """The responses to ``requests``, in their order; where one fails or this is cancelled, the others are cancelled."""
    if len(requests) > 1 and hasattr(engine, "agenerate_batch"):
        return list(await engine.agenerate_batch(requests))
    tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
