"""Servers are those that the user named, in whatever way; what was named and cannot be used is told."""

import itertools

import pytest
from fake_sglang import FakeSGLang
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from server_parts import served

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError, WeightUpdateError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.network import server_url
from rollwright.inference.router import Router
from rollwright.rollout.engines import RemoteEngine


@pytest.mark.parametrize("argument", ["addresses", "addr"])
@pytest.mark.parametrize("as_list", [True, False])
def test_named_servers_win_over_those_of_the_environment(monkeypatch, argument, as_list):
    """``addr`` is AReaL's name."""
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "127.0.0.1:1")
    with served(FakeSGLang().app) as address:
        client = SGLangClient(RolloutConfig(setup_timeout=60))
        client.initialize(**{argument: [address] if as_list else address})
        try:
            assert client.addresses == [address]
        finally:
            client.destroy()


def test_several_may_be_named_in_one_text():
    with served(FakeSGLang().app) as first, served(FakeSGLang().app) as second:
        client = SGLangClient(RolloutConfig(setup_timeout=60))
        client.initialize(addresses=f"{first}, {second}")
        try:
            assert client.addresses == [first, second]
        finally:
            client.destroy()


def test_an_argument_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match="adress"):
        SGLangClient().initialize(adress="127.0.0.1:1")
    with pytest.raises(ConfigError, match="one of addresses and addr"):
        SGLangClient().initialize(addresses="127.0.0.1:1", addr="127.0.0.1:1")


def test_what_other_trainers_say_of_themselves_is_taken():
    with served(FakeSGLang().app) as address:
        client = SGLangClient(RolloutConfig(setup_timeout=60))
        client.initialize(None, addr=address, train_data_parallel_size=2, engine_id="0")
        client.destroy()


def test_blanks_around_an_address_do_no_harm_and_no_port_is_above_65535(monkeypatch):
    assert server_url(" 127.0.0.1:30000 ") == "http://127.0.0.1:30000"
    for wrong in ("127.0.0.1:99999999", "127.0.0.1:0"):
        with pytest.raises(ConfigError, match="65535"):
            server_url(wrong)


def test_an_update_that_every_server_refuses_unread_leaves_them_in_service(tmp_path):
    """A path below no weights root is a wrong argument, not doubtful weights: what ran goes on, and the next update may be right."""
    fakes = FakeSGLang(version="0"), FakeSGLang(version="0")
    refusing = {fake.app for fake in fakes}
    for fake in fakes:

        @fake.app.middleware("http")
        async def refuse(request, go_on, app=fake.app):
            if app in refusing and request.url.path == "/update_weights_from_disk":
                return JSONResponse({"error": {"message": "below no root"}}, status_code=403)
            return await go_on(request)

    with served(fakes[0].app) as first, served(fakes[1].app) as second:
        client = SGLangClient(RolloutConfig(setup_timeout=60), addresses=[first, second])
        client.initialize()
        try:
            with pytest.raises(WeightUpdateError, match="403"):
                client.publication.update_from_disk(str(tmp_path), 1)
            assert len(client.servers.router.in_service()) == 2
            assert not any(server.has_doubtful_weights for server in client.servers.router.servers)
            assert client.get_version() == 0
            refusing.discard(fakes[0].app)
            assert client.publication.update_from_disk(str(tmp_path), 1) == [first]
            assert [server.address for server in client.servers.router.in_service()] == [first]
        finally:
            client.destroy()


def test_a_missing_key_says_where_to_set_it():
    fake = FakeSGLang()

    @fake.app.middleware("http")
    async def ask_for_a_key(request, go_on):
        if request.url.path != "/health" and request.headers.get("authorization") != "Bearer right":
            return JSONResponse({"error": {"message": "no valid key"}}, status_code=401)
        return await go_on(request)

    with served(fake.app) as address:
        with pytest.raises(EngineError, match=r"Set rollout\.api_key, or ROLLWRIGHT_API_KEY"):
            SGLangClient(RolloutConfig(setup_timeout=60)).initialize(addr=address)
        client = SGLangClient(RolloutConfig(setup_timeout=60, api_key="right"))
        client.initialize(addr=address)
        client.destroy()


@given(names=st.lists(st.sampled_from(["a", "a/1", "a/1/2", "1", ""]), min_size=2, max_size=30))
def test_no_id_on_the_wire_begins_another(names):
    """SGLang aborts by the beginning of an id."""
    router = Router(["a:1"])
    ids = [router.new_wire_id(name) for name in names]
    assert not [(one, other) for one, other in itertools.permutations(ids, 2) if other.startswith(one)]


def test_a_server_that_is_too_old_or_another_is_told():
    """SGLang before 0.5.6 ends what runs at every pause."""
    fake = FakeSGLang()
    fake.app.router.routes[:] = [route for route in fake.app.router.routes if getattr(route, "path", "") != "/server_info"]
    with served(fake.app) as address, pytest.raises(EngineError, match=r"SGLang 0\.5\.6 or newer"):
        SGLangClient(RolloutConfig(setup_timeout=60)).initialize(addr=address)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"enable_deterministic_inference": True}, True),
        ({"enable_deterministic_inference": False}, False),
        ({"server": "rollwright", "enable_deterministic_inference": True, "batch_invariant": False}, False),
        ({"server": "rollwright", "enable_deterministic_inference": True, "batch_invariant": True}, True),
    ],
)
def test_a_deterministic_run_is_refused_by_servers_that_go_by_the_batch(said, expected):
    fake = FakeSGLang()
    fake.info = said
    with served(fake.app) as address:
        config = RolloutConfig(setup_timeout=60, backend="sglang", addresses=[address])
        rollout = RemoteEngine(config, deterministic=True)
        if expected:
            rollout.initialize()
            assert rollout.sampler.is_batch_invariant
            rollout.destroy()
        else:
            with pytest.raises(ConfigError, match="what RemoteInferenceEngine answers may depend on what else is computed"):
                rollout.initialize()
