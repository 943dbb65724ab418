"""Tools of MCP servers: real servers in boxes and over HTTP, with both versions of the SDK on either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from client_cases import ENVIRONMENTS, environment_of
from mcp_use import CALLS, use_all
from parts import TOOL_TEMPLATE, JournalledEpisodes, Script, sampled, tool_tokenizer
from quiet_ports import quiet_ports

from rollwright import McpServer, Tools
from rollwright.config.experiment import NewVisionConfig
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.data.tokenizer import build_character_tokenizer, load_tokenizer
from rollwright.data.vision import IMAGE, VISION_PIECES
from rollwright.errors import ConfigError, LostToolError, WorkflowError
from rollwright.training.model import new_vision_model
from rollwright.workflows.registry import FUNCTIONS
from rollwright.workflows.task_runner import TaskRunner

pytestmark = pytest.mark.usefixtures("bubblewrap")
pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
PROGRAMS = Path(__file__).with_name("programs")
NOTES = {"command": "python3 notes_server.py", "directory": str(PROGRAMS)}


def environment_of_sdk_2() -> Path:
    environment = ENVIRONMENTS / ".venv-clients-mcp2"
    if not list(environment.glob(".complete-*")):
        pytest.skip(f"{environment} is not there or not complete: run scripts/make_client_envs.sh")
    return environment


@contextlib.contextmanager
def served(
    interpreter: str | Path = sys.executable, script: Path = PROGRAMS / "notes_server.py"
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of a server over HTTP."""
    (port,) = quiet_ports(1)
    process = subprocess.Popen([interpreter, script, str(port)], env={"PATH": os.environ["PATH"]})
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server with the SDK of this environment."""
    with served() as (url, _):
        yield url


def children() -> set[psutil.Process]:
    """Servers of notes, and boxes that show their directory, with all that runs in these; boxes of other tests run beside them."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("notes_server" in word or word == str(PROGRAMS) for word in process.cmdline()):
                found |= {process, *process.children(recursive=True)}
    return found


def check_use(used: list) -> None:
    """Check the results of ``CALLS``. Version 2 of the SDK does not tell a client why a tool failed."""
    names, first, read, failed, refused, slow, last = used
    assert names == ["notes_add_note", "notes_read_notes", "notes_wait", "notes_leave", "notes_look_around", "notes_draw"]
    assert first[1]
    assert "milk" in read[0]
    assert failed[0].startswith("Error executing tool add_note")
    assert "Field required" in refused[0]
    assert slow == ["notes_wait took longer than 0.5 seconds.", False]
    assert [each[1] for each in (read, failed, refused, last)] == [True, False, False, True]
    assert len(CALLS) == len(used) - 1


# -- versions of the SDK -------------------------------------------------------------------------------------------------


async def used_by_sdk_2(servers: dict[str, dict], *arguments: str) -> dict[str, list]:
    """What a program with version 2 of the SDK does with servers; see ``mcp_use``."""
    (packages,) = environment_of_sdk_2().glob("lib/python*/site-packages")
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, Path(__file__).with_name("mcp_use.py"), json.dumps(servers), *arguments),
        env={**os.environ, "PYTHONPATH": str(packages)},
        stdout=subprocess.PIPE,
    )
    return json.loads((await program.communicate())[0])


async def test_both_versions_of_the_sdk_talk_with_servers_of_both(address):
    environment = environment_of_sdk_2()
    of_2 = {**NOTES, "command": "python notes_server.py", "programs": [str(environment)]}
    with served(environment / "bin" / "python") as (address_2, _):
        servers = {"box 1": NOTES, "box 2": of_2, "http 1": {"url": address}, "http 2": {"url": address_2}}
        clients = {"1.": await use_all(servers), "2.": await used_by_sdk_2(servers)}
    for version, used in clients.items():
        assert used.pop("sdk")[0].startswith(version)
        assert list(used) == list(servers)
        for results in used.values():
            check_use(results)


async def test_servers_of_the_newest_revision_alone_need_version_2_of_the_sdk(tmp_path):
    environment = environment_of("mcp_node")
    script = Path(shutil.copy(PROGRAMS / "newest_notes.mjs", tmp_path))
    (tmp_path / "node_modules").symlink_to(environment.resolve() / "node_modules")
    in_box = {"command": f"node {script.name}", "directory": str(tmp_path), "programs": [str(environment)]}
    with served(environment / "node_modules" / ".bin" / "node", script) as (address, _):
        servers = {"box": in_box, "http": {"url": address}}
        used = await used_by_sdk_2(servers)
        not_listed = await used_by_sdk_2({"http": {"url": address}}, "--without-list")
        for server in servers.values():
            with pytest.raises(ConfigError, match=r"speaks revision 2026-07-28 of the protocol, and mcp 1\..*'mcp>=2'"):
                async with Tools([server]):
                    pass
    assert used.pop("sdk")[0].startswith("2.")
    for names, first, read, failed, refused, slow, last in used.values():
        assert names == ["notes_add_note", "notes_read_notes", "notes_wait"]
        assert (first, read, last) == (["1 kept", True], ['["milk"]', True], ["2 kept", True])
        assert failed == ["an empty note", False]
        assert "expected string" in refused[0]
        assert not refused[1]
        assert slow == ["notes_wait took longer than 0.5 seconds.", False]
    assert not_listed["http"] == ["3 kept", True, []]


# -- sessions ------------------------------------------------------------------------------------------------------------


async def test_each_episode_has_a_server_of_its_own_that_reaches_nothing_and_leaves_nothing(address, tmp_path):
    port = int(address.split(":")[2].split("/")[0])
    before = children()

    async def episode(text: str) -> str:
        async with Tools([NOTES]) as tools:
            added = asyncio.gather(*(tools.call("add_note", {"text": text}) for _ in range(3)))  # in tasks of their own
            assert all(result.ok for result in await added)
            around = await tools.call("look_around", {"path": str(tmp_path), "port": port})
            assert around.text.startswith("False False")
            assert {"bwrap", "python3"} <= {each.name() for each in children() - before}
            return (await tools.call("read_notes", "")).text

    a, b = await asyncio.gather(episode("a"), episode("b"))
    assert "b" not in a
    assert "a" not in b
    assert children() == before


async def test_a_cancelled_episode_leaves_nothing():
    before, begun = children(), asyncio.Event()

    async def episode() -> None:
        async with Tools([NOTES]) as tools:
            begun.set()
            await tools.call("wait", {"seconds": 100})

    running = asyncio.create_task(episode())
    starting = asyncio.create_task(episode())
    await begun.wait()
    await asyncio.sleep(0.2)
    for task in (running, starting):
        task.cancel()
    results = await asyncio.gather(running, starting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    assert children() == before


async def test_a_session_over_http_ends_with_its_episode(address):
    async with Tools([{"url": address, "tools": ["add_note"]}]) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas] == ["add_note"]
    async with Tools([{"url": address}]) as tools:
        assert "DELETE" in (await tools.call("look_around", {"path": "/", "port": 1})).text


# -- failures of the infrastructure ----------------------------------------------------------------------------------------


async def test_a_server_that_is_gone_is_no_answer_for_the_model():
    async def in_box() -> None:
        async with Tools([NOTES]) as tools:
            with pytest.raises(LostToolError, match="is gone: it has ended with exit code 3"):
                await tools.call("leave", "")
            with pytest.raises(LostToolError, match="is gone"):
                await tools.call("read_notes", "")

    async def over_http(swallows: bool) -> None:
        with served() as (address, process):
            async with Tools([{"url": address}]) as tools:
                process.kill()
                process.wait()
                with contextlib.suppress(LostToolError) if swallows else contextlib.nullcontext():
                    await tools.call("read_notes", "")

    with pytest.raises(LostToolError, match="is gone"):
        await in_box()  # the episode went on, and its sample is none
    for swallows in (False, True):
        with pytest.raises(LostToolError, match="is gone: ConnectError"):
            await over_http(swallows)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": "python3 nothing.py"}, r"did not start: it has ended with exit code 2\. It said: .*can't open file"),
        ({"command": "no-such-program"}, "exit code 127.*not found"),
        ({"command": "sleep 100", "start_timeout": 0.5}, "did not start: it gave no answer within 0.5 seconds"),
        ({"url": f"http://127.0.0.1:{quiet_ports(1)[0]}/mcp"}, "did not start: ConnectError"),
    ],
)
async def test_a_server_that_does_not_start_says_why(server, said):
    before = children()
    with pytest.raises(LostToolError, match=said):
        async with Tools([server]):
            pass
    assert children() == before


async def test_tools_that_a_server_lacks_or_that_share_a_name_are_refused(address):
    with pytest.raises(LostToolError, match="no tool 'read_note'; did you mean 'read_notes'"):
        async with Tools([{"url": address, "tools": ["read_note"]}]):
            pass
    with pytest.raises(WorkflowError, match=r"two tools are called 'add_note'.*prefix"):
        async with Tools([{"url": address}, {"url": address}]):
            pass
    tools = Tools([{"url": address}])
    with pytest.raises(WorkflowError, match="async with Tools"):
        _ = tools.schemas
    async with tools:
        with pytest.raises(WorkflowError, match="entered once"):
            await tools.__aenter__()


# -- journal and workflow --------------------------------------------------------------------------------------------------


async def test_a_replay_needs_no_server(tmp_path):
    episodes = JournalledEpisodes(tmp_path)
    with served() as (address, _):

        async def run():
            async with Tools([McpServer(url=address)]) as tools:
                kinds = {tool.name: tool.journal.kind for tool in tools.offered}
                return [kinds, tools.schemas, await tools.call("add_note", {"text": "x"}), await tools.call("read_notes", "")]

        first = await episodes.first(run)
    assert {first[0][name] for name in ("add_note", "wait")} == {"restart"}
    assert first[0]["read_notes"] == "recorded"
    assert first[2].ok
    assert await episodes.again(run) == first


async def test_the_tool_calling_workflow_calls_them(address):
    def reward(prompt, completion, prompt_ids, completion_ids, *, tool_calls, **_):
        return float(all(call["ok"] for call in tool_calls))

    FUNCTIONS["test_notes"] = McpServer(url=address, prefix="n_")
    tokenizer = tool_tokenizer()
    call = '<tool_call>{"name": "n_add_note", "arguments": {"text": "milk"}}</tool_call>'
    taskset = TasksetConfig(
        format=FormatConfig(prompt_key="question", response_key="answer"),
        workflow="tool_calling_workflow",
        reward_fn=reward,
        workflow_args={"tools": ["test_notes"]},
        group_size=1,
    )
    sample = sampled(Script(tokenizer, call, "Done."))
    try:
        (experience,) = await TaskRunner([taskset], tokenizer).arun_episode(sample, {"question": "Note it.", "answer": ""})
    finally:
        del FUNCTIONS["test_notes"]
    assert experience.reward == 1.0
    text = tokenizer.decode(experience.tokens, skip_special_tokens=False)
    assert "n_add_note n_read_notes" in text
    assert "kept<|end|>" in text


def always(*_, **columns):
    return 1.0


async def test_a_model_that_reads_images_sees_those_of_a_server_and_others_read_their_names(tmp_path):
    vision = NewVisionConfig(patch_size=8, layers=1, hidden_size=16, heads=2, max_tokens=16)
    tokenizer = build_character_tokenizer(chat_template=TOOL_TEMPLATE, pieces=VISION_PIECES)
    new_vision_model(tmp_path, tokenizer=tokenizer, vision=vision, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    calls = [f'<tool_call>{{"name": "draw", "arguments": {{"color": "{color}"}}}}</tool_call>' for color in ("red", "blue")]
    row = {"question": "Draw two squares.", "answer": "done"}
    for tokenizer in (load_tokenizer(str(tmp_path)), tool_tokenizer()):
        engine = Script(tokenizer, *calls, "done")
        sample = sampled(engine)
        taskset = TasksetConfig(
            format=FormatConfig(prompt_key="question", response_key="answer"),
            workflow="tool_calling_workflow",
            reward_fn=always,
            workflow_args={"tools": [{**NOTES, "tools": ["draw"]}]},
            group_size=1,
        )
        (experience,) = await TaskRunner([taskset], tokenizer).arun_episode(sample, row)
        text = tokenizer.decode(experience.tokens, skip_special_tokens=False)
        trained = experience.response_tokens[experience.action_mask].tolist()
        assert trained == [token for record in sample.recorder.records for token in record.output_ids]
        if tokenizer.name_or_path == str(tmp_path):
            assert experience.multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
            assert text.count(IMAGE) == 8
            colors = [image.getpixel((0, 0)) for image in engine.requests[-1].image_data]
            assert colors == [(255, 0, 0), (0, 0, 255)]
        else:
            assert "<|user|>red:\n[image, image/png, not shown]<|end|>" in text
