"""A tool loop over the ``openai`` package: ``python sums_agent.py BASE_URL API_KEY MODEL QUESTION``."""

from __future__ import annotations

import json
import sys

import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two.", "parameters": PARAMETERS}}]

base_url, api_key, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
messages = [{"role": "user", "content": question}]
while True:
    message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
