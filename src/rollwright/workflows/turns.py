"""Token sequences of multi-turn episodes: prompt, sampled tokens, and context between them.

A sequence holds only token ids and a loss mask. Log-probabilities, versions and temperature come from the record of the requests.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import PromptTooLongError
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse


class TokenSequence:
    """A row under construction.

    Attributes:
        input_ids: token ids.
        loss_mask: 1 for trained tokens, else 0.
        prompt_length: number of tokens of the prompt.
        version: version of the weights that sampled the first token.
        truncated: True if a length limit ended the episode.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.input_ids = list(prompt_ids)
        self.loss_mask = [0] * len(prompt_ids)
        self.prompt_length = len(prompt_ids)
        self.version = 0
        self.truncated = False

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.input_ids[self.prompt_length :]

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample, such as tool results."""
        self.input_ids += ids
        self.loss_mask += [0] * len(ids)

    def append_response(self, response: ModelResponse, *, trained: int | None = None) -> None:
        """Append sampled tokens.

        Args:
            response: the engine's response.
            trained: number of leading tokens that are trained; the rest count as context. Default: all.
        """
        if 1 not in self.loss_mask and response.output_versions:
            self.version = response.output_versions[0]
        count = response.output_len if trained is None else trained
        self.input_ids += response.output_tokens
        self.loss_mask += [1] * count + [0] * (response.output_len - count)

    def row(self, reward: float) -> dict[str, Any]:
        """Return the episode's one-dimensional row, which the normaliser completes from the record of requests."""
        return {"input_ids": self.input_ids, "loss_mask": self.loss_mask, "rewards": reward, "truncated": self.truncated}


class Turns(TokenSequence):
    """A token sequence that the engine extends turn by turn::

        turns = Turns(engine, prompt_ids, gconfig, tokenizer, max_turns=8, max_tokens=4096)
        async for response in turns:
            if response.truncated or is_answer(response):
                break
            turns.append_context(what_a_tool_says(response))
        if turns.is_aborted:
            return None
        return turns.row(reward)

    The iteration ends after ``max_turns`` turns, when there is no room for another token, or when a request was aborted.

    Args:
        engine: samples each turn; all requests have one ``rid``, so they go to the server that holds the cache.
        prompt_ids: prompt of the first turn.
        gconfig: how a turn is sampled.
        tokenizer: for the engine's stop strings.
        max_turns: maximum number of turns.
        max_tokens: limit of the whole sequence, including the prompt. If None, only the engine's context limits it.

    Attributes:
        count: turns so far.
        truncated: True if a limit cut the last turn, or left no room for another.
        is_aborted: True if a request was aborted; the episode should be rejected.
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
        self.is_aborted = False

    @property
    def is_last(self) -> bool:
        """True if this was the last turn, so further context would not be read."""
        return self.count == self._max_turns

    @property
    def room(self) -> int:
        """Tokens left until the limit of the whole sequence."""
        return max(0, self._max_tokens - len(self))

    def append_filled(self, template: str, **value: str) -> None:
        """Append a template whose ``{name}`` placeholder is filled with text, within the limit of the whole sequence.

        Long text is cut at its end, so that the next turn has room for ``max_new_tokens`` or half of the remaining tokens.

        Args:
            template: template that contains the placeholder once.
            value: the text, as a keyword argument with the placeholder's name.
        """
        [(placeholder, text)] = value.items()
        ids = self._encode(fill(template, **value))
        reserved = max(1, min(self._gconfig.max_new_tokens, self.room // 2))
        if len(ids) > self.room - reserved:
            before, after = (self._encode(part) for part in template.split(f"{{{placeholder}}}", 1))
            room_for_text = max(0, self.room - reserved - len(before) - len(after))
            ids = [*before, *self._encode(text)[:room_for_text], *after][: self.room]
        self.append_context(ids)

    def __aiter__(self) -> Turns:
        return self

    async def __anext__(self) -> ModelResponse:
        """Sample the next response; its tokens are already in the sequence.

        Raises:
            PromptTooLongError: there is no room for the first turn in ``max_tokens`` or the engine's context. If a later turn has
                no room, the iteration ends, and context that did not fit into the engine is removed.
        """
        if self.is_last:
            raise StopAsyncIteration
        if self.room == 0 and self.count == 0:
            raise PromptTooLongError(
                f"The prompt has {len(self)} tokens, and max_tokens={self._max_tokens} limits prompt and turns together: raise it, or "
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
            end = len(self) - self.loss_mask[::-1].index(1)  # remove the context after the last sampled token
            del self.input_ids[end:], self.loss_mask[end:]
            raise StopAsyncIteration from None
        if response.stop_reason == "abort":
            self.is_aborted = True
            raise StopAsyncIteration
        self.count += 1
        self.truncated = response.truncated
        self.append_response(response)
        return response

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class BranchedSequence(TokenSequence):
    """A row that forks and joins: a trunk, parallel branches that grow from its end, and the trunk again.

    The same tokens can have two layouts:

    * **plain**: one causal sequence, branch after branch. ``other_context`` marks trained tokens whose context includes branches that
      were not visible when the tokens were sampled.
    * **isolated**: the row has ``branch_ids`` (0 is the trunk) and ``position_ids``. Branches do not see each other, and each begins
      at the position after the trunk's last token. The trunk then sees all branches, and continues after the longest one's last
      position. Sampling and training compute the same log-probabilities.

    Args:
        prompt_ids: beginning of the trunk.
        isolated: use the isolated layout.
    """

    def __init__(self, prompt_ids: Sequence[int], *, isolated: bool) -> None:
        super().__init__(prompt_ids)
        self.isolated = isolated
        self.branch_ids = [0] * len(prompt_ids)
        self.position_ids = list(range(len(prompt_ids)))
        self.other_context = [False] * len(prompt_ids)
        self._branch = 0
        self._branches = 0  # opened so far
        self._next_position = len(prompt_ids)  # in the open branch or trunk
        self._fork = 0  # first position of the current fork's branches
        self._farthest = len(prompt_ids)  # position after the longest branch

    def open_branch(self) -> int:
        """Continue in a new branch from the end of the trunk, and return its number."""
        if self._branch == 0:
            self._fork = self._farthest = self._next_position
        self._branches += 1
        self._branch, self._next_position = self._branches, self._fork
        return self._branch

    def close_branches(self) -> None:
        """Continue in the trunk, after the longest branch."""
        self._branch, self._next_position = 0, self._farthest

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample to the open branch."""
        super().append_context(ids)
        self._extend_layout()

    def append_response(self, response: ModelResponse, *, trained: int | None = None) -> None:
        """Append sampled tokens to the open branch; see :meth:`TokenSequence.append_response`."""
        super().append_response(response, trained=trained)
        self._extend_layout()

    def _extend_layout(self) -> None:
        """Extend the layout by the appended tokens."""
        added = self.loss_mask[len(self.branch_ids) :]
        self.branch_ids += [self._branch] * len(added)
        self.position_ids += range(self._next_position, self._next_position + len(added))
        self.other_context += [bool(is_trained) and self._branch > 1 and not self.isolated for is_trained in added]
        self._next_position += len(added)
        self._farthest = max(self._farthest, self._next_position)

    def layout_before(self, opening: Sequence[int], *, in_new_branch: bool) -> dict[str, list[int]]:
        """Return ``position_ids`` and ``branch_ids`` of a request for this row followed by ``opening``; empty if plain.

        Args:
            opening: tokens of the request after the row.
            in_new_branch: True if ``opening`` begins a branch at the end of the trunk, False if it continues the open branch.
        """
        if not self.isolated:
            return {}
        branch = self._branches + 1 if in_new_branch else self._branch
        positions = range(self._next_position, self._next_position + len(opening))
        return {
            "position_ids": [*self.position_ids, *positions],
            "branch_ids": [*self.branch_ids, *[branch] * len(opening)],
        }

    def layout(self) -> dict[str, list[int]]:
        """Return ``position_ids`` and ``branch_ids`` of the row; empty if plain."""
        return {"position_ids": self.position_ids, "branch_ids": self.branch_ids} if self.isolated else {}

    def row(self, reward: float) -> dict[str, Any]:
        """Return the row of the episode, with the columns of its layout."""
        return super().row(reward) | (self.layout() or {"other_context": self.other_context})


def fill(template: str, **values: str) -> str:
    """Fill the ``{name}`` placeholders of a template in one pass. Other braces, in the template or in values, are kept."""
    return re.sub("|".join(re.escape(f"{{{name}}}") for name in values), lambda match: values[match[0][1:-1]], template)
