"""A model that is sharded computes, loads, saves and resumes as one that is not."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_policy import gradients, tiny_actor, tiny_batch, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig, PPOActorConfig, TrainEngineConfig
from rollwright.errors import CheckpointError, ConfigError, LostRankError
from rollwright.inference.weights.stream import WeightStream
from rollwright.training import fsdp
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.engine import TrainEngine
from rollwright.training.hf_checkpoint import load_weights, save_model
from rollwright.training.model import empty_model, load_model, new_model
from rollwright.training.recovery_checkpoint import RecoverCheckpoints


@pytest.fixture
def group():
    """The process group of one that a sharded model makes ends with the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def actor_of(path, shard="always", **keys):
    keys = {"optimizer": OptimizerConfig(lr=1e-2), **keys}
    actor = FSDPPPOActor(PPOActorConfig(path=str(path), device="cpu", shard=shard, **keys))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor


def train(actor, steps=2, start=0):
    for step in range(start, start + steps):
        actor.ppo_update(actor.compute_advantages(tiny_batch(seed=step)))
        actor.step_lr_scheduler()
    return actor.full_weights()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    save_model(tiny_model(dtype=torch.float32), directory)
    return directory


def test_an_empty_model_takes_no_memory_and_has_its_buffers(path):
    config = TrainEngineConfig(path=str(path), device="cpu")
    empty, whole = empty_model(config, torch.float32), load_model(config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight  # tied
    for (name, ours), (other, theirs) in zip(empty.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


def test_a_sharded_model_is_loaded_trained_and_written_as_a_whole_one(path, tmp_path, group):
    whole, sharded = actor_of(path, "never", kl_ctl=0.1), actor_of(path, kl_ctl=0.1)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in sharded.reference.model.parameters())
    assert sharded.model.lm_head.weight is sharded.model.model.embed_tokens.weight
    for name, tensor in whole.full_weights().items():
        assert torch.equal(sharded.full_weights()[name], tensor), name
        assert torch.equal(sharded.reference.full_weights()[name], tensor), name
    logp = whole.compute_logp(tiny_batch())
    torch.testing.assert_close(sharded.compute_logp(tiny_batch()), logp, atol=1e-6, rtol=0)
    torch.testing.assert_close(sharded.compute_ref_logp(tiny_batch()), whole.compute_ref_logp(tiny_batch()), atol=1e-6, rtol=0)
    expected, found = train(whole), train(sharded)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
    sharded.save(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, tensor in saved.named_parameters():
        assert torch.equal(found[name], tensor), name
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert (tmp_path / "saved" / "generation_config.json").exists()


@pytest.mark.parametrize(("before", "after"), [("always", "never"), ("never", "always"), ("always", "always")])
def test_a_checkpoint_is_read_by_whole_and_sharded_models(path, tmp_path, group, before, after):
    first = actor_of(path, before)
    train(first, 2)
    RecoverCheckpoints(tmp_path).save(2, {"actor": first.state_dict()})
    expected = train(first, 2, start=2)
    second = actor_of(path, after)
    train(second, 1, start=50)
    second.load_state_dict(RecoverCheckpoints(tmp_path).load()[1]["actor"])
    for name, tensor in train(second, 2, start=2).items():
        torch.testing.assert_close(tensor, expected[name], atol=0 if before == after else 1e-5, rtol=0)


def test_a_checkpoint_in_the_background_is_of_its_step(path, tmp_path, group):
    actor = actor_of(path)
    train(actor, 1)
    expected = actor.full_weights()
    checkpoints = RecoverCheckpoints(tmp_path, keep=1, in_background=True)
    for step in (1, 2):
        checkpoints.save(step, {"actor": actor.state_dict()})
    train(actor, 3, start=1)  # while it is written
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    actor.load_state_dict(checkpoints.load()[1]["actor"])
    for name, tensor in actor.full_weights().items():
        assert torch.equal(tensor, expected[name]), name


def save_and_wait(checkpoints, step, actor):
    checkpoints.save(step, {"actor": actor.state_dict()})
    checkpoints.wait()


def test_a_part_that_cannot_be_written_leaves_no_checkpoint(path, tmp_path, group, monkeypatch):
    actor = actor_of(path)
    for in_background in (False, True):
        checkpoints = RecoverCheckpoints(tmp_path / "recover", in_background=in_background)
        save_and_wait(checkpoints, 1, actor)
        with monkeypatch.context() as patched:

            def full(*arguments, **options):
                raise OSError(28, "No space left on device")

            patched.setattr("torch.distributed.checkpoint.filesystem._write_files_from_queue", full)
            with pytest.raises(CheckpointError, match=r"step_00000002 could not be written.*No space left"):
                save_and_wait(checkpoints, 2, actor)
        assert [entry.name for entry in (tmp_path / "recover").iterdir()] == ["step_00000001"]


def test_a_damaged_part_is_noticed(path, tmp_path, group):
    actor, checkpoints = actor_of(path), RecoverCheckpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"actor": actor.state_dict()})
    (part,) = (checkpoints.path(2) / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match="shard-00001"):
        checkpoints.load(2)
    assert checkpoints.load()[0] == 1


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    config = Qwen3MoeConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory / "model")
    return directory / "model"


def test_experts_that_are_held_in_one_tensor_are_loaded_and_written_one_by_one(experts, tmp_path, group):
    names = set(load_file(experts / "model.safetensors"))
    assert any("experts.3." in name for name in names)  # on disk, each on its own
    engine = TrainEngine(TrainEngineConfig(path=str(experts), device="cpu", shard="always", optimizer=None))
    engine.initialize()
    whole = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    for name, tensor in whole.named_parameters():
        assert torch.equal(engine.full_weights()[name], tensor), name
    engine.save(tmp_path / "saved")
    written, before = load_file(tmp_path / "saved" / "model.safetensors"), load_file(experts / "model.safetensors")
    assert {*written} == names
    assert all(torch.equal(written[name], before[name]) for name in names)


def test_a_checkpoint_of_another_model_is_not_read(path, experts, group):
    config = TrainEngineConfig(path=str(experts), device="cpu")
    model = empty_model(config, torch.float32)
    fsdp.allocate(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"has no weights for \d+ tensors|could not be read"):
        load_weights(model, str(path))
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load_weights(model, str(path.parent))


def test_a_rank_that_is_lost_while_weights_are_read_is_not_a_fault_of_the_files(path, group, monkeypatch):
    """One that Ctrl-C ended, say: the others would call the model unreadable."""

    def lost(*arguments, **options):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:25505")

    model = empty_model(TrainEngineConfig(path=str(path), device="cpu"), torch.float32)
    fsdp.allocate(model, torch.device("cpu"))
    monkeypatch.setattr("rollwright.training.hf_checkpoint.call_checkpoint", lost)
    with pytest.raises(LostRankError, match=r"another process of the training has ended .*closed by peer"):
        load_weights(model, str(path))


def test_random_weights_are_drawn_one_module_at_a_time(path, group):
    torch.manual_seed(3)
    engines = []
    for _ in range(2):
        engines.append(TrainEngine(TrainEngineConfig(path=str(path), device="cpu", shard="always", init_from_scratch=True)))
        engines[-1].initialize()
    first, again = (engine.full_weights() for engine in engines)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert (tensor == 1).all() if "norm" in name else 0.015 < tensor.std() < 0.025, name
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradient(monkeypatch):
    compiled, compile_module = [], torch.nn.Module.compile
    monkeypatch.setattr(  # forward and backward are traced, but not handed to the C++ compiler, which takes minutes
        torch.nn.Module, "compile", lambda module: compiled.append(module) or compile_module(module, backend="aot_eager")
    )
    found = []
    for flag in (False, True):  # in float32 a CPU would have fast layers
        actor = tiny_actor(dtype=torch.float32, compile_layers=flag)
        found.append(gradients(actor))
        actor.ppo_update(actor.compute_advantages(tiny_batch()))
    assert compiled == list(actor.model.model.layers)
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=1e-7, rtol=0)


def test_activations_of_every_second_layer_are_recomputed_to_the_same_gradient():
    found = []
    for actor in (tiny_actor(), tiny_actor(gradient_checkpointing=True, gradient_checkpointing_every=2)):
        caught = gradients(actor)
        actor.ppo_update(actor.compute_advantages(tiny_batch()))
        found.append(caught)
    assert [layer.gradient_checkpointing for layer in actor.model.model.layers] == [False, True]
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-9, rtol=0)


def test_shards_that_are_offloaded_train_the_same(path, tmp_path, monkeypatch, group):
    """The way of a GPU's shards through the host's memory, on a CPU: loaded, trained, kept and published."""
    expected = train(actor_of(path))
    monkeypatch.setattr("rollwright.training.engine.wants_sharding", lambda *_, **__: True)  # which refuses it on a CPU
    actor = actor_of(path, cpu_offload=True)
    weights = train(actor)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=0)
    RecoverCheckpoints(tmp_path / "recover").save(2, {"actor": actor.state_dict()})
    again = actor_of(path, cpu_offload=True)
    again.load_state_dict(RecoverCheckpoints(tmp_path / "recover").load()[1]["actor"])
    expected = train(actor, 1, start=2)
    for name, tensor in train(again, 1, start=2).items():
        assert torch.equal(tensor, expected[name]), name


def test_settings_that_do_not_fit_are_refused(path, group):
    with pytest.raises(ConfigError, match="cpu_offload moves the shards of a GPU"):
        actor_of(path, cpu_offload=True)
    with pytest.raises(ConfigError, match="shard_size=2 does not divide the 1 ranks"):
        actor_of(path, shard_size=2)


def test_one_rank_reads_whole_weights_as_it_likes(path, group):
    weights = actor_of(path).weights(torch.bfloat16)
    assert {tensor.dtype for _, tensor in weights} == {torch.bfloat16} == {tensor.dtype for _, tensor in weights.described}
    assert fsdp.with_whole_weights(weights, lambda stream: len(list(stream)) + len(list(stream))) == 2 * len(weights.described)
    assert weights.nbytes == sum(tensor.nbytes for _, tensor in weights)
    assert isinstance(weights, WeightStream)


def test_an_uneven_vocabulary_is_sharded(tmp_path, group):
    new_model(tmp_path / "m", vocab_size=37, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, head_dim=6)
    engine = TrainEngine(TrainEngineConfig(path=str(tmp_path / "m"), device="cpu", shard="always"))
    engine.initialize()
    assert {name: list(t.shape) for name, t in engine.full_weights().items()}["model.embed_tokens.weight"] == [37, 12]


def test_a_stream_that_was_left_is_read_to_its_end_before_it_is_read_again(monkeypatch):
    """The other ranks are in the first reading until its end: a sender that begins again still holds it."""
    told: list[object] = []
    weights = WeightStream.of([(name, torch.zeros(2)) for name in "abc"])
    read = weights._read
    weights._read = lambda: (told.append(pair[0]) or pair for pair in read())
    for name, value in {"world_size": lambda: 2, "broadcast": told.append, "from_first_rank": lambda make: make()}.items():
        monkeypatch.setattr(fsdp.parallel, name, value)

    def use(stream):
        first = iter(stream)
        next(first)
        return [name for name, _ in stream]

    assert fsdp.with_whole_weights(weights, use) == ["a", "b", "c"]
    assert told == [b"gather", "a", "b", "c", b"gather", "a", "b", "c", b"enough"]
