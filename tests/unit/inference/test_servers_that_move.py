"""Servers that come back at another address: given the current weights by who publishes, then asked by the others."""

from __future__ import annotations

import contextlib
import time

import pytest
from fake_sglang import FakeSGLang, ask
from server_parts import served

from rollwright.config.sections import RolloutConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.router import Router

CONFIG = RolloutConfig(setup_timeout=60, request_timeout=60)


@contextlib.contextmanager
def clients(*fakes, count, only_ask=()):
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(fake.app)) for fake in fakes]
        modes = ({"only_asks": True} if number in only_ask else {"servers_are_replaced": True} for number in range(count))
        made = [RemoteInferenceEngine(SGLangBackend, CONFIG, addresses=addresses, **mode) for mode in modes]
        for client in made:
            client.initialize()
            stack.callback(client.destroy)
        yield made


def wait_until(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def says(publisher):
    """What a rank says of what it has published."""
    return lambda: (publisher.get_version(), publisher.weight_holders)


def test_a_server_at_a_new_address_is_given_the_weights_before_anybody_asks_it(tmp_path):
    lasting, lost, new = FakeSGLang(), FakeSGLang(), FakeSGLang()
    with (
        clients(lasting, lost, count=3, only_ask=(2,)) as (publisher, controller, worker),
        served(new.app) as address,
    ):
        with pytest.raises(WeightUpdateError, match="has not been given version 0"):
            worker.weights.bring_back(worker.servers.router.servers[0])
        assert not worker.servers.router.in_service()  # until it is told
        controller.weights.publisher = says(publisher)
        publisher.publication.update_from_disk(str(tmp_path), 1)
        controller.weights.adopt_version()
        worker.weights.follow(controller.addresses, controller.get_version())
        assert worker.get_version() == controller.get_version() == 1
        assert len(worker.servers.router.in_service()) == 2
        present = [publisher.addresses[0], address]
        controller.servers.router.replace(present)
        worker.servers.router.replace(present)
        time.sleep(1.5)  # both have looked
        assert [server.in_service for server in controller.servers.router.servers] == [True, False]
        assert [server.in_service for server in worker.servers.router.servers] == [True, False]
        publisher.servers.router.replace(present)
        for client in (publisher, controller):
            wait_until(lambda client=client: len(client.servers.router.in_service()) == 2)
        worker.weights.follow(present, 1)
        assert len(worker.servers.router.in_service()) == 2
        assert len(new.bodies["update_weights_from_disk"]) == 1
        commands = {name: len(bodies) for name, bodies in new.bodies.items()}
        worker.servers.router.take_out(worker.servers.router.servers[1], "a doubt")
        worker.weights.bring_back(worker.servers.router.servers[1])
        assert {name: len(bodies) for name, bodies in new.bodies.items()} == commands  # it sends no commands
        assert ask(worker).output_versions == [1, 1, 1]


def test_a_server_that_refuses_a_publication_is_left_out_until_it_holds_it(tmp_path):
    takes, refuses = FakeSGLang(), FakeSGLang()
    with clients(takes, refuses, count=2) as (publisher, controller):
        controller.weights.publisher = says(publisher)
        publisher.servers.stop_watching()
        refuses.fails.add("update_weights_from_disk")
        good, bad = publisher.addresses
        controller.pause()
        assert publisher.publication.update_from_disk(str(tmp_path), 1) == [good]
        controller.weights.adopt_version()
        controller.resume()
        assert controller.get_version() == 1
        assert controller.weight_holders == [good]
        with pytest.raises(WeightUpdateError, match="holds version '0', and has not been given version 1"):
            controller.weights.bring_back(controller.servers.router.servers[1])
        assert ask(controller).server == good
        refuses.fails.clear()
        publisher.weights.bring_back(publisher.servers.router.servers[1])
        wait_until(lambda: controller.weight_holders == [good, bad])
        assert refuses.version == "1"


def test_what_is_lost_while_a_client_starts_is_waited_for_later(tmp_path):
    living, stale, dead = FakeSGLang(version="4"), FakeSGLang(version="0"), FakeSGLang()
    with served(living.app) as first, served(stale.app) as second:
        with served(dead.app) as third:
            pass
        addresses = [first, second, third]
        client = RemoteInferenceEngine(SGLangBackend, CONFIG, addresses=addresses, servers_are_replaced=True)
        client.initialize()
        try:
            assert client.get_version() == 4
            assert client.weight_holders == [first]
            client.servers.stop_watching()
            client.publication.update_from_disk(str(tmp_path), 4)  # what a gang does that takes another one's place
            assert client.weight_holders == [first, second]
        finally:
            client.destroy()


def test_a_publication_takes_in_a_server_that_has_just_joined(tmp_path):
    lasting, new = FakeSGLang(), FakeSGLang()
    with clients(lasting, count=1) as (publisher,), served(new.app) as address:
        publisher.servers.stop_watching()
        publisher.servers.router.replace([*publisher.addresses, address])
        assert publisher.weight_dtype == publisher.backend.held_dtype(publisher.servers.router.servers[0])
        assert publisher.publication.update_from_disk(str(tmp_path), 1) == publisher.addresses
        assert len(publisher.servers.router.in_service()) == 2


def test_a_server_that_joins_while_weights_change_answers_who_publishes(tmp_path):
    lasting, new = FakeSGLang(), FakeSGLang()
    with clients(lasting, count=2) as (publisher, controller), served(new.app) as address:
        for client in (publisher, controller):
            client.servers.stop_watching()
        controller.weights.publisher = says(publisher)
        controller.pause()
        present = [*publisher.addresses, address]
        publisher.servers.router.replace(present)
        publisher.publication.update_from_disk(str(tmp_path), 1)
        controller.servers.router.replace(present)
        controller.weights.bring_back(controller.servers.router.servers[1])
        assert len(controller.servers.router.in_service()) == 2
        pauses, resumes = (len(new.bodies[f"{word}_generation"]) for word in ("pause", "continue"))
        assert pauses == resumes  # of the publisher alone: one paused by the controller would not answer its audit
        controller.resume()
        assert len(new.bodies["continue_generation"]) == resumes + 1


def test_what_is_with_a_server_that_left_is_asked_elsewhere():
    router = Router(["a:1", "b:1"])
    server = router.choose("one")
    stays = next(each for each in router.servers if each is not server)
    router.replace([stays.address, "c:1"])
    assert router.choose("one") is stays
    assert "c:1: out of service, it has just joined" in router.describe()
    router.put_back(router.servers[1])
    assert router.choose("two").address == "c:1"
