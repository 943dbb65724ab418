"""An endpoint of the OpenAI chat protocol as an engine: against the real server, and against answers that a provider gives."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.chat_template import end_ids, prompt_ids
from rollwright.data.tokenizer import END, build_byte_tokenizer, load_tokenizer
from rollwright.errors import ConfigError, EngineError, PromptTooLongError, RequestAborted
from rollwright.inference import chat_endpoint
from rollwright.inference.chat_endpoint import ChatEndpoint
from rollwright.inference.request import ModelRequest

TOKENIZER = build_byte_tokenizer()


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",))).filter(lambda text: "<" not in text))
def test_any_text_survives_the_byte_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_the_byte_tokenizer_is_saved_and_loaded(tmp_path):
    build_byte_tokenizer(tmp_path)
    loaded = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Grüße, 世界"}]
    assert prompt_ids(loaded, messages) == prompt_ids(TOKENIZER, messages)


class Provider:
    """An HTTP server that keeps what it was asked and gives the answers that a test lists, then the last one again."""

    def __init__(self, *answers):
        self.asked, self.answers, self.keys = [], list(answers), []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._send(200, {"data": [{"id": name} for name in provider.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                provider.asked.append((self.path, body))
                provider.keys.append(self.headers.get("Authorization"))
                answer = provider.answers.pop(0) if len(provider.answers) > 1 else provider.answers[0]
                if callable(answer):
                    answer = answer()
                self._send(*answer)

            def _send(self, status, body):
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self.models = ["only"]
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def provide():
    started = []

    def start(*answers):
        started.append(Provider(*answers))
        return started[-1]

    yield start
    for provider in started:
        provider.server.shutdown()
        provider.server.server_close()


def said(text, reason="stop"):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


def request(messages, **arguments):
    return ModelRequest(input_ids=prompt_ids(TOKENIZER, messages), gconfig=GenerationHyperparameters(**arguments), seed=7)


USER = [{"role": "user", "content": "2+2?"}]


async def test_messages_and_arguments_arrive_and_the_answer_becomes_tokens(provide):
    provider = provide(said("vier é"), said("cut", "length"))
    engine = ChatEndpoint(provider.url, TOKENIZER, model="m", api_key="secret")
    engine.initialize()
    messages = [{"role": "system", "content": "Be brief.\n"}, *USER, {"role": "assistant", "content": "4"}, *USER]
    response = await engine.agenerate(request(messages, max_new_tokens=9, temperature=0.5, top_p=0.9, stop=["\n"]))
    expected = {
        "model": "m",
        "messages": messages,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["\n"],
    }
    assert provider.asked == [("/v1/chat/completions", expected)]
    assert provider.keys == ["Bearer secret"]
    assert TOKENIZER.decode(response.output_tokens) == "vier é" + END
    assert (response.stop_reason, response.server) == ("stop", f"{provider.url}/v1")
    assert len(response.output_logprobs) == len(response.output_versions) == len(response.output_tokens)
    cut = await engine.agenerate(request(USER, greedy=True, max_new_tokens=3))
    assert provider.asked[1][1] == {"model": "m", "messages": USER, "max_tokens": 3, "temperature": 0.0}
    assert (cut.truncated, TOKENIZER.decode(cut.output_tokens)) == (True, "cut")
    engine.destroy()


async def test_a_busy_endpoint_is_asked_again_and_a_refusal_is_not(provide, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "_PAUSES", (0.01, 0.01))
    busy = provide((429, {"error": {"message": "slow down"}}), (503, {}), said("ok"))
    engine = ChatEndpoint(busy.url, TOKENIZER, model="m")
    assert TOKENIZER.decode((await engine.agenerate(request(USER))).output_tokens) == "ok" + END
    assert len(busy.asked) == 3
    engine.destroy()
    for answer, error, words in [
        ((429, {"error": {"message": "no credit"}}), EngineError, "no credit"),
        (
            (400, {"error": {"message": "This exceeds the maximum context length"}}),
            PromptTooLongError,
            "maximum context length",
        ),
        ((401, {"error": {"message": "bad key"}}), EngineError, "bad key"),
        ((200, {"answer": 42}), EngineError, "answered without choices"),
    ]:
        engine = ChatEndpoint(provide(answer).url, TOKENIZER, model="m")
        with pytest.raises(error, match=words):
            await engine.agenerate(request(USER))
        engine.destroy()


async def test_an_endpoint_that_wants_the_newer_name_of_the_limit_gets_it(provide):
    refusal = (400, {"error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead."}})
    provider = provide(refusal, said("a"), said("b"))
    engine = ChatEndpoint(provider.url + "/v1/", TOKENIZER, model="m")
    for _ in range(2):
        await engine.agenerate(request(USER, max_new_tokens=5))
    assert [[key for key in body if "max" in key] for _, body in provider.asked] == [
        ["max_tokens"],
        ["max_completion_tokens"],
        ["max_completion_tokens"],
    ]
    engine.destroy()


async def test_what_the_protocol_cannot_say_is_refused(provide):
    engine = ChatEndpoint(provide(said("x")).url, TOKENIZER, model="m")
    with pytest.raises(EngineError, match="does not take top_k, regex"):
        await engine.agenerate(request(USER, top_k=5, regex="[0-9]+"))
    with pytest.raises(EngineError, match="does not take stop_token_ids"):
        await engine.agenerate(request(USER, stop_token_ids=[TOKENIZER.convert_tokens_to_ids(END), 50]))
    await engine.agenerate(request(USER, stop_token_ids=sorted(end_ids(TOKENIZER))))
    with pytest.raises(EngineError, match="has to be messages that end with the user's turn"):
        await engine.agenerate(ModelRequest(input_ids=TOKENIZER.encode("a bare prompt", add_special_tokens=False)))
    started = [*prompt_ids(TOKENIZER, USER), *TOKENIZER.encode("Well", add_special_tokens=False)]
    with pytest.raises(EngineError, match="continues an answer"):
        await engine.agenerate(ModelRequest(input_ids=started))
    engine.destroy()
    with pytest.raises(Exception, match="cannot offer tools"):
        prompt_ids(TOKENIZER, USER, [{"type": "function", "function": {"name": "f"}}])


async def test_an_aborted_request_ends(provide):
    gate = threading.Event()
    engine = ChatEndpoint(provide(lambda: (gate.wait(30), said("late"))[1]).url, TOKENIZER, model="m")
    running = asyncio.create_task(engine.agenerate(request(USER)))
    await asyncio.sleep(0.2)
    engine.abort()
    with pytest.raises(RequestAborted):
        await running
    gate.set()
    engine.destroy()


def test_the_name_of_the_model(provide):
    provider = provide(said("x"))
    engine = ChatEndpoint(provider.url, TOKENIZER)
    engine.initialize()
    assert engine.model == "only"
    provider.models = ["a", "b"]
    with pytest.raises(ConfigError, match=r"lists 2 models \(a, b\). Name one: served_model"):
        ChatEndpoint(provider.url, TOKENIZER).initialize()
    with pytest.raises(ConfigError, match=r"does not list its models .*cannot be reached"):
        ChatEndpoint("http://127.0.0.1:9", TOKENIZER).initialize()
