"""Programs that are agents, and packages of Node: each reads a file, runs a command and answers."""

from __future__ import annotations

import json
import re

import pytest
from client_cases import Case
from command_programs import CLAUDE, CODEX, MINI, NOTE, OPENCODE, QWEN, SECONDS
from directed_model import THOUGHT, call_of

ANSWER = "It is 7341."
#: What the command prints is in no prompt otherwise.
COMMAND, PRINTED = "tr 7 9 < note.txt", "The number is 9341."
SHOWN = "a file is read, a command is run"


def replies(read: tuple[str, str], run: str, path: str = "note.txt", **more: object) -> list[str]:
    """What the model says to a program whose tools have these names; the first has an argument of the second name."""
    tool, argument = read
    return [
        THOUGHT + call_of(tool, json.dumps({argument: path})),
        call_of(run, json.dumps({"command": COMMAND, **more})),
        ANSWER,
    ]


OF_CLAUDE = replies(("Read", "file_path"), "Bash")
OF_QWEN = replies(("read_file", "file_path"), "run_shell_command", "/proc/self/cwd/note.txt", is_background=False)
OF_OPENCODE = replies(("read", "filePath"), "bash", description="show")
OF_SCRIPTS = replies(("read", "path"), "shell")
OF_CODEX = [
    THOUGHT + call_of("exec_command", json.dumps({"cmd": "cat note.txt"})),
    call_of("multi_agent_v1__close_agent", '{"target": "nobody"}'),
    call_of("exec_command", json.dumps({"cmd": COMMAND})),
    ANSWER,
]
SHORT_TASK = "Read note.txt and tell the number."


def wait_for_agent(prompt: str) -> str:
    """What Codex's model says to wait for the sub-agent that it has started, which has a random name."""
    (agent,) = set(re.findall(r"agent_id\W+([\w-]+)", prompt.rpartition("<tool_response>")[2]))
    return call_of("multi_agent_v1__wait_agent", json.dumps({"targets": [agent], "timeout_ms": 1000 * SECONDS}))


#: Codex's sub-agents run at the same time as their parent; this one waits.
DELEGATED_BY_CODEX = [
    call_of("multi_agent_v1__spawn_agent", json.dumps({"message": SHORT_TASK})),
    wait_for_agent,
    *OF_CODEX[-2:],
]
OF_MINI = [
    call_of("bash", '{"command": "cat note.txt"}'),
    call_of("bash", json.dumps({"command": COMMAND})),
    call_of("bash", json.dumps({"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{ANSWER}'"})),
]


def delegated(whole: list[str], tool: str, **more: object) -> list[str]:
    """The replies with the first call made by a sub-agent, which a call of ``tool`` starts."""
    asked = {"description": "read the note", "prompt": SHORT_TASK, **more}
    return [call_of(tool, json.dumps(asked)), whole[0], f"The note says: {NOTE}", *whole[1:]]


IN_BACK = {"subagent_type": "general-purpose", "run_in_background": False}
RETRIED = "answers are lost, and asked for again"
SUB_AGENT = "a sub-agent reads a file, a command is run"
DELEGATES = {"rows": 2, "why": "the sub-agent's is its own", "is_long": True}
NODE_OPENAI, NODE_ANTHROPIC = ("openai", "vendors_node"), ("@anthropic-ai/sdk", "vendors_node")
VERCEL, VERCEL_OPENAI = ("@ai-sdk/openai-compatible", "vercel_node"), ("@ai-sdk/openai", "vercel_node")

CASES = [
    Case(CODEX.name, "codex", "as_is", f"`codex exec`: {SHOWN}, a tool of a namespace is called", OF_CODEX),
    Case(CLAUDE.name, "claude", "as_is", f"`claude --bare -p`: {SHOWN}", OF_CLAUDE),
    Case(QWEN.name, "qwen", "as_is", f"`qwen --bare`: {SHOWN}", OF_QWEN),
    Case(OPENCODE.name, "opencode", "as_is", f"`opencode run`: {SHOWN}", OF_OPENCODE),
    Case(MINI.name, "mini", "as_is", f"`mini`: {SHOWN}", OF_MINI),
    Case(*NODE_OPENAI, "run_tools", "Node: `runTools`", OF_SCRIPTS),
    Case(*NODE_ANTHROPIC, "tool_runner", "Node: `toolRunner`, which keeps a thread at the server", OF_SCRIPTS),
    Case(*VERCEL, "stream_chat", "Node: `streamText`", OF_SCRIPTS),
    Case(*VERCEL_OPENAI, "generate_responses", "Node: `generateText`", OF_SCRIPTS),
    Case(*NODE_OPENAI, "run_tools_stream", "Node: `runTools`, streamed", OF_SCRIPTS, is_long=True),
    Case(*NODE_OPENAI, "responses", "Node: streamed tool loop", OF_SCRIPTS, is_long=True),
    Case(*NODE_ANTHROPIC, "tool_runner_stream", "Node: `toolRunner`, streamed", OF_SCRIPTS, is_long=True),
    Case(*VERCEL, "generate_chat", "Node: `generateText`", OF_SCRIPTS, is_long=True),
    Case(*VERCEL_OPENAI, "stream_responses", "Node: `streamText`", OF_SCRIPTS, is_long=True),
    Case(CLAUDE.name, "claude", "whole", f"`claude -p`: {SHOWN}", OF_CLAUDE, is_long=True),
    Case(CODEX.name, "codex", "retried", f"`codex exec`: {RETRIED}", OF_CODEX, lost=("closed", "error"), is_long=True),
    Case(OPENCODE.name, "opencode", "retried", f"`opencode run`: {RETRIED}", OF_OPENCODE, lost=("error",), is_long=True),
    Case(CLAUDE.name, "claude", "retried", f"`claude --bare -p`: {RETRIED}", OF_CLAUDE, lost=("error",), is_long=True),
    Case(
        CLAUDE.name,
        "claude",
        "sub_agent",
        f"`claude -p`: {SUB_AGENT}",
        delegated(OF_CLAUDE, "Agent", **IN_BACK | {"subagent_type": "Explore"}),
        sub_agent="agent",
        **DELEGATES,
    ),
    Case(
        CODEX.name,
        "codex",
        "sub_agent",
        f"`codex exec`: {SUB_AGENT}",
        DELEGATED_BY_CODEX,
        beside=(f"user\n{SHORT_TASK}", [OF_CODEX[0], f"The note says: {NOTE}"]),
        sub_agent="agent",
        **DELEGATES,
    ),
    Case(
        QWEN.name,
        "qwen",
        "sub_agent",
        f"`qwen`: {SUB_AGENT}",
        delegated(OF_QWEN, "agent", **IN_BACK),
        sub_agent="agent",
        **DELEGATES,
    ),
    Case(
        OPENCODE.name,
        "opencode",
        "sub_agent",
        f"`opencode run`: {SUB_AGENT}",
        delegated(OF_OPENCODE, "task", subagent_type="general"),
        sub_agent="task",
        **DELEGATES,
    ),
    Case(
        OPENCODE.name,
        "opencode",
        "titled",
        f"`opencode run` with titles, which are not trained: {SHOWN}",
        OF_OPENCODE,
        is_long=True,
        aside=("You are a title generator", "The number"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs(case, play, world):
    played = play(case)
    text = played.value[1] if isinstance(played.value, list) else played.value
    assert text == ANSWER
    last = world.text(played.records[-1].prompt_ids)
    assert NOTE in last, "the file that the program read"
    assert PRINTED in last, "what the command printed"
    assert len({record.rid for record in played.records}) == case.rows, "one conversation each"
    assert played.side_calls == (case.aside is not None)
    assert played.retries == len(case.lost)
    assert not played.refused
    assert [row.info.get("sub_agent", "") for row in played.rows] == [*[""] * (len(played.rows) - 1), case.sub_agent][
        : case.rows
    ]
    if case.client == CODEX.name:
        asked = played.records[0].metadata["warnings"]
        assert any("web_search is left out" in warning for warning in asked)
    else:
        assert all("warnings" not in record.metadata for record in played.records)
    if case.name == "stream_chat":
        assert {"tool-call", "tool-result", "text-delta", "reasoning-delta", "finish"} <= set(played.value[0])
