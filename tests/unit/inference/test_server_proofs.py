"""Servers that a canary has not proven get no requests, and a proof does not touch the others."""

from __future__ import annotations

import pytest
from fake_sglang import FakeSGLang, ask, connected
from server_parts import served

from rollwright.errors import WeightUpdateError
from rollwright.inference.request import ModelRequest
from rollwright.training.canary import _refuse_unchanged

PROBE = ModelRequest(input_ids=[1, 2, 3])


def commands(fake):
    return [call for call in fake.calls if call != "update_weight_version"]


def test_a_server_that_joins_waits_for_a_proof_that_leaves_the_others_alone(tmp_path):
    first, new = FakeSGLang(), FakeSGLang()
    with connected(first) as client, served(new.app) as address:
        with client.proof():
            client.publication.update_from_disk(str(tmp_path), 0)
            assert len(client.probe(PROBE)) == 1
        assert not client.awaits_proof(0)
        client.use_servers([*client.addresses, address])
        lasting, joined = client.servers.router.servers
        with pytest.raises(WeightUpdateError, match="waits for the trainer's canary"):
            client.weights.bring_back(joined)
        assert client.awaits_proof(0)
        assert not client.awaits_proof(1)  # another server samples version 0 meanwhile
        before = commands(first)
        client.publication.update_from_disk(str(tmp_path), 1)  # a publication does not prove it either
        assert client.servers.router.in_service() == [lasting]
        assert len(commands(first)) > len(before)
        before = commands(first)
        with client.proof():
            client.publication.update_from_disk(str(tmp_path), 1)
            (name,) = client.probe(PROBE)
            assert address in name
            assert client.servers.router.in_service() == [lasting]  # until the end
            assert ask(client).server == lasting.address
        assert commands(first) == before
        assert commands(new)[-3:] == ["pause_generation", "update_weights_from_disk", "continue_generation"]
        assert len(client.servers.router.in_service()) == 2
        assert not client.awaits_proof(1)


def test_a_server_that_fails_its_proof_stays_out(tmp_path):
    first, new = FakeSGLang(), FakeSGLang()
    with connected(first) as client, served(new.app) as address:
        with client.proof():
            client.publication.update_from_disk(str(tmp_path), 0)
            client.probe(PROBE)
        client.use_servers([*client.addresses, address])
        with pytest.raises(RuntimeError), client.proof():  # noqa: PT012 - raised inside the proof
            client.publication.update_from_disk(str(tmp_path), 0)
            raise RuntimeError("it computes with other weights")
        assert len(client.servers.router.in_service()) == 1
        new.fails.add("update_weights_from_disk")
        with client.proof():
            assert client.publication.update_from_disk(str(tmp_path), 0) == []  # the run does not depend on it
            assert client.probe(PROBE) == {}
        assert len(client.servers.router.in_service()) == 1
        assert ask(client).output_versions == [0, 0, 0]


def test_a_server_that_needs_its_weights_again_has_to_be_proven_again(tmp_path):
    fake = FakeSGLang()
    with connected(fake) as client:
        with client.proof():
            client.publication.update_from_disk(str(tmp_path), 3)
            client.probe(PROBE)
        (server,) = client.servers.router.servers
        client.servers.router.take_out(server, "a connection was lost")
        client.weights.bring_back(server)  # it still holds version 3
        assert server.in_service
        client.servers.router.take_out(server, "it was started again")
        fake.version = "0"
        with pytest.raises(WeightUpdateError, match="waits for the trainer's canary"):
            client.weights.bring_back(server)
        assert fake.version == "3"
        assert client.awaits_proof(4)  # nothing else samples


def test_checksums_that_do_not_change_name_the_tensor():
    changed = {"a server": {"model.norm.weight": "1", "experts.3.up_proj.weight": "2", "k_scale": "3"}}
    names = {"model.norm.weight", "experts.3.up_proj.weight"}
    _refuse_unchanged(changed, {"a server": {"model.norm.weight": "4", "experts.3.up_proj.weight": "5", "k_scale": "3"}}, names)
    _refuse_unchanged({}, {}, names)
    with pytest.raises(
        WeightUpdateError, match=r"a server does not take experts\.3\.up_proj\.weight \(experts\): its checksum"
    ):
        _refuse_unchanged(changed, {"a server": {"model.norm.weight": "4", "experts.3.up_proj.weight": "2"}}, names)
