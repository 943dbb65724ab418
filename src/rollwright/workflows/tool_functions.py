"""Python functions as tools: their JSON schemas for the chat template, and their calls, which never raise.

What goes wrong in a call (an unknown name, broken JSON, an exception, a time limit) is text that the model reads: a tool that
fails is something an agent has to deal with, not the end of its episode.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.errors import WorkflowError
from rollwright.processes.sandbox import run_python
from rollwright.workflows.registry import resolve_function
from rollwright.workflows.script_output import script_output, shortened

PYTHON_SECONDS = 10.0
MAX_CHARACTERS = 4000


async def execute_python(code: str) -> str:
    """Run a Python script and return what it prints. Each script starts afresh.

    Args:
        code: The script; print what you want to see.
    """
    return script_output(await run_python(code, timeout=PYTHON_SECONDS), PYTHON_SECONDS, MAX_CHARACTERS)


#: Tools that go by a name.
BUILT_IN: dict[str, Callable[..., Any]] = {"execute_python": execute_python}


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: the text that the model reads, and whether the tool did its work."""

    text: str
    ok: bool


class ToolFunctions:
    """The tools of a task.

    Args:
        tools: functions, plain or async, import paths of functions, or names of ``BUILT_IN``. Parameters need type hints, and
            the docstring, in Google's form, says what the function and each parameter are for.
        timeout: seconds that one call may take. A plain function that takes longer is left behind in its thread.

    Raises:
        WorkflowError: a function cannot be found, two have one name, or no schema can be made of one.
    """

    def __init__(self, tools: Sequence[Callable[..., Any] | str], timeout: float = 30.0) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.timeout = timeout
        for tool in tools:
            function = BUILT_IN[tool] if isinstance(tool, str) and tool in BUILT_IN else resolve_function(tool, "tool")
            if function.__name__ in self.functions:
                raise WorkflowError(f"two tools are called {function.__name__!r}; the model could not tell them apart.")
            self.functions[function.__name__] = function
        self.schemas = [_schema(function) for function in self.functions.values()]

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool with arguments that the model wrote.

        Args:
            name: of the tool.
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
        try:
            inspect.signature(function).bind(**values)
        except TypeError as error:
            return ToolResult(f"The arguments do not fit {name}: {error}.", False)
        try:
            async with asyncio.timeout(self.timeout):
                result = await (
                    function(**values) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, **values)
                )
        except TimeoutError:
            return ToolResult(f"{name} took longer than {self.timeout:g} seconds.", False)
        except Exception as error:
            return ToolResult(f"{type(error).__name__}: {error}", False)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return ToolResult(shortened(text, MAX_CHARACTERS), True)

    def guarded(self) -> list[Callable[..., Any]]:
        """The tools as async functions with the same names, signatures and docstrings, whose failures are text."""

        def guard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            async def call(**arguments: Any) -> str:
                return (await self.call(name, json.dumps(arguments))).text

            return call

        return [guard(name, function) for name, function in self.functions.items()]


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # transformers has a type of its own for each thing that is missing
        raise WorkflowError(
            f"no schema can be made of the tool {function.__name__!r}: {error} Give every parameter a type hint and a line "
            "under 'Args:' in the docstring."
        ) from error
