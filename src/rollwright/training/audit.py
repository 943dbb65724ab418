"""Do the engines compute what the trainer computes? The trainer's side of ``rollwright.inference.weights.audit``.

Every rank takes part: the first asks the engines, all score what they answered, and the first compares.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from rollwright.inference.request import ModelResponse
from rollwright.inference.weights.audit import NEW_TOKENS, Agreement, audit, probe_request, score_of, tolerance_of
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel

if TYPE_CHECKING:
    from rollwright.training.engine import TrainEngine

logger = getLogger("publish")


def can_answer(engine: Any) -> bool:
    """True where ``engine`` can be asked for the probe now: it knows how to, and is not servers that are paused."""
    client = _client(engine)
    return hasattr(client, "probe") and not getattr(client, "is_paused", False)


def audit_engines(engine: Any, trainer: TrainEngine, version: int, new_tokens: int = NEW_TOKENS) -> list[Agreement]:
    """Have the engines sample the probe, and compare their log-probabilities with the trainer's.

    Args:
        engine: in this process, or a client of servers; only the first rank's is asked.
        trainer: whose present weights were published.
        version: that they were published as.
        new_tokens: tokens of the probe.

    Returns:
        One entry for each engine; none for an engine that cannot be asked (one that is not ours).

    Raises:
        WeightUpdateError: on every rank, where an engine is over the tolerance, or answered with another version.
    """
    client = _client(engine)
    score = score_of(trainer)
    answers: dict[str, ModelResponse] = {}

    def ask() -> list[tuple[list[int], float]]:
        if hasattr(client, "probe"):
            answers.update(client.probe(probe_request(score.vocabulary, new_tokens)))
        # Servers with the same weights sample the same tokens, which are then scored once.
        distinct = {tuple(answer.input_tokens + answer.output_tokens): answer.temperature for answer in answers.values()}
        return [(list(ids), temperature) for ids, temperature in distinct.items()]

    scored = {
        tuple(ids): score(torch.tensor([ids]), temperature)
        for ids, temperature in parallel.from_first_rank(ask, trainer.device)
    }

    def judge() -> list[dict[str, Any]]:
        tolerance = tolerance_of(getattr(engine, "config", None), trainer)
        agreements = audit(answers, lambda ids_BL, _: scored[tuple(ids_BL[0].tolist())], version, tolerance)
        return [asdict(agreement) for agreement in agreements]

    agreements = [Agreement(**agreement) for agreement in parallel.from_first_rank(judge, trainer.device)]
    if agreements:
        logger.debug("audit of version %d: largest mean difference %.1e", version, max(one.mean for one in agreements))
    return agreements


def _client(engine: Any) -> Any:
    return getattr(engine, "client", engine)
