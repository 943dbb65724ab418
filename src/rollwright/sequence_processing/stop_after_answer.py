"""Ending a response after its answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from rollwright.errors import ConfigError

ANSWER_END = "</answer>"


class StopAfterAnswer(LogitsProcessor):
    """A logits processor that forces the end token once a row's newest token has completed the closing answer tag.

    ``SequenceProcessor`` needs no logits processor: its engine ends a response with the tag itself
    (``GenerationConfig.stop_after_answer``), so that no token is in it that the policy did not sample. This class is the
    same rule for ``model.generate(logits_processor=[StopAfterAnswer(tokenizer)])``, where a row can only end with an end
    token: there one token more follows the tag.

    Args:
        tokenizer: decodes the newest tokens and names the end token.
        tag: the text after which a row ends.

    Raises:
        ConfigError: the tokenizer has no end token.
    """

    def __init__(self, tokenizer: Any, tag: str = ANSWER_END) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("StopAfterAnswer forces the end token, and the tokenizer has none: set tokenizer.eos_token.")
        self.tag = tag
        self._tokenizer = tokenizer
        self._window = len(tag.encode()) + 1  # a tag of n bytes spans at most n tokens

    def _ends_with_tag(self, tokens: list[int]) -> bool:
        tail = tokens[-self._window :]
        return self._tokenizer.decode(tail).count(self.tag) > self._tokenizer.decode(tail[:-1]).count(self.tag)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, V]`` in which only the end token is left for rows of ``input_ids [B, L]`` that end with the tag."""
        ended = [index for index, tokens in enumerate(input_ids.tolist()) if self._ends_with_tag(tokens)]
        if ended:
            scores = scores.clone()
            forced = torch.full_like(scores[0], float("-inf"))
            forced[self._tokenizer.eos_token_id] = 0.0
            scores[ended] = forced
        return scores
