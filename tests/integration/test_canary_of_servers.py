"""The canary over real servers: tensors that are lost on their way to a server are named, also after a server was started again."""

from __future__ import annotations

import pytest
import torch
import transformers
from real_servers import served_model
from test_builtin_process import ROWS, config_of, reward, server_at

from rollwright import PPOTrainer
from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import PPOActorConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.weights.files import content_digests, read_weights, write_weights
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.training import publish_and_audit
from rollwright.training.actor import FSDPPPOActor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def write_experts(directory):
    """A random Qwen3 whose first layer is dense and whose second has experts."""
    tokenizer = build_character_tokenizer()
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0], max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An actor, and the client of a server that was started with its model."""
    path = write_experts(tmp_path_factory.mktemp("model"))
    actor = FSDPPPOActor(PPOActorConfig(path=str(path), device="cpu"))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    with served_model(path, tmp_path_factory.mktemp("logs")) as (servers, client):
        actor.connect_engine(client, WeightUpdateMeta.from_disk(servers.weights_root / "published"))
        yield actor, client


class Fault:
    """Loses tensors between the trainer and its servers."""

    def __init__(self, change):
        self.change, self.sent = change, []

    def __call__(self, model, weights, as_published=publish_and_audit.as_published):
        self.sent.append({name: tensor.clone() for name, tensor in as_published(model, weights)})
        return WeightStream.of(self.change(self))


def without(*parts):
    return Fault(lambda fault: {name: t for name, t in fault.sent[-1].items() if not any(part in name for part in parts)})


def swapped(one, other):
    def swap(name):
        return name.replace(one, "\0").replace(other, one).replace("\0", other)

    return Fault(
        lambda fault: {name: fault.sent[-1][swap(name)] if ".experts." not in name else t for name, t in fault.sent[-1].items()}
    )


FAULTS = {
    "experts": (without("experts"), r"layers\.1\.mlp\.experts|the experts"),
    "embeddings": (without("embed_tokens"), r"model\.embed_tokens\.weight \(embeddings\)"),
    "head": (without("lm_head"), r"lm_head\.weight \(head\)"),
    "norms": (without("norm"), r"the norms"),
    "one layer": (without("layers.1."), r"several tensors of layer 1"),
    "gate and up swapped": (swapped("gate_proj", "up_proj"), r"takes gate_proj for up_proj, and the other way round"),
    "another version": (Fault(lambda fault: fault.sent[max(0, len(fault.sent) - 2)]), r"version before, although it reports version 0"),
}  # fmt: skip


def test_a_server_that_takes_everything_is_proven_and_holds_the_true_weights(trained):
    actor, client = trained
    before = actor.full_weights()
    actor.prove_publication()
    assert actor._proof.difference < 1e-4
    assert not actor._proof.unclear
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.full_weights().items())
    assert actor._publisher.agreements[0].mean < 1e-4
    assert [server.in_service for server in client.servers.router.servers] == [True]
    (checksums,) = client.checksums().values()
    assert checksums == {name: digest.hex() for name, digest in content_digests(actor.model.named_parameters()).items()}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_reach_a_server_is_named(trained, monkeypatch, name):
    actor, client = trained
    fault, expected = FAULTS[name]
    client.weights.proofs._proven.clear()
    actor.republish()  # what the test before has left
    if name == "another version":
        fault.sent.append(
            {name: tensor.clone() for name, tensor in publish_and_audit.as_published(actor.model, actor.weights())}
        )
    monkeypatch.setattr(publish_and_audit, "as_published", fault)
    with pytest.raises(WeightUpdateError, match=expected):
        actor.prove_publication()


def test_a_server_that_was_started_again_is_proven_before_anything_that_it_samples_is_trained(tmp_path, monkeypatch, request):
    """Whole servers that come back are in test_builtin_process; here the new one loses its norms."""
    if request.config.getoption("--seeds") < 2:
        pytest.skip("two servers start: this is part of the long form (--seeds 2)")
    config = config_of(tmp_path)
    config.total_train_steps = 6
    with PPOTrainer(config, ROWS) as trainer:
        client, load, update = trainer.rollout.client, SGLangBackend.load_from_disk, trainer.actor.ppo_update
        (first,) = client.addresses
        updates = []

        def load_some(self, server, directory, version, digest):
            if server.address != first:
                whole, directory = dict(read_weights(directory)), f"{directory}-without-norms"
                digest = write_weights(directory, {name: whole[name] for name in whole if "norm" not in name}, version)
            load(self, server, directory, version, digest)

        def kill_after_the_second(batch):
            updates.append([server.address for server in client.servers.router.in_service()])
            result = update(batch)
            if len(updates) == 2:
                server_at(first).kill()
            return result

        monkeypatch.setattr(SGLangBackend, "load_from_disk", load_some)
        monkeypatch.setattr(trainer.actor, "ppo_update", kill_after_the_second)
        with pytest.raises(WeightUpdateError, match="norms"):
            trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
        assert len(updates) < 6
        assert all(addresses in ([first], []) for addresses in updates)
