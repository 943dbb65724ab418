"""Servers that die, hang or refuse at every moment of an update: the others go on, and nothing samples with doubtful weights."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from fake_sglang import FakeSGLang, ask, connected
from server_parts import served

from rollwright.config.sections import RolloutConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.request import ModelRequest
from rollwright.inference.router import Server
from rollwright.inference.weights import group as weight_group
from rollwright.inference.weights.transfer import WeightUpdateMeta


@contextlib.contextmanager
def with_one_that_dies(lasting: FakeSGLang, dying: FakeSGLang, **settings):
    """A client of two servers, and a call that ends the second."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(served(lasting.app))
        end = contextlib.ExitStack()
        stack.callback(end.close)
        other = end.enter_context(served(dying.app))
        config = RolloutConfig(setup_timeout=60, request_timeout=60, **settings)
        client = SGLangClient(config, addresses=[address, other])
        client.initialize()
        stack.callback(client.destroy)
        yield client, end.close


def in_service(client) -> list[int]:
    return [place for place, server in enumerate(client.servers.router.servers) if server.in_service]


def wait_until(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_update_goes_on_without_a_server_that_died_unnoticed(tmp_path):
    lasting, dying = FakeSGLang(), FakeSGLang()
    with with_one_that_dies(lasting, dying) as (client, kill):
        kill()
        client.pause()  # nothing was asked since: here it is noticed
        assert in_service(client) == [0]
        assert client.publication.update_from_disk(str(tmp_path), 1) == client.addresses[:1]
        client.resume()
        assert ask(client).output_versions == [1, 1, 1]


@pytest.mark.parametrize("call", ["pause_generation", "continue_generation", "update_weights_from_disk"])
def test_a_server_that_refuses_a_part_of_an_update_is_taken_out(call, tmp_path):
    willing, unwilling = FakeSGLang(), FakeSGLang()
    with connected(willing, unwilling) as client:
        client.servers.stop_watching()
        unwilling.fails = {call}
        assert client.publication.update_from_disk(str(tmp_path), 1)[0] == client.addresses[0]
        assert in_service(client) == [0]
        assert not client.weights.is_paused
        assert ask(client).output_versions == [1, 1, 1]


def test_where_no_server_can_be_paused_none_is_given_weights(tmp_path):
    fake = FakeSGLang()
    with connected(fake) as client:
        client.servers.stop_watching()
        fake.fails = {"pause_generation"}
        with pytest.raises(
            WeightUpdateError, match=r"No sglang server took version 1.*pause_generation answered 500: on purpose"
        ):
            client.publication.update_from_disk(str(tmp_path), 1)
        assert not client.weights.is_paused
        assert "update_weights_from_disk" not in fake.bodies
        assert client.get_version() == 0


def test_a_publication_waits_for_the_only_server_to_be_started_again(tmp_path):
    fake = FakeSGLang()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        address = first.enter_context(served(fake.app))
        client = SGLangClient(RolloutConfig(setup_timeout=60), addresses=[address])
        client.initialize()
        stack.callback(client.destroy)
        first.close()
        again, taken = FakeSGLang(), []

        def publish() -> None:
            client.pause()
            taken.extend(client.publication.update_from_disk(str(tmp_path), 1))
            client.resume()

        publishing = threading.Thread(target=publish)
        publishing.start()
        wait_until(lambda: in_service(client) == [])
        stack.enter_context(served(again.app, port=int(address.rpartition(":")[2])))
        publishing.join(60)
        assert taken == [address]
        assert ask(client).output_versions == [1, 1, 1]


def test_what_a_server_was_asked_is_asked_elsewhere_when_it_is_taken_out():
    """A server that hangs keeps its connections open: nobody but us will end the wait."""
    fakes = FakeSGLang(), FakeSGLang()
    fakes[1].delay = 3600
    with connected(*fakes) as client:

        async def scenario():
            running = [asyncio.ensure_future(client.agenerate(ModelRequest(input_ids=[1, 2]))) for _ in range(10)]
            while len(fakes[1].bodies.get("generate", [])) < 5:  # noqa: ASYNC110 - the fake has no event
                await asyncio.sleep(0.01)
            client.servers.router.servers[1].failed_checks = 2
            await asyncio.to_thread(client.servers.check, _Hanging(client.servers.router.servers[1], client))
            return await asyncio.wait_for(asyncio.gather(*running), 60)

        responses = asyncio.run(scenario())
        assert all(response.output_tokens == [7, 8, 9] for response in responses)
        assert in_service(client) == [0]
        assert all(server.load == 0 for server in client.servers.router.servers)


def _Hanging(server: Server, client) -> Server:  # noqa: N802 - stands for a server
    client.servers.is_healthy = lambda _: False
    return server


def test_the_last_server_keeps_what_it_was_asked():
    fake = FakeSGLang()
    fake.delay = 0.3
    with connected(fake) as client:

        async def scenario():
            running = asyncio.ensure_future(client.agenerate(ModelRequest(input_ids=[1, 2])))
            while not fake.bodies.get("generate"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            client.servers.router.take_out(client.servers.router.servers[0], "slow")
            return await running

        assert asyncio.run(scenario()).output_tokens == [7, 8, 9]
        assert len(fake.bodies["generate"]) == 1


def test_a_failed_update_leaves_doubtful_weights_whatever_the_label_says(tmp_path):
    fake = FakeSGLang(version="4")
    with connected(fake) as client:
        client.servers.stop_watching()
        fake.fails = {"update_weights_from_disk"}
        with pytest.raises(WeightUpdateError, match="took version 5"):
            client.publication.update_from_disk(str(tmp_path), 5)
        fake.fails = set()
        (server,) = client.servers.router.servers
        with pytest.raises(WeightUpdateError, match="'4', which may be incomplete, and version 4 is not on disk"):
            client.weights.bring_back(server)
        client.publication.update_from_disk(str(tmp_path), 5)  # the next publication makes it whole
        assert server.in_service
        assert not server.has_doubtful_weights
        assert ask(client).output_versions == [5, 5, 5]


def test_a_restarted_server_that_calls_its_first_weights_0_is_given_the_published_ones(tmp_path):
    fake = FakeSGLang()
    with connected(fake) as client:
        client.publication.update_from_disk(str(tmp_path), 0)  # the trainer's first weights, not those that it was started with
        client.servers.stop_watching()
        client.servers.router.take_out(client.servers.router.servers[0], "restarts")
        fake.bodies.clear()
        fake.version = "0"
        client.weights.bring_back(client.servers.router.servers[0])
        assert len(fake.bodies["update_weights_from_disk"]) == 1


def test_a_server_is_not_brought_back_with_weights_that_another_client_has_replaced(tmp_path):
    fakes = FakeSGLang(), FakeSGLang()
    with connected(*fakes) as client:
        client.publication.update_from_disk(str(tmp_path), 1)
        client.servers.stop_watching()
        client.servers.router.take_out(client.servers.router.servers[1], "restarts")
        fakes[0].version, fakes[1].version = "2", "default"
        client.set_version(2)
        with pytest.raises(WeightUpdateError, match="version 2 is not on disk"):
            client.weights.bring_back(client.servers.router.servers[1])
        fakes[1].version = "2"  # the other client has given it the weights, too
        client.weights.bring_back(client.servers.router.servers[1])
        assert in_service(client) == [0, 1]
        assert len(fakes[1].bodies["update_weights_from_disk"]) == 1


def test_a_server_that_comes_back_while_the_client_resumes_is_not_left_paused(tmp_path):
    fakes = FakeSGLang(), FakeSGLang()
    with connected(*fakes) as client:
        client.publication.update_from_disk(str(tmp_path), 1)
        client.servers.stop_watching()
        back = client.servers.router.servers[1]
        client.pause()
        client.servers.router.take_out(back, "gone for a moment")
        fakes[1].version = "default"  # it was restarted
        restore, begun, go_on = client.weights.restore, threading.Event(), threading.Event()

        def slow_restore(server):
            begun.set()
            assert go_on.wait(60)
            restore(server)

        client.weights.restore = slow_restore
        bringing = threading.Thread(target=client.weights.bring_back, args=(back,))
        resuming = threading.Thread(target=client.resume)
        bringing.start()
        assert begun.wait(60)
        resuming.start()
        go_on.set()
        for thread in (bringing, resuming):
            thread.join(60)
        assert back.in_service
        assert fakes[1].calls[-1] == "continue_generation"


def test_shared_files_are_not_written_while_a_server_is_brought_back_with_them(tmp_path):
    fake = FakeSGLang()
    weights = {"a": torch.zeros(3)}
    with connected(fake) as client:
        meta = WeightUpdateMeta.shared(tmp_path / "shared" / "current")
        client.update_weights(meta, version=1, weights=weights)
        client.servers.stop_watching()
        with client.weights.lock:  # as the monitor holds it
            publishing = threading.Thread(
                target=lambda: client.update_weights(meta, version=2, weights={"a": torch.ones(3)}), daemon=True
            )
            publishing.start()
            publishing.join(0.3)
            assert client.publication.mapped_weights(None)._mapped["a"].tolist() == [0, 0, 0]
        publishing.join(60)
        assert client.publication.mapped_weights(None)._mapped["a"].tolist() == [1, 1, 1]
        assert client.get_version() == 2


def test_versions_on_disk_of_a_run_that_went_back_do_not_take_the_place_of_the_newest(tmp_path):
    fake = FakeSGLang()
    meta = WeightUpdateMeta.from_disk(tmp_path)
    with connected(fake) as client:
        for version in (7, 8, 9, 3):  # killed after 9, and resumed from the checkpoint of 2
            client.update_weights(meta, version=version, weights={"a": torch.zeros(1)})
        assert [path.name for path in tmp_path.iterdir()] == ["v3"]


def test_the_watch_over_servers_outlives_what_nobody_foresaw(caplog):
    fakes = FakeSGLang(), FakeSGLang()
    with connected(*fakes) as client:
        whole = client.backend.on_connected
        tried = threading.Event()

        def fails_once(server):
            client.backend.on_connected = whole
            tried.set()
            raise ZeroDivisionError

        client.backend.on_connected = fails_once
        client.servers.router.take_out(client.servers.router.servers[0], "for a moment")
        assert tried.wait(60)
        wait_until(lambda: in_service(client) == [0, 1])
        assert "Watching the servers failed" in caplog.text


def test_abort_on_an_event_loop_does_not_hold_it_up():
    fake, calls, go_on = FakeSGLang(), [], threading.Event()
    fake.is_held = True

    def abort_slowly(*_) -> None:
        calls.append("begun")
        go_on.wait(60)
        calls.append("ended")

    with connected(fake) as client:

        async def scenario():
            running = asyncio.ensure_future(client.agenerate(ModelRequest(input_ids=[1, 2], rid="talk")))
            while not fake.bodies.get("generate"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            client.backend.abort_on_server = abort_slowly
            client.abort("talk")
            assert "ended" not in calls  # the server's answer is not waited for
            go_on.set()
            fake.is_held = False
            await running

        asyncio.run(scenario())
        wait_until(lambda: calls == ["begun", "ended"])


def test_more_requests_than_the_system_allows_connections_wait_for_one():
    """Where every request had a socket of its own at once, those beyond the limit would look like a server that is gone."""
    script = textwrap.dedent(
        """
        import asyncio, resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
        from rollwright.config.sections import RolloutConfig
        from rollwright.inference.request import ModelRequest
        from rollwright.inference.backends.sglang import SGLangClient
        client = SGLangClient(RolloutConfig(request_retries=0), addresses=[sys.argv[1]])
        client.initialize()
        async def crowd():
            return await asyncio.gather(*(client.agenerate(ModelRequest(input_ids=[1, 2])) for _ in range(600)))
        assert len(asyncio.run(crowd())) == 600
        assert client.servers.router.in_service()
        client.destroy()
        """
    )
    fake = FakeSGLang()
    fake.delay = 0.2
    fake.context_length = 1 << 20
    with served(fake.app) as address:
        done = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_group_that_was_left_says_so():
    group = object.__new__(weight_group.WeightGroup)
    group._group, group._store, group.name, group.device = object(), object(), "g", torch.device("cpu")
    group.close()
    with pytest.raises(WeightUpdateError, match="was left"):
        group.broadcast(torch.zeros(1))
