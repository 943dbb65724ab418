"""A pretended engine for these tests: it samples at random over a few tokens and records as the sample's engine does."""

from __future__ import annotations

import hashlib
import random

from rollwright import GenerationHyperparameters, ModelRequest, ModelResponse
from rollwright.experience.recorder import Recorder, RequestRecord


def logprob_of(context: list[int], token: int) -> float:
    """A log-probability that depends on the context and the token alone, as a model's does."""
    digest = hashlib.blake2b(bytes([*context, 255, token]), digest_size=4).digest()
    return -(1 + int.from_bytes(digest, "big") % 10_000) / 1000


class PretendedEngine:
    """Samples ``length`` tokens for a prompt and records them."""

    def __init__(self, seed: int, vocabulary: int = 3) -> None:
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.recorder = Recorder()
        self.version = 0

    def ask(
        self,
        prompt: list[int],
        length: int,
        *,
        rid: str = "r",
        temperature: float = 0.7,
        stop_reason: str = "stop",
        output: list[int] | None = None,
    ) -> RequestRecord:
        output = output or [self.random.randrange(self.vocabulary) for _ in range(length)]
        logprobs = [logprob_of(prompt + output[:index], token) for index, token in enumerate(output)]
        response = ModelResponse(
            input_tokens=list(prompt),
            output_tokens=list(output),
            output_logprobs=logprobs,
            output_versions=[self.version] * len(output),
            stop_reason=stop_reason,
            temperature=temperature,
            seed=self.random.randrange(100),
        )
        gconfig = GenerationHyperparameters(temperature=temperature)
        return self.recorder.record(ModelRequest(input_ids=list(prompt), rid=rid, gconfig=gconfig), response)
