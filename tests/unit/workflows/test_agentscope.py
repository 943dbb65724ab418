"""AgentScope's own ReAct agent at the OpenAI front: what it samples is what is trained."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
from parts import Script, sampled, tool_tokenizer
from tool_scripts import add

from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.errors import ConfigError
from rollwright.experience.normaliser import normalise
from rollwright.workflows import agentscope_react
from rollwright.workflows.task_runner import TaskRunner

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
RESULT = '<tool_call>{"name": "GenerateStructuredOutput", "arguments": {"result": "\\\\boxed{3}"}}</tool_call>'
ROW = {"question": "1+2?", "answer": "3"}


def taskset(**arguments) -> TasksetConfig:
    return TasksetConfig(
        format=FormatConfig(prompt_key="question", response_key="answer"),
        workflow="agentscope_react_math_workflow",
        workflow_args={"tools": [add], **arguments},
        group_size=1,
    )


async def run(script, **arguments):
    pytest.importorskip("agentscope", reason="the extra 'agentscope' is not installed")
    from rollwright.inference.front.openai_front import OpenAIFront

    tokenizer = tool_tokenizer()
    sample = sampled(Script(tokenizer, *script))
    with OpenAIFront(tokenizer, "policy") as front:
        services = SimpleNamespace(openai_front=front, auxiliary_models=[])
        runner = TaskRunner([taskset(**arguments)], tokenizer, services=services)
        return await runner.arun_episode(sample, ROW), sample.recorder


async def test_an_agent_with_tools_is_one_experience_of_the_engines_tokens():
    (experience,), recorder = await run([ADD, RESULT])
    assert experience.reward == pytest.approx(1.0)
    trained = experience.response_tokens[experience.action_mask].tolist()
    assert trained == [token for record in recorder.records for token in record.output_ids]
    assert len(recorder) == 2
    assert normalise([experience], recorder)["versions"].max() == 2


async def test_a_plain_reply_is_the_result_where_no_structure_is_asked_for():
    (experience,), recorder = await run([ADD, r"It is \boxed{3}."], structured=False)
    assert experience.reward == pytest.approx(1.0)
    assert len(recorder) == 2


async def test_an_agent_that_comes_to_no_result_is_scored_without_one():
    experiences, recorder = await run([ADD], max_iters=2)
    assert all(experience.reward <= 0 for experience in experiences)
    assert experiences[0].metrics["completed"] == 0
    assert len(recorder) > 2  # AgentScope asks a few times more for a result


async def test_the_result_that_agentscope_forces_is_begun_by_the_front_and_sampled_from_there():
    goes_on = ' {"result": "\\\\boxed{3}"}}</tool_call>'
    experiences, recorder = await run([ADD, goes_on], max_iters=1)
    assert [experience.reward for experience in experiences] == [pytest.approx(1.0)] * len(experiences)
    trained = [token for experience in experiences for token in experience.response_tokens[experience.action_mask].tolist()]
    assert trained == [token for record in recorder.records for token in record.output_ids]


async def test_agentscope_is_imported_beside_the_event_loop(monkeypatch):
    """It takes seconds, in which no other sample would go on."""
    threads, require = [], agentscope_react._require_agentscope
    monkeypatch.setattr(
        agentscope_react, "_require_agentscope", lambda: (threads.append(threading.current_thread()), require())
    )
    await run([RESULT])
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_without_agentscope_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "agentscope.agent", None)
    with pytest.raises(ConfigError, match=r"rollwright\[agentscope\]"):
        agentscope_react._require_agentscope()
