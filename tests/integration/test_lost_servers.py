"""Servers that are killed: what ran on them goes on elsewhere, and they come back with the right weights or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time

import psutil
import pytest
from real_servers import Trainer, ask, gather_while, served_model, write_model

from rollwright.errors import EngineError
from rollwright.inference.launcher import ServerProcess
from rollwright.inference.weights.group import WeightGroup
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.placement.local_servers import LocalServers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def kill(servers: LocalServers, number: int) -> None:
    (server,) = psutil.Process(servers.servers[number].pid).children()
    server.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def started_again(servers: LocalServers, number: int, logs):
    """The same command on the same port, as an operator would run it: the process holds the model's first weights."""
    before = servers.servers[number]
    again = ServerProcess(before.command, before.address, logs / "again.log", {"OMP_NUM_THREADS": "1"})
    try:
        again.wait_healthy(300)
        yield again
    finally:
        again.stop()


def wait_in_service(client, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(client.servers.router.in_service()) != count:
        assert time.monotonic() < deadline, client.servers.router.describe()
        time.sleep(0.05)


@pytest.mark.parametrize("way", ["shared", "disk", "xccl"])
def test_a_server_killed_in_the_middle_of_a_batch_comes_back_with_the_published_weights(model_path, tmp_path, way):
    with served_model(model_path, tmp_path / "logs", count=2) as (servers, client):
        meta = {
            "shared": WeightUpdateMeta.shared(),
            "disk": WeightUpdateMeta.from_disk(servers.weights_root / "disk"),
            "xccl": WeightUpdateMeta.from_fsdp_xccl("sglang:d2p1t1"),
        }[way]
        trainer = Trainer(model_path)

        def publish() -> list:
            trainer.step()
            return trainer.publish(client, meta).agreements

        publish()
        responses = asyncio.run(gather_while(client, ask(100, tokens=60), lambda: kill(servers, 0)))
        assert len(responses) >= 100
        assert trainer.check_versions(responses) == {1}
        wait_in_service(client, 1)
        with started_again(servers, 0, tmp_path):
            if way == "xccl":  # these weights are on no disk: it has to wait for the next ones
                deadline = time.monotonic() + 300
                while "version 1 is not on disk" not in client.servers.router.describe():
                    assert time.monotonic() < deadline, client.servers.router.describe()
                    time.sleep(0.05)
                publish()
            wait_in_service(client, 2)
            served = {server.address: server.served for server in client.servers.router.servers}
            responses = asyncio.run(gather_while(client, ask(60, tokens=20, seed=500), lambda: None))
            assert trainer.check_versions(responses) == {trainer.version}
            assert all(server.served > served[server.address] for server in client.servers.router.servers)
            assert len(publish()) == 2  # it takes part in what follows


def test_a_server_killed_in_the_middle_of_a_broadcast_does_not_end_the_publication(model_path, tmp_path, monkeypatch):
    """A group cannot go on without one of its ranks: it is formed anew with those that are left."""
    with served_model(model_path, tmp_path / "logs", count=3) as (servers, client):
        meta = dataclasses.replace(WeightUpdateMeta.from_fsdp_xccl("sglang:d3p1t1"), bucket_bytes=40_000)
        trainer = Trainer(model_path)

        def publish() -> list:
            trainer.step()
            return trainer.publish(client, meta).agreements

        publish()
        sent, send = [], WeightGroup.send

        def send_and_kill(self, bucket) -> None:
            sent.append(bucket)
            if len(sent) == 3:
                kill(servers, 1)
                time.sleep(0.5)
            send(self, bucket)

        monkeypatch.setattr(WeightGroup, "send", send_and_kill)
        took, agreements = [], []

        def publish_timed() -> None:
            started = time.monotonic()
            agreements.extend(publish())
            took.append(time.monotonic() - started)

        responses = asyncio.run(gather_while(client, ask(60, tokens=100), publish_timed))
        assert took[0] < 100  # a second or two; the group's own limit is 120 s
        assert len(agreements) == 2
        assert [server.address for server in client.servers.router.servers if not server.in_service] == [servers.addresses[1]]
        assert all(len(response.output_tokens) == 100 for response in responses)
        assert trainer.check_versions(responses) <= {1, 2}
        assert all(server.load == 0 for server in client.servers.router.servers), client.servers.router.servers
        assert trainer.check_versions(asyncio.run(gather_while(client, ask(8, tokens=6, seed=500), lambda: None))) == {2}


def test_a_server_that_hangs_loses_what_it_was_asked_and_comes_back(model_path, tmp_path, monkeypatch):
    """A stopped process keeps its connections open and answers nothing."""
    with served_model(model_path, tmp_path / "logs", count=2) as (servers, client):
        client.servers.check_interval, client.servers.strikes = 0.5, 2
        monkeypatch.setattr("rollwright.inference.server_set.CHECK_SECONDS", 5.0)
        trainer = Trainer(model_path)
        trainer.step()
        trainer.publish(client)
        (process,) = psutil.Process(servers.servers[0].pid).children()
        try:
            responses = asyncio.run(gather_while(client, ask(100, tokens=60), process.suspend))
            assert all(len(response.output_tokens) == 60 for response in responses)
            assert [server.address for server in client.servers.router.servers if not server.in_service] == [
                servers.addresses[0]
            ]
            trainer.step()
            assert len(trainer.publish(client).agreements) == 1
        finally:
            process.resume()
        wait_in_service(client, 2)
        responses += asyncio.run(gather_while(client, ask(40, tokens=6, seed=500), lambda: None))
        assert trainer.check_versions(responses) == {1, 2}


def test_when_no_server_is_left_the_log_of_the_last_is_told_at_once(model_path, tmp_path):
    with served_model(model_path, tmp_path) as (servers, client):
        client.own(servers)

        async def keep_asking(request) -> EngineError:
            while True:
                try:
                    await client.agenerate(request)
                except EngineError as error:
                    if "broke off" not in str(error):  # the kill came in the middle of an answer
                        return error

        async def scenario():
            running = [asyncio.ensure_future(keep_asking(request)) for request in ask(20, tokens=300)]
            async with asyncio.timeout(300):
                while client.servers.router.servers[0].load < 20:  # noqa: ASYNC110 - the router has no event
                    await asyncio.sleep(0.01)
                kill(servers, 0)
                return await asyncio.gather(*running)

        client.config.setup_timeout = 3600.0  # for which it is not waited
        errors = asyncio.run(scenario())
        assert {str(error).partition("\n")[0].partition(" ended with")[2] for error in errors} == {
            f" status {128 + signal.SIGKILL}. The end of {tmp_path / 'builtin_process-0.log'}:"
        }
        assert os.path.isdir(servers.weights_root)
    assert not os.path.exists(servers.weights_root)
