"""Two ranks that share one model: loading, checkpoints at another number of ranks, whole weights, long waits, failures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_scripts import run_ranks

UNIT = Path(__file__).parents[1] / "unit" / "training"

WORKER = """
import json, os, sys, time
from datetime import timedelta
sys.path.insert(0, {unit!r})
import torch
import torch.distributed as dist
from tiny_policy import tiny_batch
from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.errors import CheckpointError, DataError, TrainingError
from rollwright.experience.trajectory import select_rows
from rollwright.inference.weights.files import write_weights
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.recovery_checkpoint import RecoverCheckpoints
from rollwright.training.fsdp import own_tensors, with_whole_weights

model, out = sys.argv[1:3]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=15))  # of the gradients' group: a wait in it fails

def make(**keys):
    keys = {{"optimizer": OptimizerConfig(lr=1e-2), **keys}}
    actor = FSDPPPOActor(PPOActorConfig(path=model, device="cpu", **keys))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor

def train(actor, steps, start=0):
    for step in range(start, start + steps):
        batch = select_rows(tiny_batch(seed=step), list(range(8)) if rank == 0 else list(range(8, 12)))
        actor.ppo_update(actor.compute_advantages(batch))
        actor.step_lr_scheduler()
    return actor.full_weights()

result = {{}}

# Each rank holds its half, of the reference, too.
actor = make(kl_ctl=0.1)
for engine in (actor, actor.reference):
    held = sum(tensor.to_local().numel() for tensor in own_tensors(engine.model).values())
    whole = sum(tensor.numel() for tensor in own_tensors(engine.model).values())
    assert held <= 0.51 * whole + 100, (held, whole)
result["loaded"] = actor.full_weights()
result["trained"] = train(actor, 2)

# Copies that are replicated train as one that is sharded.
result["replicated"] = train(make(kl_ctl=0.1, shard_size=1), 2)

# A checkpoint of two ranks, written while training goes on; and one that one process has written.
checkpoints = RecoverCheckpoints(out + "/two", in_background=True)
checkpoints.save(2, {{"actor": actor.state_dict()}} if rank == 0 else {{"actor": actor.state_dict()}})
result["on"] = train(actor, 2, start=2)
checkpoints.wait()
actor.load_state_dict(RecoverCheckpoints(out + "/one").load()[1]["actor"])
result["resumed"] = train(actor, 2, start=2)

# A rank that cannot write: all are told, and nothing is left.
checkpoints = RecoverCheckpoints(out + "/full")
if rank == 1:
    from torch.distributed.checkpoint import filesystem
    whole_write, filesystem._write_files_from_queue = filesystem._write_files_from_queue, lambda **options: 1 / 0
try:
    checkpoints.save(1, {{"actor": actor.state_dict()}})
except CheckpointError as error:
    result["full"] = str(error)
if rank == 1:
    filesystem._write_files_from_queue = whole_write
parallel.wait_for_all()
assert not list(checkpoints.directory.iterdir())

# Whole weights: read twice, left in the middle, and with a failure of the first rank.
def twice(weights):
    return [write_weights(out + "/a", weights, 1), write_weights(out + "/b", weights, 1)]
first, second = with_whole_weights(actor.weights(), twice)
assert first == second
def left(weights):
    for name, tensor in weights:
        return name
result["left"] = with_whole_weights(actor.weights(torch.bfloat16), left)
def failing(weights):
    for name, tensor in weights:
        raise DataError("no")
for use in (failing, lambda weights: 1 / 0):
    try:
        with_whole_weights(actor.weights(), use)
    except (DataError, TrainingError, ZeroDivisionError) as error:
        result.setdefault("failed", []).append(type(error).__name__)
actor.save(out + "/model")

# The first rank may take longer than the gradients' group waits.
result["waited"] = parallel.from_first_rank(lambda: time.sleep(20) or 7)
try:
    parallel.on_all_ranks(lambda: 1 / (1 - rank))
except (TrainingError, ZeroDivisionError) as error:
    result["all"] = str(error)
torch.save(result, f"{{out}}/rank{{rank}}.pt")
parallel.wait_for_all()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_hold_one_model_together(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(UNIT))
    from tiny_policy import tiny_batch, tiny_model
    from transformers import AutoModelForCausalLM

    from rollwright.config.experiment import FinetuneSpec
    from rollwright.config.sections import OptimizerConfig, PPOActorConfig
    from rollwright.training.actor import FSDPPPOActor
    from rollwright.training.hf_checkpoint import save_model
    from rollwright.training.recovery_checkpoint import RecoverCheckpoints

    save_model(tiny_model(dtype=torch.float32), tmp_path / "start")
    config = PPOActorConfig(path=str(tmp_path / "start"), device="cpu", kl_ctl=0.1, optimizer=OptimizerConfig(lr=1e-2))
    actor = FSDPPPOActor(config)
    actor.initialize(None, FinetuneSpec(1, 100, 10))

    def train(steps: int, start: int = 0) -> dict[str, torch.Tensor]:
        for step in range(start, start + steps):
            actor.ppo_update(actor.compute_advantages(tiny_batch(seed=step)))
            actor.step_lr_scheduler()
        return actor.full_weights()

    one = {"loaded": actor.full_weights(), "trained": train(2)}
    RecoverCheckpoints(tmp_path / "one").save(2, {"actor": actor.state_dict()})
    one["on"] = train(2, start=2)

    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(unit=str(UNIT)))
    run_ranks(script, tmp_path / "start", tmp_path, count=2)
    two = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for name, tensor in one["loaded"].items():
        assert torch.equal(two[0]["loaded"][name], tensor), name
    for ours, theirs in (("trained", "trained"), ("trained", "replicated"), ("on", "on"), ("on", "resumed")):
        for name, tensor in one[ours].items():
            torch.testing.assert_close(two[1][theirs][name], tensor, atol=2e-5, rtol=0)
            assert torch.equal(two[0][theirs][name], two[1][theirs][name])
    actor.load_state_dict(RecoverCheckpoints(tmp_path / "two").load()[1]["actor"])
    for name, tensor in train(2, start=2).items():
        torch.testing.assert_close(two[0]["on"][name], tensor, atol=2e-5, rtol=0)
    assert len(list((tmp_path / "two" / "step_00000002" / "parts").iterdir())) == 2
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, tensor in saved.named_parameters():
        assert torch.equal(two[0]["resumed"][name], tensor), name
    for told in two:
        assert "ZeroDivisionError" in told["full"]
        assert told["left"] == "model.embed_tokens.weight"
        assert told["waited"] == 7
    assert two[0]["failed"] == ["DataError", "ZeroDivisionError"]
    assert two[1]["failed"] == ["DataError", "TrainingError"]
    assert (two[0]["all"], two[1]["all"]) == ("on rank 1: division by zero", "division by zero")
