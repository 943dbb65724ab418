"""Task-style tool calling: the model calls tools by its chat template's own convention until it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.data.chat_template import without_end
from rollwright.experience.experience import Experience
from rollwright.inference.server.tool_calls import ReadReply, tool_convention
from rollwright.processes.sandbox import SandboxResult, run_python
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import ResettableWorkflow, Task, TaskReward, with_reward
from rollwright.workflows.tools import MAX_CHARACTERS, Tools, shortened, use_sandbox

MAX_TURNS = 8
PYTHON_SECONDS = 10.0


@WORKFLOWS.register_module("tool_calling_workflow")
class ToolCallingWorkflow(ResettableWorkflow):
    """Lets the model call tools and read their results until it answers; one experience for each conversation.

    The conversation comes from the task's format. The last reply is scored by the task's reward function, which also gets
    ``tool_calls``, a list of ``{"name", "arguments", "ok"}`` in the order of the calls. Tool results are not trained on. A malformed
    call is answered with the reason, and counted in the metric ``malformed_tool_calls``. A model that reads images gets the images of
    the results; other models read that there was an image. ``workflow_args`` may hold:

    * ``tools``: functions and MCP servers, as :class:`Tools` takes them; by default ``execute_python``;
    * ``max_turns`` (8): maximum number of replies;
    * ``tool_timeout`` (30): time limit of a call in seconds.
    """

    @staticmethod
    def uses_sandbox(arguments: Mapping[str, Any]) -> bool:
        """Return whether a tool of these ``workflow_args`` needs a sandbox."""
        return use_sandbox(arguments.get("tools", ["execute_python"]))

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        arguments = task.arguments(tools=["execute_python"], tool_timeout=30.0, max_turns=MAX_TURNS)
        self.tools = Tools(arguments["tools"], arguments["tool_timeout"])
        self.max_turns = arguments["max_turns"]
        self.reward = TaskReward(task, "ToolCallingWorkflow")

    async def run_async(self) -> list[Experience]:
        """Converse until a reply calls no tool or is cut, or until the turns or the context are used up."""
        async with self.tools:
            return await self._converse(self.task.messages())

    async def _converse(self, messages: list[dict[str, Any]]) -> list[Experience]:
        calls: list[dict[str, Any]] = []
        turns, malformed, reply = 0, 0, None
        async for reply in self.model.replies(messages, self.max_turns, self.tools.schemas):
            turns += 1
            _, asked, broken = ReadReply("", [], []) if reply.truncated else self._read(reply)
            malformed += len(broken)
            if not (asked or broken) or turns == self.max_turns:
                break
            for why in broken:
                messages.append(
                    {
                        "role": "tool",
                        "name": "error",
                        "content": f"A tool call could not be read: {why}. Write it in the form that you were shown.",
                    }
                )
            for call in asked:
                result = await self.tools.call(call.name, call.arguments)
                calls.append({"name": call.name, "arguments": call.arguments, "ok": result.ok})
                content = result.content if self.model.sees else result.named
                messages.append({"role": "tool", "name": call.name, "content": content})
        assert reply is not None
        reward = await self._score(reply, messages, calls)
        metrics = {
            "turns": turns,
            "tool_calls": len(calls),
            "failed_tool_calls": sum(not call["ok"] for call in calls),
            "malformed_tool_calls": malformed,
        }
        get_tracker("rollout").scalar(**metrics)
        return with_reward(self.model.extract_experience_from_history(), reward, **metrics)

    async def _score(self, reply: Experience, messages: list[dict[str, Any]], calls: list[dict[str, Any]]) -> float:
        """Return the reward of a conversation that ended with ``reply``."""
        return await self.reward(reply, columns={"tool_calls": calls})

    def _read(self, reply: Experience) -> ReadReply:
        tokenizer = self.model.tokenizer
        text = tokenizer.decode(reply.response_tokens, skip_special_tokens=False)
        return tool_convention(tokenizer.chat_template or "").parse(without_end(text, tokenizer), self.tools.schemas)


async def execute_python(code: str) -> str:
    """Run a Python script and return what it prints. Each script starts afresh.

    Args:
        code: The script; print what you want to see.
    """
    return script_output(await run_python(code, timeout=PYTHON_SECONDS), PYTHON_SECONDS, MAX_CHARACTERS)


execute_python.uses_sandbox = True  # type: ignore[attr-defined]


def script_output(result: SandboxResult, timeout: float, max_characters: int) -> str:
    """Return the output of a script, followed by the reason if it failed: the last line of its traceback, or its time limit.

    Args:
        result: result of the run.
        timeout: the script's time limit in seconds.
        max_characters: see :func:`shortened`.
    """
    text = result.stdout.strip()
    if result.timed_out:
        text = f"{text}\nThe script was stopped after {timeout:g} seconds.".strip()
    elif not result.ok:
        last_line = (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
        text = f"{text}\n{last_line}".strip()
    return shortened(text or "The script printed nothing.", max_characters)
