"""What the engine samples is what the model says: log-probabilities, greedy tokens, shared prompts, chunks, kept prefixes."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from builtin_models import VOCABULARY, reference_logprobs, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError, PromptTooLongError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(3, VOCABULARY) for _ in range(choose.randrange(1, longest))] for _ in range(count)]


def requests(prompt_list, **arguments) -> list[ModelRequest]:
    return [ModelRequest(p, GenerationHyperparameters(**arguments), seed=i) for i, p in enumerate(prompt_list)]


def assert_logprobs_match(model, sent, responses, temperature: float, tolerance: float = 1e-4) -> None:
    for request, response in zip(sent, responses, strict=True):
        assert response.input_tokens == request.input_ids
        assert len(response.output_logprobs) == len(response.output_versions) == response.output_len
        expected = reference_logprobs(model, request.input_ids, response.output_tokens, temperature)
        assert (expected - torch.tensor(response.output_logprobs)).abs().max() < tolerance


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral", "gpt2", "gpt_neox", "gemma2"])
def test_logprobs_are_the_models_at_temperature_and_in_any_schedule(architecture):
    model = tiny_model(architecture)
    sent = requests(prompts(11), max_new_tokens=12, temperature=0.7)
    with BuiltinEngine(model, max_running_requests=4, prefill_tokens=24) as engine:
        assert_logprobs_match(model, sent, engine.generate(sent), 0.7)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_greedy_equals_transformers_generate(architecture):
    model = tiny_model(architecture)
    sent = requests(prompts(5), max_new_tokens=16, greedy=True, temperature=0.3)
    with BuiltinEngine(model) as engine:
        responses = engine.generate(sent)
    for request, response in zip(sent, responses, strict=True):
        ids = torch.tensor([request.input_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert response.output_tokens == expected[0, ids.shape[1] :].tolist()
        assert response.temperature == 1.0
        assert response.stop_reason == ("stop" if response.output_tokens[-1] == 2 else "length")
    assert_logprobs_match(model, sent, responses, 1.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 1e4,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_rotary_scaling_is_honoured(rope):
    model = tiny_model("llama", rope_parameters=rope)
    sent = requests(prompts(4, longest=90), max_new_tokens=8)
    with BuiltinEngine(model) as engine:
        assert_logprobs_match(model, sent, engine.generate(sent), 1.0)


def test_bfloat16_runs_on_both_paths():
    for architecture in ("qwen3", "gpt2"):
        model = tiny_model(architecture, torch.bfloat16)
        sent = requests(prompts(4), max_new_tokens=6)
        with BuiltinEngine(model) as engine:
            assert_logprobs_match(model, sent, engine.generate(sent), 1.0, tolerance=0.5)


def test_a_prompt_of_a_group_is_prefilled_once():
    model = tiny_model("qwen3")
    prompt = prompts(1, longest=60)[0] + [5] * 20
    sent = requests([prompt] * 8, max_new_tokens=8, temperature=0.7, ignore_eos=True)
    with BuiltinEngine(model, max_running_requests=5) as engine:
        responses = engine.generate(sent)
        assert engine.stats()["prefill_tokens"] < len(prompt) + 8  # later members compute a token or two, not the prompt
    assert_logprobs_match(model, sent, responses, 0.7)
    assert len({tuple(r.output_tokens) for r in responses}) == 8


def test_the_next_turn_begins_from_the_kept_cache_and_equals_a_fresh_one():
    model = tiny_model("qwen2")
    first = ModelRequest(
        prompts(1)[0] + [7] * 30, GenerationHyperparameters(max_new_tokens=10, ignore_eos=True), rid="c", seed=1
    )
    with BuiltinEngine(model) as engine, BuiltinEngine(model, prefix_cache=False) as fresh:
        turn = engine.generate([first])[0]
        computed = engine.stats()["prefill_tokens"]
        longer = ModelRequest(turn.input_tokens + turn.output_tokens + [9, 8, 7], first.gconfig, rid="c", seed=2)
        reused, recomputed = engine.generate([longer])[0], fresh.generate([longer])[0]
        assert engine.stats()["prefill_tokens"] - computed == 4  # the last sampled token and three new ones
    assert reused.output_tokens == recomputed.output_tokens
    torch.testing.assert_close(reused.output_logprobs, recomputed.output_logprobs, atol=1e-5, rtol=0)


def test_a_repeat_is_bit_identical():
    model = tiny_model("qwen3")
    sent = requests(prompts(9), max_new_tokens=20, temperature=0.9)
    runs = []
    for _ in range(2):
        with BuiltinEngine(model, max_running_requests=4, prefill_tokens=16) as engine:
            runs.append([(r.output_tokens, r.output_logprobs) for r in engine.generate(sent)])
            engine.flush_cache()
            runs.append([(r.output_tokens, r.output_logprobs) for r in asyncio.run(engine.agenerate_batch(sent))])
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_requests_without_seeds_repeat_by_order_and_differ_from_each_other():
    model = tiny_model("qwen3")
    sent = [ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=12, ignore_eos=True)) for _ in range(3)]
    outputs = []
    for _ in range(2):
        with BuiltinEngine(model, seed=3) as engine:
            responses = engine.generate(sent)
            outputs.append([r.output_tokens for r in responses])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 3
    again = ModelRequest([5, 6], sent[0].gconfig, seed=responses[1].seed)
    with BuiltinEngine(model) as engine:
        assert engine.generate([again])[0].output_tokens == outputs[0][1]


def test_limits_of_length_and_vocabulary_are_clean_errors():
    model = tiny_model("qwen3")
    with BuiltinEngine(model, context_length=32) as engine:
        with pytest.raises(PromptTooLongError, match="32"):
            engine.generate([ModelRequest([5] * 32)])
        with pytest.raises(EngineError, match="another model's tokenizer"):
            engine.generate([ModelRequest([VOCABULARY])])
        gconfig = GenerationHyperparameters(max_new_tokens=100, ignore_eos=True)
        response = engine.generate([ModelRequest([5] * 30, gconfig)])[0]
        assert (response.output_len, response.stop_reason, response.truncated) == (2, "length", True)
        with pytest.raises(PromptTooLongError):  # one bad request of a batch queues none
            engine.generate([ModelRequest([5]), ModelRequest([5] * 40)])
        assert engine.stats()["generated_tokens"] == 2


def test_long_prompts_do_not_stall_what_runs():
    model = tiny_model("qwen3")
    short = ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=30, ignore_eos=True))
    long = ModelRequest([7] * 200, GenerationHyperparameters(max_new_tokens=2))
    sampled = list[int]()  # for each token in order, the length of the prompt that it answers
    with BuiltinEngine(model, prefill_tokens=10) as engine:
        futures = engine.submit([short, long], on_token=lambda sequence, *_: sampled.append(sequence.prompt_length))
        responses = [future.result() for future in futures]
    assert_logprobs_match(model, [short, long], responses, 1.0)
    assert sampled.index(200) >= 19  # 200 tokens at 10 a step, and a token of the short prompt after each of them
