"""Weights shared with a trainer: nothing copied, changes in place seen, versions right whatever runs meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from builtin_models import reference_logprobs, step, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

LONG = GenerationHyperparameters(max_new_tokens=16, temperature=0.7, ignore_eos=True)


def change(model, scale: float = 0.3) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter) * parameter.std().nan_to_num(0.1))


def expect_logprobs(model, response, first: int, last: int) -> None:
    expected = reference_logprobs(model, response.input_tokens, response.output_tokens, 0.7)[first:last]
    torch.testing.assert_close(torch.tensor(response.output_logprobs[first:last]).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "gpt2"])
def test_an_optimizer_step_is_seen_at_once_and_nothing_is_copied(architecture):
    model = tiny_model(architecture)
    before = {name: p.clone() for name, p in model.named_parameters()}
    identities = {name: id(p) for name, p in model.named_parameters()}
    with BuiltinEngine(model) as engine:
        assert {name: id(p) for name, p in model.named_parameters()} == identities
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, before[name], atol=0, rtol=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        request = ModelRequest([5, 6, 7], LONG, seed=1)
        engine.generate([request])
        engine.pause()
        model(torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
        optimizer.step()
        engine.publish(1)
        engine.resume()
        response = engine.generate([request])[0]
        assert response.output_versions == [1] * 16
        expect_logprobs(model, response, 0, 16)


def test_fused_parameters_share_one_storage():
    model = tiny_model("qwen3")
    with BuiltinEngine(model) as engine:
        attention = model.model.layers[0].self_attn
        storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
        assert len(storages) == 1
        assert engine._runner.forward._layers[0].qkv_weight.untyped_storage().data_ptr() in storages
        second = BuiltinEngine(model)  # fused already: the same storage again
        assert second._runner.forward._layers[0].qkv_weight.data_ptr() == attention.q_proj.weight.data_ptr()
        second.destroy()


def test_a_shared_model_saves_and_loads_as_before(tmp_path):
    model = tiny_model("qwen3")
    with BuiltinEngine(model):
        model.save_pretrained(tmp_path / "hf")
        save_file({n: p for n, p in model.state_dict().items() if n != "lm_head.weight"}, tmp_path / "plain.safetensors")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        plain = load_file(tmp_path / "plain.safetensors")
        for name, parameter in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], parameter, atol=0, rtol=0)
            if name in plain:
                torch.testing.assert_close(plain[name], parameter, atol=0, rtol=0)
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert size < 1.2 * sum(p.numel() * 4 for p in model.parameters()) + 10_000


def test_parameters_with_new_storage_are_shared_again_at_publication():
    model = tiny_model("llama")
    with BuiltinEngine(model) as engine:
        other = tiny_model("llama", seed=5)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data = theirs.data.clone()
        model.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
        engine.publish(1)
        expect_logprobs(other, engine.generate([ModelRequest([5, 6], LONG)])[0], 0, 16)
        change(model)
        engine.publish(2)
        expect_logprobs(model, engine.generate([ModelRequest([5, 6], LONG)])[0], 0, 16)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_versions_when_weights_change_under_running_requests(policy, architecture):
    old, model = tiny_model(architecture), tiny_model(architecture)
    with BuiltinEngine(model, on_weight_update=policy, max_running_requests=3) as engine:
        engine.pause()
        futures = engine.submit([ModelRequest([5 + i, 6, 7], LONG, seed=i) for i in range(5)])
        step(engine, 5)  # prefill gives one token, and each step one more
        change(model)
        engine.publish(3)
        step(engine, 4)
        engine.resume()
        responses = [f.result(60) for f in futures]
        assert [r.output_versions for r in responses[:3]] == [[0] * 6 + [3] * 10] * 3
        assert [r.output_versions for r in responses[3:]] == [[3] * 16] * 2
        for response in responses[:3]:
            expect_logprobs(old, response, 0, 6)
        for response in responses if policy == "recompute" else responses[3:]:
            expect_logprobs(model, response, 6 if response in responses[:3] else 0, 16)
        again = engine.generate([ModelRequest(responses[0].input_tokens + responses[0].output_tokens, LONG)])[0]
        expect_logprobs(model, again, 0, 16)  # nothing computed by old weights is reused


def test_wait_lets_running_requests_end_and_holds_new_ones():
    model = tiny_model("qwen3")
    with BuiltinEngine(model, on_weight_update="wait", max_running_requests=2) as engine:
        futures = engine.submit([ModelRequest([5, 6], LONG, seed=i) for i in range(6)])
        new = {name: torch.randn_like(p) for name, p in model.state_dict().items() if "norm" not in name}
        engine.update_weights(version=1, weights=new)
        for future in futures:
            assert len(set(future.result(60).output_versions)) == 1
        assert engine.get_version() == 1


def drains(engine: BuiltinEngine, drain) -> tuple[list, list]:
    """Requests that run and requests that wait when ``drain`` is called, and what becomes of both until it returns."""
    allowed, step_once = threading.Semaphore(0), engine._stepper.step

    def step_when_allowed(finished):
        assert allowed.acquire(timeout=120)
        return step_once(finished)

    engine._stepper.step = step_when_allowed
    running = engine.submit([ModelRequest([5, 6], LONG, seed=i) for i in range(2)])
    allowed.release()
    deadline = time.monotonic() + 120
    while not engine.stats()["generated_tokens"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    held = engine.submit([ModelRequest([5, 6], LONG, seed=i) for i in range(3)])
    draining = threading.Thread(target=drain)
    draining.start()
    while not engine._stepper.scheduler.holding:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    allowed.release(10_000)
    draining.join(120)
    return running, held


def test_wait_drains_at_pause_because_shared_weights_change_after_it():
    model = tiny_model("qwen3")
    with BuiltinEngine(model, on_weight_update="wait", max_running_requests=2) as engine:
        running, held = drains(engine, engine.pause)
        assert [f.result(60).output_versions for f in running] == [[0] * 16] * 2
        engine.publish(1)
        assert not any(f.done() for f in held)
        engine.resume()
        assert [f.result(60).output_versions for f in held] == [[1] * 16] * 3


def test_load_weights_copies_all_or_nothing():
    model, other = tiny_model("qwen2"), tiny_model("qwen2", seed=4)
    with BuiltinEngine(model) as engine:
        engine.update_weights(version=2, weights=other.state_dict())
        expect_logprobs(other, engine.generate([ModelRequest([5, 6], LONG)])[0], 0, 16)
        before = model.model.norm.weight.clone()
        for bad in ({"model.norm.weight": torch.zeros(3)}, {"model.norm.weight": torch.zeros(32), "no.such": torch.zeros(1)}):
            with pytest.raises(WeightUpdateError, match="another model"):
                engine.update_weights(version=3, weights=bad)
        assert engine.get_version() == 2
        torch.testing.assert_close(model.model.norm.weight, before, atol=0, rtol=0)


def test_set_version_confirms_and_versions_only_grow():
    with BuiltinEngine(tiny_model("qwen3"), version=4) as engine:
        engine.set_version(4)
        with pytest.raises(WeightUpdateError, match="publish"):
            engine.set_version(5)
        with pytest.raises(WeightUpdateError, match="only grow"):
            engine.publish(3)


def test_going_back_ends_what_runs_and_relabels_the_rest():
    model, other = tiny_model("qwen3"), tiny_model("qwen3", seed=4)
    with BuiltinEngine(model, version=4) as engine:
        engine.pause()
        waiting = engine.submit([ModelRequest([5, 6 + index], LONG) for index in range(2)])
        engine.go_back(2)
        assert [future.result(60).stop_reason for future in waiting] == ["abort", "abort"]
        engine.update_weights(version=2, weights=other.state_dict())
        engine.resume()
        (response,) = engine.generate([ModelRequest([5, 6], LONG)])
        assert set(response.output_versions) == {2}
        expect_logprobs(other, response, 0, 16)


def test_going_back_may_let_what_runs_finish_and_keep_what_waits():
    model, other = tiny_model("qwen3"), tiny_model("qwen3", seed=4)
    with BuiltinEngine(model, version=4, max_running_requests=2) as engine:
        running, held = drains(engine, lambda: engine.go_back(2, finish=True))
        assert [f.result(60).output_versions for f in running] == [[4] * 16] * 2
        engine.update_weights(version=2, weights=other.state_dict())
        for response in (f.result(60) for f in held):
            assert response.output_versions == [2] * 16
            expect_logprobs(other, response, 0, 16)


def test_updates_race_with_generation_and_no_token_is_mislabelled():
    """Each version's weights make one token certain, so a wrong label shows."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)

    def name_token(version: int) -> None:
        with torch.no_grad():
            model.model.norm.weight.zero_()
        model.lm_head.bias.data.fill_(-50.0)
        model.lm_head.bias.data[10 + version] = 50.0

    model.lm_head.bias = torch.nn.Parameter(torch.zeros(96))
    name_token(0)
    with BuiltinEngine(model, max_running_requests=16) as engine:
        gconfig = GenerationHyperparameters(max_new_tokens=60, ignore_eos=True)

        def update() -> None:
            for version in range(1, 30):
                seen = engine.stats()["generated_tokens"]
                while engine.stats()["generated_tokens"] < seen + 32:
                    time.sleep(0.001)
                engine.pause()
                name_token(version)
                engine.publish(version)
                engine.resume()

        trainer, responses = threading.Thread(target=update, daemon=True), []
        trainer.start()
        while trainer.is_alive():
            futures = engine.submit([ModelRequest([5, 6], gconfig) for _ in range(32)])
            responses += [f.result(60) for f in futures]
    for response in responses:
        assert response.output_tokens == [10 + version for version in response.output_versions]
    assert len({v for r in responses for v in r.output_versions}) > 20
    assert any(len(set(r.output_versions)) > 1 for r in responses)
