"""What a client does with MCP servers: a program that uses the version of the SDK that it finds, and prints its results as JSON."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

from rollwright import McpServer, Tools
from rollwright.environments.mcp_servers import McpSession

#: Tool and arguments, in this order.
CALLS = (
    ("notes_add_note", {"text": "milk"}),
    ("notes_read_notes", {}),
    ("notes_add_note", {"text": ""}),
    ("notes_add_note", {}),
    ("notes_wait", {"seconds": 60}),
    ("notes_add_note", {"text": "bread"}),
)


async def use(server: McpServer) -> list[Any]:
    """The names of the tools, then the text of each call and whether it succeeded."""
    results = []
    async with Tools([server]) as tools:
        names = [schema["function"]["name"] for schema in tools.schemas]
        for name, arguments in CALLS:
            tools.timeout = 0.5 if name == "notes_wait" else 60.0
            results.append(await tools.call(name, json.dumps(arguments)))
    return [names, *([result.text, result.ok] for result in results)]


async def use_without_list(server: McpServer) -> list[Any]:
    """The result of a call in a session that has not listed the tools, as in an episode that goes on after a replay."""
    session = McpSession(server)
    try:
        return list(await session.call("add_note", {"text": "butter"}))
    finally:
        await session.stop()


async def use_all(servers: dict[str, dict[str, Any]], how: Callable[[McpServer], Any] = use) -> dict[str, list[Any]]:
    """Use several servers at once, by name; ``sdk`` is the version of the SDK here."""
    used = await asyncio.gather(*(how(McpServer(prefix="notes_", **server)) for server in servers.values()))
    return {"sdk": [importlib.metadata.version("mcp")], **dict(zip(servers, used, strict=True))}


if __name__ == "__main__":
    how = use_without_list if "--without-list" in sys.argv else use
    print(json.dumps(asyncio.run(use_all(json.loads(sys.argv[1]), how))))
