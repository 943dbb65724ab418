"""Decode steps with reordered copies of the weights compute what the model computes, also after its weights have changed."""

from __future__ import annotations

import pytest
import torch
from parts import qwen3_config, random_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference.backends.builtin import loading, packed_weights
from rollwright.inference.backends.builtin import model as builtin_model
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.loading import copied_in, paired
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights.stream import WeightStream

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture
def model(monkeypatch):
    """A small model for which copies always pay."""
    monkeypatch.setattr(packed_weights, "_LEAST_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_GAIN", 0.0)
    return random_model(
        qwen3_config(build_character_tokenizer(), hidden_size=64, intermediate_size=96, head_dim=32), seed=0, scale=3.0
    )


def requests(count=5):
    gconfig = GenerationHyperparameters(max_new_tokens=8, temperature=0.7, ignore_eos=True)
    return [ModelRequest([6 + index, 7, 8][: 1 + index % 3], gconfig, seed=index) for index in range(count)]


def logprobs(model, responses, temperature=0.7):
    """Of the sampled tokens, from a plain forward of each row."""
    found = []
    for response in responses:
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        with torch.no_grad():
            logprobs_TV = (model(ids).logits[0, len(response.input_tokens) - 1 : -1].double() / temperature).log_softmax(-1)
        found.append(logprobs_TV.gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0])
    return torch.cat(found)


def differences(model, responses):
    """Of the engine's log-probabilities from the model's."""
    own = torch.cat([torch.tensor(response.output_logprobs, dtype=torch.float64) for response in responses])
    return (logprobs(model, responses) - own).abs()


def largest_difference(model, responses):
    return float(differences(model, responses).max())


def test_decode_steps_compute_what_the_model_computes(model):
    with BuiltinEngine(model, threads=1) as engine:
        assert engine._runner.forward._packed is not None
        assert largest_difference(model, engine.generate(requests())) < 1e-4
        assert engine._runner.forward._packed._copies is not None


def test_bfloat16_is_as_precise_as_in_transformers(model):
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    with BuiltinEngine(model, threads=1, dtype="bfloat16") as engine:
        assert engine._runner.forward._embedding.dtype == torch.bfloat16
        responses = engine.generate(requests(48))
        assert (engine._runner.forward._packed is not None) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    of_plain_forward = (logprobs(copied_in(model, torch.bfloat16), responses) - logprobs(model, responses)).abs().mean()
    assert 1e-4 < differences(model, responses).mean() < 1.1 * of_plain_forward


def test_a_processor_without_bfloat16_is_told_to_use_float32(model, monkeypatch):
    said = []
    monkeypatch.setattr(builtin_model, "has_bfloat16_instructions", lambda: False)
    monkeypatch.setattr(builtin_model, "log_once", lambda level, message: said.append(message))
    for dtype, times in (("auto", 0), ("bfloat16", 1)):
        BuiltinEngine(model, threads=1, dtype=dtype).destroy()
        assert sum("Set rollout.dtype: float32" in message for message in said) == times


def test_copies_in_bfloat16_follow_publications(model):
    with BuiltinEngine(model, threads=1, dtype="bfloat16") as engine:
        before = engine.generate(requests())
        with torch.no_grad():
            model.lm_head.weight.mul_(-0.5)
        assert differences(model, before).mean() > 0.5
        engine.publish(1, paired(engine.model, WeightStream.of(model.state_dict())))
        assert differences(model, engine.generate(requests())).mean() < 0.2


@pytest.mark.parametrize("fused", [False, True])  # torch counts no changes by the fused step, which the trainer uses
def test_copies_follow_the_weights(model, fused):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    with BuiltinEngine(model, threads=1) as engine:
        engine.generate(requests())
        for version in (1, 2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
            engine.pause()
            optimizer.step()
            engine.publish(version)
            engine.resume()
            assert largest_difference(model, engine.generate(requests())) < 1e-4
        engine.pause()
        with torch.no_grad():  # in place, and not published: it takes effect at once, as without copies
            model.lm_head.weight.mul_(0.5)
        engine.flush_cache()
        engine.resume()
        assert largest_difference(model, engine.generate(requests())) < 1e-4


@pytest.mark.parametrize("limit", ["_LEAST_BYTES", "_GAIN"])
def test_where_they_do_not_pay_there_are_none(model, monkeypatch, limit):
    monkeypatch.setattr(packed_weights, limit, 1 << 40)
    with BuiltinEngine(model, threads=1) as engine:
        assert engine._runner.forward._packed is None


def test_memory_that_is_needed_elsewhere_is_not_taken(model, monkeypatch):
    monkeypatch.setattr(packed_weights, "free_memory", lambda: sum(each.nbytes for each in model.parameters()))
    with BuiltinEngine(model, threads=1) as engine:
        assert engine._runner.forward._packed is None


def test_deterministic_engines_compute_with_the_weights_themselves(model):
    with BuiltinEngine(model, threads=1, batch_invariant=True) as engine:
        assert engine._runner.forward._packed is None


def test_free_memory_where_the_system_says_only_how_much_there_is(monkeypatch):
    assert 0 < loading.free_memory() < 1 << 50
    pages = {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 1 << 14}  # as on macOS
    monkeypatch.setattr("os.sysconf_names", pages)
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert loading.free_memory() == 8 << 30
