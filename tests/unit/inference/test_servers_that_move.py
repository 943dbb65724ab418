"""Servers that come back at another address: given the current weights by who publishes, then asked by the others."""

from __future__ import annotations

import contextlib
import time

import pytest
from fake_sglang import FakeSGLang, ask
from server_parts import served

from rollwright.config.sections import RolloutConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.router import Router

CONFIG = RolloutConfig(setup_timeout=60, request_timeout=60)


@contextlib.contextmanager
def clients(*fakes, count):
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(fake.app)) for fake in fakes]
        made = [SGLangClient(CONFIG, addresses=addresses) for _ in range(count)]
        for client in made:
            client.initialize()
            stack.callback(client.destroy)
        yield made


def wait_until(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_at_a_new_address_is_given_the_weights_before_anybody_asks_it(tmp_path):
    lasting, lost, new = FakeSGLang(), FakeSGLang(), FakeSGLang()
    with clients(lasting, lost, count=3) as (publisher, controller, worker), served(new.app) as address:
        worker.only_asks = True
        publisher.update_weights_from_disk(str(tmp_path), 1)
        controller.set_version(1)
        worker.adopt_version()
        assert worker.get_version() == 1
        present = [publisher.addresses[0], address]
        controller.use_servers(present)
        worker.use_servers(present)
        time.sleep(1.5)  # both have looked
        assert [server.in_service for server in controller.router.servers] == [True, False]
        assert [server.in_service for server in worker.router.servers] == [True, False]
        publisher.use_servers(present)
        for client in (publisher, controller, worker):
            wait_until(lambda client=client: len(client.router.in_service()) == 2)
        assert len(new.bodies["update_weights_from_disk"]) == 1
        commands = {name: len(bodies) for name, bodies in new.bodies.items()}
        worker.router.take_out(worker.router.servers[1], "a doubt")
        worker._bring_back(worker.router.servers[1])
        assert {name: len(bodies) for name, bodies in new.bodies.items()} == commands  # it sends no commands
        assert ask(worker).output_versions == [1, 1, 1]


def test_a_publication_takes_in_a_server_that_has_just_joined(tmp_path):
    lasting, new = FakeSGLang(), FakeSGLang()
    with clients(lasting, count=1) as (publisher,), served(new.app) as address:
        publisher._monitor.stop()
        publisher.use_servers([*publisher.addresses, address])
        assert publisher.weight_dtype == publisher.held_dtype(publisher.router.servers[0])
        assert publisher.update_weights_from_disk(str(tmp_path), 1) == publisher.addresses
        assert len(publisher.router.in_service()) == 2


def test_servers_with_different_weights_have_no_version_to_adopt():
    one, other = FakeSGLang(version="3"), FakeSGLang(version="3")
    with clients(one, other, count=1) as (client,):
        other.version = "4"
        with pytest.raises(WeightUpdateError, match="hold different weights"):
            client.adopt_version()


def test_what_is_with_a_server_that_left_is_asked_elsewhere():
    router = Router(["a:1", "b:1"])
    server = router.choose("one")
    stays = next(each for each in router.servers if each is not server)
    router.replace([stays.address, "c:1"])
    assert router.choose("one") is stays
    assert "c:1: out of service, it has just joined" in router.describe()
    router.put_back(router.servers[1])
    assert router.choose("two").address == "c:1"
