"""Connections whose request never ends are closed after a limit, with a key or without."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Request

import rollwright
from rollwright.inference.server.service import ServerThread, make_service
from rollwright.inference.server.settings import ServiceSettings

LIMIT = 0.5
HEAD = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
KEYED = HEAD + b"Authorization: Bearer secret\r\n"


@pytest.fixture(scope="module")
def service():
    router = APIRouter()

    @router.post("/echo")
    async def echo(request: Request, seconds: float = 0.0):
        body = await request.json()
        await asyncio.sleep(seconds)
        return body

    settings = ServiceSettings(api_key="secret", receive_seconds=LIMIT)
    server = ServerThread(make_service("echo", [router], settings), settings)
    yield settings.port
    server.stop()


def dripped(port, begin, drop, most=20 * LIMIT):
    """Seconds until the server closes a connection on which ``drop`` is sent again and again after ``begin``."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(0.05)
        started = time.monotonic()
        try:
            client.sendall(begin)
            while time.monotonic() - started < most:
                try:
                    if client.recv(4096) == b"":
                        break
                except TimeoutError:
                    pass
                client.sendall(drop)
        except (ConnectionResetError, BrokenPipeError):
            pass
        return time.monotonic() - started


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (b"", b""),  # says nothing
        (b"", b"\r\n"),
        (b"POST /ec", b"h"),
        (HEAD, b"X-More: 1\r\n"),  # headers that never end, before a key is known
        (KEYED, b"X-More: 1\r\n"),
        (HEAD + b"Content-Length: 5000\r\n\r\n", b" "),  # refused for its key, and sends on
        (KEYED + b"Content-Length: 5000\r\n\r\n", b" "),
        (KEYED + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (KEYED + b"Content-Length: 2\r\n\r\n{}" + KEYED, b"X-More: 1\r\n"),  # the second of a connection
        (KEYED + b"Content-Length: 2\r\n\r\n{}", b"\r\n"),
    ],
    ids=["nothing", "lines", "path", "headers", "headers-key", "body", "body-key", "chunks", "second", "lines-after"],
)
def test_a_request_that_drips_is_closed(service, begin, drop):
    assert 0.5 * LIMIT < dripped(service, begin, drop) < 6 * LIMIT


def test_a_long_answer_and_a_connection_that_is_used_again_are_not_closed(service):
    with httpx.Client(base_url=f"http://127.0.0.1:{service}", headers={"Authorization": "Bearer secret"}) as client:
        for _ in range(2):
            assert client.post("/echo?seconds=1.2", json={"a": 1}, timeout=30).json() == {"a": 1}
            time.sleep(2 * LIMIT)  # kept alive in between


def test_a_body_that_comes_in_time_in_pieces_is_read(service):
    with socket.create_connection(("127.0.0.1", service)) as client:
        client.sendall(KEYED + b"Connection: close\r\nContent-Length: 4\r\n\r\n")
        for byte in (b"[", b"1", b" ", b"]"):
            time.sleep(LIMIT / 10)
            client.sendall(byte)
        client.settimeout(30)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"[1]")


def test_every_http_server_of_the_package_is_started_in_one_place():
    source = Path(rollwright.__file__).parent
    starts = ("uvicorn.Server(", "uvicorn.Config(", "uvicorn.run(", "HTTPServer(", "web.run_app(", "asyncio.start_server(")
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if any(text in path.read_text() for text in starts)}
    relays = {"processes/http_box.py"}  # passes bytes on to the socket of the front, which is started there as well
    assert found - relays == {"inference/server/service.py"}
