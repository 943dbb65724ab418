"""What a request may cost before it is refused: time, memory, and work for clients that have gone."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_parts import served, tiny_engine

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference.server.application import create_application
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.prompts import PromptReader, longest_token
from rollwright.inference.server.settings import ServerSettings

MIB = 1 << 20


def memory(name: str) -> int:
    """VmRSS or VmHWM (the most since ``forget_peak``) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(context_length=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine):
    app = create_application(engine, ServerSettings(max_body_bytes=64 * MIB), model_path="tiny")
    with served(app) as address:
        yield address


PATHS = {
    "/generate": lambda text: {"text": text},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text", ["a", "hello ", " ", "\u6f22"])
def test_a_text_that_cannot_fit_costs_little(address, path, text):
    text *= 8 * MIB // len(text.encode())
    body = json.dumps(PATHS[path](text), ensure_ascii=False).encode()
    forget_peak()
    before, started = memory("VmHWM"), time.process_time()
    answer = httpx.post(f"http://{address}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert time.process_time() - started < 5
    assert memory("VmHWM") - before < 300 * MIB


def test_by_default_no_body_is_read_that_the_context_could_not_hold(engine):
    app = create_application(engine, settings := ServerSettings(), model_path="tiny")
    assert settings.max_body_bytes == MIB + 256 * 256
    with served_without_end(app) as address:
        body = b'{"text": "' + b"a" * (2 * MIB) + b'"}'
        answer = httpx.post(f"http://{address}/generate", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413


def test_large_bodies_at_once_take_little_and_what_they_took_is_given_back(address):
    body = b'{"text": "' + b"a" * (30 * MIB) + b'"}'
    forget_peak()
    before = memory("VmRSS")

    def ask(_: int) -> int:
        connection = http.client.HTTPConnection(address, timeout=300)  # which sends the body as it is, without a copy
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        return connection.getresponse().status

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [400] * 8
    assert memory("VmHWM") - before < 500 * MIB
    deadline = time.monotonic() + 20
    while memory("VmRSS") - before > 200 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_body_of_a_client_that_goes_is_dropped(address, engine):
    """It goes while its body is on the way, and while its request waits or runs."""
    for declared in (30 * MIB, 100_000):
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(declared))
        connection.endheaders(b'{"text": "' + b"a" * 1000)
        time.sleep(0.05)
        connection.close()
    httpx.post(f"http://{address}/pause_generation", json={"mode": "retract"}, timeout=60)
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps({"text": "ab", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 60
    while engine.stats()["queued"] + engine.stats()["waiting"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    connection.close()
    time.sleep(0.2)
    sampled = engine.stats()["generated_tokens"]
    httpx.post(f"http://{address}/continue_generation", timeout=60)
    while engine.stats()["queued"] + engine.stats()["waiting"] + engine.stats()["running"] > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.stats()["generated_tokens"] - sampled < 200


def test_two_clients_that_send_nothing_do_not_hold_up_small_requests(address):
    slow = []
    for _ in range(3):
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(10 * MIB))
        connection.endheaders(b"{")
        slow.append(connection)
    answered = threading.Event()

    def ask() -> None:
        httpx.post(f"http://{address}/generate", json={"text": "ab", "sampling_params": {"max_new_tokens": 2}}, timeout=60)
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    assert answered.wait(30)
    for connection in slow:
        connection.close()


class Counting:
    """Encodes like another tokenizer, and counts the characters that it was given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.encoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self):
        return len(self.tokenizer)

    def __bool__(self):
        return True

    def encode(self, text, **options):
        self.encoded += len(text)
        return self.tokenizer.encode(text, **options)


def test_what_fits_is_encoded_and_what_does_not_is_not():
    tokenizer = Counting(build_character_tokenizer())
    reader = PromptReader(tokenizer, 20_000)
    assert len(reader.encode("a" * 20_000, "text")) == 20_000
    with pytest.raises(RequestError, match="20001 tokens, longer than the limit of 20000"):
        reader.encode("a" * 20_001, "text")
    tokenizer.encoded = 0
    with pytest.raises(RequestError, match="tokens, longer than the limit"):
        reader.encode("a" * 170_000, "text")  # of a length that longer tokens could make fit
    assert tokenizer.encoded < 70_000
    tokenizer.encoded = 0
    with pytest.raises(RequestError, match=r"\d+ characters, longer than"):
        reader.encode("a" * (longest_token(tokenizer) * 20_000 + 1), "text")
    assert tokenizer.encoded == 0


def served_without_end(app):
    """Like ``served``, for an application whose engine goes on after it."""
    import contextlib

    from rollwright.inference.server.service import ServerThread

    @contextlib.contextmanager
    def opened():
        thread = ServerThread(app, ServerSettings(port=0))
        try:
            yield thread.url.removeprefix("http://")
        finally:
            thread.stop()

    return opened()
