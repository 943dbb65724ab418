"""The tool-calling workflow: tools by their functions, failures as text, one experience for a conversation."""

from __future__ import annotations

import functools
import threading

import pytest
from parts import Script, sampled, tool_tokenizer
from tool_scripts import add

from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.normaliser import normalise
from rollwright.processes.sandbox import sandboxed
from rollwright.workflows.task_runner import TaskRunner
from rollwright.workflows.tools import Tools

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def fails(x: str) -> str:
    """Fail.

    Args:
        x: Anything.
    """
    raise ValueError(f"no {x}")


def repeat(x: str) -> str:
    """Repeat.

    Args:
        x: Anything.
    """
    return x


def reward(prompt, completion, prompt_ids, completion_ids, *, answer, tool_calls, **_):
    return float(completion == answer) + 0.1 * sum(call["ok"] for call in tool_calls)


def taskset(**arguments) -> TasksetConfig:
    return TasksetConfig(
        format=FormatConfig(prompt_key="question", response_key="answer"),
        workflow="tool_calling_workflow",
        reward_fn=reward,
        workflow_args={"tools": [add, fails], **arguments},
        group_size=1,
    )


async def run(script, row, **arguments):
    tokenizer = tool_tokenizer()
    sample = sampled(Script(tokenizer, *script))
    experiences = await TaskRunner([taskset(**arguments)], tokenizer).arun_episode(sample, row)
    return experiences, sample.recorder, tokenizer


async def test_a_half_of_a_surrogate_pair_in_a_tool_s_text_is_replaced():
    tools = Tools([fails, repeat])
    arguments = '{"x": "a\\ud83d"}'
    assert (await tools.call("repeat", arguments)).text == "a?"
    assert (await tools.call("fails", arguments)).text == "ValueError: no a?"


async def test_tools_are_called_until_the_model_answers():
    row = {"question": "1+2?", "answer": "3"}
    wrong = '<tool_call>{"name": "fails", "arguments": {"x": "way"}}</tool_call>'
    (experience,), recorder, tokenizer = await run([ADD, wrong, "3"], row)
    assert experience.reward == pytest.approx(1.1)
    assert experience.metrics["tool_calls"] == 2
    assert experience.metrics["failed_tool_calls"] == 1
    text = tokenizer.decode(experience.tokens, skip_special_tokens=False)
    assert "add fails" in text  # the tools stand in the prompt
    assert "<|user|>3<|end|>" in text
    assert "<|user|>ValueError: no way<|end|>" in text
    trained = experience.response_tokens[experience.action_mask].tolist()
    assert trained == [token for record in recorder.records for token in record.output_ids]
    assert int(normalise([experience], recorder)["loss_mask"].sum()) == len(trained)


async def test_a_call_that_cannot_be_read_is_answered_with_why_and_counted():
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1, }}</tool_call>'
    (experience,), recorder, tokenizer = await run([broken, ADD, "3"], {"question": "1+2?", "answer": "3"})
    assert experience.reward == pytest.approx(1.1)
    assert experience.metrics["malformed_tool_calls"] == 1
    assert experience.metrics["tool_calls"] == 1
    text = tokenizer.decode(experience.tokens, skip_special_tokens=False)
    assert "<|user|>A tool call could not be read: its JSON is broken" in text
    assert len(recorder) == 3


async def test_turns_are_limited():
    (experience,), recorder, _ = await run([ADD], {"question": "1+2?", "answer": "3"}, max_turns=3)
    assert len(recorder) == 3
    assert experience.metrics["tool_calls"] == 2
    assert experience.reward == pytest.approx(0.2)


async def test_what_goes_wrong_in_a_call_is_text():
    over = threading.Event()

    def slow(x: int) -> str:
        """Wait.

        Args:
            x: Seconds.
        """
        over.wait(60)
        return "late"

    tools = Tools([add, slow], timeout=0.05)
    assert (await Tools([add]).call("add", '{"a": 1, "b": 5}')).text == "6"
    for name, arguments, said in [
        ("sub", "{}", "There is no tool 'sub'; there are add, slow."),
        ("add", "{1", "no JSON"),
        ("add", "[1]", "JSON object"),
        ("add", '{"a": 1}', "missing a required argument"),
        ("slow", '{"x": 0.3}', "longer than 0.05 seconds"),
    ]:
        result = await tools.call(name, arguments)
        assert not result.ok
        assert said in result.text
    over.set()


async def test_python_of_the_model_runs_in_the_sandbox(bubblewrap):
    call = functools.partial(Tools(["execute_python"]).call, "execute_python")
    assert (await call('{"code": "print(6*7)"}')).text == "42"
    assert "Permission" in (await call('{"code": "import os; os.fork()"}')).text


async def test_a_sandbox_that_is_missing_is_no_answer_for_the_model():
    with sandboxed("nowhere"), pytest.raises(ConfigError, match="there is no sandbox 'nowhere'"):
        await Tools(["execute_python"]).call("execute_python", '{"code": "print(6*7)"}')


def test_tools_that_cannot_be_offered_are_refused():
    def untyped(x):
        """Nobody knows what x is."""

    with pytest.raises(WorkflowError, match="two tools are called 'add'"):
        Tools([add, add])
    with pytest.raises(WorkflowError, match="type hint"):
        Tools([untyped])
    assert Tools([add]).schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
