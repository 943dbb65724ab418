"""Which way weights take to which engine."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_policy import tiny_actor, tiny_batch, tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import OptimizerConfig, PPOActorConfig, RolloutConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.engine import WeightReceiver
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.rollout.engines import LocalRolloutEngine, _sampling_dtype
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.publish_and_audit import (
    NEW_TOKENS_IN_PROCESS,
    SentWeights,
    SharedWeights,
    ask_engines,
    largest_difference,
    probe_request,
    publisher_for,
)


@pytest.fixture
def shared():
    actor = tiny_actor(dtype=torch.float32, lr=1e-2)
    with BuiltinEngine(actor.model, max_running_requests=8) as engine:
        yield actor, engine


def sampled(engine, actor):
    """A greedy completion's log-probabilities by the engine, and by the trainer."""
    gconfig = GenerationHyperparameters(max_new_tokens=6, temperature=0.7, ignore_eos=True, seed=5)
    (response,) = engine.generate([ModelRequest(input_ids=[3, 4, 5], gconfig=gconfig)])
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    scored = actor.compute_logp({"input_ids": ids, "temperature": torch.tensor([0.7])})[0, 3:]
    return response, torch.tensor(response.output_logprobs), scored


def test_an_update_reaches_the_engine_that_shares_the_weights(shared):
    actor, engine = shared
    actor.connect_engine(engine)
    assert isinstance(actor._publisher, SharedWeights)
    _, before, scored = sampled(engine, actor)
    torch.testing.assert_close(before, scored, atol=1e-5, rtol=0)
    actor.ppo_update(actor.compute_advantages(tiny_batch()))
    actor.update_weights()
    response, after, scored = sampled(engine, actor)
    torch.testing.assert_close(after, scored, atol=1e-5, rtol=0)
    assert response.output_versions == [1] * 6
    assert engine.get_version() == actor.version == 1


def test_no_token_is_sampled_between_the_first_step_and_publication(shared):
    actor, engine = shared
    actor.connect_engine(engine)
    actor.ppo_update(actor.compute_advantages(tiny_batch()))
    (future,) = engine.submit(
        [ModelRequest(input_ids=[3], gconfig=GenerationHyperparameters(max_new_tokens=2, ignore_eos=True))]
    )
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    actor.update_weights()
    assert future.result(timeout=60).output_versions == [1, 1]


def test_an_engine_over_another_copy_is_given_the_weights():
    actor = tiny_actor(dtype=torch.float32, lr=1e-2)
    rollout = LocalRolloutEngine(RolloutConfig(max_running_requests=4, device="cpu"), model=tiny_model(dtype=torch.float32))
    with rollout:
        actor.connect_engine(rollout)
        assert isinstance(actor._publisher, SentWeights)
        actor.ppo_update(actor.compute_advantages(tiny_batch()))
        actor.update_weights(WeightUpdateMeta.memory())
        actor.set_version(1)
        rollout.set_version(1)
        request = ModelRequest(input_ids=[3, 4], gconfig=GenerationHyperparameters(max_new_tokens=3, ignore_eos=True))
        response = asyncio.run(rollout.agenerate(request))
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    torch.testing.assert_close(
        actor.compute_logp({"input_ids": ids})[0, 2:], torch.tensor(response.output_logprobs), atol=1e-5, rtol=0
    )
    assert response.output_versions == [1, 1, 1]


def test_a_copy_in_another_type_is_sampled_from_and_filled_by_each_publication():
    actor = tiny_actor(dtype=torch.float32, lr=1e-2)
    settings = RolloutConfig(max_running_requests=4, device="cpu", dtype="bfloat16")
    with LocalRolloutEngine(settings, model=actor.model) as rollout:
        copied, trained = rollout.client.local_model, actor.model
        assert rollout.client.weight_dtype == torch.bfloat16
        assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
        assert {buffer.dtype for buffer in copied.buffers()} == {buffer.dtype for buffer in trained.buffers()}
        assert len(list(copied.parameters())) == len(list(trained.parameters()))  # what was tied is tied
        assert not any("forward" in module.__dict__ for module in copied.modules())
        actor.connect_engine(rollout)
        assert isinstance(actor._publisher, SentWeights)
        before = [parameter.clone() for parameter in copied.parameters()]
        actor.ppo_update(actor.compute_advantages(tiny_batch()))
        assert all(map(torch.equal, before, copied.parameters()))  # it samples on with what it has
        actor.update_weights()
        masters = dict(trained.named_parameters())
        assert all(torch.equal(held, masters[name].bfloat16()) for name, held in copied.named_parameters())
        (agreement,) = actor._publisher.agreements
        assert 1e-5 < agreement.mean < 5e-2  # compared, by the limit of 16-bit types
        request = ModelRequest(input_ids=[3, 4], gconfig=GenerationHyperparameters(max_new_tokens=3, ignore_eos=True))
        assert asyncio.run(rollout.agenerate(request)).output_versions == [1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "device", "held", "wanted"),
    [
        ("auto", "cuda", torch.float32, "bfloat16"),
        ("auto", "cuda", torch.bfloat16, "auto"),
        ("auto", "cpu", torch.float32, "auto"),
        ("float32", "cuda", torch.float32, "float32"),
    ],
)
def test_only_a_gpus_float32_masters_are_copied_by_themselves(monkeypatch, dtype, device, held, wanted):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    weight = SimpleNamespace(device=torch.device(device), dtype=held)
    model = SimpleNamespace(parameters=lambda: iter([weight]))
    assert _sampling_dtype(RolloutConfig(dtype=dtype), model) == wanted
    assert _sampling_dtype(RolloutConfig(dtype=dtype), "a/path") == dtype


def test_servers_are_sent_whole_weights():
    class Servers(WeightReceiver):
        def update_weights(self, meta=None, *, version, weights, config=None):
            self.got = (meta, version, [name for name, _ in weights], config)

    actor, servers, meta = tiny_actor(), Servers(), WeightUpdateMeta.from_disk("/nowhere")
    actor.connect_engine(servers, meta)
    assert isinstance(actor._publisher, SentWeights)
    actor.update_weights(meta)
    assert servers.got == (meta, 1, [name for name, _ in actor.model.named_parameters()], actor.model.config)


class Listener(WeightReceiver):
    """Notes the names and shapes that it is sent."""

    def __init__(self, model=None):
        self.local_model_here = model

    @property
    def local_model(self):
        return self.local_model_here

    def update_weights(self, meta=None, *, version, weights, config=None):
        self.got = {name: tuple(tensor.shape) for name, tensor in weights}


def mixture_of_experts():
    config = transformers.Qwen3MoeConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("is_here", [False, True])
def test_servers_are_sent_the_names_of_save_pretrained_and_an_engine_here_the_models_own(is_here, tmp_path):
    model = mixture_of_experts()
    model.save_pretrained(tmp_path)
    actor = FSDPPPOActor(PPOActorConfig(device="cpu"), model=model)
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    listener = Listener(mixture_of_experts() if is_here else None)
    actor.connect_engine(listener)
    actor.update_weights()
    on_disk = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(on_disk) > len(own)  # the experts of a layer, each on its own
    assert listener.got == (own if is_here else on_disk)


@pytest.mark.parametrize(
    ("held", "experts", "is_warned"),
    [(torch.bfloat16, True, True), (torch.float32, True, False), (torch.bfloat16, False, False)],
)
def test_servers_that_route_in_16_bits_are_warned_of_once(held, experts, is_warned, caplog):
    class Servers(WeightReceiver):
        weight_dtype = held

        def update_weights(self, meta=None, *, version, weights, config=None):
            list(weights)

    actor = tiny_actor(dtype=torch.float32)
    if experts:
        actor = FSDPPPOActor(PPOActorConfig(device="cpu"), model=mixture_of_experts())
        actor.initialize(None, FinetuneSpec(1, 100, 10))
    actor.connect_engine(Servers())
    with caplog.at_level("WARNING", logger="rollwright"):
        actor.update_weights()
        actor.update_weights()
    assert caplog.text.count("routes each token to some of 4 experts, and the servers compute in bfloat16") == is_warned


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32, None])
def test_weights_are_sent_in_the_type_that_the_engine_holds(held):
    class Servers(WeightReceiver):
        weight_dtype = held

        def update_weights(self, meta=None, *, version, weights, config=None):
            self.got = {tensor.dtype for _, tensor in weights}

    actor, servers = tiny_actor(dtype=torch.float32), Servers()
    actor.connect_engine(servers)
    actor.update_weights()
    assert servers.got == {held or torch.float32}


@pytest.mark.parametrize(("held", "limit"), [(torch.bfloat16, 5e-2), (torch.float32, 1e-3), (None, 1e-3)])
def test_servers_are_compared_with_the_tolerance_of_the_type_that_they_report(held, limit):
    sampler = SimpleNamespace(probe=lambda request: {}, weight_dtype=held, local_model=None)
    answers = ask_engines(SimpleNamespace(sampler=sampler, logprob_tolerance=None), ModelRequest([1]))
    assert largest_difference(answers.tolerance, torch.float32, answers.dtype) == limit


def test_what_is_no_engine_is_refused():
    with pytest.raises(WeightUpdateError, match="neither update_weights"):
        publisher_for(tiny_actor(), object(), None)


def test_republishing_keeps_the_version(shared):
    actor, engine = shared
    actor.connect_engine(engine)
    actor.version = 7  # as after load_state_dict
    actor.republish()
    assert engine.get_version() == actor.version == 7
    assert sampled(engine, actor)[0].output_versions == [7] * 6


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])  # our own forward, and the model's
def test_an_engine_samples_on_where_the_trainer_checkpoints_activations(architecture, tmp_path):
    path = tmp_path / "model"
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=4, n_positions=64, eos_token_id=0)
    model = tiny_model(dtype=torch.float32) if architecture == "qwen3" else transformers.GPT2LMHeadModel(config)
    model.save_pretrained(path)
    actor = FSDPPPOActor(
        PPOActorConfig(path=str(path), device="cpu", gradient_checkpointing=True, optimizer=OptimizerConfig(lr=1e-2))
    )
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    with BuiltinEngine(actor.model, max_running_requests=8) as engine:
        actor.connect_engine(engine)
        actor.ppo_update(actor.compute_advantages(tiny_batch()))
        actor.update_weights()
        response, given, scored = sampled(engine, actor)
    torch.testing.assert_close(given, scored, atol=1e-5, rtol=0)
    assert response.output_versions == [1] * 6


# -- the audit ---------------------------------------------------------------------------------------------------------


def test_every_publication_in_this_process_is_audited_also_while_the_engine_is_paused(shared):
    actor, engine = shared
    actor.connect_engine(engine)
    engine.pause()  # as a trainer's loop does around a publication
    metrics = actor.ppo_update(actor.compute_advantages(tiny_batch()))
    assert "logprob_difference/probe" not in metrics  # nothing was published yet
    before = engine.stats()
    actor.update_weights()
    (agreement,) = actor._publisher.agreements
    assert agreement.mean < 1e-5
    assert agreement.tokens == NEW_TOKENS_IN_PROCESS
    changed = {name for name, value in engine.stats().items() if value != before[name]}
    assert changed == {"version"}  # the probe leaves no trace in queue, cache or counts
    metrics = actor.ppo_update(actor.compute_advantages(tiny_batch(seed=1)))
    assert metrics["logprob_difference/probe"] == agreement.mean


def test_the_probe_does_not_wait_for_those_in_the_queue(shared):
    _, engine = shared
    gconfig = GenerationHyperparameters(max_new_tokens=50, ignore_eos=True, seed=1)
    for _ in range(10):  # this thread could be kept from asking until all are done
        futures = engine.submit([ModelRequest(input_ids=[3 + index % 9, 4], gconfig=gconfig) for index in range(40)])
        (alone,) = engine.probe(probe_request(engine.model)).values()
        was_first = not all(future.done() for future in futures)
        assert all(future.result(timeout=60).output_len == 50 for future in futures)
        if was_first:
            break
    assert was_first
    (again,) = engine.generate([probe_request(engine.model)])
    assert again.output_tokens == alone.output_tokens
    assert again.output_logprobs == pytest.approx(alone.output_logprobs, abs=1e-5)


def test_an_engine_in_this_process_that_computes_with_other_weights_is_told_and_stays_paused(shared):
    actor, engine = shared
    actor.connect_engine(engine)
    actor.ppo_update(actor.compute_advantages(tiny_batch()))
    norm = engine.model.model.norm
    norm.forward = lambda hidden: torch.nn.functional.rms_norm(hidden, hidden.shape[-1:]) * 3  # the trainer's forward alone
    with pytest.raises(WeightUpdateError, match="The built-in engine says that it holds version 1, but its log-probabilities"):
        actor.update_weights()
    assert actor.version == 0
    (future,) = engine.submit([ModelRequest(input_ids=[3], gconfig=GenerationHyperparameters(max_new_tokens=1))])
    with pytest.raises(TimeoutError):
        future.result(timeout=0.1)


def test_a_copy_that_lost_a_weight_is_told(monkeypatch):
    actor = tiny_actor(dtype=torch.float32, lr=1e-1)
    rollout = LocalRolloutEngine(RolloutConfig(max_running_requests=4, device="cpu"), model=tiny_model(dtype=torch.float32))
    with rollout:
        actor.connect_engine(rollout)
        actor.ppo_update(actor.compute_advantages(tiny_batch()))
        whole = actor.full_weights()
        part = WeightStream.of({name: whole[name] for name in whole if "mlp" not in name})
        monkeypatch.setattr(actor, "weights", lambda dtype: part)
        with pytest.raises(WeightUpdateError, match="differ from the trainer's"):
            actor.update_weights()
        rollout.config.logprob_tolerance = 100.0
        actor.update_weights()
        assert actor.version == 1
