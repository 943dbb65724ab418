"""One request inside the engine: its tokens, how it ends, and where its keys and values are."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rollwright.inference.request import ModelRequest, ModelResponse

_INCOMPLETE = "�"  # what tokenizers decode an unfinished multi-byte character to

#: A sampled token, its log-probability and its version: ``(tokens, log-probabilities, versions)`` of an output.
Sampled = tuple[list[int], list[float], list[int]]


@dataclass(eq=False)
class Sequence:
    """A request from submission to response.

    Attributes:
        tokens: prompt and generated tokens. While the sequence is in a row, its newest tokens are in the row table and are
            added here when it leaves the row; so are ``logprobs`` and ``versions``, one for each generated token.
        length_limit: most tokens, the prompt included.
        has_own_layout: positions or attention differ from a plain causal sequence.
        position_delta: position minus index of the tokens after a multi-modal prompt.
        hidden: ``[prompt]`` bool, the columns that new tokens must not see; None where they see all.
        on_token: called in the engine's thread with the sequence, each sampled token, its log-probability and version.
        cached: leading tokens whose keys and values are in its row.
        row: its row in the cache, -1 while it waits.
        prefix_source: where a computed prefix is to be copied from.
        is_current: False where some keys and values were computed by older weights.
    """

    request: ModelRequest
    tokens: list[int]
    prompt_length: int
    length_limit: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    has_own_layout: bool = False
    position_delta: int = 0
    hidden: Tensor | None = None
    stop_strings: StopStrings | None = None
    on_token: Callable[[Sequence, int, float, int], None] | None = None
    future: Future[ModelResponse] = field(default_factory=Future)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    row: int = -1
    prefix_source: object = None
    is_current: bool = True
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    @property
    def shareable_length(self) -> int:
        """Leading tokens whose keys and values equal those of a plain causal text sequence.

        A trunk token sees all tokens before it, so leading trunk tokens at positions 0, 1, 2, ... are plain. Multi-modal
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
        """Rotary position of every token, ``[len(tokens)]``; new tokens continue after the last prompt token's."""
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

    def response(
        self, stop_reason: str = "stop", stop_match: str | int | None = None, sampled: Sampled | None = None
    ) -> ModelResponse:
        """The response with all that was generated so far, or with what a listener has kept of it (``sampled``)."""
        tokens, logprobs, versions = sampled or (self.tokens[self.prompt_length :], self.logprobs, self.versions)
        now = time.monotonic()
        return ModelResponse(
            input_tokens=self.tokens[: self.prompt_length],
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason=stop_reason,
            stop_match=stop_match,
            latency=now - self.submitted_at,
            ttft=(self.first_token_at or now) - self.submitted_at,
            temperature=self.request.gconfig.effective_temperature,
            rid=self.request.rid,
            seed=self.seed,
        )


class StopStrings:
    """Finds stop strings in the decoded text of one output as it grows, also where they span tokens or characters span tokens.

    Text is decoded a few tokens at a time: each new piece is the difference between decoding from a settled token on with
    and without the new tokens, as decoding single tokens loses spaces in some tokenizers. Special tokens are decoded too,
    so that a special token's text may be a stop string.

    Args:
        tokenizer: decodes ids.
        stop: the strings that end the sequence.
    """

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._overlap = max((len(text) for text in self._stop), default=1) - 1
        self._pending: list[int] = []  # the newest settled piece, as context, and the tokens after it
        self._known = ""  # the text of that piece
        self._known_tokens = 0
        self._tail = ""  # the last characters of the known text, in which a stop string may have begun

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def find(self, token: int, may_stop: bool = True) -> str | None:
        """The stop string that a new token completes, if any.

        Args:
            token: the output token after those given before.
            may_stop: False below ``min_new_tokens``: the text is followed but no match is reported.
        """
        self._pending.append(token)
        text = self._decode(self._pending)
        new, before = text[len(self._known) :], len(self._tail)
        searched = self._tail + new.rstrip(_INCOMPLETE)
        if not text.endswith(_INCOMPLETE):
            searched = self._tail + new
            self._pending = self._pending[self._known_tokens :]
            self._known_tokens = len(self._pending)
            self._known = self._decode(self._pending)
            self._tail = searched[-self._overlap :] if self._overlap else ""
        if not may_stop:
            return None
        # a stop string that was complete before this token came below ``min_new_tokens``
        found = [(searched.find(text, max(0, before - len(text) + 1)), text) for text in self._stop]
        return min((match for match in found if match[0] >= 0), default=(0, None))[1]
