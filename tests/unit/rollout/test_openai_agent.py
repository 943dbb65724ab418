"""Agents as workflows: run by the executor, scored by what they return or post."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai
import pytest
from echo import EchoEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import DatasetConfig, FormatConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.loader import TaskLoader
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import RolloutError
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.openai_agent import OpenAIAgentWorkflow

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
GCONFIG = GenerationHyperparameters(temperature=0.5, max_new_tokens=8)


def ask(base_url, api_key, text="q"):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    return client, client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}])


def plain_agent(data, base_url, api_key):
    ask(base_url, api_key, data["question"])
    return data["reward"]


async def async_agent(data, base_url, api_key, bonus=0.0):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    answer = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "q"}])
    await client.close()
    return {answer.id: data["reward"] + bonus}


class PostingAgent:
    def run(self, data, base_url, api_key):
        client, _ = ask(base_url, api_key)
        client.post("/rewards", cast_to=object, body={"reward": data["reward"]})


class SilentAgent:
    def run(self, data, base_url, api_key):
        return 1.0


@pytest.fixture
def executor():
    executor = RolloutExecutor(EchoEngine(output_length=4), RolloutConfig(max_sample_retries=0, max_failed_share=1.0))
    yield executor
    executor.destroy()


def rollout(executor, agent, **kwargs):
    workflow = OpenAIAgentWorkflow(agent, build_character_tokenizer(), GCONFIG, **kwargs)
    rows = [{"question": f"{index}?", "reward": float(index)} for index in range(3)]
    try:
        return executor.rollout_batch(rows, workflow, group_size=2)
    finally:
        workflow.front.close()


def test_a_plain_function_runs_in_a_thread_and_its_number_is_the_reward(executor):
    batch = rollout(executor, plain_agent)
    assert sorted(batch["rewards"].tolist()) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert batch["loss_mask"].sum(1).tolist() == [4] * 6
    assert set(batch["temperature"].tolist()) == {0.5}


def test_an_async_function_rewards_its_calls(executor):
    batch = rollout(executor, async_agent, agent_kwargs={"bonus": 0.5})
    assert sorted(batch["token_rewards"].sum(1).tolist()) == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]
    assert batch["rewards"].tolist() == [0.0] * 6


def test_a_class_may_post_its_reward(executor):
    assert sorted(rollout(executor, PostingAgent)["rewards"].tolist()) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_an_agent_that_asks_somebody_else_is_told(executor):
    with pytest.raises(RolloutError, match="without a model call of this run"):
        rollout(executor, SilentAgent)


def playing_agent(data, base_url, api_key, opponents):
    """Plays one game: both sides say something, and the opponent's reward is posted with its key if the task says so."""
    (name,) = opponents
    assert name in ("old", "opponent")
    ask(base_url, api_key, data["question"])
    other, _ = ask(base_url, opponents[name], data["question"])
    if data["reward"] == 2.0:
        other.post("/rewards", cast_to=object, body={"reward": 0.25})
    return data["reward"]


@pytest.fixture
def frozen(monkeypatch):
    """What an opponent's directory holds, in the place of a model."""
    asked = {}

    def engine(self, path):
        return asked.setdefault(Path(path).name, EchoEngine(output_length=2))

    monkeypatch.setattr("rollwright.workflows.opponents.Opponents.engine", engine)
    return asked


def test_a_frozen_opponent_has_a_key_of_its_own_and_nothing_of_it_is_trained(executor, frozen, tmp_path):
    rows = rollout(executor, playing_agent, opponents={"old": str(tmp_path)})
    assert rows["agent"] == ["policy", "old"] * 6
    assert rows["trainable"].tolist() == [True, False] * 6
    assert rows["loss_mask"].sum(1).tolist() == [4, 0] * 6
    assert rows["attention_mask"].sum(1).tolist()[:2] == [rows["attention_mask"][0].sum(), rows["attention_mask"][0].sum() - 2]
    assert [round(reward, 2) for reward in rows["rewards"].tolist()] == [0, 0, 0, 0, 1, -1, 1, -1, 2, 0.25, 2, 0.25]
    assert len(frozen[tmp_path.name].requests) == 6
    assert len({request.seed for request in frozen[tmp_path.name].requests}) == 6
    assert rows["sample_ids"].tolist() == [sample for sample in rows["sample_ids"].tolist()[::2] for _ in range(2)]


def test_an_earlier_version_has_the_opponents_key(executor, frozen, tmp_path):
    (tmp_path / "step-000002").mkdir()
    pool = {"directory": str(tmp_path), "share": 1.0, "choose": "win_rate"}
    rows = rollout(executor, playing_agent, pool=pool)  # no version is old enough: the policy plays itself
    assert rows["agent"] == ["policy"] * 12
    assert rows["loss_mask"].sum(1).tolist() == [4, 0] * 6
    executor.engine.set_version(2)
    workflow = OpenAIAgentWorkflow(playing_agent, build_character_tokenizer(), GCONFIG, pool=pool)
    tasks = [{"question": "1?", "reward": 1.0, "ordinal": 5}]
    rows = executor.prepare_batch(iter(tasks), workflow, group_size=2, batch_size=1)
    workflow.front.close()
    assert rows["agent"] == ["policy", "step-000002"] * 2
    assert workflow.opponents.games == {"step-000002": (2.0, 2.0)}


def chatty_agent(data, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": data["question"]}]
    for _ in range(2):
        reply = client.chat.completions.create(model="default", messages=messages)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": "more"},
        ]
    return data["reward"]


@pytest.mark.parametrize("agent", [chatty_agent, async_agent])
def test_deterministic_runs_repeat(agent):
    batches, seeds = [], []
    for _ in range(2):
        engine = EchoEngine(output_length=4)
        executor = RolloutExecutor(engine, RolloutConfig(), seed=3, deterministic=True)
        batches.append(rollout(executor, agent))
        executor.destroy()
        seeds.append(sorted(request.seed for request in engine.requests))
    assert batches[0]["input_ids"].tolist() == batches[1]["input_ids"].tolist()
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0])


def test_data_is_the_row_with_what_the_docs_say(executor, tmp_path):
    page = Path(__file__).resolve().parents[3] / "docs" / "openai-front.md"
    about = page.read_text(encoding="utf-8").partition("`data` is the task")[2].partition("##")[0]
    told = {name for line in re.findall(r"^\| (`.*?) \|", about, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", line)}
    row = {"question": "1+2?", "answer": "3", "level": 5, "functions": TOOLS}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    layout = FormatConfig(prompt_key="question", response_key="answer", tools_key="functions")
    config = DatasetConfig(path=str(tmp_path / "rows.jsonl"), batch_size=1, format=layout)
    seen = []

    def agent(data, base_url, api_key):
        seen.append(data)
        ask(base_url, api_key, data["messages"][0]["content"])
        return 1.0

    workflow = OpenAIAgentWorkflow(agent, build_character_tokenizer(), GCONFIG)
    try:
        executor.rollout_batch(TaskLoader.from_config(get_dataset(config), config, 1).draw(), workflow, group_size=2)
    finally:
        workflow.front.close()
    first, second = seen
    assert first == second
    assert first is not second
    assert first == {
        **row,
        "messages": [{"role": "user", "content": "1+2?"}],
        "tools": TOOLS,
        "ordinal": 0,
    }
    assert told == {"messages", "answer", "tools", "images", "ordinal"}
