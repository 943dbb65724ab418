"""The canary over the real vLLM (its CPU build): what does not reach it is named."""

from __future__ import annotations

import pytest
from real_servers import write_model
from test_canary_of_servers import FAULTS
from test_vllm_server import pytestmark, vllm_server  # noqa: F401 - skipped without the environment

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import PPOActorConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.training import publish_and_audit
from rollwright.training.actor import FSDPPPOActor


def test_what_does_not_reach_vllm_is_named(tmp_path, monkeypatch, request):
    if request.config.getoption("--seeds") < 2:
        pytest.skip("vLLM starts, which takes minutes: this is part of the long form (--seeds 2)")
    path = write_model(tmp_path / "model")  # dense: the CPU build cannot load experts a second time
    actor = FSDPPPOActor(PPOActorConfig(path=str(path), device="cpu"))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    with vllm_server(path, tmp_path / "logs") as client:
        actor.connect_engine(client, WeightUpdateMeta.from_disk(tmp_path / "published"))
        actor.prove_publication()
        assert actor._proof.difference < 1e-3
        assert not actor._proof.unclear
        for name in FAULTS.keys() - {"experts"}:
            fault, expected = FAULTS[name]
            client.weights.proofs._proven.clear()
            actor.republish()  # what the fault before has left
            true = {name: tensor.clone() for name, tensor in publish_and_audit.as_published(actor.model, actor.weights())}
            fault.sent[:] = [true] if name == "another version" else []
            with monkeypatch.context() as patched:
                patched.setattr(publish_and_audit, "as_published", fault)
                with pytest.raises(WeightUpdateError, match=expected):
                    actor.prove_publication()
