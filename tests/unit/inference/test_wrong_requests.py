"""Requests that no engine can serve are refused alone: a step is shared, and what breaks it would end all that it computes."""

import asyncio
import json
import math
import threading
import time

import httpx
import numpy as np
import pytest
from server_parts import served, tiny_engine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.application import create_application
from rollwright.inference.server.bodies import Chat, Completion, Generate, NativeSampling
from rollwright.inference.server.settings import ServerSettings

HUGE = 1 << 70
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(context_length=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    roots = [str(tmp_path_factory.mktemp("roots"))]
    app = create_application(engine, ServerSettings(max_body_bytes=1 << 20, weights_roots=roots), model_path="tiny")
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        yield client


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": math.inf}, "temperature is inf; it has to be a finite number"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -0.5}, "temperature is -0.5; it has to be at least 0"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0.0}, "top_p is 0.0; it has to be more than 0.0 and at most 1.0"),
        ({"top_k": 1.5}, "top_k is 1.5; it has to be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [["a"]]}, "stop is"),
        ({"stop": [1]}, "stop is"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is"),
        ({"n_samples": 4}, "send n_samples requests"),
    ],
)
def test_a_generation_argument_that_breaks_its_limits_is_named(engine, changes, said):
    gconfig = GenerationHyperparameters(max_new_tokens=2).new(**changes)
    with pytest.raises(EngineError, match=said):
        engine.generate([ModelRequest(input_ids=[5], gconfig=gconfig)])


@pytest.mark.parametrize("name", ["position_ids", "branch_ids"])
@pytest.mark.parametrize("value", [5, "5", ["a"], [None], [[1]], {"a": 1}, [-1], [HUGE], [True]])
def test_a_layout_of_what_are_no_numbers_is_named(name, value):
    with pytest.raises(EngineError, match=name):
        ModelRequest(input_ids=[5], **{name: value})


def test_positions_beyond_the_context_are_refused(engine):
    with pytest.raises(EngineError, match="position_ids hold 99999"):
        engine.generate([ModelRequest(input_ids=[5], position_ids=[99999])])


def test_layouts_may_be_arrays(engine):
    request = ModelRequest(
        input_ids=[5, 6],
        position_ids=np.arange(2),
        branch_ids=np.zeros(2, int),
        gconfig=GenerationHyperparameters(max_new_tokens=2),
    )
    (response,) = engine.generate([request])
    assert response.output_tokens


def test_what_no_token_can_be_and_no_length_can_reach_does_no_harm(engine):
    gconfig = GenerationHyperparameters(
        max_new_tokens=3, min_new_tokens=HUGE, stop_token_ids=[HUGE, -1], top_k=HUGE, seed=-HUGE, ignore_eos=True
    )
    (response,) = engine.generate([ModelRequest(input_ids=[5], gconfig=gconfig)])
    assert len(response.output_tokens) == 3


#: Values that the JSON of a request may hold anywhere.
ODD = [
    *(None, True, 0, 1, -1, HUGE, -HUGE, 10**400, 1.5, 1e30, 1e308, math.inf, math.nan),
    *("", "x", "5", "\0", "a\0b", "\ud800", "x" * 5000),
    *([], [1], ["a"], [""], [None], [[1]], [[]], [{}], [HUGE], [-1], ["a", 1], {}, {"a": 1}, {"type": "text"}),
    *([{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "assistant", "content": "a", "tool_calls": 5}]),
    *([{"function": {"name": 5}}], [{"function": {"name": "f", "parameters": "x"}}]),
    [{"function": {"name": "f", "parameters": {"properties": [1]}}}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": [1]}}]}],
]
CONTROL = {
    "/pause_generation": ["mode"],
    "/abort_request": ["rid"],
    "/update_weight_version": ["new_version"],
    "/update_weights_from_disk": ["model_path", "weight_version", "content_digest", "abort_all_requests"],
    "/init_weights_update_group": ["group_name", "master_port"],
    "/destroy_weights_update_group": ["group_name"],
    "/update_weights_from_distributed": ["names", "group_name", "weight_version"],
    "/weights_checker": ["action"],
    "/release_memory_occupation": ["tags"],
    "/resume_memory_occupation": ["tags"],
}


def parameters(body):
    """Names of all parameters that a body knows: honoured, neutral and ignored."""
    return [*body.model_fields, *body.neutral, *sorted(body.ignored)]


def bodies():
    """Every parameter of every path, one odd value after the other."""
    for body, path, base in (
        (Chat, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        (Completion, "/v1/completions", {"prompt": "hi"}),
    ):
        for name in parameters(body):
            yield from ((path, {**base, "max_tokens": 2, name: value}) for value in ODD)
    for name in parameters(NativeSampling):
        yield from (("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, name: value}}) for value in ODD)
    for name in parameters(Generate):
        prompt = {} if name in ("text", "input_ids") else {"input_ids": [5]}
        yield from (("/generate", {**prompt, "sampling_params": {"max_new_tokens": 2}, name: value}) for value in ODD)
    for path, names in CONTROL.items():
        yield from ((path, {name: value}) for name in names for value in ODD)


def test_no_value_of_any_parameter_is_a_fault_of_the_server(server, engine):
    async def ask_all():
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(base_url=server.base_url, limits=limits, timeout=60) as client:

            async def ask(path, body):
                content = json.dumps(body)  # with infinities and NaN, as Python writes them
                answer = await client.post(path, content=content, headers=JSON)
                return None if answer.status_code < 500 else (path, body, answer.text)

            faults = [await ask(path, body) for path, body in bodies()]
        return [fault for fault in faults if fault is not None]

    assert asyncio.run(ask_all()) == []
    server.post("/continue_generation", json={})
    assert server.get("/health_generate").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/update_weights_from_disk", {"model_path": "a\0b"}, "is no path"),
        ("/generate", {"input_ids": [5], "sampling_params": {"sampling_seed": 10**400}}, "at most 9223372036854775807"),
        ("/generate", {"input_ids": [5], "sampling_params": {"sampling_seed": 1e30}}, "sampling_seed=1e+30"),
        ("/v1/completions", {"prompt": [5], "seed": 10**400}, "at most 9223372036854775807"),
        ("/update_weight_version", {"new_version": 1 << 31}, "between 0 and 2147483647"),
        ("/update_weight_version", {"new_version": 1e30}, "new_version=1e+30"),
    ],
)
def test_what_no_machine_can_hold_is_refused_by_name(server, path, body, said):
    answer = server.post(path, json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_no_version_follows_the_last(server):
    last = (1 << 31) - 1
    assert server.post("/update_weight_version", json={"new_version": last}).status_code == 200
    for path, body in (("/update_weight_version", {}), ("/update_weights_from_disk", {"model_path": "x"})):
        assert server.post(path, json=body).status_code in (400, 403)
    assert "No version follows" in server.post("/update_weight_version", json={}).json()["error"]["message"]
    answer = server.post("/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    assert answer.json()["meta_info"]["weight_version"] == str(last)
    server.post("/update_weight_version", json={"new_version": 0})


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b'"x"', b"null", b"{"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/abort_request"])
def test_a_body_that_is_no_object_is_a_400(server, path, raw):
    answer = server.post(path, content=raw, headers=JSON)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_more_completions_than_allowed_are_refused_before_they_are_made(server):
    limited = httpx.Timeout(60)  # so many would take for ever
    many = server.post("/generate", json={"input_ids": [5], "sampling_params": {"n": 1 << 40}}, timeout=limited)
    assert (many.status_code, "limit of 256" in many.text) == (400, True)
    wide = server.post("/generate", json={"text": ["hi"] * 257}, timeout=limited)
    assert (wide.status_code, "limit of 256" in wide.text) == (400, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chat_template_kwargs": {"chat_template": "{{ 'other' }}"}}, "cannot set 'chat_template'"),
        ({"chat_template_kwargs": {"truncation": True, "max_length": 2}}, "cannot set 'max_length'"),
        ({"chat_template_kwargs": {"return_tensors": "pt"}}, "cannot set 'return_tensors'"),
        ({"stream_options": {"include_use": True}}, "cannot set 'include_use'; it takes include_usage"),
    ],
)
def test_a_request_does_not_change_how_its_prompt_is_made(server, changes, said):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **changes}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_variables_of_the_template_reach_it(server):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.post("/v1/chat/completions", json=body).status_code == 200


def test_a_long_prompt_does_not_hold_up_health_checks():
    """A client that hears nothing from ``/health`` takes its server out."""
    answers: list[httpx.Response] = []

    def ask(address: str) -> None:
        answers.append(httpx.post(f"http://{address}/generate", json={"text": "hello " * 5_000_000}, timeout=120))

    app = create_application(tiny_engine(), ServerSettings(max_body_bytes=64 << 20), model_path="tiny")
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        for _ in range(10):  # the machine itself may stand still for as long; a loop that is held up always does
            asked = threading.Thread(target=ask, args=(address,))
            asked.start()
            slowest = 0.0
            while asked.is_alive():
                started = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - started)
                asked.join(0.02)
            assert answers[-1].status_code == 400
            if slowest < 0.5 * answers[-1].elapsed.total_seconds():
                return
    raise AssertionError("each time, a health check took as long as half of the prompt")


def test_logprobs_0_asks_for_those_of_the_sampled_tokens(server):
    answer = server.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, "logprobs": 0})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 2
    (choice,) = server.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).json()["choices"]
    assert choice["logprobs"] is None
