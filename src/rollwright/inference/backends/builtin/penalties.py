"""Adjusts the scores of one sequence before a token is drawn: logit bias, penalties and a grammar.

Log-probabilities are taken before the adjustment. A sequence without one has no extra cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.grammar import Grammar


class Adjustment:
    """Bias, penalties and grammar of one sequence, in vLLM's order: bias, repetition, frequency, presence; the grammar last.

    Args:
        gconfig: generation arguments of the request.
        prompt: counts for the repetition penalty (as in Transformers and vLLM), not for the other two (as in OpenAI's API).
        grammar: grammar of the output, if any.
    """

    def __init__(self, gconfig: GenerationHyperparameters, prompt: list[int], grammar: Grammar | None) -> None:
        self._gconfig = gconfig
        self._grammar = grammar
        self._prompt = prompt
        self._state: tuple[Tensor, Tensor, Tensor] | None = (
            None  # made with the first token, because many requests wait for theirs
        )

    def take(self, token: int) -> None:
        """Record the newest output token."""
        if self._state is not None:
            counts_V, seen_V, _ = self._state
            counts_V[token] += 1
            seen_V[token] = True
        if self._grammar is not None:
            self._grammar.take(token)

    @property
    def error(self) -> EngineError | None:
        """Why the sequence cannot continue; None if it can."""
        if self._grammar is None or not self._grammar.error:
            return None
        return EngineError(f"The grammar of the request cannot be followed further: {self._grammar.error:.500}")

    def apply(self, scores_V: Tensor) -> None:
        """Adjust logits that were divided by the temperature, in place."""
        self._add_penalties(scores_V)
        if self._grammar is not None:
            self._grammar.mask(scores_V)

    def _add_penalties(self, scores_V: Tensor) -> None:
        gconfig, temperature = self._gconfig, self._gconfig.effective_temperature
        if self._state is None:
            seen_V = torch.zeros_like(scores_V, dtype=torch.bool)
            seen_V[self._prompt] = True
            bias_V = torch.zeros_like(scores_V)
            bias_V[list(gconfig.logit_bias)] = scores_V.new_tensor(list(gconfig.logit_bias.values()))
            self._state = torch.zeros_like(scores_V), seen_V, bias_V
        counts_V, seen_V, bias_V = self._state
        scores_V.add_(bias_V, alpha=1 / temperature)
        if (penalty := gconfig.repetition_penalty) != 1.0:
            penalised = torch.where(scores_V > 0, scores_V / penalty, scores_V * penalty)
            scores_V.copy_(torch.where(seen_V, penalised, scores_V))
        if gconfig.frequency_penalty or gconfig.presence_penalty:
            penalty_V = gconfig.frequency_penalty * counts_V + gconfig.presence_penalty * (counts_V > 0)
            scores_V.sub_(penalty_V / temperature)
