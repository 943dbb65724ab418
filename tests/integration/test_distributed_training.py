"""Two processes over Gloo train as one does: gradients, updates, metrics and checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from rank_scripts import run_ranks

UNIT = Path(__file__).parents[1] / "unit" / "training"

WORKER = """
import json, os, sys
sys.path.insert(0, {unit!r})
import torch
from tiny_policy import gradients, grouped_batch, tiny_actor
from rollwright.config.sections import NormConfig
from rollwright.training import parallel
from rollwright.training.recovery_checkpoint import RecoverCheckpoints
from rollwright.experience.trajectory import select_rows
from rollwright.training.rank_shares import own_share

out = sys.argv[1]
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

def share(batch):
    if world == 1:
        return batch
    # The first rank has two groups, the second one: numbers of micro-batches differ too.
    return select_rows(batch, list(range(8)) if rank == 0 else list(range(8, 12)))

actor = tiny_actor(share_prefixes={share}, max_tokens=30, kl_ctl=0.1, adv_norm=NormConfig(std_level="batch"), lr=1e-2)
batch = share(grouped_batch())
logp = actor.compute_logp(batch)
assert actor.division.shares_prefixes == {share}
actor.compute_advantages(batch)
step = actor._step
caught = gradients(actor)
actor.ppo_update(batch)
actor._step = step
result = {{"logp": logp, "advantages": batch["advantages"], "gradient": caught}}
metrics = []
for number in range(3):
    batch = actor.compute_advantages(share(grouped_batch(seed=number)))
    metrics.append(actor.ppo_update(batch))
    actor.step_lr_scheduler()
drawn = share(grouped_batch(seed=5)) if world == 1 else own_share(grouped_batch(seed=5) if rank == 0 else None)
metrics.append(actor.forward_backward(actor.compute_advantages(drawn), "policy"))
metrics.append(actor.forward_backward(share(grouped_batch(seed=6)), lambda rows, logprobs, entropies: logprobs.square()))
metrics.append(actor.optim_step())
actor.save(out + "/saved")
before = actor.full_weights()
actor.forward_backward(share(grouped_batch(seed=6)), "sft")
actor.optim_step()
actor.load(out + "/saved")
assert all(torch.equal(before[name], tensor) for name, tensor in actor.full_weights().items())
checkpoints = RecoverCheckpoints(out + "/recover")
state = actor.state_dict()
checkpoints.save(3, state)
result["weights"] = actor.full_weights()
actor.ppo_update(actor.compute_advantages(share(grouped_batch(seed=9))))
result["next"] = actor.full_weights()
if world > 1:
    torch.distributed.barrier()
actor.load_state_dict(checkpoints.load()[1])
actor.ppo_update(actor.compute_advantages(share(grouped_batch(seed=9))))
result["resumed"] = actor.full_weights()
actor.save(out + "/model")
torch.save(result, f"{{out}}/rank{{rank}}.pt")
if rank == 0:
    json.dump(metrics, open(out + "/metrics.json", "w"))
if world > 1:
    torch.distributed.destroy_process_group()
"""


BALANCED_WORKER = """
import os, sys
sys.path.insert(0, {unit!r})
import torch
from tiny_policy import gradients, grouped_batch, tiny_actor
from rollwright.experience.trajectory import select_rows
from rollwright.training.micro_batches import rows_of_ranks
from rollwright.training.prefix_tree import SortedRows

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
actor = tiny_actor(share_prefixes={share}, max_tokens=30)
batch = grouped_batch()
batch["input_ids"][:7, :5] = batch["input_ids"][0, :5]
batch["group_ids"] = torch.tensor([0] * 7 + [1] * 2 + [2] * 3)  # 7, 2 and 3 rows
batch["sample_ids"] = torch.arange(12)
rows = rows_of_ranks(batch, world)[rank]
mine = select_rows(batch, rows)
actor.compute_advantages(mine)
caught = gradients(actor)
actor.ppo_update(mine)
torch.save({{"rows": rows, "gradient": caught, "tokens": SortedRows(mine).distinct}}, f"{{sys.argv[1]}}/rank{{rank}}.pt")
if world > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def train(directory: Path, world: int, *, share_prefixes: bool = False, worker: str = WORKER) -> list[dict]:
    directory.mkdir()
    script = directory / "worker.py"
    script.write_text(worker.format(unit=str(UNIT), share=share_prefixes))
    run_ranks(script, directory, count=world)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_train_as_one(tmp_path):
    (one,) = train(tmp_path / "one", 1)
    two = train(tmp_path / "two", 2)
    torch.testing.assert_close(torch.cat([part["logp"] for part in two]), one["logp"], atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([part["advantages"] for part in two]), one["advantages"], atol=1e-6, rtol=0)
    for part in two:
        for name, gradient in one["gradient"].items():
            torch.testing.assert_close(part["gradient"][name], gradient, atol=1e-9, rtol=0)
        for moment in ("weights", "next", "resumed"):
            for name, weight in one[moment].items():
                torch.testing.assert_close(part[moment][name], weight, atol=1e-7, rtol=0)
        for name, weight in part["next"].items():
            assert torch.equal(part["resumed"][name], weight), name
    ours, theirs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-6), name
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model", dtype=torch.float64)
    for name, weight in saved.named_parameters():  # a tied one once
        torch.testing.assert_close(weight.detach(), two[0]["resumed"][name], atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_share_prefixes_as_one_does(tmp_path):
    """Shared tokens are summed in another order: gradients are compared by their norms, and no optimizer is between them."""
    (one,) = train(tmp_path / "one", 1, share_prefixes=True)
    two = train(tmp_path / "two", 2, share_prefixes=True)
    torch.testing.assert_close(torch.cat([part["logp"] for part in two]), one["logp"], atol=1e-6, rtol=0)
    for part in two:
        for name, gradient in one["gradient"].items():
            assert float((part["gradient"][name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_with_unequal_groups_train_as_one(tmp_path):
    """Seven rows of one group on one rank, five of two groups on the other: their distinct tokens are about as many."""
    (one,) = train(tmp_path / "one", 1, share_prefixes=True, worker=BALANCED_WORKER)
    two = train(tmp_path / "two", 2, share_prefixes=True, worker=BALANCED_WORKER)
    assert sorted(part["rows"].tolist() for part in two) == [list(range(7)), list(range(7, 12))]
    assert sum(part["tokens"] for part in two) == one["tokens"]
    for part in two:
        for name, gradient in one["gradient"].items():
            assert float((part["gradient"][name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name
