"""An engine that answers with its prompt's last token, counted up, with programmable latency and faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rollwright.errors import EngineError
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse


class EchoEngine(InferenceEngine):
    """Deterministic in prompt and seed; the version is whatever was set last."""

    def __init__(self, latency: Callable[[ModelRequest], float] | float = 0.0, output_length: int = 3) -> None:
        self.latency = latency
        self.output_length = output_length
        self.version = 0
        self.requests: list[ModelRequest] = []
        self.fails: Callable[[ModelRequest], bool] = lambda request: False
        self.is_paused = False
        self.calls: list[str] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        latency = self.latency(request) if callable(self.latency) else self.latency
        if latency:
            await asyncio.sleep(latency)
        if self.fails(request):
            raise EngineError("the echo was told to fail.")
        draw = random.Random(request.seed)
        tokens = [draw.randrange(10, 100) for _ in range(self.output_length)]
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=tokens,
            output_logprobs=[-draw.random() for _ in tokens],
            output_versions=[self.version] * len(tokens),
            temperature=request.gconfig.effective_temperature,
            rid=request.rid,
            seed=request.seed,
        )

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version

    def pause(self) -> None:
        self.is_paused = True
        self.calls.append("pause")

    def resume(self) -> None:
        self.is_paused = False
        self.calls.append("resume")

    def abort(self, rid: str | None = None) -> None:
        self.calls.append(f"abort {rid}")
