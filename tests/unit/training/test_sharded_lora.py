"""A sharded model with an adapter is loaded, scored, trained, saved and resumed as a whole one."""

import pytest
import torch
import torch.distributed as dist
from test_sharding import train
from tiny_policy import tiny_batch, tiny_model
from torch.distributed.tensor import DTensor

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import LoraConfig, OptimizerConfig, PPOActorConfig
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.hf_checkpoint import save_model
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

pytest.importorskip("peft")


@pytest.fixture
def group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    save_model(tiny_model(dtype=torch.float32), directory)
    return directory


def actor_of(path, shard, **keys):
    torch.manual_seed(1)
    keys = {"optimizer": OptimizerConfig(lr=1e-2), "lora": LoraConfig(rank=4), **keys}
    actor = FSDPPPOActor(PPOActorConfig(path=str(path), device="cpu", shard=shard, kl_ctl=0.1, **keys))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_sharded_model_trains_its_adapter_as_a_whole_one(path, tmp_path, group, use_dora):
    lora = LoraConfig(rank=4, use_dora=use_dora)
    whole, sharded = actor_of(path, "never", lora=lora), actor_of(path, "always", lora=lora)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.model.parameters())
    assert sharded.shared_model is None
    for name, tensor in whole.full_weights().items():
        torch.testing.assert_close(sharded.full_weights()[name], tensor, atol=1e-6, rtol=0)
    torch.testing.assert_close(sharded.compute_ref_logp(tiny_batch()), whole.compute_ref_logp(tiny_batch()), atol=1e-6, rtol=0)
    expected, found = train(whole), train(sharded)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
    assert max(tensor.abs().max() for name, tensor in found.items() if "lora_B" in name) > 1e-3
    torch.testing.assert_close(sharded.compute_logp(tiny_batch()), whole.compute_logp(tiny_batch()), atol=1e-5, rtol=0)
    RecoverCheckpoints(tmp_path).save(2, {"actor": sharded.state_dict()})
    again = actor_of(path, "never", lora=lora)
    again.load_state_dict(RecoverCheckpoints(tmp_path).load()[1]["actor"])
    expected = train(whole, 1, start=2)
    for name, tensor in train(again, 1, start=2).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


def test_a_sharded_base_in_bfloat16_has_an_adapter_in_float32(path, group):
    actor = actor_of(path, "always", dtype="bfloat16")
    assert {(p.requires_grad, p.dtype) for p in actor.model.parameters()} == {(False, torch.bfloat16), (True, torch.float32)}
    expected = actor_of(path, "never", dtype="bfloat16").compute_logp(tiny_batch())
    torch.testing.assert_close(actor.compute_logp(tiny_batch()), expected, atol=0.05, rtol=0)
    before = actor.full_weights()
    after = train(actor, 1)
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.items() if "lora_B" in name)
