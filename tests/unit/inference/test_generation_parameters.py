"""The table of generation parameters: each field is honoured or refused, on each of the three engines."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.bodies import NativeSampling

#: A value of each field that is not its default.
OTHER = {
    "n_samples": 3,
    "max_new_tokens": 7,
    "min_new_tokens": 2,
    "greedy": True,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {3: 1.5, 17: -100.0},
    "json_schema": '{"type": "object"}',
    "regex": "a+",
    "grammar": 'start: "a"',
    "stop": ["</answer>"],
    "stop_token_ids": [11],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "seed": 5,
}
TABLES = {"sglang": SGLangBackend.parameters, "vllm": VLLMBackend.parameters}
FIELDS = [field.name for field in fields(GenerationHyperparameters)]


def wire_params(engine: str, gconfig: GenerationHyperparameters) -> dict:
    return TABLES[engine].sampling_params(gconfig, gconfig.seed)


def test_the_table_and_this_test_know_every_field():
    own = ["n_samples", "greedy"]  # which no server has: several requests, and a temperature of 0
    for table in TABLES.values():
        assert [name for name in FIELDS if name not in own] == list(table.wires)
    assert list(OTHER) == FIELDS
    default = GenerationHyperparameters()
    assert all(getattr(default, name) != value for name, value in OTHER.items())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_reaches_the_server_or_is_refused(engine, name):
    gconfig = GenerationHyperparameters(**{name: OTHER[name]})
    wire = TABLES[engine].wire(name)
    if wire.shifts_logprobs or wire.refusal(gconfig):
        with pytest.raises(EngineError, match=rf"{name}=.*here:1"):
            TABLES[engine].check(gconfig, "here:1")
        return
    assert TABLES[engine].check(gconfig, "here:1") is False
    sent, neutral = wire_params(engine, gconfig), wire_params(engine, GenerationHyperparameters())
    assert sent[wire.key] != neutral.get(wire.key)
    assert {key: value for key, value in sent.items() if key != wire.key} == {
        key: value for key, value in neutral.items() if key != wire.key
    }


@pytest.mark.parametrize("name", FIELDS)
def test_our_server_reads_back_what_the_client_wrote(name):
    """The built-in engine behind ``serve-model``: nothing is lost between the two ends of the wire."""
    if name == "n_samples":
        with pytest.raises(EngineError, match="n_samples"):
            TABLES["sglang"].check(GenerationHyperparameters(n_samples=3), "x", gives_contract_logprobs=True)
        return
    gconfig = GenerationHyperparameters(**{name: OTHER[name]})
    assert TABLES["sglang"].check(gconfig, "x", gives_contract_logprobs=True) is False
    sampling = NativeSampling.of(TABLES["sglang"].sampling_params(gconfig, gconfig.seed))
    read = sampling.gconfig()
    assert sampling.no_stop_trim
    if gconfig.greedy:
        assert read.is_greedy
        return
    assert getattr(read, name) == getattr(gconfig, name)


def test_shifted_logprobs_are_asked_for_only_where_accepted_and_flagged():
    nucleus = GenerationHyperparameters(top_p=0.9)
    assert TABLES["sglang"].check(nucleus, "x") is False  # SGLang's are those before top-p
    with pytest.raises(EngineError, match="accept_shifted_logprobs"):
        TABLES["vllm"].check(nucleus, "x")
    assert TABLES["vllm"].check(nucleus, "x", accept_shifted=True) is True
    assert TABLES["vllm"].check(GenerationHyperparameters(greedy=True, top_p=0.9), "x") is False


def test_stop_strings_with_a_minimum_length_are_refused_for_sglang_alone():
    both = GenerationHyperparameters(stop=["x"], min_new_tokens=3)
    with pytest.raises(EngineError, match="stop_token_ids"):
        TABLES["sglang"].check(both, "x", accept_shifted=True)
    assert TABLES["vllm"].check(both, "x", accept_shifted=True) is True


@pytest.mark.parametrize("top_k", [0, -1, 1 << 30, 1 << 40])
def test_every_way_to_say_all_tokens_is_neutral(top_k):
    gconfig = GenerationHyperparameters(top_k=top_k)
    assert TABLES["vllm"].check(gconfig, "x") is False
    assert TABLES["sglang"].sampling_params(gconfig, None)["top_k"] == -1
    assert TABLES["vllm"].sampling_params(gconfig, None)["top_k"] == 0


def test_our_server_knows_every_key_that_the_client_sends():
    assert set(TABLES["sglang"].sampling_params(GenerationHyperparameters(), None)) <= {
        *NativeSampling.model_fields,
        *NativeSampling.neutral,
    }


def test_a_request_takes_generation_arguments_and_no_dict():
    with pytest.raises(EngineError, match=r"gconfig is \{'max_new_tokens': 4\}.*give GenerationHyperparameters\("):
        ModelRequest(input_ids=[1], gconfig={"max_new_tokens": 4})
