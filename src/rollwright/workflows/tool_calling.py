"""Task-style tool calling: the model calls Python functions by its chat template's own convention until it answers.

Python functions are tools: ``ToolFunctions`` makes their JSON schemas for the chat template, and calls them. Calls never raise: a
failure (an unknown name, invalid JSON, an exception, a time limit) is text that the model reads.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.data.chat_template import without_end
from rollwright.errors import ConfigError, SandboxError, WorkflowError
from rollwright.experience.durable import kept_calls
from rollwright.experience.experience import Experience
from rollwright.inference.server.tool_calls import ReadReply, tool_convention
from rollwright.processes.sandbox import SandboxResult, run_python
from rollwright.registry import why_not_called
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.task import ResettableWorkflow, Task, TaskReward, with_reward

MAX_TURNS = 8
PYTHON_SECONDS = 10.0
MAX_CHARACTERS = 4000


@WORKFLOWS.register_module("tool_calling_workflow")
class ToolCallingWorkflow(ResettableWorkflow):
    """Lets the model call tools and read their results until it answers; one experience for each conversation.

    The conversation comes from the task's format. The last reply is scored by the task's reward function, which also gets
    ``tool_calls``, a list of ``{"name", "arguments", "ok"}`` in the order of the calls. Tool results are not trained on. A malformed
    call is answered with the reason, and counted in the metric ``malformed_tool_calls``.
    ``workflow_args`` may hold:

    * ``tools``: functions, their import paths, or ``execute_python`` (the default);
    * ``max_turns`` (8): maximum number of replies;
    * ``tool_timeout`` (30): time limit of a call in seconds.
    """

    @staticmethod
    def uses_sandbox(arguments: Mapping[str, Any]) -> bool:
        """Return whether a tool of these ``workflow_args`` runs Python that the model writes."""
        tools = [resolve_function(tool, "tool") for tool in arguments.get("tools", ["execute_python"])]
        return any(getattr(tool, "uses_sandbox", False) for tool in tools)

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        arguments = task.arguments(tools=["execute_python"], tool_timeout=30.0, max_turns=MAX_TURNS)
        self.tools = ToolFunctions(arguments["tools"], arguments["tool_timeout"])
        self.max_turns = arguments["max_turns"]
        self.reward = TaskReward(task, "ToolCallingWorkflow")

    async def run_async(self) -> list[Experience]:
        """Converse until a reply calls no tool or is cut, or until the turns or the context are used up."""
        messages = self.task.messages()
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
                messages.append({"role": "tool", "name": call.name, "content": result.text})
        assert reply is not None
        reward = await self.reward(reply, columns={"tool_calls": calls})
        metrics = {
            "turns": turns,
            "tool_calls": len(calls),
            "failed_tool_calls": sum(not call["ok"] for call in calls),
            "malformed_tool_calls": malformed,
        }
        get_tracker("rollout").scalar(**metrics)
        return with_reward(self.model.extract_experience_from_history(), reward, **metrics)

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


@dataclass(frozen=True)
class ToolResult:
    """Result of a call: the text that the model reads, and whether the call succeeded."""

    text: str
    ok: bool


class ToolFunctions:
    """The tools of a task. How results are recorded in the journal is set by each function's ``durable`` (default: ``recorded``).

    Args:
        tools: functions, plain or async, import paths of functions, or names in ``FUNCTIONS``. Parameters need type hints, and
            a Google-style docstring describes the function and each parameter.
        timeout: seconds that one call may take. A plain function that takes longer is abandoned in its thread.

    Raises:
        WorkflowError: a function cannot be found, two share a name, or no schema can be made for a function.
    """

    def __init__(self, tools: Sequence[Callable[..., Any] | str], timeout: float = 30.0) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.timeout = timeout
        for tool in tools:
            function = resolve_function(tool, "tool")
            if function.__name__ in self.functions:
                raise WorkflowError(f"two tools are called {function.__name__!r}; the model could not tell them apart.")
            self.functions[function.__name__] = function
        self.schemas = [_schema(function) for function in self.functions.values()]

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool with arguments that the model wrote.

        Args:
            name: name of the tool.
            arguments: JSON text of an object.
        """
        function = self.functions.get(name)
        if function is None:
            return ToolResult(f"There is no tool {name!r}; there are {', '.join(self.functions) or 'none'}.", False)
        try:
            values = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            return ToolResult(f"The arguments are no JSON ({error}).", False)
        if not isinstance(values, dict):
            return ToolResult("The arguments have to be a JSON object.", False)
        if why := why_not_called(function, **values):
            return ToolResult(f"The arguments do not fit {name}: {why}.", False)
        function, journal = kept_calls(function, f"tool {name}")
        return ToolResult(*await journal.awaited(self._run, function, name, values))

    async def _run(self, function: Callable[..., Any], name: str, values: dict[str, Any]) -> tuple[str, bool]:
        """Run a tool, and return the text that the model reads and whether the call succeeded."""
        try:
            async with asyncio.timeout(self.timeout):
                result = await (
                    function(**values) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, **values)
                )
        except TimeoutError:
            return f"{name} took longer than {self.timeout:g} seconds.", False
        except (ConfigError, SandboxError):  # the model cannot fix these
            raise
        except Exception as error:
            return _unicode(f"{type(error).__name__}: {error}"), False
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return _unicode(shortened(text, MAX_CHARACTERS)), True

    def guarded(self) -> list[Callable[..., Any]]:
        """Return the tools as async functions with the same names, signatures and docstrings, which return failures as text."""

        def guard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            async def call(**arguments: Any) -> str:
                return (await self.call(name, json.dumps(arguments))).text

            return call

        return [guard(name, function) for name, function in self.functions.items()]


def _unicode(text: str) -> str:
    """Replace lone surrogates with ``?``, because neither the journal nor a tokenizer accepts them."""
    return text.encode("utf-8", "replace").decode()


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # transformers raises various types
        raise WorkflowError(
            f"no schema can be made of the tool {function.__name__!r}: {error} Give every parameter a type hint and a line "
            "under 'Args:' in the docstring."
        ) from error


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


def shortened(text: str, max_characters: int) -> str:
    """Shorten a string to about ``max_characters`` by replacing its middle with ``...`` on a line of its own."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n...\n{text[len(text) - half :]}"
