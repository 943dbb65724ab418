"""The canary: each tensor that an engine does not compute with is found and named before anything is trained."""

import copy

import pytest
import torch
import transformers
from tiny_policy import tiny_actor, tiny_batch, tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import LoraConfig, PPOActorConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.engine import WeightReceiver
from rollwright.inference.weights.stream import WeightStream
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.canary import Canary
from rollwright.training.publish_and_audit import SharedWeights
from rollwright.training.seeded_change import SeededChange, exchangeable, kind_of, layer_of


class FaultyEngine(BuiltinEngine):
    """Loads what ``fault`` makes of the published weights, and reports success."""

    fault = staticmethod(dict)

    def receive_weights(self, weights, version, meta, config):
        self.received = getattr(self, "received", [])
        named = {name: tensor.clone() for name, tensor in weights}
        self.received.append(named)
        super().receive_weights(WeightStream.of(self.fault(named)), version, meta, config)


def without(*parts):
    return lambda named: {name: tensor for name, tensor in named.items() if not any(part in name for part in parts)}


def swapped(one, other):
    def swap(name):
        return name.replace(one, "\0").replace(other, one).replace("\0", other)

    return lambda named: {name: named[swap(name)] for name in named}


def copied_engine(actor, fault=dict):
    engine = FaultyEngine(copy.deepcopy(actor.model), max_running_requests=2, kv_cache_bytes=1 << 20, threads=1)
    engine.fault = fault
    return engine


def weights_of(actor):
    return {name: tensor.detach().clone() for name, tensor in actor.model.state_dict().items()}


def is_equal(before, actor):
    return all(torch.equal(tensor, before[name]) for name, tensor in actor.model.state_dict().items())


@pytest.fixture
def actor():
    return tiny_actor(dtype=torch.float32, lr=1e-3)


def large_actor():
    """An actor whose weights are larger than new ones, so that attention is far from uniform."""
    actor = tiny_actor(dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
            if "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return actor


# -- nothing is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_engine_that_takes_everything_passes_and_holds_the_true_weights(actor, is_shared):
    before = weights_of(actor)
    engine = BuiltinEngine(actor.model, max_running_requests=2, threads=1) if is_shared else copied_engine(actor)
    with engine:
        actor.connect_engine(engine)
        assert isinstance(actor._publisher, SharedWeights) == is_shared
        actor.prove_publication()
        assert is_equal(before, actor)
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
        assert engine.get_version() == actor.version == 0
        proof = actor._proof
        assert proof.difference < 1e-5
        assert proof.unclear == []
        assert proof.unreached == []
        assert min(proof.movement.values()) > 1e-4
        metrics = actor.ppo_update(actor.compute_advantages(tiny_batch()))
        assert metrics["canary/unreached"] == 0
        assert metrics["canary/logprob_difference"] == proof.difference
        actor.update_weights()
        assert engine.get_version() == 1
        assert "canary/unreached" not in actor.ppo_update(actor.compute_advantages(tiny_batch()))


def test_each_kind_alone_moves_the_log_probabilities_far_beyond_the_audits_limit():
    actor = large_actor()
    with copied_engine(actor) as engine:
        actor.connect_engine(engine)
        proof = Canary(actor, actor._publisher).prove()
    assert {"embeddings", "norms", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= set(
        proof.movement
    )
    assert min(proof.movement.values()) > 20 * 1e-3


def test_only_probes_are_sampled_and_random_numbers_are_left_alone(actor):
    with copied_engine(actor) as engine:
        actor.connect_engine(engine)
        state, before = torch.get_rng_state(), engine.stats()
        actor.prove_publication()
        assert torch.equal(torch.get_rng_state(), state)
        assert {name for name, value in engine.stats().items() if value != before[name]} == set()


def test_an_engine_that_answers_no_probes_gets_only_the_true_weights(actor):
    class Listener(WeightReceiver):
        got = ()

        def update_weights(self, meta=None, *, version, weights, config=None):
            self.got += (({name: tensor.clone() for name, tensor in weights}, version),)

    listener = Listener()
    actor.connect_engine(listener)
    actor.prove_publication()
    ((named, version),) = listener.got
    assert version == 0
    assert all(torch.equal(named[name], parameter) for name, parameter in actor.model.named_parameters())
    assert actor._proof is None


# -- injected faults ---------------------------------------------------------------------------------------------------

FAULTS = {
    "embeddings": (without("embed_tokens"), r"model\.embed_tokens\.weight \(embeddings\)"),
    "norms": (without("norm"), r"all or several of the norms"),
    "one norm": (without("layers.1.post_attention_layernorm"), r"model\.layers\.1\.post_attention_layernorm\.weight \(norms\)"),
    "one matrix": (without("layers.0.self_attn.k_proj"), r"model\.layers\.0\.self_attn\.k_proj\.weight \(k_proj\)"),
    "one layer": (without("layers.1."), r"several tensors of layer 1"),
    "down": (without("down_proj"), r"all or several of the down_proj"),
    "several kinds": (without("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"), r"several kinds, such as model\.layers\.0\.self_attn\.q_proj"),
    "gate and up swapped": (swapped("gate_proj", "up_proj"), r"takes gate_proj for up_proj, and the other way round"),
    "keys and values swapped": (swapped("k_proj", "v_proj"), r"takes k_proj for v_proj"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_engine_does_not_take_is_named(actor, fault):
    function, expected = FAULTS[fault]
    before = weights_of(actor)
    with copied_engine(actor, function) as engine:
        actor.connect_engine(engine)
        with pytest.raises(WeightUpdateError, match=expected) as failure:
            actor.prove_publication()
        assert "The built-in engine does not compute with the weights that it is given" in str(failure.value)
    assert is_equal(before, actor)
    assert actor.version == 0


def test_an_engine_that_is_one_publication_behind_is_named(actor):
    engine = copied_engine(actor)
    engine.fault = lambda named: engine.received[-2] if len(engine.received) > 1 else {}
    with engine:
        actor.connect_engine(engine)
        with pytest.raises(WeightUpdateError, match=r"those of the version before, although it reports version 0"):
            actor.prove_publication()


def test_an_engine_that_reports_another_version_is_named(actor):
    class Ahead(FaultyEngine):
        def receive_weights(self, weights, version, meta, config):
            super().receive_weights(weights, version + 1, meta, config)

    with Ahead(copy.deepcopy(actor.model), max_running_requests=2, threads=1) as engine:
        actor.connect_engine(engine)
        with pytest.raises(WeightUpdateError, match=r"with version \[1\], not 0"):
            actor.prove_publication()


def test_a_fused_copy_that_is_not_refreshed_is_found_in_an_engine_that_shares_the_weights(actor):
    with BuiltinEngine(actor.model, max_running_requests=2, threads=1) as engine:
        actor.connect_engine(engine)
        forward = engine._runner.forward
        forward._layers[1].gate_up_weight = forward._layers[1].gate_up_weight.clone()
        forward.share_weights = lambda: None
        before = weights_of(actor)
        with pytest.raises(WeightUpdateError, match=r"several tensors of layer 1|layers\.1\.mlp\.(gate|up)_proj"):
            actor.prove_publication()
        assert is_equal(before, actor)


def test_a_small_difference_below_the_limit_is_named_by_its_kind(actor, monkeypatch):
    """With the limit of 16-bit types, the norms of a new model alone hardly move anything."""
    with copied_engine(actor, without("k_norm")) as engine:
        actor.connect_engine(engine)
        monkeypatch.setattr(FaultyEngine, "logprob_tolerance", 10.0)
        with pytest.raises(WeightUpdateError, match=r"old values of the norms \(k_norm\)"):
            actor.prove_publication()


def experts_actor(experts=4, seed=0):
    config = transformers.Qwen3MoeConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=experts, num_experts_per_tok=1, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    actor = FSDPPPOActor(PPOActorConfig(device="cpu"), model=model.eval())
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor


def test_experts_that_do_not_arrive_are_named():
    actor = experts_actor()
    with copied_engine(actor, without("experts")) as engine:
        actor.connect_engine(engine)
        with pytest.raises(WeightUpdateError, match="all or several of the experts"):
            actor.prove_publication()


def test_a_router_that_does_not_arrive_is_named():
    actor = experts_actor()
    with copied_engine(actor, without("layers.1.mlp.gate.")) as engine:
        actor.connect_engine(engine)
        with pytest.raises(WeightUpdateError, match=r"layers\.1\.mlp\.gate\.weight \(router\)"):
            actor.prove_publication()


def test_experts_without_a_token_are_listed():
    actor = experts_actor(experts=64)
    with copied_engine(actor) as engine:
        actor.connect_engine(engine)
        proof = Canary(actor, actor._publisher).prove()
    assert proof.unreached
    assert all("experts" in name for name in proof.unreached)
    assert len(proof.unreached) < 2 * 64 * 3  # at most 30 tokens and one expert for each: not all of both layers


# -- the change --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_takes_every_tensor_and_is_undone_bit_for_bit(dtype):
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()  # as the B of a new adapter
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e-44 if dtype == torch.float32 else 1e-40  # not a normal number
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    change = SeededChange(model, before, seed=1)
    change.make(change.names)
    changed = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert all(not torch.equal(changed[name], tensor) for name, tensor in before.items())
    assert all(torch.isfinite(tensor).all() for tensor in changed.values())
    half = change.names[::2]
    change.make(half)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, changed[name] if name in half else before[name])
    change.make(())
    for name, parameter in model.named_parameters():
        as_integers = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(parameter.view(as_integers), before[name].view(as_integers))


def test_no_two_tensors_are_changed_by_one_pattern():
    model = tiny_model(dtype=torch.float32)
    names = [name for name, parameter in model.named_parameters() if tuple(parameter.shape) == (16,)]
    before = {name: dict(model.named_parameters())[name].detach().clone() for name in names}
    SeededChange(model, names, seed=1).make(names)
    patterns = {tuple((dict(model.named_parameters())[name] / before[name]).tolist()) for name in names}
    assert len(patterns) == len(names) > 2


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("model.embed_tokens.weight", "embeddings", None),
        ("transformer.wte.weight", "embeddings", None),
        ("lm_head.weight", "head", None),
        ("model.norm.weight", "norms", None),
        ("transformer.h.3.ln_1.bias", "norms", 3),
        ("model.layers.7.self_attn.q_norm.weight", "norms", 7),
        ("model.layers.7.input_layernorm.weight", "norms", 7),
        ("model.layers.7.self_attn.q_proj.weight", "q_proj", 7),
        ("model.layers.7.self_attn.q_proj.bias", "q_proj (bias)", 7),
        ("model.layers.2.mlp.experts.gate_up_proj", "experts", 2),
        ("model.layers.2.mlp.experts.5.down_proj.weight", "experts", 2),
        ("model.layers.2.mlp.gate.weight", "router", 2),
        ("model.layers.2.mlp.gate_proj.weight", "gate_proj", 2),
        ("model.layers.2.mlp.up_proj.lora_A.default.weight", "LoRA A", 2),
        ("model.layers.2.mlp.up_proj.lora_B.default.weight", "LoRA B", 2),
    ],
)
def test_kinds_and_layers(name, kind, layer):
    assert (kind_of(name), layer_of(name)) == (kind, layer)


def test_tensors_that_could_be_mistaken_for_each_other():
    shapes = {f"layers.{n}.{name}.weight": torch.Size(shape) for n in (0, 1) for name, shape in
              {"mlp.gate": (4, 2), "mlp.up": (4, 2), "mlp.down": (2, 4)}.items()}  # fmt: skip
    assert exchangeable(shapes) == {
        ("gate", "up"): [(f"layers.{n}.mlp.gate.weight", f"layers.{n}.mlp.up.weight") for n in (0, 1)]
    }


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted_actor():
    return tiny_actor(dtype=torch.float32, lora=LoraConfig(rank=2, alpha=8.0))


class StaleAdapterEngine(BuiltinEngine):
    """Keeps the first values of the adapter's tensors that ``part`` names."""

    part = ""

    def receive_weights(self, weights, version, meta, config):
        named = {name: tensor.clone() for name, tensor in weights}
        self.first = getattr(self, "first", None) or named
        if self.part:
            named |= {name: tensor for name, tensor in self.first.items() if self.part in name}
        super().receive_weights(WeightStream.of(named, weights.adapter), version, meta, config)


def adapter_engine(actor):
    return StaleAdapterEngine(actor.shared_model, max_running_requests=2, kv_cache_bytes=1 << 20, threads=1)


def test_an_adapter_whose_b_is_zero_is_proven_and_is_zero_again():
    actor = adapted_actor()
    before = weights_of(actor)
    with adapter_engine(actor) as engine:
        actor.connect_engine(engine)
        actor.prove_publication()
        proof = actor._proof
        assert proof.difference < 1e-5
        assert proof.unclear == proof.unreached == []
        assert set(proof.movement) == {"LoRA A", "LoRA B"}
        assert min(proof.movement.values()) > 1e-3
    assert is_equal(before, actor)
    assert all(not tensor.any() for name, tensor in before.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("lora_A", "all or several of the LoRA A"),
        ("lora_B", "all or several of the LoRA B"),
        ("layers.1.mlp.up_proj.lora_A", r"layers\.1\.mlp\.up_proj\.lora_A\.default\.weight \(LoRA A\)"),
        ("layers.0.self_attn.v_proj.lora_B", r"layers\.0\.self_attn\.v_proj\.lora_B\.default\.weight \(LoRA B\)"),
        (".", "all or several of the LoRA B"),  # without B, its A has no effect
    ],
)
def test_a_half_of_an_adapter_that_does_not_arrive_is_named(part, expected):
    actor = adapted_actor()
    before = weights_of(actor)
    with adapter_engine(actor) as engine:
        actor.connect_engine(engine)
        actor.republish()
        engine.part = part
        with pytest.raises(WeightUpdateError, match=expected):
            actor.prove_publication()
    assert is_equal(before, actor)
