"""A server of the Model Context Protocol, with either version of the SDK: it keeps notes.

``notes_server.py`` talks over its standard streams; ``notes_server.py PORT`` over streamable HTTP.
"""

from __future__ import annotations

import base64
import io
import os
import socket
import sys

import anyio
from mcp.types import ImageContent, TextContent

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # version 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("notes")
notes: list[str] = []
methods: list[str] = []


@server.tool()
def add_note(text: str) -> str:
    """Keep a note."""
    if not text:
        raise ValueError("an empty note")
    notes.append(text)
    return f"{len(notes)} kept"


@server.tool(annotations={"readOnlyHint": True})
def read_notes() -> list[str]:
    """Read all notes."""
    return notes


@server.tool()
async def wait(seconds: float) -> str:
    """Wait for some seconds."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool(name="look.around")
def look_around(path: str, port: int) -> str:
    """Say what the server reaches of a machine."""
    with socket.socket() as client:
        client.settimeout(1)
        return f"{os.path.exists(path)} {client.connect_ex(('127.0.0.1', port)) == 0} {' '.join(methods)}"


@server.tool(structured_output=False)
def draw(color: str):
    """Draw a square."""
    from PIL import Image  # not in every environment of these tests

    image = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(image, "PNG")
    block = {"type": "image", "data": base64.b64encode(image.getvalue()).decode(), "mimeType": "image/png"}
    return [TextContent(type="text", text=f"{color}:"), ImageContent.model_validate(block)]


def _watched(app):
    """The application, which notes the methods of its requests."""

    async def watched(scope, receive, send):
        methods.append(scope.get("method", ""))
        await app(scope, receive, send)

    return watched


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import uvicorn

        uvicorn.run(_watched(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    else:
        server.run()
