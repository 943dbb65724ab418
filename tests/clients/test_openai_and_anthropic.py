"""The vendors' own packages."""

from __future__ import annotations

import pytest
from client_cases import Case
from directed_model import CALL, FREE, THOUGHT

ANSWER = "17 + 25 is 42."
OPENAI, ANTHROPIC = ("openai", "vendors_openai"), ("anthropic", "vendors_anthropic")
CASES = [
    Case(*OPENAI, "chat", "tool loop, reasoning apart", [THOUGHT + CALL, THOUGHT + ANSWER]),
    Case(*OPENAI, "chat_stream", "streamed tool loop", [THOUGHT + CALL, ANSWER]),
    Case(*OPENAI, "chat_parse", "`parse`, two turns", [FREE, FREE]),
    Case(*OPENAI, "responses", "tool loop by `previous_response_id`", [THOUGHT + CALL, THOUGHT + ANSWER]),
    Case(*OPENAI, "responses_stream", "streamed tool loop, items sent back", [THOUGHT + CALL, ANSWER]),
    Case(*OPENAI, "responses_parse", "`parse`, two turns", [FREE, FREE]),
    Case(*ANTHROPIC, "messages", "tool loop, thinking blocks", [THOUGHT + CALL, THOUGHT + ANSWER]),
    Case(*ANTHROPIC, "stream", "streams, two turns", [THOUGHT + ANSWER, ANSWER]),
    Case(*ANTHROPIC, "parse", "`parse`", [FREE]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_openai_and_anthropic(case, play):
    played = play(case)
    match case.name:
        case "chat":
            assert played.value == ANSWER
        case "chat_stream":
            kinds, called, last = played.value
            assert (called, last) == (["add"], ANSWER)
            assert "tool_calls.function.arguments.done" in kinds
        case "responses":
            assert played.value == [["reasoning", "message"], ANSWER]
        case "responses_stream":
            kinds, text = played.value
            assert text == ANSWER
            assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(kinds)
        case "messages":
            assert played.value == [[["thinking", "tool_use"], ["thinking", "text"]], ANSWER]
        case "stream":
            kinds, first, second = played.value
            assert (first, second) == (ANSWER, ANSWER)
            assert {"thinking", "text", "message_stop"} <= set(kinds)
        case _:  # parsed by the client from what the model said under the schema's grammar
            verdicts = played.value if isinstance(played.value, list) else [played.value]
            assert all(verdict["answer"] in ("yes", "no") for verdict in verdicts)
