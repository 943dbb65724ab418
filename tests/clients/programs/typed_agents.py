"""Pydantic AI over each of the three dialects."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is 17 + 25?"


class Verdict(BaseModel):
    """What is parsed."""

    answer: Literal["yes", "no"]
    certain: bool


def _model(dialect, base_url, api_key):
    if dialect == "messages":
        provider = AnthropicProvider(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        return AnthropicModel("default", provider=provider)
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[dialect]
    return kind("default", provider=OpenAIProvider(base_url=base_url, api_key=api_key))


async def _structured(output, base_url, api_key):
    agent = Agent(_model("chat", base_url, api_key), output_type=output)
    return (await agent.run("Is 17 + 25 = 42?")).output.model_dump()


async def native(base_url, api_key):
    return await _structured(NativeOutput(Verdict), base_url, api_key)


async def prompted(base_url, api_key):
    return await _structured(PromptedOutput(Verdict), base_url, api_key)


async def tool_output(base_url, api_key):
    return await _structured(ToolOutput(Verdict), base_url, api_key)


async def _thinking(dialect, base_url, api_key):
    """A tool, and another turn: what comes back of the reasoning is the client's own form of it."""
    agent = Agent(_model(dialect, base_url, api_key), instructions="Add with the tool.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    first = await agent.run(QUESTION)
    second = await agent.run("Sure?", message_history=first.all_messages())
    parts = [part for message in second.all_messages() for part in message.parts if part.part_kind == "thinking"]
    raw = [(part.provider_details or {}).get("raw_content") for part in parts]  # where a reasoning item has no summary
    return first.output, second.output, [part.content or "".join(text) for part, text in zip(parts, raw, strict=True)]


async def thinking_chat(base_url, api_key):
    return await _thinking("chat", base_url, api_key)


async def thinking_responses(base_url, api_key):
    return await _thinking("responses", base_url, api_key)


async def thinking_messages(base_url, api_key):
    return await _thinking("messages", base_url, api_key)


async def stream(base_url, api_key):
    agent = Agent(_model("chat", base_url, api_key))
    async with agent.run_stream(QUESTION) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    return len(pieces), "".join(pieces)
