"""What guards one service guards all: the inference server, the retrieval service, the OpenAI front and ``serve`` mode."""

from __future__ import annotations

import socket

import httpx
import pytest
from server_parts import tiny_engine
from services import service
from starlette.datastructures import Headers

from rollwright.inference.server.application import create_application
from rollwright.inference.server.request_guard import Guard
from rollwright.inference.server.service import bind
from rollwright.inference.server.settings import ServerSettings, ServiceSettings

JSON = {"Content-Type": "application/json"}
#: Of each service: a GET and a POST, whose body it takes.
ASKED = {
    "server": ("/model_info", "/pause_generation", {}),
    "retrieval": ("/health", "/retrieve", {"queries": ["red"]}),
    "front": ("/v1/models", "/v1/rewards", {"reward": 1.0}),
    "serve": ("/status", "/runs", {}),
}


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(context_length=256) as engine:
        yield engine


@pytest.fixture(params=ASKED)
def asked(request, engine):
    with service(request.param, engine) as client:
        yield client, *ASKED[request.param]


def test_every_name_of_this_machine_is_answered(asked):
    client, get, post, body = asked
    port = client.base_url.port
    for name in ("localhost", "127.0.0.1", "[::1]", "LocalHost", f"localhost:{port}", "127.0.0.1:1", "[::1]:80"):
        for headers in ({"Host": name}, {"Host": name, "Origin": f"http://{name}"}):
            assert client.get(get, headers=headers).status_code == 200, headers
            assert client.post(post, json=body, headers=headers).status_code == 200, headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example:80"},
        {"Host": "evil.example#localhost"},
        {"Host": "localhost@evil.example"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://localhost.evil.example"},
    ],
    ids=str,
)
def test_a_page_of_another_site_is_refused(asked, headers):
    client, get, post, body = asked
    assert client.get(get, headers=headers).status_code == 403
    refused = client.post(post, json=body, headers=headers)
    assert refused.status_code == 403
    (name, value) = next(iter(headers.items()))
    assert f"{name} {value!r} is not a name of this service" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_body_that_a_page_may_send_unasked_is_refused(asked, kind):
    client, _, post, _ = asked
    refused = client.post(post, content=b"{}", headers={"Content-Type": kind} if kind else {})
    assert refused.status_code == 415
    assert "application/json" in refused.json()["error"]["message"]
    streamed = client.post(post, content=iter([b"{}"]), headers={"Content-Type": kind} if kind else {})
    assert streamed.status_code == 415
    assert client.post(post, content=b"{}", headers={"Content-Type": "application/json; charset=utf-8"}).status_code != 415


def test_a_body_over_the_limit_is_refused_unread(asked):
    client, _, post, _ = asked
    assert client.post(post, content=b" " * 5000, headers=JSON).status_code == 413
    assert client.post(post, content=iter([b" " * 3000] * 2), headers=JSON).status_code == 413  # which does not say its length


@pytest.mark.parametrize("kind", ["front", "serve"])
def test_a_key_of_odd_letters_is_a_wrong_key(engine, kind):
    get, post, body = ASKED[kind]
    with service(kind, engine) as client:
        for key in (b"Bearer \xc3\xa9", b"Bearer \xff", b"\xff"):
            assert client.post(post, json=body, headers={"Authorization": key}).status_code == 401
            assert client.get(get, headers={"Authorization": key}).status_code == 401


def test_the_counts_of_serve_mode_want_its_key(engine):
    with service("serve", engine) as client:
        assert client.get("/status").status_code == 200
        assert httpx.get(client.base_url.join("/status"), timeout=60).status_code == 401


def test_nothing_changes_by_get(engine):
    app = create_application(engine, ServerSettings())
    readable = {"/health", "/ping", "/health_generate", "/metrics", "/weights_checker", "/v1/models", "/v1/models/{name}"}
    readable |= {"/", "/v1/responses/{id}"}
    readable |= {"/model_info", "/get_model_info", "/server_info", "/get_server_info", "/weight_version", "/get_weight_version"}
    assert {path for path, methods in app.openapi()["paths"].items() if "get" in methods} == readable


def test_addresses_and_names_that_a_service_is_bound_to_or_told_are_its_names():
    guard = Guard(None, ServiceSettings("0.0.0.0", api_key="k", allowed_hosts=["models.example"]))

    def refusal(host, server=("10.1.2.3", 80)):

        found = guard.refusal({"path": "/health", "server": server}, Headers({"host": host}))
        return found and found.status

    for name in ("0.0.0.0:5", "10.1.2.3", "models.example:443", socket.gethostname(), "localhost"):
        assert refusal(name) is None, name
    assert refusal("10.1.2.4") == 403
    assert refusal("10.1.2.3", None) == 403


def test_localhost_reaches_a_service_by_both_families():
    settings = ServiceSettings("localhost")
    sockets = bind(settings)
    try:
        assert {listener.getsockname()[:2] for listener in sockets} <= {("127.0.0.1", settings.port), ("::1", settings.port)}
        assert settings.port
    finally:
        for listener in sockets:
            listener.close()
