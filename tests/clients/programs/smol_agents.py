"""smolagents: an agent that calls tools, and one that writes Python."""

from __future__ import annotations

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

QUESTION = "What is 17 + 25?"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def _model(base_url, api_key):
    return OpenAIModel(model_id="default", api_base=base_url, api_key=api_key, client_kwargs={"max_retries": 0})


def tool_calling(base_url, api_key):
    return ToolCallingAgent(tools=[add], model=_model(base_url, api_key), max_steps=4, verbosity_level=0).run(QUESTION)


def code(base_url, api_key):
    return CodeAgent(tools=[add], model=_model(base_url, api_key), max_steps=4, verbosity_level=0).run(QUESTION)
