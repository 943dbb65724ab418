"""LoRA adapters in the built-in engine, compared with untouched PEFT models."""

from __future__ import annotations

import threading

import peft
import pytest
import torch
from adapter_models import published, random_adapter, spec_of
from builtin_models import reference_logprobs, step, tiny_model
from parts import qwen3_config, random_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.builtin.adapters import Adapter
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights.stream import WeightStream
from rollwright.workflows.opponents import Opponents

LONG = GenerationHyperparameters(max_new_tokens=12, temperature=0.7, ignore_eos=True)
PROMPT = list(range(5, 45))


def request(prompt=PROMPT, seed: int = 1, **changes) -> ModelRequest:
    return ModelRequest(list(prompt), LONG, seed=seed, **changes)


def expect(model, response, atol: float = 1e-5) -> None:
    """Every output token has the log-probability that ``model``, a PEFT model or a base, gives it."""
    expected = reference_logprobs(model, response.input_tokens, response.output_tokens, 0.7)
    torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=atol, rtol=0)


def publish(engine, adapted, version: int) -> None:
    engine.update_weights(version=version, weights=published(adapted))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral", "gemma2", "gpt_neox", "gpt2"])
def test_an_adapter_gives_pefts_numbers_at_prefill_and_decode(architecture):
    model = tiny_model(architecture)
    adapted = random_adapter(model, 1)
    with BuiltinEngine(model) as engine:
        publish(engine, adapted, 1)
        responses = engine.generate([request(PROMPT[:length], length, prompt_logprobs_from=1) for length in (3, 17, 40)])
    for response in responses:
        expect(adapted, response)
        prompt = response.input_tokens
        scored = reference_logprobs(adapted, prompt[:1], prompt[1:], 0.7)
        torch.testing.assert_close(torch.tensor(response.input_logprobs).double(), scored, atol=1e-5, rtol=0)
        assert response.output_versions == [1] * 12


@pytest.mark.parametrize(
    ("architecture", "targets", "options"),
    [
        ("qwen3", ["q_proj", "v_proj"], {}),
        ("llama", ["k_proj", "down_proj"], {"use_rslora": True}),
        ("qwen2", ["up_proj", "o_proj", "lm_head"], {}),  # its head is tied to the embedding
        ("gemma2", ["gate_proj", "lm_head"], {"use_rslora": True}),
    ],
)
def test_some_layers_rslora_and_tied_heads(architecture, targets, options):
    model = tiny_model(architecture)
    adapted = [random_adapter(model, seed, targets=targets, **options) for seed in (1, 2)]
    with BuiltinEngine(model) as engine:
        for version, each in enumerate(adapted, 1):
            publish(engine, each, version)
        names = [None, "policy-v1", "policy-v2", ""]
        responses = engine.generate([request(PROMPT[: 9 + i], i, lora_name=name) for i, name in enumerate(names)])
    for each, response in zip([adapted[1], adapted[0], adapted[1], model], responses, strict=True):
        expect(each, response)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_requests_end_with_the_adapter_that_they_began_with(architecture):
    model = tiny_model(architecture)
    adapted = [random_adapter(model, seed) for seed in (1, 2)]
    with BuiltinEngine(model, max_adapters=2) as engine:
        engine.pause()
        futures = engine.submit([request(), request(PROMPT[:7], 2)])
        step(engine, 3)
        for version, each in enumerate(adapted, 1):
            publish(engine, each, version)
            futures += engine.submit([request(PROMPT, 5), request(PROMPT[:20], version)])
            step(engine, 2)
        assert engine._stepper.scheduler.preemptions == 0
        assert engine.get_version() == 2
        step(engine, 12)
        responses = [future.result() for future in futures]
    assert [response.output_versions for response in responses] == [[v] * 12 for v in (0, 0, 1, 1, 2, 2)]
    for each, response in zip([model, model, adapted[0], adapted[0], adapted[1], adapted[1]], responses, strict=True):
        expect(each, response)


def test_prefixes_of_other_adapters_are_not_reused():
    model = tiny_model("qwen3")
    adapted = [random_adapter(model, seed) for seed in (1, 2)]
    with BuiltinEngine(model) as engine:
        for version, each in enumerate(adapted, 1):
            publish(engine, each, version)
        one, base = request(lora_name="policy-v1"), request(lora_name="")
        first = engine.generate([one])[0]
        before = engine.stats()["reused_tokens"]
        others = engine.generate([request(lora_name="policy-v2"), base])
        assert engine.stats()["reused_tokens"] == before
        assert engine.generate([one])[0].output_tokens == first.output_tokens
        assert engine.stats()["reused_tokens"] > before
        expect(adapted[1], others[0])
        expect(model, others[1])
        kept = engine.stats()["kept_sequences"]
        engine.unload_adapter("policy-v1")
        assert engine.stats()["kept_sequences"] < kept


def test_an_adapter_published_again_under_its_version_replaces_the_first():
    model = tiny_model("qwen3")
    first, second = random_adapter(model, 1), random_adapter(model, 2)
    with BuiltinEngine(model) as engine:
        publish(engine, first, 1)
        expect(first, engine.generate([request()])[0])
        publish(engine, second, 1)
        expect(second, engine.generate([request()])[0])
        (probed,) = engine.probe(request()).values()
        expect(second, probed)


def test_tensors_are_copied():
    model = tiny_model("qwen3")
    adapted = random_adapter(model, 1)
    with BuiltinEngine(model) as engine:
        publish(engine, adapted, 1)
        before = engine.generate([request()])[0]
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.zero_()
        after = engine.generate([request()])[0]
    assert after.output_tokens == before.output_tokens
    assert after.output_logprobs == pytest.approx(before.output_logprobs, abs=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_layers_that_a_trainer_injected_in_the_model_are_not_sampled_with(architecture):
    model, plain = tiny_model(architecture), tiny_model(architecture)
    adapted = random_adapter(plain, 1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    injected = peft.get_peft_model(model, config)
    with BuiltinEngine(model, base_only=True) as engine:
        assert type(engine._runner.forward).__name__ == ("LlamaFamily" if architecture == "qwen3" else "GeneralModel")
        base = engine.generate([request()])[0]
        expect(plain, base)
        publish(engine, adapted, 1)
        expect(adapted, engine.generate([request()])[0])
        ids = torch.tensor([PROMPT])
        with torch.no_grad():  # the trainer's own passes are as before
            assert not torch.allclose(injected(ids).logits, plain(ids).logits, atol=1e-3)
            with injected.disable_adapter():
                torch.testing.assert_close(injected(ids).logits, plain(ids).logits)


def test_injected_layers_are_sampled_with_until_an_adapter_is_published():
    model = tiny_model("qwen3")
    live, later = random_adapter(model, 1), random_adapter(model, 2)
    inner = live.base_model.model
    with BuiltinEngine(inner) as engine:
        expect(live, engine.generate([request()])[0])
        publish(engine, later, 1)
        expect(later, engine.generate([request()])[0])
        expect(model, engine.generate([request(lora_name="")])[0])


def test_old_versions_are_dropped_when_nobody_uses_them():
    model = tiny_model("llama")
    with BuiltinEngine(model, max_adapters=2) as engine:
        engine.pause()
        publish(engine, random_adapter(model, 1), 1)
        future = engine.submit([request()])[0]
        step(engine)
        for version in (2, 3):
            publish(engine, random_adapter(model, version), version)
        assert [adapter.name for adapter in engine.adapters] == ["policy-v1", "policy-v2", "policy-v3"]
        assert engine.adapter_requests() == {"policy-v1": 1, "policy-v2": 0, "policy-v3": 0}
        step(engine, 12)
        assert future.done()
        publish(engine, random_adapter(model, 4), 4)
        assert [adapter.name for adapter in engine.adapters] == ["policy-v3", "policy-v4"]
        with pytest.raises(EngineError, match=r"no adapter 'policy-v1'.*policy-v3, policy-v4"):
            engine.submit([request(lora_name="policy-v1")])


def test_unloading_waits_for_requests_but_not_while_they_are_paused():
    model = tiny_model("qwen3")
    adapted = random_adapter(model, 1)
    with BuiltinEngine(model) as engine:
        engine.load_adapter(Adapter.copied("mine", published(adapted), model, 7, path="somewhere"))
        gconfig = GenerationHyperparameters(max_new_tokens=100, ignore_eos=True, temperature=0.7)
        engine.pause()
        future = engine.submit([ModelRequest(PROMPT, gconfig, lora_name="mine")])[0]
        adapter = engine.unload_adapter("mine")
        assert engine.requests_to_wait_for(adapter) == 0  # it would wait until somebody resumes
        with pytest.raises(EngineError, match="no adapter 'mine'"):
            engine.unload_adapter("mine")
        engine.resume()
        expect(adapted, future.result(), 1e-4)
        engine.load_adapter(Adapter.copied("mine", published(adapted), model, 7, path="somewhere"))
        future = engine.submit([ModelRequest(PROMPT, gconfig, lora_name="mine")])[0]
        adapter = engine.unload_adapter("mine")
        while engine.requests_to_wait_for(adapter):
            pass
        assert future.result(timeout=5).output_versions == [7] * 100


def test_going_back_drops_later_adapters():
    model = tiny_model("qwen3")
    adapted = random_adapter(model, 1)
    with BuiltinEngine(model) as engine:
        for version in (4, 5):
            publish(engine, adapted, version)
        with pytest.raises(WeightUpdateError, match="cannot follow 5"):
            publish(engine, adapted, 3)
        engine.go_back(3)
        publish(engine, adapted, 3)
        assert [adapter.name for adapter in engine.adapters] == ["policy-v3"]
        assert engine.generate([request()])[0].output_versions == [3] * 12


def test_base_weights_published_after_an_adapter_are_sampled_alone():
    model = tiny_model("qwen3")
    with BuiltinEngine(model) as engine:
        publish(engine, random_adapter(model, 1), 1)
        engine.pause()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        engine.publish(2)
        engine.resume()
        response = engine.generate([request()])[0]
        assert response.output_versions == [2] * 12
        expect(model, response)


def test_a_paused_run_stands_still_and_the_others_go_on():
    model = tiny_model("qwen3")
    with BuiltinEngine(model) as engine:
        engine.pause()
        requests = [request(PROMPT[: 10 + i], i, metadata={"run": run}) for i, run in enumerate("abab")]
        alone = [engine_alone(model, each) for each in requests]
        futures = engine.submit(requests)
        step(engine, 4)
        engine.pause_run("a")
        futures += engine.submit([request(seed=9, metadata={"run": "a"})])
        step(engine, 12)
        assert [future.done() for future in futures] == [False, True, False, True, False]
        engine.resume_run("a")
        step(engine, 30)
        assert [future.result().output_tokens for future in futures[:4]] == alone
        futures = engine.submit(requests)
        engine.abort(run="b")
        assert [future.done() and future.result().stop_reason for future in futures] == [False, "abort", False, "abort"]


def engine_alone(model, each: ModelRequest) -> list[int]:
    with BuiltinEngine(model) as engine:
        return engine.generate([each])[0].output_tokens


def round_by_place(monkeypatch, threads):
    """Let products with the A of rank 4 of up to three layers round by the place of a row, if computed with so many threads.

    MKL does so on Intel processors with AVX2 if several threads share the rows of a matrix with few outputs.
    """
    linear = torch.nn.functional.linear

    def rounding(inputs, weight, *bias):
        if len(weight) > 12 or torch.get_num_threads() not in threads:
            return linear(inputs, weight, *bias)
        return linear(inputs, weight, *bias) * (1 + 1e-6 * (torch.arange(len(inputs)) % 2)[:, None])

    monkeypatch.setattr("torch.nn.functional.linear", rounding)


@pytest.mark.parametrize(("architecture", "threads"), [("qwen3", 1), ("qwen3", 2), ("gpt2", 1), ("gemma2", 1)])
def test_batch_invariant_answers_with_adapters_mixed(architecture, threads, monkeypatch):
    model = tiny_model(architecture)
    adapted = [random_adapter(model, seed) for seed in (1, 2)]
    if threads == 2:
        round_by_place(monkeypatch, {2})
    with BuiltinEngine(model, batch_invariant=True, threads=threads, kv_cache_bytes=1 << 24) as engine:
        for version, each in enumerate(adapted, 1):
            publish(engine, each, version)
        names = ["", "policy-v1", "policy-v2"]
        requests = [request(PROMPT[: 3 + i], i, lora_name=names[i % 3]) for i in range(21)]
        alone = [engine.generate([each])[0] for each in requests]
        together = engine.generate(requests)
    assert [(r.output_tokens, r.output_logprobs) for r in together] == [(r.output_tokens, r.output_logprobs) for r in alone]
    for i in (1, 2):
        expect(adapted[i - 1], together[i])


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_batch_invariant_refuses_an_adapter_whose_rows_depend_on_their_place(architecture, monkeypatch):
    model = tiny_model(architecture)
    round_by_place(monkeypatch, {1, 2})
    with BuiltinEngine(model, batch_invariant=True, threads=1, kv_cache_bytes=1 << 24) as engine:
        with pytest.raises(WeightUpdateError, match="Choose another rank"):
            publish(engine, random_adapter(model, 1), 1)
        assert engine.generate([request()])[0].output_tokens


def test_a_model_in_bfloat16_adds_in_float32():
    model = tiny_model("qwen3", torch.bfloat16)
    adapted = random_adapter(model, 1)
    with BuiltinEngine(model) as engine:
        publish(engine, adapted, 1)
        response = engine.generate([request()])[0]
        expected = reference_logprobs(adapted, PROMPT, response.output_tokens, 0.7)
        base = reference_logprobs(model, PROMPT, response.output_tokens, 0.7)
    got = torch.tensor(response.output_logprobs).double()
    assert (got - expected).abs().mean() < 0.1 * (got - base).abs().mean()


def test_adapters_can_be_published_while_requests_run():
    model = tiny_model("qwen3")
    adapted = [random_adapter(model, seed) for seed in range(3)]
    with BuiltinEngine(model, max_adapters=1) as engine:
        responses = []

        def sample(first: int) -> None:
            for seed in range(first, first + 10):
                responses.extend(engine.generate([request(seed=seed)]))

        threads = [threading.Thread(target=sample, args=(100 * i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for version in range(1, 9):
            publish(engine, adapted[version % 3], version)
        for thread in threads:
            thread.join()
    assert len(responses) == 30
    for response in responses:
        (version,) = set(response.output_versions)
        expect(adapted[version % 3] if version else model, response)


def faulty(adapted, change) -> WeightStream:
    tensors = dict(peft.get_peft_model_state_dict(adapted))
    change(tensors)
    return WeightStream.of(tensors, spec_of(adapted))


def drop_b(tensors) -> None:
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]


def rename(tensors) -> None:
    for half in "AB":
        name = f"base_model.model.model.layers.1.mlp.up_proj.lora_{half}.weight"
        tensors[name.replace("layers.1", "layers.7")] = tensors.pop(name)


def transpose(tensors) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[name] = tensors[name].t().contiguous()


def embed(tensors) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(4, 96)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_b, r"lacks base_model\.model\.model\.layers\.1\.mlp\.up_proj\.lora_B\.weight"),
        (rename, r"layers\.7\.mlp\.up_proj, which is not in the model"),
        (transpose, r"\(32, 4\).*q_proj.*another rank"),
        (embed, "lora_embedding_A, which is no lora_A or lora_B of a linear layer"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_nothing_changes(change, said):
    model = tiny_model("qwen3")
    adapted = random_adapter(model, 1)
    with BuiltinEngine(model) as engine:
        publish(engine, adapted, 1)
        with pytest.raises(WeightUpdateError, match=said):
            engine.update_weights(version=2, weights=faulty(adapted, change))
        assert engine.get_version() == 1
        expect(adapted, engine.generate([request()])[0])


def test_dora_is_refused_by_name():
    model = tiny_model("qwen3")
    adapted = random_adapter(model, 1, use_dora=True)
    with BuiltinEngine(model) as engine, pytest.raises(WeightUpdateError, match=r"use_dora.*rollout\.backend: builtin"):
        publish(engine, adapted, 1)


async def test_the_directory_of_an_adapter_is_an_opponent(tmp_path):
    tokenizer = build_character_tokenizer()
    model = random_model(qwen3_config(tokenizer))
    model.save_pretrained(tmp_path / "base")
    adapted = random_adapter(model, 1)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    opponents = Opponents(tokenizer, {"old": str(tmp_path / "adapter")})
    expect(adapted, await opponents.engine(opponents.directory("old")).agenerate(request(PROMPT[:5], 1)))
