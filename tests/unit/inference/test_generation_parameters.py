"""The table of generation parameters: each field is honoured or refused, on each of the three engines."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.parameters import PARAMETERS, check_parameters, sglang_sampling_params, vllm_sampling_params
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.native_fields import NEUTRAL_SAMPLING, SAMPLING, generation_arguments

#: A value of each field that is not its default.
OTHER = {
    "n_samples": 3,
    "max_new_tokens": 7,
    "min_new_tokens": 2,
    "greedy": True,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 5,
    "frequency_penalty": 0.3,
    "stop": ["</answer>"],
    "stop_token_ids": [11],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "seed": 5,
}
WIRE = {"sglang": sglang_sampling_params, "vllm": vllm_sampling_params}


def wire_params(engine: str, gconfig: GenerationHyperparameters) -> dict:
    return WIRE[engine](gconfig, gconfig.seed)


def test_the_table_and_this_test_know_every_field():
    names = [field.name for field in fields(GenerationHyperparameters)]
    assert [parameter.name for parameter in PARAMETERS] == names
    assert list(OTHER) == names
    default = GenerationHyperparameters()
    assert all(getattr(default, name) != value for name, value in OTHER.items())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_each_field_reaches_the_server_or_is_refused(engine, parameter):
    gconfig = GenerationHyperparameters(**{parameter.name: OTHER[parameter.name]})
    wire = getattr(parameter, engine)
    if wire.shifts_logprobs or wire.refusal(gconfig):
        with pytest.raises(EngineError, match=rf"{parameter.name}=.*here:1"):
            check_parameters(gconfig, engine, where="here:1")
        return
    assert check_parameters(gconfig, engine, where="here:1") is False
    sent, neutral = wire_params(engine, gconfig), wire_params(engine, GenerationHyperparameters())
    assert sent[wire.key] != neutral[wire.key]
    assert {key: value for key, value in sent.items() if key != wire.key} == {
        key: value for key, value in neutral.items() if key != wire.key
    }


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_our_server_reads_back_what_the_client_wrote(parameter):
    """The built-in engine behind ``serve-model``: nothing is lost between the two ends of the wire."""
    if parameter.name == "n_samples":
        with pytest.raises(EngineError, match="n_samples"):
            check_parameters(GenerationHyperparameters(n_samples=3), "sglang", where="x", gives_contract_logprobs=True)
        return
    gconfig = GenerationHyperparameters(**{parameter.name: OTHER[parameter.name]})
    assert check_parameters(gconfig, "sglang", where="x", gives_contract_logprobs=True) is False
    read, keep_stop = generation_arguments(sglang_sampling_params(gconfig, gconfig.seed))
    assert keep_stop
    if gconfig.greedy:
        assert read.is_greedy
        return
    assert getattr(read, parameter.name) == getattr(gconfig, parameter.name)


def test_shifted_logprobs_are_asked_for_only_where_accepted_and_flagged():
    nucleus = GenerationHyperparameters(top_p=0.9)
    assert check_parameters(nucleus, "sglang", where="x") is False  # SGLang's are those before top-p
    with pytest.raises(EngineError, match="accept_shifted_logprobs"):
        check_parameters(nucleus, "vllm", where="x")
    assert check_parameters(nucleus, "vllm", where="x", accept_shifted=True) is True
    assert check_parameters(GenerationHyperparameters(greedy=True, top_p=0.9), "vllm", where="x") is False


def test_stop_strings_with_a_minimum_length_are_refused_for_sglang_alone():
    both = GenerationHyperparameters(stop=["x"], min_new_tokens=3)
    with pytest.raises(EngineError, match="stop_token_ids"):
        check_parameters(both, "sglang", where="x", accept_shifted=True)
    assert check_parameters(both, "vllm", where="x", accept_shifted=True) is True


@pytest.mark.parametrize("top_k", [0, -1, 1 << 30, 1 << 40])
def test_every_way_to_say_all_tokens_is_neutral(top_k):
    gconfig = GenerationHyperparameters(top_k=top_k)
    assert check_parameters(gconfig, "vllm", where="x") is False
    assert sglang_sampling_params(gconfig, None)["top_k"] == -1
    assert vllm_sampling_params(gconfig, None)["top_k"] == 0


def test_our_server_knows_every_key_that_the_client_sends():
    assert set(sglang_sampling_params(GenerationHyperparameters(), None)) <= set(SAMPLING) | set(NEUTRAL_SAMPLING)


def test_a_request_takes_generation_arguments_and_no_dict():
    with pytest.raises(EngineError, match=r"gconfig is \{'max_new_tokens': 4\}.*give GenerationHyperparameters\("):
        ModelRequest(input_ids=[1], gconfig={"max_new_tokens": 4})
