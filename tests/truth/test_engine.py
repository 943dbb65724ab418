"""The built-in engine against the untouched forward of each row alone: equal or refused, for every causal family.

Each model answers requests alone, among requests of other lengths, and in second turns that begin from what the first left in the cache.
CI runs ``families.QUICK``; ``--all-families`` runs every case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest, ModelResponse

from . import families, table

TEMPERATURE = 1.7
NEW_TOKENS = 12
#: Prompts on both sides of every regime, one that grows beyond the window and one that grows beyond the trained positions.
LENGTHS = (families.LENGTH, 7, families.WINDOW - 4, families.TRAINED - 4, families.WINDOW + 20)
SHORT = families.TRAINED - NEW_TOKENS - 4  # with its completion and a second turn it stays within the trained positions


def request(tokens: list[int], seed: int, scored: bool = False) -> ModelRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
    return ModelRequest(tokens, gconfig, seed=seed, top_logprobs=16, prompt_logprobs_from=1 if scored else None)


def distance(made: families.Made, response: ModelResponse) -> float:
    """The largest of a response from the untouched forward: of sampled tokens, of likely ones beside them, and of a scored prompt."""
    prompt, output = response.input_tokens, response.output_tokens
    expected_LV = families.plain_logprobs(made.model, prompt + output, TEMPERATURE)
    apart = [0.0]
    for index, (token, logprob) in enumerate(zip(output, response.output_logprobs, strict=True), len(prompt) - 1):
        likely = response.output_top_logprobs[index + 1 - len(prompt)]
        apart += [abs(value - float(expected_LV[index, number])) for number, value in [(token, logprob), *likely]]
    for index, value in enumerate(response.input_logprobs or []):  # that of the first token is no part of it
        apart.append(abs(value - float(expected_LV[index, prompt[index + 1]])))
    return max(apart)


def answers(engine: BuiltinEngine, requests: Iterable[ModelRequest]) -> list[ModelResponse]:
    """Those of the requests that the engine takes, submitted together."""
    return engine.generate([request for request in requests if len(request.input_ids) < engine.context_length])


def alone(made: families.Made, engine: BuiltinEngine) -> list[ModelResponse]:
    return [
        answer for length in (*LENGTHS, SHORT) for answer in answers(engine, [request(families.row(length), 1, scored=True)])
    ]


def batched(made: families.Made, engine: BuiltinEngine) -> list[ModelResponse]:
    return answers(engine, [request(families.row(length, seed=length), length) for length in (*LENGTHS, SHORT)])


def second_turns(made: families.Made, engine: BuiltinEngine) -> list[ModelResponse]:
    first = answers(engine, [request(families.row(length, seed=length), length) for length in (families.LENGTH, 26, 20)])
    rows = [[*answer.input_tokens, *answer.output_tokens, *families.row(4, seed=3)] for answer in first]
    before = engine.stats()["reused_tokens"]
    second = answers(engine, [request(row, len(row)) for row in rows])
    assert engine.stats()["reused_tokens"] - before >= 16 * len(second)
    return second


WAYS: dict[str, Callable[[families.Made, BuiltinEngine], list[ModelResponse]]] = {
    "alone": alone,
    "batched": batched,
    "second turns": second_turns,
}


def outcomes(made: families.Made) -> dict[str, str]:
    """For each way ``equal``, ``equal up to N tokens`` (longer rows are refused) or ``refused``; else by how much it is off."""
    try:
        engine = BuiltinEngine(made.untouched(), threads=1, max_running_requests=8, prefill_tokens=48, kv_cache_bytes=1 << 26)
    except EngineError:
        return dict.fromkeys(WAYS, "refused")
    with engine:
        return {way: _outcome(made, engine, run(made, engine)) for way, run in WAYS.items()}


def _outcome(made: families.Made, engine: BuiltinEngine, responses: list[ModelResponse]) -> str:
    assert responses
    worst = max(distance(made, response) for response in responses)
    if not worst <= made.limit:
        return f"off by {worst:.2g} nats"
    if engine.context_length >= families.LENGTH + NEW_TOKENS:
        return "equal"
    with pytest.raises(EngineError, match=f"context is {engine.context_length}"):
        engine.generate([request(families.row(engine.context_length), 1)])
    return f"equal up to {engine.context_length} tokens"


def test_the_engine_computes_what_the_untouched_forward_computes_or_refuses(made: families.Made) -> None:
    found = outcomes(made)
    assert not any("off by" in said for said in found.values()), found
    assert table.cell(found) == table.said(made.case.name)["engine"]  # the page says what is refused
