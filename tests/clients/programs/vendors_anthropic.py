"""The ``anthropic`` package, as its documentation uses it."""

from __future__ import annotations

from typing import Literal

import anthropic
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is 17 + 25?"}]
TOOLS = [
    {
        "name": "add",
        "description": "Add two.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]


class Verdict(BaseModel):
    """What is parsed."""

    answer: Literal["yes", "no"]
    certain: bool


def _client(base_url, api_key):
    return anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)


def messages(base_url, api_key):
    client, history = _client(base_url, api_key), list(ASK)
    while True:
        answer = client.messages.create(
            model="default",
            max_tokens=1200,
            system="Add.",
            messages=history,
            tools=TOOLS,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        history.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return [[block.type for block in message["content"]] for message in history[1::2]], answer.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
            for block in answer.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})


def stream(base_url, api_key):
    client = _client(base_url, api_key)
    with client.messages.stream(model="default", max_tokens=600, messages=ASK, tools=TOOLS) as events:
        kinds = {event.type for event in events}
        answer = events.get_final_message()
    history = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And twice that?"}]
    with client.messages.stream(model="default", max_tokens=600, messages=history, tools=TOOLS) as events:
        return sorted(kinds), answer.content[-1].text, events.get_final_text()


def parse(base_url, api_key):
    answer = _client(base_url, api_key).messages.parse(model="default", max_tokens=600, messages=ASK, output_format=Verdict)
    return answer.parsed_output.model_dump()
