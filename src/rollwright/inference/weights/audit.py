"""Does an engine compute what the trainer computes? Compared by log-probabilities, because version labels can lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import WeightUpdateError
from rollwright.inference.request import ModelRequest, ModelResponse

#: Not 1: an engine that leaves the temperature out of its log-probabilities would pass at 1.
TEMPERATURE = 0.7
PROMPT_TOKENS, NEW_TOKENS = 12, 16
#: Of an engine in the trainer's process, where the tokens of the next batch are compared, too.
NEW_TOKENS_IN_PROCESS = 4

#: ``(input_ids [1, L], temperature)`` -> log-probabilities ``[1, L]`` under the trainer's weights, index t for token t.
Score = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Agreement:
    """Differences of log-probabilities between one engine and the trainer over the probe's tokens."""

    engine: str
    mean: float
    largest: float
    tokens: int


def probe_request(vocabulary: int, new_tokens: int = NEW_TOKENS) -> ModelRequest:
    """The fixed probe: ids spread over the vocabulary, sampled at temperature 0.7 to a forced length.

    Args:
        vocabulary: number of token ids.
        new_tokens: that are sampled.
    """
    ids = [(7 + 31 * index * index + 17 * index) % vocabulary for index in range(PROMPT_TOKENS)]
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, temperature=TEMPERATURE, ignore_eos=True)
    return ModelRequest(input_ids=ids, gconfig=gconfig, rid="audit-probe", seed=12345)


def compare(engine: str, response: ModelResponse, score: Score) -> Agreement:
    """The differences between an engine's log-probabilities and the trainer's for the same tokens.

    Raises:
        WeightUpdateError: the engine gave no token, or numbers that are not finite.
    """
    if not response.output_tokens:
        raise WeightUpdateError(f"{engine} gave no token for the audit's probe; stop_reason {response.stop_reason!r}.")
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    trainer = score(ids, response.temperature).detach().to("cpu", torch.float64)[0, len(response.input_tokens) :]
    difference = (torch.tensor(response.output_logprobs, dtype=torch.float64) - trainer).abs()
    if not bool(torch.isfinite(difference).all()):
        raise WeightUpdateError(f"{engine} or the trainer gives log-probabilities that are not finite for the audit's probe.")
    return Agreement(engine, float(difference.mean()), float(difference.max()), len(difference))


def audit(responses: dict[str, ModelResponse], score: Score, version: int, tolerance: float) -> list[Agreement]:
    """Compare every engine's answer to the probe with the trainer.

    Args:
        responses: engine name to its answer.
        score: the trainer's log-probabilities.
        version: that was just published.
        tolerance: largest mean absolute difference.

    Returns:
        One entry for each engine.

    Raises:
        WeightUpdateError: an engine is over the tolerance, or answered with another version; it is named.
    """
    agreements: list[Agreement] = []
    for engine, response in responses.items():
        wrong = sorted(set(response.output_versions) - {version})
        if wrong:
            raise WeightUpdateError(
                f"{engine} sampled the audit's probe with version {wrong}, not {version}, after its update."
            )
        agreement = compare(engine, response, score)
        agreements.append(agreement)
        if agreement.mean > tolerance:
            raise WeightUpdateError(
                f"{engine} says that it holds version {version}, but its log-probabilities differ from the trainer's by "
                f"{agreement.mean:.2e} on average (largest {agreement.largest:.2e}, limit {tolerance:.0e}): it does not compute "
                "with the published weights. A known case is a model with tied embeddings on a vLLM server, whose output head "
                "keeps its old copy: use a model with an untied head. Otherwise check the server's dtype and logprobs mode; "
                "rollout.logprob_tolerance sets the limit."
            )
    return agreements


class TrainerScore:
    """The log-probabilities of an actor, as the audit asks for them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.vocabulary = int(trainer.model.config.get_text_config().vocab_size)

    def __call__(self, input_ids_BL: Tensor, temperature: float) -> Tensor:
        mask_BL = torch.ones_like(input_ids_BL)
        return self._trainer.compute_logp(
            {
                "input_ids": input_ids_BL,
                "attention_mask": mask_BL.bool(),
                "loss_mask": mask_BL,
                "temperature": torch.full((len(input_ids_BL),), temperature),
            }
        )


def score_of(trainer: Any) -> TrainerScore:
    """How the audit asks an actor for log-probabilities."""
    return TrainerScore(trainer)


def tolerance_of(config: Any, trainer: Any) -> float:
    """``rollout.logprob_tolerance`` (of a config that may be None), or what the compute type allows."""
    tolerance = getattr(config, "logprob_tolerance", None)
    if tolerance is not None:
        return tolerance
    return 1e-3 if getattr(trainer, "compute_dtype", torch.float32) == torch.float32 else 5e-2
