"""OpenAI's agents in their default mode, which speaks to the Responses API."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI
from pydantic import BaseModel

QUESTION = "What is 17 + 25?"


class Verdict(BaseModel):
    """What is parsed."""

    answer: Literal["yes", "no"]
    certain: bool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def _connect(base_url, api_key):
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0))


async def tools(base_url, api_key):
    _connect(base_url, api_key)
    agent = Agent(name="adder", instructions="Add with the tool.", model="default", tools=[add])
    first = await Runner.run(agent, QUESTION)
    again = [*first.to_input_list(), {"role": "user", "content": "Sure?"}]
    second = await Runner.run(agent, again)
    return first.final_output, second.final_output


async def stream(base_url, api_key):
    _connect(base_url, api_key)
    agent = Agent(name="adder", instructions="Add with the tool.", model="default", tools=[add])
    run = Runner.run_streamed(agent, QUESTION)
    kinds = {event.type async for event in run.stream_events()}
    return sorted(kinds), run.final_output


async def structured(base_url, api_key):
    _connect(base_url, api_key)
    agent = Agent(name="judge", instructions="Judge.", model="default", output_type=Verdict)
    first = await Runner.run(agent, "Is 17 + 25 = 42?")
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
    return [run.final_output.model_dump() for run in (first, second)]


async def structured_with_tools(base_url, api_key):
    _connect(base_url, api_key)
    agent = Agent(name="judge", instructions="Judge.", model="default", output_type=Verdict, tools=[add])
    return (await Runner.run(agent, "Is 17 + 25 = 42?")).final_output.model_dump()


async def handoff(base_url, api_key):
    _connect(base_url, api_key)
    adder = Agent(name="adder", handoff_description="Adds.", instructions="Add.", model="default")
    boss = Agent(name="boss", instructions="Hand over.", model="default", handoffs=[adder])
    run = await Runner.run(boss, QUESTION)
    return run.last_agent.name, run.final_output


async def mcp(base_url, api_key):
    _connect(base_url, api_key)
    server = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]}
    async with MCPServerStdio(params=server, client_session_timeout_seconds=60) as offered:
        agent = Agent(name="adder", instructions="Add.", model="default", mcp_servers=[offered])
        run = await Runner.run(agent, QUESTION)
    return [item.type for item in run.new_items], run.final_output
