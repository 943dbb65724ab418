"""The turns of an episode: ask, look at the response, say something, ask again."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import PromptTooLongError
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.workflows.prompting import fill
from rollwright.workflows.token_sequence import TokenSequence


class Turns(TokenSequence):
    """A token sequence that the engine goes on with, turn by turn::

        turns = Turns(engine, prompt_ids, gconfig, tokenizer, max_turns=8, max_tokens=4096)
        async for response in turns:
            if response.truncated or is_answer(response):
                break
            turns.append_context(what_a_tool_says(response))
        if turns.is_aborted:
            return None
        return turns.row(reward)

    The iteration ends by itself after ``max_turns`` turns, where no token has room, and where somebody aborted the request.

    Args:
        engine: asked for each turn; all requests have one ``rid``, so one server, which holds the cache, sees them all.
        prompt_ids: what the first turn goes on from.
        gconfig: how a turn is sampled.
        tokenizer: for the engine's stop strings.
        max_turns: turns at most.
        max_tokens: tokens of the whole sequence, prompt included; a turn is sampled up to there. None: the engine's context
            is the only limit.

    Attributes:
        count: turns so far.
        truncated: a limit ended the last turn, or left no room for a further one.
        is_aborted: somebody ended a request; the episode is to be rejected.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        prompt_ids: Sequence[int],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        max_turns: int,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(prompt_ids)
        self._engine = engine
        self._gconfig = gconfig.new(n_samples=1)
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._rid = uuid.uuid4().hex
        self.count = 0
        self.truncated = False
        self.is_aborted = False

    @property
    def is_last(self) -> bool:
        """No further turn will be asked for: nobody would read what is said now."""
        return self.count == self._max_turns

    @property
    def room(self) -> int:
        """Tokens that the limit of the whole sequence leaves."""
        return max(0, self._max_tokens - len(self))

    def append_filled(self, template: str, **value: str) -> None:
        """Put a template with a text in its ``{place}`` behind the last turn, within the limit of the whole sequence.

        The end of a long text is left out, so that the next turn has room for all that it may sample, or, where little room is
        left, for half of it.

        Args:
            template: has the place once.
            value: the text, under the place's name.
        """
        [(place, text)] = value.items()
        ids = self._encode(fill(template, **value))
        reserved = max(1, min(self._gconfig.max_new_tokens, self.room // 2))
        if len(ids) > self.room - reserved:
            before, after = (self._encode(part) for part in template.split(f"{{{place}}}", 1))
            kept = max(0, self.room - reserved - len(before) - len(after))
            ids = [*before, *self._encode(text)[:kept], *after][: self.room]
        self.append_context(ids)

    def __aiter__(self) -> Turns:
        return self

    async def __anext__(self) -> ModelResponse:
        """The next response, whose tokens are in the sequence already.

        Raises:
            PromptTooLongError: there is no room for the first turn, in ``max_tokens`` or the engine's context. Where there is none
                for a later one, the iteration ends; what was said after the last turn is taken back where the engine refused it.
        """
        if self.is_last:
            raise StopAsyncIteration
        if self.room == 0 and self.count == 0:
            raise PromptTooLongError(
                f"The prompt has {len(self)} tokens, and max_tokens={self._max_tokens} is of prompt and turns together: raise it, or "
                "shorten the prompt."
            )
        if self.room == 0:
            self.truncated = True
            raise StopAsyncIteration
        gconfig = self._gconfig.new(max_new_tokens=min(self._gconfig.max_new_tokens, self.room))
        request = ModelRequest(rid=self._rid, input_ids=self.input_ids, gconfig=gconfig, tokenizer=self._tokenizer)
        try:
            response = await self._engine.agenerate(request)
        except PromptTooLongError:
            if self.count == 0:
                raise
            self.truncated = True
            self._take_back_context()
            raise StopAsyncIteration from None
        if response.stop_reason == "abort":
            self.is_aborted = True
            raise StopAsyncIteration
        self.count += 1
        self.truncated = response.truncated
        self.append_response(response)
        return response

    def row(self, reward: float) -> Trajectory:
        """The trajectory ``[1, L]`` of the episode."""
        return self.trajectory(reward, truncated=self.truncated, temperature=self._gconfig.effective_temperature)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _take_back_context(self) -> None:
        """Take away what was put after the last sampled token."""
        end = len(self)
        while end > 0 and not self.loss_mask[end - 1]:
            end -= 1
        for column in (self.input_ids, self.logprobs, self.loss_mask, self.versions):
            del column[end:]
