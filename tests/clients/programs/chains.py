"""LangChain's models and LangGraph's graphs."""

from __future__ import annotations

import asyncio
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

QUESTION = "What is 17 + 25?"


class Verdict(BaseModel):
    """A verdict."""

    answer: Literal["yes", "no"]
    certain: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def _openai(base_url, api_key, **settings):
    return ChatOpenAI(model="default", base_url=base_url, api_key=api_key, max_retries=0, **settings)


def _anthropic(base_url, api_key):
    return ChatAnthropic(model="default", base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, max_tokens=600)


def _structured(method, base_url, api_key):
    model = _openai(base_url, api_key).with_structured_output(Verdict, method=method)
    return model.invoke("Is 17 + 25 = 42? Answer in JSON.").model_dump()


def json_schema(base_url, api_key):
    return _structured("json_schema", base_url, api_key)


def function_calling(base_url, api_key):
    return _structured("function_calling", base_url, api_key)


def json_mode(base_url, api_key):
    return _structured("json_mode", base_url, api_key)


def structured_responses(base_url, api_key):
    model = _openai(base_url, api_key, use_responses_api=True).with_structured_output(Verdict)
    return model.invoke("Is 17 + 25 = 42?").model_dump()


def structured_messages(base_url, api_key):
    return _anthropic(base_url, api_key).with_structured_output(Verdict).invoke("Is 17 + 25 = 42?").model_dump()


def _graph(model):
    model = model.bind_tools([add])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def _run(graph):
    state = graph.invoke({"messages": [HumanMessage(QUESTION)]})
    state = graph.invoke({"messages": [*state["messages"], HumanMessage("Sure?")]})
    return [type(message).__name__ for message in state["messages"]], state["messages"][-1].text


def graph(base_url, api_key):
    return _run(_graph(_openai(base_url, api_key)))


def graph_responses(base_url, api_key):
    return _run(_graph(_openai(base_url, api_key, use_responses_api=True)))


def graph_messages(base_url, api_key):
    return _run(_graph(_anthropic(base_url, api_key)))


async def graph_streamed(base_url, api_key):
    model = _openai(base_url, api_key).bind_tools([add])

    async def ask(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    pieces = []
    async with asyncio.timeout(120):
        given = {"messages": [HumanMessage(QUESTION)]}
        async for message, _ in graph.compile().astream(given, stream_mode="messages"):
            pieces.append(message.text)
    return "".join(pieces)
