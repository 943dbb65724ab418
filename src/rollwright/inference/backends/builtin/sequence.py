"""One request inside the engine: its tokens, what it may still generate, and where its keys and values are."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.stop import StopStrings
from rollwright.inference.request import ModelRequest, ModelResponse


@dataclass(eq=False)
class Sequence:
    """A request from submission to response.

    Attributes:
        tokens: prompt and generated tokens; while the sequence occupies a row, what it generated lately is in the row table
            and is added here when it leaves the row.
        cached: leading tokens whose keys and values are in its row.
        row: its row in the cache, -1 while it waits.
        version_spans: ``(first output index, version)`` of each run of tokens sampled under one version.
    """

    request: ModelRequest
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    future: Future = field(default_factory=Future)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    stop_strings: StopStrings | None = None
    cached: int = 0
    row: int = -1
    prefix_source: object = None  # where a computed prefix is to be copied from
    is_current: bool = True  # False: some keys and values were computed by older weights
    position_delta: int = 0  # position less index of the tokens after a multi-modal prompt
    hidden: Any = None  # columns that new tokens must not see, see forward_batch.hidden_columns
    on_token: Callable[[int, float, int], None] | None = None  # told each sampled token, its log-probability and version
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    @property
    def gconfig(self) -> GenerationHyperparameters:
        """How it is sampled."""
        return self.request.gconfig

    @property
    def generated(self) -> int:
        """Output tokens in ``tokens`` (not those that are still only in the row table)."""
        return len(self.tokens) - self.prompt_length

    @property
    def length_limit(self) -> int:
        """Tokens it has at most when it ends."""
        return self.prompt_length + self.max_new_tokens

    @property
    def has_own_layout(self) -> bool:
        """True where positions or attention differ from a plain causal sequence."""
        request = self.request
        return request.branch_ids is not None or request.position_ids is not None or self.position_delta != 0

    @property
    def shareable_length(self) -> int:
        """Leading prompt tokens whose keys and values equal those of a plain causal text sequence.

        A trunk token sees all before it, so leading trunk tokens at positions 0, 1, 2, ... are plain. Multi-modal
        prompts share nothing: equal ids may stand for different images.
        """
        if self.request.multi_modal:
            return 0
        if not self.has_own_layout:
            return len(self.tokens)
        branches, positions = self.branch_ids(), self.position_ids()
        differs = (branches != 0) | (positions != np.arange(len(positions)))
        return int(differs.argmax()) if differs.any() else len(positions)

    def position_ids(self) -> np.ndarray:
        """Rotary position of every token, ``[len(tokens)]``; new tokens go on from the last prompt token's."""
        length = len(self.tokens)
        if self.request.position_ids is None:
            return np.arange(length) + self.position_delta
        positions = np.asarray(self.request.position_ids, dtype=np.int64)
        return np.concatenate([positions, positions[-1] + 1 + np.arange(length - len(positions))])

    def branch_ids(self) -> np.ndarray:
        """Branch of every token, ``[len(tokens)]``; new tokens belong to the last prompt token's branch; 0 is the trunk."""
        length = len(self.tokens)
        if self.request.branch_ids is None:
            return np.zeros(length, dtype=np.int64)
        branches = np.asarray(self.request.branch_ids, dtype=np.int64)
        return np.concatenate([branches, np.full(length - len(branches), branches[-1])])

    def mark_version(self, output_index: int, version: int) -> None:
        """Say that output tokens from ``output_index`` on are sampled by ``version``."""
        if not self.version_spans or self.version_spans[-1][1] != version:
            if self.version_spans and self.version_spans[-1][0] == output_index:
                self.version_spans.pop()
            self.version_spans.append((output_index, version))

    def response(self, stop_reason: str, stop_match: str | int | None = None) -> ModelResponse:
        """The response with all that was generated so far."""
        output = self.tokens[self.prompt_length :]
        versions: list[int] = []
        for index, (first, version) in enumerate(self.version_spans):
            last = self.version_spans[index + 1][0] if index + 1 < len(self.version_spans) else len(output)
            versions += [version] * (min(last, len(output)) - first)
        now = time.monotonic()
        return ModelResponse(
            input_tokens=self.tokens[: self.prompt_length],
            output_tokens=output,
            output_logprobs=self.logprobs,
            output_versions=versions,
            stop_reason=stop_reason,
            stop_match=stop_match,
            latency=now - self.submitted_at,
            ttft=(self.first_token_at or now) - self.submitted_at,
            temperature=self.gconfig.effective_temperature,
            rid=self.request.rid,
            seed=self.seed,
        )

    def partial_response(self, sampled: list[tuple[int, float, int]]) -> ModelResponse:
        """The response so far, from the tokens, log-probabilities and versions that a listener kept."""
        tokens, logprobs, versions = (list(column) for column in zip(*sampled, strict=True))
        now = time.monotonic()
        return ModelResponse(
            input_tokens=self.tokens[: self.prompt_length],
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            latency=now - self.submitted_at,
            ttft=(self.first_token_at or now) - self.submitted_at,
            temperature=self.gconfig.effective_temperature,
            rid=self.request.rid,
            seed=self.seed,
        )
