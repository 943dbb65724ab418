"""A conversation that outgrows the context: the client is told in its own terms, and the sample keeps what it recorded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest
from echo import EchoEngine

from rollwright import Workflow
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import TasksetConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import PromptTooLongError, RolloutError
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.workflows.openai_agent import OpenAIAgentWorkflow
from rollwright.workflows.task_runner import TaskRunner

GCONFIG = GenerationHyperparameters(temperature=0.5, max_new_tokens=8)


class Small(EchoEngine):
    """Its context holds a few turns."""

    context_length = 60

    async def agenerate(self, request):
        if len(request.input_ids) >= self.context_length:
            raise PromptTooLongError(f"The prompt has {len(request.input_ids)} tokens.")
        return await super().agenerate(request)


def talk(base_url, api_key, question="q", model="default"):
    """Goes on until it is told that there is no more room."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(model=model, messages=messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "more"}]


def raising(data, base_url, api_key):
    talk(base_url, api_key)


def wrapping(data, base_url, api_key):
    try:
        talk(base_url, api_key)
    except openai.BadRequestError:
        raise RuntimeError("the model failed") from None


def handling(data, base_url, api_key):
    with pytest.raises(openai.BadRequestError) as refused:
        talk(base_url, api_key)
    return 1.0 if refused.value.code == "context_length_exceeded" else 0.0


def silent(data, base_url, api_key):
    handling(data, base_url, api_key)


def rewarding(data, base_url, api_key):
    openai.OpenAI(base_url=base_url, api_key=api_key).post("/rewards", cast_to=object, body={"reward": 0.5})
    talk(base_url, api_key)


def streaming(data, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    list(client.chat.completions.create(model="default", messages=[{"role": "user", "content": "q"}], stream=True))
    list(client.completions.create(model="default", prompt="q" * 100, stream=True))


def completing(data, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    client.completions.create(model="default", prompt="q")
    client.completions.create(model="default", prompt=[5] * 60)  # of which the engine itself says that it does not fit


def responding(data, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    client.responses.create(model="default", input="q")
    client.responses.create(model="default", input="q" * 100)


def messaging(data, base_url, api_key):
    for text in ("q", "q" * 100):
        body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        httpx.post(f"{base_url}/messages", json=body, headers={"x-api-key": api_key}, timeout=60).raise_for_status()


@pytest.fixture
def executor():
    executor = RolloutExecutor(Small(output_length=4), RolloutConfig(max_sample_retries=0, max_failed_share=0.0))
    yield executor
    executor.destroy()


@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        (raising, -1.0),
        (wrapping, -1.0),
        (silent, -1.0),
        (streaming, -1.0),
        (completing, -1.0),
        (responding, -1.0),
        (messaging, -1.0),
        (handling, 1.0),
        (rewarding, 0.5),
    ],
)
def test_an_agent_keeps_what_it_asked(executor, agent, reward):
    workflow = OpenAIAgentWorkflow(agent, build_character_tokenizer(), GCONFIG, overflow_reward=-1.0)
    with workflow.front:
        batch = executor.rollout_batch([{}, {}], workflow, group_size=2)
    assert batch["rewards"].tolist() == [reward] * 4
    assert batch["truncated"].all()
    assert (batch["loss_mask"].sum(1) >= 4).all()


def too_long(data, base_url, api_key):
    talk(base_url, api_key, question="q" * 100)


def broken(data, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    client.chat.completions.create(model="default", messages=[{"role": "user", "content": "q"}])
    raise KeyError("a mistake of the agent's")


@pytest.mark.parametrize(("agent", "said"), [(too_long, "first prompt leaves no room"), (broken, "a mistake of the agent")])
def test_other_failures_are_failures(executor, agent, said):
    workflow = OpenAIAgentWorkflow(agent, build_character_tokenizer(), GCONFIG)
    with workflow.front, pytest.raises(RolloutError, match=said):
        executor.rollout_batch([{}], workflow, group_size=1)


class Talking(Workflow):
    def __init__(self, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def run(self):
        episode = self.model.openai_episode
        talk(episode.base_url, episode.api_key)


class Chatting(Workflow):
    def __init__(self, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def run(self):
        messages = [{"role": "user", "content": "q"}]
        while True:
            (reply,) = self.model.chat(messages)
            messages += [{"role": "assistant", "content": reply.response_text}, {"role": "user", "content": "more"}]


class Broken(Workflow):
    def __init__(self, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def run(self):
        self.model.chat([{"role": "user", "content": "q"}])
        raise KeyError("a mistake of the workflow's")


@pytest.mark.parametrize("kind", [Talking, Chatting])
async def test_a_task_style_workflow_keeps_what_it_asked(kind):
    tokenizer = build_character_tokenizer()
    with OpenAIFront(tokenizer) as front:
        services = SimpleNamespace(openai_front=front, auxiliary_models=[])
        taskset = TasksetConfig(workflow=kind, group_size=1, gconfig=GCONFIG)
        runner = TaskRunner([taskset], tokenizer, services=services, overflow_reward=-0.5)
        sample = SampleEngine(Small(output_length=4), SampleName(0, 0), run_seed=0, loop=asyncio.get_running_loop())
        (experience,) = await runner.arun_episode(sample, {"question": "q"})
    assert (experience.reward, experience.truncated) == (-0.5, True)
    assert experience.action_mask.sum() >= 8  # of two replies at least


async def test_a_mistake_of_a_workflow_stays_one():
    tokenizer = build_character_tokenizer()
    runner = TaskRunner([TasksetConfig(workflow=Broken, group_size=1, gconfig=GCONFIG)], tokenizer)
    sample = SampleEngine(Small(output_length=4), SampleName(0, 0), run_seed=0, loop=asyncio.get_running_loop())
    with pytest.raises(KeyError, match="a mistake of the workflow"):
        await runner.arun_episode(sample, {"question": "q"})
