"""Weights reach real servers on every way, under running requests, and every token's version is right."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from real_servers import Trainer, ask, gather_while, served_model, write_model

from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_servers(model_path, tmp_path_factory):
    with served_model(model_path, tmp_path_factory.mktemp("logs"), count=2) as (servers, client):
        yield servers, client, Trainer(model_path)


def test_every_way_reaches_every_server_and_is_audited(two_servers):
    servers, client, trainer = two_servers
    ways = [
        None,
        WeightUpdateMeta.shared(),
        WeightUpdateMeta.from_disk(servers.weights_root / "disk"),
        WeightUpdateMeta.from_fsdp_xccl("sglang:d2p1t1+d1p1t1"),
        WeightUpdateMeta.from_fsdp_xccl("sglang:d2p1t1"),
    ]
    for meta in ways:
        version = trainer.step()
        agreements = trainer.publish(client, meta).agreements
        assert len(client.servers.router.in_service()) == 2
        assert client.get_version() == version
        assert len(agreements) == 2
        assert max(agreement.mean for agreement in agreements) < 1e-4
        responses = asyncio.run(gather_while(client, ask(8, tokens=6, seed=version), lambda: None))
        assert trainer.check_versions(responses) == {version}
        client.set_version(version)
    assert [path.name for path in sorted((servers.weights_root / "disk").iterdir())] == ["v3"]


def changed_under_way(response) -> bool:
    return len(set(response.output_versions)) > 1


@pytest.mark.parametrize("way", ["shared", "disk", "xccl"])
def test_versions_are_right_when_weights_change_under_hundreds_of_requests(two_servers, way):
    servers, client, trainer = two_servers
    meta = {
        "shared": WeightUpdateMeta.shared(),
        "disk": WeightUpdateMeta.from_disk(servers.weights_root / "under-way"),
        "xccl": WeightUpdateMeta.from_fsdp_xccl("sglang:d2p1t1"),
    }[way]
    before = trainer.version

    def update_twice() -> None:
        for _ in range(2):
            trainer.step()
            trainer.publish(client, meta)
            time.sleep(0.2)

    responses = asyncio.run(
        gather_while(client, ask(300, tokens=120, seed=1000 * before), update_twice, seen=changed_under_way)
    )
    assert all(len(response.output_tokens) == 120 for response in responses)
    seen = trainer.check_versions(responses)
    assert before in seen
    assert seen & {before + 1, before + 2}
    assert any(map(changed_under_way, responses))


def test_a_paused_client_is_audited_when_it_resumes(two_servers):
    _, client, trainer = two_servers
    client.pause()
    trainer.step()
    publisher = trainer.publish(client)
    assert publisher.agreements == []
    client.resume()
    assert len(publisher.agreements) == 2


def test_an_engine_that_does_not_hold_what_was_published_is_named(two_servers, monkeypatch):
    _, client, trainer = two_servers
    other = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in trainer.model.state_dict().items()}
    trainer.step()
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "weights", lambda dtype: WeightStream.of(other))
        with pytest.raises(WeightUpdateError, match=r"server at 127\.0\.0\.1:\d+ says that it holds version"):
            trainer.publish(client)
    trainer.step()
    trainer.publish(client)


def test_damaged_weights_are_refused_and_the_old_ones_serve_on(two_servers, tmp_path):
    servers, client, trainer = two_servers
    from rollwright.inference.weights.files import write_weights

    directory = servers.weights_root / "damaged"
    digest = write_weights(directory, trainer.model.state_dict().items(), trainer.version + 1)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(WeightUpdateError, match="digest"):
        client.publication.update_from_disk(str(directory), trainer.version + 1, digest)
    assert client.get_version() == trainer.version
    deadline = time.monotonic() + 120  # both were taken out; the monitor finds them fit and puts them back
    while len(client.servers.router.in_service()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    responses = asyncio.run(gather_while(client, ask(4, tokens=5), lambda: None))
    assert trainer.check_versions(responses) == {trainer.version}


@pytest.mark.parametrize("policy", ["keep", "wait"])
def test_other_policies_for_running_requests(model_path, tmp_path, policy):
    with served_model(model_path, tmp_path, on_weight_update=policy) as (_, client):
        trainer = Trainer(model_path)

        def update() -> None:
            trainer.step()
            trainer.publish(client)

        # Requests that are waited for are seen when one was answered before the update and another after it.
        seen = changed_under_way if policy == "keep" else lambda response: response.output_versions[0] > 0
        responses = asyncio.run(gather_while(client, ask(40, tokens=60), update, seen=seen))
        if policy == "wait":
            assert not any(map(changed_under_way, responses))
            assert {0, 1} <= trainer.check_versions(responses)
        else:
            # the versions are labelled; the cache is the old weights', so log-probabilities are a mixture
            assert any(map(changed_under_way, responses))
