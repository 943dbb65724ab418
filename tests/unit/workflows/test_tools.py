"""Tools: how they are named, what they return, and failures that are no text. ``tests/clients/test_mcp_tools.py`` has real servers."""

from __future__ import annotations

import contextlib
import sys

import pytest
from tool_scripts import add

from rollwright.environments.mcp_servers import McpServer, tool_name
from rollwright.errors import ConfigError, LostToolError, WorkflowError
from rollwright.experience.durable import durable
from rollwright.workflows.registry import FUNCTIONS, resolve_function
from rollwright.workflows.tools import ToolResult, Tools, use_sandbox

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
URL = "http://127.0.0.1:9/mcp"


def refused(value: str) -> ToolResult:
    """Refuse.

    Args:
        value: Anything.
    """
    return ToolResult(f"no {value}", False)


@durable(kind="restart")
def buy(item: str) -> dict:
    """Buy something.

    Args:
        item: What.
    """
    if item == "moon":
        raise LostToolError("the shop does not answer.")
    return {"bought": item}


async def test_a_function_s_result_is_text_json_or_says_that_it_failed():
    tools = Tools([add, refused, buy])
    assert await tools.call("add", {"a": 1, "b": 2}) == ToolResult("3", True)
    assert await tools.call("refused", '{"value": "x"}') == ToolResult("no x", False)
    assert (await tools.call("buy", '{"item": "ä"}')).text == '{"bought": "ä"}'
    assert [tool.journal.kind for tool in tools.offered] == ["recorded", "recorded", "restart"]


@pytest.mark.parametrize(("error", "said"), [(None, "the shop does not answer"), (KeyError("its own"), "its own")])
async def test_a_lost_tool_is_raised_if_the_caller_swallows_it_and_raises_nothing_else(error, said):
    async def episode() -> None:
        async with Tools([buy]) as tools:
            with contextlib.suppress(Exception):
                await tools.call("buy", '{"item": "moon"}')
            assert (await tools.call("buy", '{"item": "tea"}')).ok
            if error is not None:
                raise error

    with pytest.raises((LostToolError, KeyError), match=said):
        await episode()


def test_servers_are_named_like_functions_and_only_those_in_boxes_need_a_sandbox(tmp_path, monkeypatch):
    (tmp_path / "my_servers.py").write_text(f"from rollwright import McpServer\nremote = McpServer(url={URL!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    FUNCTIONS["test_server"] = McpServer(command="python3 notes.py", directory=str(tmp_path))
    try:
        assert use_sandbox(["test_server"])
        with pytest.raises(WorkflowError, match=r"feedback_fn is McpServer.*cannot be called"):
            resolve_function("test_server", "feedback_fn")
    finally:
        del FUNCTIONS["test_server"]
    assert use_sandbox(["execute_python"])
    assert use_sandbox([{"command": "notes"}])
    assert not use_sandbox([add, {"url": URL}, "my_servers.remote", "my_servers:remote"])


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({}, "a command or a url, one of them; neither is set"),
        ({"command": "notes", "url": URL}, "one of them; both are set"),
        ({"command": "notes", "comand": ""}, r"has no key 'comand'; did you mean 'command'\?"),
        ({"url": "tools.example.com/mcp"}, "has to begin with http:// or https://"),
        ({"url": URL, "network": True, "programs": ["x"]}, "programs, network has no effect with a url"),
        ({"command": "notes", "headers": {"a": "b"}}, "headers has no effect with a command"),
        ({"command": "notes", "durable": "restorable"}, "choose recorded, restart or pure"),
        ({"command": "notes", "prefix": "my.", "start_timeout": 1}, "prefix has only letters"),
        ({"command": "notes", "programs": "no/such/directory"}, "programs names 'no/such/directory'"),
        ({"command": "notes", "directory": "no/such/directory"}, "no/such/directory does not exist"),
        ({"command": "notes", "limits": {"memory": 1}}, "limits has memory; it may hold memory_bytes"),
    ],
)
def test_a_server_that_cannot_be_as_it_is_described_is_refused(server, said):
    with pytest.raises(ConfigError, match=said):
        Tools([server])


def test_without_the_package_a_server_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollwright\[mcp\]'"):
        McpServer(url=URL)


def test_names_of_tools_are_those_that_chat_apis_accept():
    server = McpServer(url=URL, prefix="a_")
    assert tool_name(server, "files.read/all") == "a_files_read_all"
    assert len(tool_name(server, "x" * 128)) == 64
