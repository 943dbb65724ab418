"""The OpenAI front: unmodified ``openai`` clients over real HTTP, recorded token for token."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import parts
import pytest
from parts import TOOL_TEMPLATE

from rollwright import WORKFLOWS, Workflow
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import WorkflowError
from rollwright.experience.normaliser import normalise
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.request import ModelResponse
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.workflows.task_runner import TaskRunner

DOCS = Path(__file__).resolve().parents[3] / "docs" / "openai-front.md"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
# What the template would write otherwise: spaces, and the order of keys.
TOOL_CALL = '<tool_call>{"arguments":  {"b": 2, "a": 1}, "name": "add"}</tool_call>'


class Script(parts.Script):
    """Takes a hundredth of a second for an answer, whose tokens are told apart by their log-probabilities."""

    def __init__(self, tokenizer, *texts):
        super().__init__(tokenizer, *texts, version=5, seconds=0.01, context_length=512)

    def logprobs(self, tokens):
        return [-0.01 * (position + 1) for position in range(len(tokens))]


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer(chat_template=TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def front(tokenizer):
    with OpenAIFront(tokenizer, "policy") as front:
        yield front


def sample_engine(engine) -> SampleEngine:
    return SampleEngine(engine, SampleName(0, 0), run_seed=1, loop=asyncio.get_running_loop())


def plain_client(episode) -> openai.OpenAI:
    base_url, api_key = episode
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def tool_agent(client: openai.OpenAI) -> str:
    """An agent as users write it; it knows nothing of us."""
    messages = [{"role": "user", "content": "1+2?"}]
    while True:
        reply = (
            client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, temperature=0.7).choices[0].message
        )
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return reply.content
        for call in reply.tool_calls:
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})


async def test_an_unmodified_agent_is_recorded_token_for_token(front, tokenizer):
    engine = Script(tokenizer, TOOL_CALL, "it is 3")
    sample = sample_engine(engine)
    with front.episode(sample) as episode:
        assert await asyncio.to_thread(tool_agent, plain_client(episode)) == "it is 3"
    first, second = sample.recorder.records
    assert tokenizer.decode(first.output_ids, skip_special_tokens=True) == TOOL_CALL  # as sampled, odd spaces included
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]
    assert second.rid == first.rid
    (experience,) = episode.experiences(reward=1.0)
    sampled = [token for record in (first, second) for token in record.output_ids]
    assert experience.response_tokens[experience.action_mask].tolist() == sampled
    assert experience.logprobs[experience.action_mask].tolist() == pytest.approx([*first.logprobs, *second.logprobs])
    assert set(experience.versions[experience.action_mask].tolist()) == {5}
    trajectory = normalise([experience], sample.recorder)
    assert trajectory["temperature"].tolist() == pytest.approx([0.7])
    assert int(trajectory["loss_mask"].sum()) == len(sampled)


async def test_branches_become_experiences_and_each_token_is_trained_once(front, tokenizer):
    sample = sample_engine(Script(tokenizer, "a", "b", "c"))

    def agent(client):
        messages = [{"role": "user", "content": "q"}]
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages.append({"role": "assistant", "content": reply.content})
        for question in ("left", "right"):
            client.chat.completions.create(model="policy", messages=[*messages, {"role": "user", "content": question}])

    with front.episode(sample) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    experiences = episode.experiences(reward=0.5)
    assert len(experiences) == 2
    assert sum(int(e.action_mask.sum()) for e in experiences) == sum(len(r.output_ids) for r in sample.recorder.records)
    records = sample.recorder.records
    assert records[0].rid == records[1].rid != records[2].rid


async def test_another_temperature_is_a_branch(front, tokenizer):
    sample = sample_engine(Script(tokenizer, "a", "b"))

    def agent(client):
        messages = [{"role": "user", "content": "q"}]
        for temperature in (1.0, 0.5):
            reply = client.chat.completions.create(model="policy", messages=messages, temperature=temperature)
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": "more"},
            ]

    with front.episode(sample) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    assert normalise(episode.experiences(reward=0.0), sample.recorder)["temperature"].tolist() == [1.0, 0.5]


async def test_rewards_of_the_run_a_turn_and_a_call(front, tokenizer):
    sample = sample_engine(Script(tokenizer, TOOL_CALL, "3", "bye"))

    def agent(client):
        messages, ids = [{"role": "user", "content": "1+2?"}], []
        for follow in ({"role": "tool", "content": "3"}, {"role": "user", "content": "thanks"}, None):
            answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            ids.append(answer.id)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), follow]
        return ids

    with front.episode(sample) as episode:
        client = plain_client(episode)
        ids = await asyncio.to_thread(agent, client)
        assert ids == episode.calls
        episode.set_reward(1.0)
        episode.set_reward(0.25, call=ids[0])
        episode.set_reward(0.5, turn=0)
        await asyncio.to_thread(client.post, "/rewards", cast_to=object, body={"reward": -1.0, "turn": -1})
        for wrong in ({"call": "chatcmpl-x"}, {"turn": 7}, {"call": ids[0], "turn": 0}):
            with pytest.raises(WorkflowError):
                episode.set_reward(1.0, **wrong)
        with pytest.raises(WorkflowError, match="finite"):
            episode.set_reward(float("nan"))
    (experience,) = episode.experiences()
    assert experience.reward == 1.0
    ends = (experience.response_tokens == tokenizer.eos_token_id).nonzero().flatten()
    given = {int(place): float(value) for place, value in enumerate(experience.token_rewards) if value}
    masked = [int(end) for end in ends if experience.action_mask[end]]
    assert given == {masked[0]: 0.25, masked[1]: 0.5, masked[2]: -1.0}


class StreamingScript(Script):
    """Gives its answers token by token."""

    async def astream(self, request):
        whole = await self.agenerate(request)
        for end in range(1, len(whole.output_tokens) + 1):
            yield ModelResponse(
                whole.input_tokens,
                whole.output_tokens[:end],
                whole.output_logprobs[:end],
                whole.output_versions[:end],
                stop_match=whole.stop_match,
                temperature=whole.temperature,
            )


async def test_an_engine_that_streams_is_streamed_and_recorded_once(front, tokenizer):
    sample = sample_engine(StreamingScript(tokenizer, "one two"))

    def agent(client):
        ask = [{"role": "user", "content": "go"}]
        stream = client.chat.completions.create(model="policy", messages=ask, stream=True)
        return [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]

    with front.episode(sample) as episode:
        pieces = await asyncio.to_thread(agent, plain_client(episode))
    assert "".join(pieces) == "one two"
    assert len(pieces) > 3
    (record,) = sample.recorder.records
    assert tokenizer.decode(record.output_ids, skip_special_tokens=True) == "one two"
    assert record.metadata["call"] == episode.calls[0]


@pytest.mark.parametrize("kind", [Script, StreamingScript])
async def test_streaming_records_the_same(front, tokenizer, kind):
    sample = sample_engine(kind(tokenizer, TOOL_CALL, "done"))

    def agent(client):
        stream = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "go"}], tools=TOOLS, stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        return [call.function.name for delta in deltas for call in delta.tool_calls or []]

    with front.episode(sample) as episode:
        assert await asyncio.to_thread(agent, plain_client(episode)) == ["add"]
    assert tokenizer.decode(sample.recorder.records[0].output_ids, skip_special_tokens=True) == TOOL_CALL
    assert len(episode.calls) == 1


async def test_concurrent_runs_are_told_apart(front, tokenizer):
    samples = [sample_engine(Script(tokenizer, f"answer {index}")) for index in range(6)]

    async def run(index):
        with front.episode(samples[index]) as episode:
            client = episode.async_client()
            assert client.model_path == "policy"
            ask = [{"role": "user", "content": f"{index}"}]
            return await asyncio.gather(*(client.chat.completions.create(model="policy", messages=ask) for _ in range(3)))

    for index, answers in enumerate(await asyncio.gather(*map(run, range(6)))):
        assert {answer.choices[0].message.content for answer in answers} == {f"answer {index}"}
        assert len(samples[index].recorder) == 3


async def test_a_key_is_refused_unless_its_run_is_open(front, tokenizer):
    sample = sample_engine(Script(tokenizer, "x"))
    episode = front.episode(sample)
    client = plain_client(episode)
    assert (await asyncio.to_thread(client.models.list)).data[0].id == "policy"
    stranger = openai.OpenAI(base_url=episode.base_url, api_key="guessed", max_retries=0)
    ask = {"model": "policy", "messages": [{"role": "user", "content": "q"}]}
    with pytest.raises(openai.AuthenticationError):
        await asyncio.to_thread(stranger.chat.completions.create, **ask)
    with pytest.raises(openai.NotFoundError):
        await asyncio.to_thread(client.chat.completions.create, **{**ask, "model": "gpt"})
    sample.close("has ended")
    with pytest.raises(openai.AuthenticationError, match="ended"):
        await asyncio.to_thread(client.chat.completions.create, **ask)
    assert len(sample.recorder) == 0


async def test_a_path_that_nothing_answers_is_told_with_those_that_there_are(front, tokenizer):
    client = plain_client(front.episode(sample_engine(Script(tokenizer, "x"))))
    with pytest.raises(openai.NotFoundError, match=r"There is no /v1/embeddings here; there are .*/v1/chat/completions"):
        await asyncio.to_thread(client.embeddings.create, model="policy", input="q")


async def test_what_a_request_leaves_out_comes_from_the_run(front, tokenizer):
    engine = Script(tokenizer, "x")
    gconfig = GenerationHyperparameters(temperature=0.3, max_new_tokens=9, stop=["!"], top_k=4)
    with front.episode(sample_engine(engine), gconfig=gconfig) as episode:
        client = episode.async_client()
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "q"}])
        await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "q"}], temperature=1.0, max_tokens=3, stop="?"
        )
    used = [request.gconfig for request in engine.requests]
    assert (used[0].temperature, used[0].max_new_tokens, used[0].stop, used[0].top_k) == (0.3, 9, ["!"], 4)
    assert (used[1].temperature, used[1].max_new_tokens, used[1].stop) == (1.0, 3, ["?"])


async def test_a_synchronous_client_does_not_block_the_loop_that_answers(front, tokenizer):
    client = front.episode(sample_engine(Script(tokenizer, "x"))).client()
    with pytest.raises(WorkflowError, match="get_openai_async_client"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "q"}])


async def test_the_unix_socket_serves_the_same_and_is_removed(tokenizer):
    with OpenAIFront(tokenizer, "policy") as front, front.episode(sample_engine(Script(tokenizer, "hello"))) as episode:
        path = front.socket
        transport = httpx.HTTPTransport(uds=str(path))
        client = openai.OpenAI(
            base_url="http://127.0.0.1:8000/v1",
            api_key=episode.api_key,
            max_retries=0,
            http_client=httpx.Client(transport=transport),
        )
        ask = [{"role": "user", "content": "hi"}]
        answer = await asyncio.to_thread(client.chat.completions.create, model="policy", messages=ask)
        assert answer.choices[0].message.content == "hello"
        with pytest.raises(openai.AuthenticationError):
            await asyncio.to_thread(client.with_options(api_key="wrong").chat.completions.create, model="policy", messages=ask)
        client.close()
        assert len(episode.calls) == 1
    assert not path.parent.exists()


def test_any_engine_is_recorded_and_the_server_ends(tokenizer):
    front, before = OpenAIFront(tokenizer), sum(thread.name == "rollwright OpenAI front" for thread in threading.enumerate())
    with front, front.episode(Script(tokenizer, "hello")) as episode:
        answer = plain_client(episode).completions.create(model="default", prompt="say", max_tokens=8)
        assert answer.choices[0].text == "hello"
        (experience,) = episode.experiences(reward=1.0)
        assert tokenizer.decode(experience.response_tokens, skip_special_tokens=True) == "hello"
        assert sum(thread.name == "rollwright OpenAI front" for thread in threading.enumerate()) == before + 1
    assert sum(thread.name == "rollwright OpenAI front" for thread in threading.enumerate()) == before
    with pytest.raises(openai.APIConnectionError):
        plain_client(episode).models.list()


async def test_the_code_of_the_docs_runs(front, tokenizer):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {"__name__": "docs_openai_front"}
    for block in blocks[:3]:
        exec(compile(block, str(DOCS), "exec"), names)

    async def framework(data, base_url, api_key):
        return await names["agent"](data, base_url, api_key)

    names["some_framework"] = framework
    row = {"messages": [{"role": "user", "content": "1+1?"}], "question": "1+1?", "answer": "2"}
    workflow = names["Agent"](tokenizer, GenerationHyperparameters(max_new_tokens=8))
    with workflow.front:
        (experience,) = await workflow.arun_episode(sample_engine(Script(tokenizer, "2")), row)
    assert experience.reward == 1.0

    layout = FormatConfig(prompt_key="question", response_key="answer")
    taskset = TasksetConfig(workflow=names["MyAgent"], format=layout, group_size=1)
    runner = TaskRunner([taskset], tokenizer, services=SimpleNamespace(openai_front=front, auxiliary_models=[]))
    (experience,) = await runner.arun_episode(sample_engine(Script(tokenizer, "2")), row)
    assert experience.reward == 1.0
    WORKFLOWS._entries.pop("my_agent")


@pytest.mark.parametrize("kept", ["get_openai_client", "get_openai_async_client"])
async def test_a_client_that_a_reused_workflow_keeps_belongs_to_its_next_sample(front, tokenizer, kept):
    """As the guide to workflows has it: the client is made in ``__init__``, and ``reset`` renews the question alone."""
    made = []

    class Keeper(Workflow):
        resettable = True

        def __init__(self, task, model, auxiliary_models):
            super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
            self.client = getattr(self.model, kept)()
            made.append(self)
            self.question = task.raw_task["question"]

        def reset(self, task):
            self.question = task.raw_task["question"]

        def ask(self):
            return self.client.chat.completions.create(
                model=self.client.model_path, messages=[{"role": "user", "content": self.question}]
            )

        def run(self):
            answer = self.ask() if kept == "get_openai_client" else asyncio.run(self.ask())
            self.model.set_reward(float(answer.choices[0].message.content))
            return self.model.extract_experience_from_history()

    taskset = TasksetConfig(workflow=Keeper, group_size=1)
    runner = TaskRunner([taskset], tokenizer, services=SimpleNamespace(openai_front=front, auxiliary_models=[]))
    for question in ("3", "4", "5"):
        sample = sample_engine(Script(tokenizer, question))
        (experience,) = await runner.arun_episode(sample, {"question": question})
        assert experience.reward == float(question)
        (record,) = sample.recorder.records  # this sample's, not the one's that the client was made for
        assert question in tokenizer.decode(record.prompt_ids)
    assert len(made) == 1
