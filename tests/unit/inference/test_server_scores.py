"""Log-probabilities over both protocols: alternatives, and scored prompts, as clients such as lm-eval ask for them."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
import torch
from builtin_models import tiny_model
from fake_sglang import FakeSGLang
from fake_sglang import ask as ask_sglang
from fake_sglang import connected as to_sglang
from server_parts import served, tiny_engine
from test_vllm_client import FakeVLLM
from test_vllm_client import ask as ask_vllm
from test_vllm_client import connected as to_vllm

from rollwright.errors import EngineError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine):
    with served(create_application(engine, ServerSettings(model_name="tiny"))) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0)


def post(address, path, **body):
    answer = httpx.post(f"http://{address}{path}", json=body, timeout=120)
    return answer.status_code, answer.json()


def rows(engine, tokens, temperature=1.0):
    """Float64 log-probabilities; row ``i`` is the distribution of token ``i + 1``."""
    with torch.no_grad():
        return (engine.model(torch.tensor([tokens])).logits[0].double() / temperature).log_softmax(-1)


def test_chat_alternatives(client, engine):
    asked = [{"role": "user", "content": "hi"}]
    settings = {"model": "tiny", "messages": asked, "max_tokens": 5, "seed": 1, "temperature": 0.7, "logprobs": True}
    answer = client.chat.completions.create(**settings, top_logprobs=4, extra_body={"return_token_ids": True})
    tokens = answer.choices[0].token_ids
    expected = rows(engine, answer.prompt_token_ids + tokens, 0.7)[len(answer.prompt_token_ids) - 1 :]
    for row, token, entry in zip(expected, tokens, answer.choices[0].logprobs.content, strict=False):
        values, ids = row.topk(4)
        assert [one.token for one in entry.top_logprobs] == [engine.tokenizer.decode([i]) for i in ids]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
    streamed = client.chat.completions.create(**settings, top_logprobs=4, stream=True)
    pieces = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [piece.model_dump() for piece in pieces] == [e.model_dump() for e in answer.choices[0].logprobs.content]
    with pytest.raises(openai.BadRequestError, match="needs logprobs=true"):
        client.chat.completions.create(model="tiny", messages=asked, top_logprobs=2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_scores_the_prompt(address, client, engine, stream):
    body = {"prompt": PROMPT, "max_tokens": 4, "echo": True, "logprobs": 2, "seed": 3, "model": "tiny"}
    choices = (
        [choice for chunk in client.completions.create(**body, stream=True) for choice in chunk.choices] if stream else None
    )
    if choices is None:
        choices = client.completions.create(**body).choices
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    scored = [one.logprobs for one in choices if one.logprobs]
    texts, logprobs, tops, offsets = ([x for one in scored for x in getattr(one, name)] for name in names)
    text = "".join(choice.text for choice in choices)
    assert text.startswith(PROMPT)
    assert offsets == [sum(map(len, texts[:i])) for i in range(len(texts))]
    prompt = engine.tokenizer.encode(PROMPT)
    tokens = prompt + engine.tokenizer.convert_tokens_to_ids(texts[len(prompt) :])
    assert (logprobs[0], tops[0]) == (None, None)
    for row, token, logprob, top in zip(rows(engine, tokens), tokens[1:], logprobs[1:], tops[1:], strict=False):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, ids = row.topk(2)
        expected = {engine.tokenizer.decode([i]): float(v) for i, v in [*zip(ids, values, strict=True), (token, row[token])]}
        assert top == pytest.approx(expected, abs=1e-4)


def test_nothing_is_sampled_where_a_prompt_is_only_scored(address, engine):
    status, answer = post(address, "/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert status == 200
    assert answer["choices"][0]["text"] == PROMPT
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(engine.tokenizer.encode(PROMPT))
    assert answer["usage"]["completion_tokens"] == 0
    status, answer = post(address, "/v1/completions", prompt=PROMPT, max_tokens=3, echo=True)  # text alone
    assert answer["choices"][0]["text"].startswith(PROMPT)
    assert answer["choices"][0]["logprobs"] is None
    assert post(address, "/v1/completions", prompt=PROMPT, max_tokens=0)[0] == 400
    sampling = {"max_new_tokens": 0}
    status, answer = post(
        address,
        "/generate",
        text=PROMPT,
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
    )
    assert (
        answer["output_ids"] == answer["meta_info"]["output_token_logprobs"] == answer["meta_info"]["output_top_logprobs"] == []
    )
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(engine.tokenizer.encode(PROMPT))
    status, answer = post(address, "/generate", text=PROMPT, sampling_params=sampling, return_logprob=True)
    assert status == 400
    assert "only scores a prompt" in answer["error"]["message"]


def test_sglangs_fields(address, engine):
    prompts = [[10, 20, 30, 40], [11, 12, 13]]
    status, answers = post(
        address,
        "/generate",
        input_ids=prompts,
        sampling_params={"max_new_tokens": 3, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=[2, 0],
        logprob_start_len=[1, -1],
        return_text_in_logprobs=True,
    )
    assert status == 200
    meta, plain = (answer["meta_info"] for answer in answers)
    assert not {"input_token_logprobs", "input_top_logprobs", "output_top_logprobs"} & plain.keys()
    expected = rows(engine, prompts[0] + answers[0]["output_ids"])
    assert meta["input_token_logprobs"][0] == [None, 20, engine.tokenizer.decode([20])]  # SGLang's first has no value
    assert meta["input_top_logprobs"][0] is None
    entries = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    for row, (logprob, token, text), top in zip(expected[1:], entries, tops, strict=False):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert text == engine.tokenizer.decode([token])
        assert [one[1] for one in top] == row.topk(2).indices.tolist()
    for wrong, said in (
        ({"top_logprobs_num": 2}, "needs return_logprob"),
        ({"return_logprob": True, "logprob_start_len": 9}, "not in a prompt of 2"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ):
        status, answer = post(address, "/generate", input_ids=[5, 6], **wrong)
        assert status == 400
        assert said in answer["error"]["message"]


def test_what_the_client_asks_comes_back_over_the_wire(address, engine):
    """``serve-model`` behind the SGLang client gives what the engine in this process gives."""
    client = SGLangClient(addresses=[address])
    client.initialize()
    try:
        for start in (0, 1, 3, 4):
            request = ModelRequest([10, 20, 30, 40], seed=5, top_logprobs=2, prompt_logprobs_from=start)
            request.gconfig = request.gconfig.new(max_new_tokens=3, temperature=0.7)
            (here,) = engine.generate([request])
            payload = client.backend.payload(request, "x", client.servers.router.servers[0])
            response = client.requests.read_answer(
                request, client.servers.ask(client.servers.router.servers[0], "POST", "/generate", payload), 0
            )
            assert response.output_tokens == here.output_tokens
            assert response.input_logprobs == pytest.approx(here.input_logprobs, abs=1e-5)
            assert [[token for token, _ in top or ()] for top in response.input_top_logprobs] == [
                [token for token, _ in top or ()] for top in here.input_top_logprobs
            ]
            assert [[t for t, _ in top] for top in response.output_top_logprobs] == [
                [t for t, _ in top] for top in here.output_top_logprobs
            ]
    finally:
        client.destroy()


SCORED = {"input_ids": [1, 2, 3], "top_logprobs": 1, "prompt_logprobs_from": 1}


def test_sglang_is_asked_and_read_in_its_own_form():
    fake = FakeSGLang()

    def answer(body):
        whole = fake.default_answer(body)
        whole["meta_info"] |= {
            "output_top_logprobs": [[[-0.1, 5, None]]] * 3,
            "input_token_logprobs": [[None, 1, None], [-0.2, 2, None], [-0.3, 3, None]],
            "input_top_logprobs": [None, [[-0.1, 4, None]], [[-0.1, 6, None]]],
        }
        return whole

    fake.answer = answer
    with to_sglang(fake) as client:
        response = ask_sglang(client, request=SCORED)
        body = fake.bodies["generate"][-1]
        assert (body["top_logprobs_num"], body["logprob_start_len"]) == (1, 0)
        assert response.output_top_logprobs == [[(5, -0.1)]] * 3
        assert response.input_logprobs == [-0.2, -0.3]
        assert response.input_top_logprobs == [[(4, -0.1)], [(6, -0.1)]]
        ask_sglang(client)
        assert not {"top_logprobs_num", "logprob_start_len"} & fake.bodies["generate"][-1].keys()
        with pytest.raises(EngineError, match=r"prompt_logprobs_from .* temperature 0\.7"):
            ask_sglang(client, request=SCORED, temperature=0.7)


def test_vllm_is_asked_and_read_in_its_own_form():
    fake = FakeVLLM()

    def score(choice):
        for entry in choice["logprobs"]["content"]:  # the sampled token first, then the others by rank
            entry["top_logprobs"] = [{"token_id": entry["token_id"], "logprob": -0.5}, {"token_id": 5, "logprob": -0.1}]

    fake.change = score
    fake.more = {"prompt_logprobs": [None, {"2": {"logprob": -0.2}, "9": {"logprob": -0.1}}, {"3": {"logprob": -0.3}}]}
    with to_vllm(fake) as client:
        response = ask_vllm(client, request=SCORED)
        assert fake.bodies[-1]["sampling_params"].items() >= {"logprobs": 2, "prompt_logprobs": 1}.items()
        assert response.output_top_logprobs == [[(5, -0.1)]] * 2
        assert response.input_logprobs == [-0.2, -0.3]
        assert response.input_top_logprobs == [[(9, -0.1)], [(3, -0.3)]]
        with pytest.raises(EngineError, match=r"prompt_logprobs_from .* temperature 0\.7"):
            ask_vllm(client, request=SCORED, temperature=0.7)


def test_lm_eval_multiple_choice(address, engine):
    """The body of lm-eval's ``local-completions``, and its own reading of the answer (``parse_logprobs``)."""
    context, choices = "the quick ", ["brown fox", "blue whale", "e"]
    encode = engine.tokenizer.encode
    prompts = [encode(context) + encode(choice, add_special_tokens=False) for choice in choices]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, answer = post(address, "/v1/completions", **body)
    assert status == 200
    length = len(encode(context))
    for prompt, choice in zip(prompts, sorted(answer["choices"], key=lambda choice: choice["index"]), strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        expected = rows(engine, prompt)[length - 1 : -1]
        targets = torch.tensor(prompt[length:])
        assert sum(logprobs) == pytest.approx(float(expected.gather(1, targets[:, None]).sum()), abs=1e-3)
        assert is_greedy == bool((expected.argmax(-1) == targets).all())
    greedy = int(rows(engine, encode(context))[-1].argmax())
    status, answer = post(address, "/v1/completions", **body | {"prompt": [[*encode(context), greedy]]})
    scored = answer["choices"][0]["logprobs"]
    assert scored["token_logprobs"][length] == max(scored["top_logprobs"][length].values())


def test_lm_eval_generate_until(address, engine):
    end = engine.tokenizer.eos_token
    body = {
        "model": "tiny",
        "prompt": [engine.tokenizer.encode(PROMPT)],
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n\n", end],
    }
    status, answer = post(address, "/v1/completions", **body, seed=1234)
    assert status == 200
    assert isinstance(answer["choices"][0]["text"], str)


def test_an_architecture_with_its_own_forward_scores_prompts():
    from rollwright.data.tokenizer import build_character_tokenizer
    from rollwright.inference.backends.builtin.engine import BuiltinEngine

    tokenizer = build_character_tokenizer()
    with BuiltinEngine(tiny_model("gpt_neox", vocab_size=len(tokenizer)), tokenizer, kv_cache_bytes=8 << 20) as engine:
        prompt = tokenizer.encode("abcabc")
        (response,) = engine.generate([ModelRequest(prompt, prompt_logprobs_from=0)])
        expected = rows(engine, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert response.input_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-4)
        assert json.dumps(response.input_logprobs)
