"""Workflows of the shapes that Trinity-RFT's files have run with the names that they import, and fill their groups."""

from __future__ import annotations

import json
from types import SimpleNamespace

import ported_workflows  # noqa: F401
import pytest
from parts import Script, tool_tokenizer

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task_runner import TaskRunner

SIZE = 3
MATH = {"question": "2+2=", "answer": "4"}
TOOLS = {
    "tools": json.dumps([{"name": "add", "parameters": {}}]),
    "conversations": [{"from": "human", "value": "1+2?"}],
    "answer": json.dumps([{"name": "add", "arguments": {"a": 1}}]),
}


@pytest.fixture(scope="module")
def tokenizer():
    return tool_tokenizer()


def batches(name, row, tokenizer, texts, *, tasks=2, services=None, **workflow_args):
    """What an executor makes of several tasks of one taskset."""
    taskset = TasksetConfig(
        workflow=name,
        format=FormatConfig(prompt_key="question", response_key="answer"),
        gconfig=GenerationHyperparameters(temperature=0.7, max_new_tokens=64),
        group_size=SIZE,
        workflow_args=workflow_args,
    )
    engine, runner = Script(tokenizer, *texts), TaskRunner([taskset], tokenizer, services=services)
    with RolloutExecutor(engine, RolloutConfig()) as executor:
        out = [executor.rollout_batch([{**row, "ordinal": number}], runner) for number in range(tasks)]
    return out, engine, WORKFLOWS.get(name)


def test_a_frozen_lake(tokenizer):
    (batch, second), engine, _ = batches(
        "ported_frozen_lake", {"map": ["SF", "HG"]}, tokenizer, ["go ```Right```", "```down```"]
    )
    assert engine.requests[0].gconfig.temperature == 0.7
    for each in (batch, second):
        assert each["sample_ids"].unique().numel() == each["input_ids"].shape[0] == SIZE
    assert {tuple(detail["metrics"]) for detail in batch["details"]} == {("env_steps", "success")}
    assert batch["versions"].max() == 2
    assert any("map" in detail["info"] for detail in batch["details"])


def test_a_frozen_lake_that_is_reached(tokenizer):
    (batch,), _, _ = batches("ported_frozen_lake", {"map": ["SG", "FF"]}, tokenizer, ["```Right```"], tasks=1)
    assert batch["rewards"].tolist() == [1.0] * SIZE


def test_rewards_of_steps(tokenizer):
    out, _, _ = batches("ported_counting", {}, tokenizer, ["one"], steps=SIZE)  # as many steps as the group has samples
    for batch in out:
        assert batch["sample_ids"].unique(return_counts=True)[1].tolist() == [SIZE] * SIZE
        assert sorted(batch["rewards"].tolist()) == sorted([0.0, 1.0, 2.0] * SIZE)
        assert (batch["loss_mask"].sum(1) == len("one") + 1).all()  # a step trains its own reply


def test_a_reward_that_all_steps_share(tokenizer):
    out, _, _ = batches("ported_propagation", {}, tokenizer, ["x"])
    for batch in out:
        assert batch["sample_ids"].unique(return_counts=True)[1].tolist() == [2] * SIZE
        assert batch["details"][0]["metrics"] == {"actual_env_steps": 2}


@pytest.mark.parametrize(
    ("arguments", "asked"), [({}, "<|system|>Put your result"), ({"use_base": True}, "System:Put your result")]
)
def test_customised_mathematics(tokenizer, arguments, asked):
    (batch, _), engine, _ = batches("ported_boxed", MATH, tokenizer, ["\\boxed{4}"], **arguments)
    assert batch["rewards"].tolist() == [1.0] * SIZE
    assert tokenizer.decode(engine.requests[0].input_ids).startswith(asked)
    assert len(engine.requests) == 2 * SIZE
    assert batch["details"][0]["metrics"] == {"accuracy": 1.0, "format_score": 0.0}


def test_tool_calls_in_text(tokenizer):
    right = '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'
    (batch, _), engine, _ = batches("ported_tool_call", TOOLS, tokenizer, [right, "no call"])
    assert sorted(batch["rewards"].tolist()) in ([0.0, 0.0, 1.0], [0.0, 1.0, 1.0])
    assert batch["sample_ids"].unique().numel() == SIZE
    assert len(engine.requests) == 2 * SIZE


def test_a_group_that_one_run_makes(tokenizer):
    out, engine, _ = batches("ported_household", {}, tokenizer, ["look"])
    for batch in out:
        assert batch["rewards"].tolist() == [0.0, 1.0, 2.0]
        assert batch["sample_ids"].unique().numel() == SIZE
    assert len(engine.requests) == 2 * 2 * SIZE


def test_a_judge_that_compares_a_group(tokenizer):
    seen = []

    def create(model, messages, stream):
        seen.append(json.loads(messages[0]["content"]))
        scores = [place / 10 for place in range(len(seen[-1]))]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=json.dumps(scores)))])

    judge = SimpleNamespace(model_path="judge", chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    services = SimpleNamespace(openai_front=None, auxiliary_models=[judge])
    (batch, _), _, _ = batches("ported_judged", MATH, tokenizer, ["\\boxed{4}", "5"], services=services)
    assert batch["rewards"].tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert [len(texts) for texts in seen] == [SIZE, SIZE]  # the judge sees the whole group
