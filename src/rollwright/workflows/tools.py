"""Tools of any workflow: Python functions and the tools of MCP servers, which a model calls with JSON.

::

    async with Tools([search, McpServer(command="python3 notes.py", directory="tools")]) as tools:  # in the episode
        ...                                                                   # offer tools.schemas to the model
        result = await tools.call("search", '{"words": "towns"}')              # result.text goes to the model

Failures of a tool (an unknown name, invalid JSON, an exception, a time limit, an error of the server) are text that the model reads.
``LostToolError``, ``SandboxError`` and ``ConfigError`` are raised, because the model cannot fix these: the sample counts as failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rollwright.environments.mcp_servers import McpServer, McpSession, tool_name
from rollwright.errors import ConfigError, LostToolError, SandboxError, WorkflowError
from rollwright.experience.durable import Durable, durable, kept_calls
from rollwright.inference.engine import run_concurrently
from rollwright.registry import why_not_called
from rollwright.workflows.registry import resolve_function

MAX_CHARACTERS = 4000


@dataclass(frozen=True)
class ToolResult:
    """Result of a call.

    Attributes:
        text: what the model reads.
        ok: True if the call succeeded.
        images: ``data:`` URLs of images, for models that read them.
    """

    text: str
    ok: bool
    images: Sequence[str] = ()

    @property
    def named(self) -> str:
        """The text with a line for each image, for models that read text only."""
        kinds = [url[5:].partition(";")[0] for url in self.images]
        return "\n".join(filter(None, [self.text, *(f"[image, {kind}, not shown]" for kind in kinds)]))

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """Content of a chat message: the text, or a list of parts if there are images."""
        if not self.images:
            return self.text
        text = [{"type": "text", "text": self.text}] if self.text else []
        return [*text, *({"type": "image_url", "image_url": {"url": url}} for url in self.images)]


@dataclass(frozen=True)
class Tool:
    """A tool as a workflow sees it.

    Attributes:
        name: name that the model calls.
        schema: in the form of OpenAI's chat API, ``{"type": "function", "function": {…}}``.
        run: called with the model's arguments as keywords; plain or async. It returns a ``ToolResult``, text, or what JSON can hold.
        journal: how calls are recorded.
        session: of the MCP server whose tool it is.
    """

    name: str
    schema: dict[str, Any]
    run: Callable[..., Any]
    journal: Durable
    session: McpSession | None = None


class Tools:
    """The tools of one episode. A context manager: MCP servers are started when it is entered, and end when it is left.

    It is entered once, by the episode; with functions alone it need not be entered.

    Args:
        tools: functions, plain or async; MCP servers (``McpServer``, or a mapping of its fields); import paths of these, or names in
            ``FUNCTIONS``. Parameters of a function need type hints, and a Google-style docstring describes the function and each
            parameter. A function's ``durable`` says how its calls are recorded in the journal (default: ``recorded``).
        timeout: seconds that one call may take. A plain function that takes longer is abandoned in its thread.

    Raises:
        WorkflowError: a tool cannot be found, two share a name, or no schema can be made for a function.
        ConfigError: an MCP server cannot be as it is described.
    """

    def __init__(self, tools: Sequence[Any], timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._tools: dict[str, Tool] = {}
        self._sessions: list[McpSession] = []
        self._is_open = False
        self._failure: Exception | None = None
        for tool in map(_resolved, tools):
            if isinstance(tool, McpServer):
                self._sessions.append(McpSession(tool))
            else:
                self._add(_function_tool(tool))

    async def __aenter__(self) -> Self:
        """Start the servers and list their tools. If the journal has the list, a server starts with the first new call.

        Raises:
            LostToolError: a server cannot be reached.
            WorkflowError: two tools share a name, or the object has been entered before.
        """
        if self._is_open:
            raise WorkflowError("Tools belong to one episode and are entered once: make them in the episode.")
        self._is_open = True
        try:
            listed = await run_concurrently(self._listed(*each) for each in enumerate(self._sessions))
            for session, tools in zip(self._sessions, listed, strict=True):
                for tool in tools:
                    self._add(_server_tool(session, tool))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the servers.

        Raises:
            LostToolError: a server was lost during a call, and the caller, such as an agent framework, did not let the error through.
        """
        await self._stop()
        if error is None and self._failure is not None:
            raise self._failure

    async def _stop(self) -> None:
        await asyncio.gather(*(session.stop() for session in self._sessions))

    async def _listed(self, number: int, session: McpSession) -> list[dict[str, Any]]:
        return await durable(f"tools of MCP server {number}").awaited(session.list_tools)

    def _add(self, tool: Tool) -> None:
        if tool.name in self._tools:
            raise WorkflowError(
                f"two tools are called {tool.name!r}; the model could not tell them apart. Set prefix for one of the MCP servers, "
                "or rename a function."
            )
        self._tools[tool.name] = tool

    @property
    def offered(self) -> list[Tool]:
        """The tools.

        Raises:
            WorkflowError: there are MCP servers, which have not been started.
        """
        if self._sessions and not self._is_open:
            raise WorkflowError("tools of MCP servers are known within 'async with Tools(…) as tools:' only.")
        return list(self._tools.values())

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools, in the form of OpenAI's chat API and of chat templates."""
        return [tool.schema for tool in self.offered]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Call a tool with arguments that the model wrote.

        Args:
            name: name of the tool.
            arguments: JSON text of an object, or the object.
        """
        tool = self._tools.get(name)
        if tool is None:
            return ToolResult(f"There is no tool {name!r}; there are {', '.join(self._tools) or 'none'}.", False)
        try:
            values = json.loads(arguments or "{}") if isinstance(arguments, str) else dict(arguments)
        except json.JSONDecodeError as error:
            return ToolResult(f"The arguments are no JSON ({error}).", False)
        if not isinstance(values, dict):
            return ToolResult("The arguments have to be a JSON object.", False)
        if why := why_not_called(tool.run, **values):
            return ToolResult(f"The arguments do not fit {name}: {why}.", False)
        try:
            # Journals of earlier versions have no images.
            text, ok, *images = await tool.journal.awaited(self._run, name, values)
            return ToolResult(text, ok, tuple(*images))
        except (ConfigError, SandboxError, LostToolError) as error:  # the model cannot fix these
            self._failure = error
            raise

    async def _run(self, name: str, values: dict[str, Any]) -> tuple[str, bool, list[str]]:
        """Run a tool, and return the fields of its ``ToolResult``."""
        tool = self._tools[name]
        if tool.session is not None:
            await tool.session.start()  # outside of the call's time limit
        try:
            async with asyncio.timeout(self.timeout):
                is_async = inspect.iscoroutinefunction(tool.run)
                result = await (tool.run(**values) if is_async else asyncio.to_thread(tool.run, **values))
        except TimeoutError:
            if tool.session is not None:
                await tool.session.check()
            return f"{name} took longer than {self.timeout:g} seconds.", False, []
        except (ConfigError, SandboxError, LostToolError):
            raise
        except Exception as error:
            return _unicode(f"{type(error).__name__}: {error}"), False, []
        if not isinstance(result, ToolResult):
            result = ToolResult(
                result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str), True
            )
        return _unicode(shortened(result.text, MAX_CHARACTERS)), result.ok, list(result.images)


def use_sandbox(tools: Sequence[Any]) -> bool:
    """Return whether a tool runs Python that the model writes, or is that of an MCP server in a box."""
    return any(getattr(_resolved(tool), "uses_sandbox", False) for tool in tools)


def _resolved(tool: Any) -> Any:
    """Return the function or the MCP server that a mapping, a name or an import path stands for."""
    if isinstance(tool, Mapping):
        return McpServer.of(tool)
    return tool if isinstance(tool, McpServer) else resolve_function(tool, "tool", McpServer)


def _function_tool(function: Callable[..., Any]) -> Tool:
    from transformers.utils.chat_template_utils import get_json_schema

    name = function.__name__
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers raises various types
        raise WorkflowError(
            f"no schema can be made of the tool {name!r}: {error} Give every parameter a type hint and a line under 'Args:' in the "
            "docstring."
        ) from error
    return Tool(name, schema, *kept_calls(function, f"tool {name}"))


def _server_tool(session: McpSession, listed: Mapping[str, Any]) -> Tool:
    """Return a tool of an MCP server, from the entry of its list."""
    name, server = tool_name(session.server, listed["name"]), session.server
    parameters = {"type": "object", "properties": {}, **listed["inputSchema"]}
    function = {"name": name, "description": listed.get("description") or "", "parameters": parameters}
    kind = "recorded" if (listed.get("annotations") or {}).get("readOnlyHint") else "restart"

    async def run(**arguments: Any) -> ToolResult:
        return ToolResult(*await session.call(listed["name"], arguments))

    return Tool(
        name,
        {"type": "function", "function": function},
        run,
        Durable(f"tool {name}", server.durable or kind),
        session,
    )


def _unicode(text: str) -> str:
    """Replace lone surrogates with ``?``, because neither the journal nor a tokenizer accepts them."""
    return text.encode("utf-8", "replace").decode()


def shortened(text: str, max_characters: int) -> str:
    """Shorten a string to about ``max_characters`` by replacing its middle with ``...`` on a line of its own."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n...\n{text[len(text) - half :]}"
