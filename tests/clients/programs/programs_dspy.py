"""DSPy: a predictor, reasoning before an answer, and an agent with a tool."""

from __future__ import annotations

import dspy

QUESTION = "What is 17 + 25?"


def _lm(base_url, api_key, **settings):
    return dspy.LM("openai/default", api_base=base_url, api_key=api_key, cache=False, num_retries=0, **settings)


def predict(base_url, api_key):
    with dspy.context(lm=_lm(base_url, api_key)):
        return dspy.Predict("question -> answer: int")(question=QUESTION).answer


def json_adapter(base_url, api_key):
    with dspy.context(lm=_lm(base_url, api_key), adapter=dspy.JSONAdapter()):
        return dspy.Predict("question -> answer: bool, certain: bool")(question=QUESTION).toDict()


def react(base_url, api_key):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with dspy.context(lm=_lm(base_url, api_key)):
        return dspy.ReAct("question -> answer: int", tools=[add], max_iters=3)(question=QUESTION).answer
