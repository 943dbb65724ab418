"""Two processes that train together publish to servers, and audit them together, on every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_scripts import run_ranks
from real_servers import served_model, write_model

UNIT = Path(__file__).parents[1] / "unit" / "training"

WORKER = """
import json, os, sys
sys.path.insert(0, {unit!r})
import torch
from tiny_policy import tiny_batch
from rollwright.config.sections import OptimizerConfig, PPOActorConfig, RolloutConfig
from rollwright.errors import RollwrightError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.rollout.engines import RemoteSGLangEngine
from rollwright.training import publish_and_audit as audits
from rollwright.training.actor import FSDPPPOActor

model, address, root, out = sys.argv[1:5]
rank = int(os.environ["RANK"])
actor = FSDPPPOActor(PPOActorConfig(path=model, device="cpu", optimizer=OptimizerConfig(lr=1e-2)))
actor.initialize(None, None)
rollout = RemoteSGLangEngine(RolloutConfig(addresses=[address])) if rank == 0 else None
if rank == 0:
    rollout.initialize()
engine = rollout if rank == 0 else object.__new__(SGLangClient)  # the other rank's is never asked
told = []

def step():
    batch = tiny_batch(seed=len(told) + 10 * rank)
    return actor.ppo_update(actor.compute_advantages(batch))

def note(name):
    told.append([name, actor.version, [a.mean for a in actor._publisher.agreements]])

for meta in (
    WeightUpdateMeta.shared(), WeightUpdateMeta.from_disk(root + "/disk"), WeightUpdateMeta.from_fsdp_xccl("sglang:d1p1t1+d2p1t1")
):
    actor.connect_engine(engine, meta)
    step()
    actor.update_weights()
    note(meta.type)

# Paused servers answer no probe: the ranks ask before the next first step.
actor.connect_engine(engine, WeightUpdateMeta.shared())
step()
if rank == 0:
    rollout.pause()
actor.update_weights()
note("paused")
if rank == 0:
    rollout.resume()
metrics = step()
note("resumed")
told.append(["metric", actor.version, metrics["logprob_difference/probe"]])

# The canary: both change and restore their shards alike.
before = actor.full_weights()
actor.prove_publication()
is_restored = all(torch.equal(tensor, before[name]) for name, tensor in actor.full_weights().items())
told.append(["canary", actor.version, [actor._proof.difference, actor._proof.unreached, actor._proof.unclear, is_restored]])
if rank == 0:
    rollout.client.weights.proofs._proven.clear()  # else there is nothing left to prove
published = audits.as_published
audits.as_published = lambda model, stream: WeightStream.of(
    [(name, t.clone()) for name, t in published(model, stream) if ".k_proj" not in name]
)
actor.connect_engine(engine, WeightUpdateMeta.from_disk(root + "/canary"))
try:
    actor.prove_publication()
except RollwrightError as error:
    told.append(["lost", actor.version, str(error)])
audits.as_published = published
if rank == 0:
    rollout.client.weights.proofs._proven.clear()
actor.connect_engine(engine, WeightUpdateMeta.shared())
actor.republish()

# Weights that are not the trainer's, each call of the server answered with success.
whole = actor.weights
def other(dtype):
    own = whole(dtype)
    return WeightStream(own.described, lambda: ((name, tensor + 0.05 * torch.randn_like(tensor)) for name, tensor in own))
actor.weights = other
try:
    actor.update_weights()
except RollwrightError as error:
    told.append(["wrong", actor.version, type(error).__name__ + ": " + str(error)])
actor.weights = whole

# A failure of the first rank alone reaches the other, which would wait for ever.
if rank == 0:
    rollout.client.update_weights = lambda *args, **kwargs: 1 / 0
try:
    actor.update_weights()
except Exception as error:
    told.append(["failed", actor.version, type(error).__name__ + ": " + str(error)])
json.dump(told, open(f"{{out}}/rank{{rank}}.json", "w"))
if rank == 0:
    rollout.destroy()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_audit_servers_together(tmp_path):
    model = write_model(tmp_path / "model")
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(unit=str(UNIT)))
    with served_model(model, tmp_path / "logs") as (servers, client):
        client.destroy()  # the first rank has its own
        run_ranks(script, model, servers.addresses[0], servers.weights_root, tmp_path, count=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first[:6] == second[:6]  # every rank knows what the first one found
    assert [[name, version] for name, version, _ in first[:5]] == [
        ["shared", 1],
        ["disk", 2],
        ["xccl", 3],
        ["paused", 4],
        ["resumed", 4],
    ]
    assert [len(means) for _, _, means in first[:5]] == [1, 1, 1, 0, 1]  # paused servers are asked when they have resumed
    assert all(mean < 1e-4 for _, _, means in first[:5] for mean in means)
    assert first[5][2] == first[4][2][0]
    for told in (first, second):
        (_, _, (difference, unreached, unclear, is_restored)), (_, _, lost), (_, version, wrong), (_, _, failed) = told[6:]
        assert difference < 1e-4
        assert unreached == unclear == []
        assert is_restored
        assert "does not take all or several of the k_proj" in lost
        assert version == 4
        assert wrong.startswith("WeightUpdateError")
        assert "says that it holds version 5" in wrong
        assert failed.startswith("ZeroDivisionError" if told is first else "TrainingError: on the first rank: division by zero")
