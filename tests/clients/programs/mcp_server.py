"""A server of the Model Context Protocol over standard input and output, with one tool."""

from __future__ import annotations

from mcp.server.fastmcp import FastMCP

server = FastMCP("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    server.run()
