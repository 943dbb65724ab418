"""The ``openai`` package, as its documentation uses it."""

from __future__ import annotations

import json
from typing import Literal

import openai
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "What is 17 + 25?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two.", "parameters": PARAMETERS}}]
TOOLS = [{"type": "function", "name": "add", "description": "Add two.", "parameters": PARAMETERS, "strict": True}]


class Verdict(BaseModel):
    """What is parsed: short, so that a model that says anything comes to an end."""

    answer: Literal["yes", "no"]
    score: int = Field(ge=0, le=9)


def _sum(arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


def chat(base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(ASK)
    while True:
        message = client.chat.completions.create(model="default", messages=messages, tools=CHAT_TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _sum(call.function.arguments)})


async def chat_stream(base_url, api_key):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    async with client.chat.completions.stream(model="default", messages=ASK, tools=CHAT_TOOLS) as stream:
        kinds = {event.type async for event in stream}
        message = (await stream.get_final_completion()).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": _sum(call.function.arguments)} for call in message.tool_calls
    ]
    async with client.chat.completions.stream(model="default", messages=[*ASK, message, *results], tools=CHAT_TOOLS) as stream:
        last = (await stream.get_final_completion()).choices[0].message
    return sorted(kinds), [call.function.name for call in message.tool_calls], last.content


def chat_parse(base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    first = client.chat.completions.parse(model="default", messages=ASK, response_format=Verdict)
    messages = [*ASK, first.choices[0].message, {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.parse(model="default", messages=messages, response_format=Verdict)
    return [each.choices[0].message.parsed.model_dump() for each in (first, second)]


def responses(base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    response = client.responses.create(model="default", instructions="Add.", input="What is 17 + 25?", tools=TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": _sum(item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]
    response = client.responses.create(
        model="default", instructions="Add.", input=outputs, tools=TOOLS, previous_response_id=response.id
    )
    kinds = [item.type for item in response.output]
    return kinds, response.output_text


def responses_stream(base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    items = list(ASK)
    with client.responses.stream(model="default", input=items, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    items += response.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": _sum(item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]
    with client.responses.stream(model="default", input=items, tools=TOOLS) as stream:
        return sorted(kinds), stream.get_final_response().output_text


def responses_parse(base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    first = client.responses.parse(model="default", input=ASK, text_format=Verdict)
    again = [{"role": "user", "content": "Sure?"}]
    second = client.responses.parse(model="default", input=again, text_format=Verdict, previous_response_id=first.id)
    return [each.output_parsed.model_dump() for each in (first, second)]
