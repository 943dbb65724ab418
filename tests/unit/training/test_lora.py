"""An adapter is trained as PEFT would train it, alone, and comes back from its files."""

import json

import pytest
import torch
from tiny_policy import VOCABULARY, grouped_batch, tiny_actor, tiny_batch, tiny_model
from transformers import AutoModelForCausalLM

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import LoraConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from rollwright.errors import CheckpointError, ConfigError, WeightUpdateError
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.weights.files import read_stream, write_weights
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.adapters import base_of, names_in_model, with_adapter
from rollwright.training.engine import TrainEngine
from rollwright.training.export import merge
from rollwright.training.hf_checkpoint import save_model
from rollwright.training.preferences import PreferenceEngine
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

peft = pytest.importorskip("peft")

LORA = LoraConfig(rank=4, alpha=12)
KINDS = {
    "all layers": LORA,
    "some layers": LoraConfig(rank=2, alpha=3, targets=["q_proj", "down_proj"]),
    "rank-stabilised": LoraConfig(rank=4, alpha=6, use_rslora=True),
    "with magnitudes": LoraConfig(rank=4, alpha=6, use_dora=True),
}


def lora_actor(lora=LORA, **keys):
    return tiny_actor(dtype=torch.float32, lora=lora, **keys)


def engine_of(kind, lora=LORA, model=None, **keys):
    config = TrainEngineConfig(device="cpu", lora=lora, optimizer=OptimizerConfig(lr=1e-2), **keys)
    engine = kind(config, model=tiny_model(dtype=torch.float32) if model is None else model)
    engine.initialize(None, FinetuneSpec(1, 100, 10))
    return engine


@torch.no_grad()
def move(engine, seed=5):
    """Give an adapter values as after some training, B included."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def untouched(lora, weights):
    """PEFT's own model with these weights."""
    targets = lora.targets or "all-linear"
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, use_rslora=lora.use_rslora, use_dora=lora.use_dora
    )
    model = peft.get_peft_model(tiny_model(dtype=torch.float32), config)
    result = peft.set_peft_model_state_dict(model, weights)
    assert not result.unexpected_keys
    assert peft.get_peft_model_state_dict(model).keys() == weights.keys()
    return model


def logprobs_of(model, batch):
    """Log-probabilities by transformers alone, ``[B, L]``."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    logits = logits / batch.get("temperature", torch.ones(len(logits)))[:, None, None]
    found = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0)) * batch["attention_mask"]


def caught_gradients(engine, update):
    """The gradients of a step, by the adapter's published names, instead of the step."""
    names, caught = names_in_model(engine.model), {}
    parameters = dict(engine.model.named_parameters())

    def catch(loss):
        caught.update({name: parameters[own].grad.clone() for name, own in names.items()})
        assert all(p.grad is None for own, p in parameters.items() if own not in names.values())
        engine.model.zero_grad()
        return {"loss": loss, "grad_norm": 0.0, "skipped_steps": 0.0}

    engine._step = catch
    update()
    del engine._step
    return caught


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_gradients_are_those_of_peft(kind):
    engine, batch = engine_of(TrainEngine, KINDS[kind]), tiny_batch()
    move(engine)
    model = untouched(KINDS[kind], engine.full_weights())
    torch.testing.assert_close(engine.compute_logp(batch), logprobs_of(model, batch), atol=1e-5, rtol=1e-5)

    caught = caught_gradients(engine, lambda: engine.sft_update(batch))
    del batch["temperature"]
    wanted = batch["loss_mask"].bool()
    (-logprobs_of(model, batch)[wanted].mean()).backward()
    theirs = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    theirs = {n.removesuffix(".weight") if "magnitude" in n else n: grad for n, grad in theirs.items()}
    assert theirs.keys() == caught.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(caught[name], grad, atol=1e-5, rtol=1e-4, msg=name)
    assert any(grad.abs().max() > 1e-3 for grad in theirs.values())


def test_a_new_adapter_changes_nothing_and_is_the_only_thing_that_trains():
    actor, plain = lora_actor(), tiny_actor(dtype=torch.float32)
    batch = tiny_batch()
    torch.testing.assert_close(actor.compute_logp(batch), plain.compute_logp(batch), atol=1e-6, rtol=0)
    base = {name: p.clone() for name, p in actor.model.named_parameters() if not p.requires_grad}
    for seed in range(2):
        actor.ppo_update(actor.compute_advantages(tiny_batch(seed)))
    after = dict(actor.model.named_parameters())
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.items())
    elements = sum(tensor.numel() for tensor in actor.full_weights().values())
    assert all(part.any() for name, part in actor.full_weights().items() if "lora_B" in name)
    held = [value for entry in actor.optimizer.state.values() for value in entry.values() if value.dim()]
    assert sum(value.numel() for value in held) == 2 * elements  # two moments
    assert len(base) == len(dict(tiny_model().named_parameters()))


def test_published_names_are_those_of_peft_and_types_stay():
    actor = lora_actor()
    stream = actor.weights(torch.bfloat16)
    assert (stream.adapter.rank, stream.adapter.alpha, stream.adapter.scaling) == (4, 12, 3.0)
    assert stream.adapter.targets == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    theirs = peft.get_peft_model_state_dict(
        peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules="all-linear"))
    )
    assert {name: tensor.shape for name, tensor in stream} == {name: tensor.shape for name, tensor in theirs.items()}
    assert {tensor.dtype for _, tensor in stream} == {torch.float32}


@pytest.mark.parametrize("keys", [{"gradient_checkpointing": True}, {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40)}], ids=str)
def test_the_gradient_depends_on_no_way_of_computing_it(keys):
    found = []
    for each in ({}, keys):
        actor = lora_actor(**each)
        move(actor)
        batch = actor.compute_advantages(tiny_batch())
        found.append(caught_gradients(actor, lambda actor=actor, batch=batch: actor.ppo_update(batch)))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-4)


def test_shared_prefixes_give_the_same_scores_and_gradients():
    found = []
    for shares in (True, False):
        actor = lora_actor(share_prefixes=shares)
        move(actor)
        batch = actor.compute_advantages(grouped_batch())
        scores = actor.compute_logp(batch)
        found.append((scores, caught_gradients(actor, lambda actor=actor, batch=batch: actor.ppo_update(batch))))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=0)
    for name, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], grad, atol=1e-5, rtol=1e-4)


def test_the_reference_is_the_base_and_no_second_model():
    actor, base = lora_actor(kl_ctl=0.1), tiny_model(dtype=torch.float32)
    for seed in range(3):
        actor.ppo_update(actor.compute_advantages(tiny_batch(seed)))
    batch = tiny_batch(9)
    expected = logprobs_of(base, batch).detach() * batch["loss_mask"]
    torch.testing.assert_close(actor.compute_ref_logp(batch), expected, atol=1e-5, rtol=0)
    assert (actor.compute_logp(batch, loss_tokens_only=True) - expected).abs().max() > 1e-3
    assert not isinstance(actor.reference, TrainEngine)
    assert all(p.requires_grad == ("lora" in name) for name, p in actor.model.named_parameters())


def test_preferences_are_learned_with_an_adapter():
    engine = engine_of(PreferenceEngine)
    batch = tiny_batch(rows=4)
    first = engine.dpo_update(batch)
    assert first["margin"] == pytest.approx(0.0, abs=1e-5)
    for _ in range(5):
        last = engine.dpo_update(batch)
    assert last["margin"] > 0.1
    assert last["loss"] < first["loss"]


def run(actor, steps, start=0):
    for step in range(start, start + steps):
        actor.ppo_update(actor.compute_advantages(tiny_batch(seed=step)))
        actor.step_lr_scheduler()
    return actor.full_weights()


def test_training_goes_on_bit_for_bit_from_a_checkpoint_of_the_adapter_alone(tmp_path):
    first = lora_actor(kl_ctl=0.1)
    run(first, 2)
    state = first.state_dict()
    assert sum(t.numel() for t in state["weights"].values()) == sum(t.numel() for t in first.full_weights().values())
    RecoverCheckpoints(tmp_path).save(2, {"actor": state})
    expected = run(first, 2, start=2)
    second = lora_actor(kl_ctl=0.1)
    run(second, 1, start=50)
    second.load_state_dict(RecoverCheckpoints(tmp_path).load()[1]["actor"])
    for name, tensor in run(second, 2, start=2).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (LoraConfig(rank=2, alpha=12), "lora.rank is 4 there and 2 here"),
        (LoraConfig(rank=4, alpha=8), "lora.alpha is 12.0 there and 8"),
        (LoraConfig(rank=4, alpha=12, targets=["q_proj"]), "lora.targets is down_proj, .* there and q_proj here"),
        (None, "holds an adapter, and this run trains all weights"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(other, message):
    state = lora_actor().state_dict()
    with pytest.raises(CheckpointError, match=message):
        tiny_actor(dtype=torch.float32, lora=other).load_state_dict(state)
    if other is None:
        with pytest.raises(CheckpointError, match="all weights of a model, and this run trains an adapter of rank 4"):
            lora_actor().load_state_dict(tiny_actor(dtype=torch.float32).state_dict())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    save_model(tiny_model(dtype=torch.float32), directory)
    return directory


def actor_at(path, **keys):
    keys = {"optimizer": OptimizerConfig(lr=1e-2), "lora": LORA, **keys}
    actor = FSDPPPOActor(PPOActorConfig(path=str(path), device="cpu", **keys))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor


@pytest.mark.parametrize("kind", ["all layers", "with magnitudes"])
def test_a_saved_adapter_is_loaded_by_peft_and_merged_by_export(path, tmp_path, kind):
    actor = actor_at(path, lora=KINDS[kind])
    move(actor)
    actor.save(tmp_path / "saved")
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    described = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(path)
    batch = {**tiny_batch(), "temperature": torch.ones(12)}
    expected = actor.compute_logp(batch)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(theirs, batch), expected, atol=1e-5, rtol=0)


def test_a_merged_model_computes_the_same_and_rounding_is_measured(path, tmp_path, monkeypatch):
    from rollwright.training import export as exporting

    actor = actor_at(path)
    move(actor)
    actor.save(tmp_path / "saved")
    monkeypatch.setattr(exporting, "load_tokenizer", lambda *arguments: None)  # the tiny model has none
    batch = {**tiny_batch(), "temperature": torch.ones(12)}
    assert merge(tmp_path / "saved", tmp_path / "whole", "float32") is None
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    assert whole.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(whole, batch), actor.compute_logp(batch), atol=1e-5, rtol=0)
    change = merge(tmp_path / "saved", tmp_path / "half", "bfloat16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    for (name, ours), (_, theirs) in zip(half.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16)), name
    assert 1e-5 < change.mean <= change.largest < 0.1
    with pytest.raises(ConfigError, match=r"is no adapter: it has no adapter_config.json"):
        merge(path, tmp_path / "no", "float32")


def test_a_saved_adapter_is_loaded_again_and_another_is_not(path, tmp_path):
    actor, other = actor_at(path), actor_at(path)
    move(actor)
    actor.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert all(torch.equal(tensor, other.full_weights()[name]) for name, tensor in actor.full_weights().items())
    with pytest.raises(ConfigError, match=r"lora\.rank is 4 there and 2 here"):
        actor_at(path, lora=LoraConfig(rank=2, alpha=12)).load(tmp_path / "saved")
    with pytest.raises(ConfigError, match="is no directory of an adapter"):
        other.load(path)


def test_an_adapter_without_its_base_is_no_model(path, tmp_path):
    actor_at(path).save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="is a LoRA adapter without its base: merge the two"):
        actor_at(tmp_path / "saved", lora=None)


def test_the_base_is_held_in_the_compute_type_and_the_adapter_in_float32(path):
    actor = actor_at(path, dtype="bfloat16")
    types = {(p.requires_grad, p.dtype) for p in actor.model.parameters()}
    assert types == {(False, torch.bfloat16), (True, torch.float32)}
    exact = actor_at(path)
    batch = tiny_batch()
    torch.testing.assert_close(actor.compute_logp(batch), exact.compute_logp(batch), atol=0.1, rtol=0)
    before = actor.full_weights()
    run(actor, 1)
    assert all(not torch.equal(before[name], tensor) for name, tensor in actor.full_weights().items() if "lora_B" in name)


def test_an_engine_in_this_process_gets_the_base_over_the_same_memory():
    actor = lora_actor()
    base = actor.shared_model
    assert type(base) is type(actor.model)
    assert not any(type(module).__module__.startswith("peft") for module in base.modules())
    assert base is actor.shared_model
    move(actor)
    assert base.state_dict().keys() == tiny_model().state_dict().keys()
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(base.parameters(), tiny_model(dtype=torch.float32).parameters(), strict=True)
    )
    inner = actor.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert base.model.layers[0].mlp.up_proj.weight is inner


class Receiver(InferenceEngine):
    """Keeps the streams that it is given."""

    def __init__(self, model):
        self.local_model, self.taken, self.version = model, [], 0

    def receive_weights(self, weights, version, meta, config):
        self.taken.append((version, weights.adapter, dict(weights)))
        self.version = version

    async def agenerate(self, request):
        raise NotImplementedError

    def get_version(self):
        return self.version

    def set_version(self, version): ...

    def pause(self): ...

    def resume(self): ...

    def abort(self, rid=None): ...


def test_an_adapter_is_sent_also_to_an_engine_that_shares_the_base():
    actor = lora_actor()
    engine = Receiver(actor.shared_model)
    actor.connect_engine(engine)
    move(actor)
    actor.update_weights()
    ((version, spec, tensors),) = engine.taken
    assert (version, spec, actor.version) == (1, actor.adapter, 1)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in actor.full_weights().items())
    assert actor.publication.size == sum(tensor.nbytes for tensor in tensors.values())


def test_an_adapter_in_files_is_read_as_one_and_can_be_put_on_another_copy(tmp_path):
    actor = lora_actor()
    move(actor)
    write_weights(tmp_path / "v1", actor.weights(), 1)
    stream = read_stream(tmp_path / "v1")
    assert stream.adapter == actor.adapter
    adapted = with_adapter(actor.shared_model, stream)
    batch = tiny_batch()
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(adapted, batch), actor.compute_logp(batch), atol=1e-5, rtol=0)
    with pytest.raises(
        WeightUpdateError,
        match=r"The adapter does not fit Qwen3ForCausalLM: .* is \[4, 3\] in the adapter and \[4, \d+\] in the model",
    ):
        with_adapter(actor.shared_model, _narrower(stream))


def _narrower(stream):
    from rollwright.inference.weights.stream import WeightStream

    return WeightStream.of({name: tensor[..., :3] for name, tensor in stream}, stream.adapter)


def test_dropout_is_of_supervised_steps_alone():
    engine, batch = engine_of(TrainEngine, LoraConfig(rank=4, dropout=0.5)), tiny_batch()
    move(engine)
    before = engine.compute_logp(batch)
    torch.manual_seed(1)
    first = caught_gradients(engine, lambda: engine.sft_update(batch))
    second = caught_gradients(engine, lambda: engine.sft_update(batch))
    torch.manual_seed(1)
    again = caught_gradients(engine, lambda: engine.sft_update(batch))
    name = next(name for name in first if "lora_B" in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], second[name])
    assert torch.equal(engine.compute_logp(batch), before)
    with pytest.raises(ConfigError, match=r"lora\.dropout is 0\.5, but PreferenceEngine compares"):
        engine_of(PreferenceEngine, LoraConfig(dropout=0.5))
    with pytest.raises(ConfigError, match=r"lora\.dropout is 0\.5, but FSDPPPOActor compares"):
        lora_actor(LoraConfig(dropout=0.5))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "all-linear", "nothing"])
def test_what_is_no_linear_layer_inside_is_refused(name):
    with pytest.raises(ConfigError, match=rf"lora.targets names '{name}', .* choose of q_proj, k_proj, v_proj"):
        lora_actor(LoraConfig(targets=["q_proj", name]))


def test_the_first_values_go_by_the_seed_alone():
    torch.manual_seed(3)
    first = lora_actor().full_weights()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    torch.rand(5)
    second = lora_actor().full_weights()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    torch.manual_seed(4)
    third = lora_actor().full_weights()
    a = next(name for name in first if "lora_A" in name)
    assert not torch.equal(first[a], third[a])
    assert first[a].abs().max() <= 16**-0.5
    assert len(first[a].unique()) > VOCABULARY


def test_a_base_is_apart_from_its_adapter_and_comes_back():
    actor = lora_actor()
    names = [name for name, _ in actor.model.named_parameters()]
    base_of(actor.model)
    assert [name for name, _ in actor.model.named_parameters()] == names
