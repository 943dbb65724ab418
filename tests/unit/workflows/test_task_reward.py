"""What the reward function of a task is called with."""

from __future__ import annotations

import asyncio

import pytest

from rollwright import Experience, Task
from rollwright.config.tasksets import FormatConfig
from rollwright.errors import WorkflowError
from rollwright.workflows.task import TaskReward

CALLS: list[tuple] = []


async def remember(prompt, completion, prompt_ids, completion_ids, *, answer, **columns) -> float:
    CALLS.append((prompt, completion, prompt_ids, completion_ids, answer, columns))
    return 0.5


def test_the_function_gets_texts_tokens_reference_row_and_arguments():
    task = Task(
        reward_fn=remember,
        raw_task={"question": "1+1=", "solution": "2", "answer": "of the row, which is no reference here", "level": 3},
        format_args=FormatConfig(prompt_key="question", response_key="solution"),
        reward_fn_args={"strict": True, "level": 4},
    )
    reply = Experience(tokens=[1, 2, 3], prompt_length=2, prompt_text="asked", response_text="said")
    assert asyncio.run(TaskReward(task, "Mine")(reply, columns={"tool_calls": [], "question": "theirs"})) == 0.5
    columns = {"tool_calls": [], "question": "1+1=", "solution": "2", "strict": True, "level": 4}
    assert CALLS.pop() == ("asked", "said", [1, 2], [3], "2", columns)
    asyncio.run(TaskReward(task, "Mine")(reply, response="result"))
    assert CALLS.pop()[:2] == ("asked", "result")


def test_a_task_without_a_function_has_the_default_or_is_refused():
    assert asyncio.run(TaskReward(Task(), "Mine", default=remember)(Experience(tokens=[1, 2], prompt_length=1))) == 0.5
    with pytest.raises(WorkflowError, match=r"Mine scores with the task's reward function, but task .* names none"):
        TaskReward(Task(), "Mine")
