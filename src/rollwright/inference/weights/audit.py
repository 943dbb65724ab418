"""Does an engine compute what the trainer computes? Compared by log-probabilities, because version labels can lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def probe_request(model: torch.nn.Module, new_tokens: int = NEW_TOKENS) -> ModelRequest:
    """The fixed probe: ids spread over the vocabulary, sampled at temperature 0.7 to a forced length.

    Args:
        model: a Hugging Face model; its vocabulary counts.
        new_tokens: that are sampled.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr]
    ids = [(7 + 31 * index * index + 17 * index) % vocabulary for index in range(PROMPT_TOKENS)]
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, temperature=TEMPERATURE, ignore_eos=True)
    return ModelRequest(input_ids=ids, gconfig=gconfig, rid="audit-probe", seed=12345)


def audit(
    responses: dict[str, ModelResponse],
    score: Score,
    version: int,
    tolerance: float | None,
    dtype: torch.dtype = torch.float32,
) -> list[Agreement]:
    """Compare every engine's answer to the probe with the trainer.

    Args:
        responses: engine name to its answer.
        score: the trainer's log-probabilities.
        version: that was just published.
        tolerance: largest mean absolute difference; None: what ``dtype`` allows.
        dtype: the trainer's compute type.

    Returns:
        One entry for each engine.

    Raises:
        WeightUpdateError: an engine is over the tolerance, answered with another version, gave no token, or numbers that are
            not finite; it is named.
    """
    limit = tolerance if tolerance is not None else 1e-3 if dtype == torch.float32 else 5e-2
    agreements: list[Agreement] = []
    for engine, response in responses.items():
        wrong = sorted(set(response.output_versions) - {version})
        if wrong:
            raise WeightUpdateError(
                f"{engine} sampled the audit's probe with version {wrong}, not {version}, after its update."
            )
        if not response.output_tokens:
            raise WeightUpdateError(f"{engine} gave no token for the audit's probe; stop_reason {response.stop_reason!r}.")
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        trainer = score(ids, response.temperature).detach().to("cpu", torch.float64)[0, len(response.input_tokens) :]
        difference = (torch.tensor(response.output_logprobs, dtype=torch.float64) - trainer).abs()
        if not bool(torch.isfinite(difference).all()):
            raise WeightUpdateError(
                f"{engine} or the trainer gives log-probabilities that are not finite for the audit's probe."
            )
        agreement = Agreement(engine, float(difference.mean()), float(difference.max()), len(difference))
        agreements.append(agreement)
        if agreement.mean > limit:
            raise WeightUpdateError(
                f"{engine} says that it holds version {version}, but its log-probabilities differ from the trainer's by "
                f"{agreement.mean:.2e} on average (largest {agreement.largest:.2e}, limit {limit:.0e}): it does not compute "
                "with the published weights. A known case is a model with tied embeddings on a vLLM server, whose output head "
                "keeps its old copy: use a model with an untied head. Otherwise check the server's dtype and logprobs mode; "
                "rollout.logprob_tolerance sets the limit."
            )
    return agreements
