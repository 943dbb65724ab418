"""The sampler against independent float64 formulas, and the rules of stopping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builtin_models import VOCABULARY, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.sampling import counter_uniforms, inverse_cdf, truncated_inverse_cdf
from rollwright.inference.request import ModelRequest

EVEN = torch.linspace(0, 1, 20_001)[:-1]  # as uniforms, they meet every token in proportion to its probability


def shares(tokens: torch.Tensor, vocabulary: int) -> np.ndarray:
    return torch.bincount(tokens, minlength=vocabulary).double().numpy() / len(tokens)


@given(st.integers(2, 300) | st.sampled_from([1040, 1536, 2003]), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_inverse_cdf_meets_tokens_in_proportion(vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocabulary, generator=generator) * (torch.rand(vocabulary, generator=generator) < 0.7)
    weights[seed % vocabulary] += 0.5
    tokens = inverse_cdf(weights.expand(len(EVEN), -1).contiguous(), EVEN)
    expected = weights.double().numpy() / weights.double().sum().item()
    assert np.abs(shares(tokens, vocabulary) - expected).max() < 2e-4
    assert (weights[tokens] > 0).all()


@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 3, 7]),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.sampled_from([0, 0.1, 0.4, 1]),
)
@settings(max_examples=60, deadline=None)
def test_top_k_then_top_p_then_min_p(seed, top_k, top_p, min_p):
    vocabulary = 24
    scores = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    probs = scores.double().softmax(-1).numpy()
    order = np.argsort(-probs)[: top_k or vocabulary]
    inside = probs[order] / probs[order].sum()
    kept = order[: int(np.searchsorted(np.cumsum(inside), top_p)) + 1] if top_p < 1 else order
    kept = kept[probs[kept] >= min_p * probs.max() * (1 - 1e-6)]
    expected = np.zeros(vocabulary)
    expected[kept] = probs[kept] / probs[kept].sum()
    count = len(EVEN)
    tokens = truncated_inverse_cdf(
        scores.expand(count, -1),
        EVEN,
        torch.full((count,), top_k),
        torch.full((count,), top_p, dtype=torch.float32),
        torch.full((count,), min_p, dtype=torch.float32),
    )
    assert np.abs(shares(tokens, vocabulary) - expected).max() < 2e-4


def test_uniforms_are_uniform_and_independent_of_neighbours():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    counters = np.tile(np.arange(200), 200)
    uniforms = counter_uniforms(seeds, counters)
    assert 0 <= uniforms.min() < 1e-3
    assert 0.999 < uniforms.max() < 1
    counts = np.histogram(uniforms, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 95  # chi-square of 49 degrees of freedom, 1e-4
    table = uniforms.reshape(200, 200).astype(np.float64)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert counter_uniforms(seeds[7:8], counters[7:8])[0] == uniforms[7]


def sample(model, gconfig, count=1, prompt=(5, 6, 7), **engine_arguments):
    with BuiltinEngine(model, **engine_arguments) as engine:
        return engine.generate([ModelRequest(list(prompt), gconfig, seed=i) for i in range(count)])


def test_sampled_frequencies_follow_the_model():
    model = tiny_model("qwen3")
    gconfig = GenerationHyperparameters(max_new_tokens=1, temperature=0.7)
    tokens = torch.tensor([r.output_tokens[0] for r in sample(model, gconfig, 4000, max_running_requests=512)])
    with torch.no_grad():
        expected = (model(torch.tensor([[5, 6, 7]])).logits[0, -1].double() / 0.7).softmax(-1).numpy()
    error = np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(shares(tokens, VOCABULARY) - expected) < 5 * error + 1e-3).all()


def test_what_a_request_draws_does_not_depend_on_its_company():
    model = tiny_model("qwen3")
    plain = GenerationHyperparameters(max_new_tokens=24, temperature=0.8, ignore_eos=True)
    others = [
        ModelRequest([9] * 20, plain.new(top_p=0.5), seed=4),
        ModelRequest([3], plain.new(greedy=True)),
        ModelRequest([4, 4], plain.new(top_k=3, max_new_tokens=5), seed=5),
        ModelRequest([8], plain.new(frequency_penalty=1.0), seed=6),
    ]
    for gconfig in (plain, plain.new(top_p=0.7, top_k=9), plain.new(frequency_penalty=0.5)):
        mine = ModelRequest([5, 6, 7], gconfig, seed=11)
        with BuiltinEngine(model) as engine:
            alone = engine.generate([mine])[0]
        with BuiltinEngine(model, max_running_requests=3, prefill_tokens=7) as engine:
            crowded = engine.generate([*others, mine, *others])[len(others)]
        assert alone.output_tokens == crowded.output_tokens
        torch.testing.assert_close(alone.output_logprobs, crowded.output_logprobs, atol=1e-5, rtol=0)


def test_truncation_and_penalties_do_not_touch_logprobs():
    model = tiny_model("llama")
    prompt = [5, 6, 7]
    adjustments = {"presence_penalty": 1.5, "repetition_penalty": 2.0, "logit_bias": {9: 4.0, 11: -3.0}, "top_k": 20}
    changes = ({"top_p": 0.4}, {"top_k": 2}, {"min_p": 0.3}, {"frequency_penalty": 2.0}, {"min_new_tokens": 6}, adjustments)
    for change in changes:
        gconfig = GenerationHyperparameters(max_new_tokens=8, temperature=0.7).new(**change)
        response = sample(model, gconfig, prompt=prompt)[0]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response.output_tokens])).logits[0, 2:-1].double() / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response.output_tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)


#: Each adjustment alone, and all together.
ADJUSTMENTS = [
    {"frequency_penalty": 2.0},
    {"presence_penalty": -1.0},
    {"repetition_penalty": 3.0},
    {"logit_bias": {9: 5.0, 11: -100.0}},
    {"frequency_penalty": 0.5, "presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {4: 2.0, 7: -1.0}},
]


def adjusted(logits_V: torch.Tensor, prompt: list[int], output: list[int], settings: dict) -> torch.Tensor:
    """Float64 logits after bias, repetition, frequency and presence penalty, one token after another."""
    logits_V = logits_V.double().clone()
    for token, bias in settings.get("logit_bias", {}).items():
        logits_V[token] += bias
    for token in {*prompt, *output}:
        factor = settings.get("repetition_penalty", 1.0)
        logits_V[token] = logits_V[token] / factor if logits_V[token] > 0 else logits_V[token] * factor
    for token in set(output):
        logits_V[token] -= settings.get("frequency_penalty", 0.0) * output.count(token) + settings.get("presence_penalty", 0.0)
    return logits_V


@pytest.mark.parametrize("settings", ADJUSTMENTS)
def test_adjustments_by_hand(settings):
    model, prompt = tiny_model("qwen3"), [5, 6, 7]
    gconfig = GenerationHyperparameters(max_new_tokens=10, greedy=True, ignore_eos=True, **settings)
    output = sample(model, gconfig)[0].output_tokens
    for place, token in enumerate(output):
        with torch.no_grad():
            logits_V = model(torch.tensor([prompt + output[:place]])).logits[0, -1]
        assert token == int(adjusted(logits_V, prompt, output[:place], settings).argmax())


@pytest.mark.parametrize("settings", [ADJUSTMENTS[-1], {**ADJUSTMENTS[-1], "min_p": 0.05}])
def test_adjusted_frequencies_follow_the_formula(settings):
    model, prompt, count, temperature = tiny_model("llama"), [5, 6, 7, 6], 4000, 0.7
    gconfig = GenerationHyperparameters(max_new_tokens=1, temperature=temperature, **settings)
    responses = sample(model, gconfig, count, prompt, max_running_requests=512)
    with torch.no_grad():
        logits_V = model(torch.tensor([prompt])).logits[0, -1]
    expected = (adjusted(logits_V, prompt, [], settings) / temperature).softmax(-1)
    expected = expected.where(expected >= settings.get("min_p", 0.0) * expected.max(), 0.0)
    expected = (expected / expected.sum()).numpy()
    error = np.sqrt(expected * (1 - expected) / count)
    tokens = torch.tensor([response.output_tokens[0] for response in responses])
    assert (np.abs(shares(tokens, VOCABULARY) - expected) < 5 * error + 1e-3).all()
    plain = (logits_V.double() / temperature).log_softmax(-1)
    got = torch.tensor([response.output_logprobs[0] for response in responses]).double()
    torch.testing.assert_close(got, plain[tokens], atol=1e-4, rtol=0)


def test_penalties_go_on_after_a_preemption():
    """What a sequence was punished for is not forgotten where its keys and values are computed again."""
    model = tiny_model("qwen3")
    gconfig = GenerationHyperparameters(max_new_tokens=150, greedy=True, ignore_eos=True, presence_penalty=0.5)
    alone = sample(model, gconfig)[0].output_tokens
    with BuiltinEngine(model, kv_cache_bytes=1 << 16, prefix_cache=False, context_length=200) as engine:
        outputs = [r.output_tokens for r in engine.generate([ModelRequest([5, 6, 7], gconfig) for _ in range(8)])]
        assert engine.stats()["preemptions"] > 0
    assert outputs == [alone] * 8


@pytest.mark.parametrize("greedy", [True, False])
def test_stop_ids_end_tokens_and_minimum_length(greedy):
    model = tiny_model("qwen3")
    base = GenerationHyperparameters(max_new_tokens=20, greedy=greedy, ignore_eos=True, seed=1)
    free = sample(model, base)[0].output_tokens
    stop_id = free[4]
    stopped = sample(model, base.new(stop_token_ids=[stop_id]))[0]
    assert stopped.output_tokens == free[: free.index(stop_id) + 1]
    assert (stopped.stop_reason, stopped.stop_match, stopped.truncated) == ("stop", stop_id, False)
    held = sample(model, base.new(stop_token_ids=[stop_id], min_new_tokens=12))[0]
    assert stop_id not in held.output_tokens[:11]
    assert held.output_len >= 12

    model.generation_config.eos_token_id = [2, stop_id]
    assert sample(model, base.new(ignore_eos=False))[0].output_tokens == stopped.output_tokens
    assert sample(model, base.new(stop_token_ids=[stop_id]))[0].output_tokens == free  # ignore_eos: end tokens never end
