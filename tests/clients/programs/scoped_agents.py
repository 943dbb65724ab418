"""AgentScope's agent, with the settings that docs/agentscope.md gives."""

from __future__ import annotations

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from pydantic import BaseModel, Field

QUESTION = "What is 17 + 25?"


class Result(BaseModel):
    """The result."""

    answer: int = Field(description="the sum")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a (int): The first.
        b (int): The second.
    """
    return a + b


def _agent(base_url, api_key, stream):
    model = OpenAIChatModel(
        credential=OpenAICredential(api_key=api_key, base_url=base_url),
        model="default",
        stream=stream,
        max_retries=0,
        context_size=1 << 24,
        client_kwargs={"max_retries": 0},
    )
    allow = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
    return Agent(
        "solver",
        "Solve the problem.",
        model,
        toolkit=Toolkit(tools=[FunctionTool(add, permission=allow)]),
        react_config=ReActConfig(max_iters=4),
        injection_config=InjectionConfig(inject_runtime_state=False),
    )


async def tools(base_url, api_key):
    reply = await _agent(base_url, api_key, False).reply(UserMsg(name="user", content=QUESTION))
    return reply.get_text_content()


async def stream(base_url, api_key):
    reply = await _agent(base_url, api_key, True).reply(UserMsg(name="user", content=QUESTION))
    return reply.get_text_content()


async def structured(base_url, api_key):
    agent = _agent(base_url, api_key, False)
    reply = await agent.reply(UserMsg(name="user", content=QUESTION), structured_schema=Result)
    return reply.structured_output
