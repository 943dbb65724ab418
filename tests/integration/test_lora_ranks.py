"""Two processes over Gloo train an adapter as one process does."""

import sys
from pathlib import Path

import pytest
import torch
from test_distributed_training import UNIT, train

sys.path.insert(0, str(UNIT))
pytest.importorskip("peft")

WORKER = """
import os, sys
sys.path.insert(0, {unit!r})
import torch
from tiny_policy import gradients, grouped_batch, tiny_actor
from rollwright.config.sections import LoraConfig
from rollwright.experience.trajectory import select_rows
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

out = sys.argv[1]
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

def share(batch):
    return batch if world == 1 else select_rows(batch, list(range(8)) if rank == 0 else list(range(8, 12)))

torch.manual_seed(1)  # of the adapter's first values
actor = tiny_actor(share_prefixes={share}, max_tokens=30, kl_ctl=0.1, lr=1e-2, lora=LoraConfig(rank=3))
batch = actor.compute_advantages(share(grouped_batch()))
step = actor._step
caught = gradients(actor)
actor.ppo_update(batch)
actor._step = step
result = {{"gradient": caught, "rank": rank}}
for number in range(2):
    actor.ppo_update(actor.compute_advantages(share(grouped_batch(seed=number))))
checkpoints = RecoverCheckpoints(out + "/recover")
checkpoints.save(2, actor.state_dict())
result["weights"] = actor.full_weights()
last = lambda: actor.ppo_update(actor.compute_advantages(share(grouped_batch(seed=9))))
last()
result["next"] = actor.full_weights()
actor.load_state_dict(checkpoints.load()[1])
last()
result["resumed"] = actor.full_weights()
actor.save(out + "/adapter")
torch.save(result, f"{{out}}/rank{{rank}}.pt")
if world > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_train_an_adapter_as_one(tmp_path):
    (one,) = train(tmp_path / "one", 1, worker=WORKER)
    two = train(tmp_path / "two", 2, worker=WORKER)
    assert max(gradient.abs().max() for gradient in one["gradient"].values()) > 1e-4
    assert all("lora" in name for name in one["gradient"])
    for part in two:
        for name, gradient in one["gradient"].items():
            torch.testing.assert_close(part["gradient"][name], gradient, atol=1e-9, rtol=0)
        for moment in ("weights", "next", "resumed"):
            for name, weight in one[moment].items():
                torch.testing.assert_close(part[moment][name], weight, atol=1e-7, rtol=0)
        for name, weight in part["next"].items():
            assert torch.equal(part["resumed"][name], weight), name
    saved = _saved(tmp_path / "two" / "adapter")
    assert saved.keys() == two[0]["resumed"].keys()
    assert all(torch.equal(tensor, two[0]["resumed"][name]) for name, tensor in saved.items())


def _saved(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "adapter_model.safetensors")
