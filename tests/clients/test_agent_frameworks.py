"""Frameworks of agents: tools, handoffs, structured output, reasoning that comes back in the framework's own form."""

from __future__ import annotations

import json

import pytest
from client_cases import Case
from directed_model import CALL, FREE, THOUGHT, call_of

ANSWER, SURE = "17 + 25 is 42.", "Yes, 42."
VERDICT = {"answer": "yes", "certain": True}
AGENTS, TYPED = ("openai-agents", "openai_agents"), ("pydantic-ai-slim", "typed_agents")
SMOL, SCOPED = ("smolagents", "smol_agents"), ("agentscope", "scoped_agents")
LOOP = [THOUGHT + CALL, THOUGHT + ANSWER]
#: A call that the server begins, as tool_choice asks for one.
BEGUN = f'final_result", "arguments": {json.dumps(VERDICT)}}}\n</tool_call>'

CASES = [
    Case(*AGENTS, "tools", "tool loop, two turns", [*LOOP, SURE]),
    Case(*AGENTS, "stream", "streamed tool loop", LOOP),
    Case(*AGENTS, "structured", "structured output, two turns", [FREE, FREE]),
    Case(*AGENTS, "structured_with_tools", "structured output after a tool", [CALL, json.dumps(VERDICT)]),
    Case(
        *AGENTS, "handoff", "handoff", [call_of("transfer_to_adder", "{}"), ANSWER], 2, "another agent has other instructions"
    ),
    Case(*AGENTS, "mcp", "tool of an MCP server (stdio)", LOOP),
    Case(*TYPED, "native", "`NativeOutput`", [FREE]),
    Case(*TYPED, "prompted", "`PromptedOutput`", [json.dumps(VERDICT)]),
    Case(*TYPED, "tool_output", "`ToolOutput`", [BEGUN]),
    Case(*TYPED, "thinking_chat", "thinking, tool, two turns", [*LOOP, SURE]),
    Case(*TYPED, "thinking_responses", "thinking, tool, two turns", [*LOOP, SURE]),
    Case(*TYPED, "thinking_messages", "thinking, tool, two turns", [*LOOP, SURE]),
    Case(*TYPED, "stream", "stream", [THOUGHT + ANSWER]),
    Case(
        *SMOL,
        "tool_calling",
        "`ToolCallingAgent`",
        ['add", "arguments": {"a": 17, "b": 25}}\n</tool_call>', 'final_answer", "arguments": {"answer": 42}}\n</tool_call>'],
        2,
        "it writes calls as text of its own",
    ),
    Case(
        *SMOL,
        "code",
        "`CodeAgent`",
        ["Thought: add them.\n<code>\nprint(add(17, 25))\n</code>", "Thought: done.\n<code>\nfinal_answer(42)\n</code>"],
    ),
    Case(*SCOPED, "tools", "ReAct agent with a tool", LOOP),
    Case(*SCOPED, "stream", "streamed", LOOP),
    Case(*SCOPED, "structured", "structured result", [CALL, call_of("GenerateStructuredOutput", '{"answer": 42}')]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agent_frameworks(case, play, world):
    played = play(case)
    match str(case):
        case "openai-agents-tools":
            assert played.value == [ANSWER, SURE]
        case "openai-agents-stream":
            assert played.value[1] == ANSWER
            assert "raw_response_event" in played.value[0]
        case "openai-agents-handoff":
            assert played.value == ["adder", ANSWER]
        case "openai-agents-mcp":
            assert played.value[0][-1] == "message_output_item"
            assert "tool_call_output_item" in played.value[0]
            assert '"text":"42"' in world.text(played.records[1].prompt_ids) or "42" in world.text(played.records[1].prompt_ids)
        case "pydantic-ai-slim-stream":
            assert played.value[1] == ANSWER
            assert played.value[0] > 2
        case "smolagents-tool_calling" | "smolagents-code":
            assert int(played.value) == 42
        case "agentscope-tools" | "agentscope-stream":
            assert played.value == ANSWER
        case "agentscope-structured":
            assert played.value == {"answer": 42}
        case name if "thinking" in name:
            assert played.value == [ANSWER, SURE, ["Add them.", "Add them."]]
        case _:
            verdicts = played.value if isinstance(played.value, list) else [played.value]
            for verdict in verdicts:
                assert verdict["answer"] in ("yes", "no")
                assert FREE in case.replies or verdict == VERDICT
