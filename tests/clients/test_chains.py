"""LangChain, LangGraph and DSPy."""

from __future__ import annotations

import json

import pytest
from client_cases import Case
from directed_model import CALL, FREE, THOUGHT

ANSWER, SURE = "17 + 25 is 42.", "Yes, 42."
VERDICT = {"answer": "yes", "certain": True}
OPENAI, ANTHROPIC = ("langchain-openai", "chains"), ("langchain-anthropic", "chains")
GRAPH, DSPY = ("langgraph", "chains"), ("dspy", "programs_dspy")
TURNS = [THOUGHT + CALL, THOUGHT + ANSWER, SURE]
BEGUN = f" {json.dumps(VERDICT)}}}\n</tool_call>"

CASES = [
    Case(*OPENAI, "json_schema", "`with_structured_output`, `json_schema`", [FREE]),
    Case(*OPENAI, "function_calling", "`with_structured_output`, `function_calling`", [BEGUN]),
    Case(*OPENAI, "json_mode", "`with_structured_output`, `json_mode`", [json.dumps(VERDICT)]),
    Case(*OPENAI, "structured_responses", "`with_structured_output`", [FREE]),
    Case(*ANTHROPIC, "structured_messages", "`with_structured_output`", [BEGUN]),
    Case(*GRAPH, "graph", "graph with tools, two turns", TURNS),
    Case(*GRAPH, "graph_responses", "graph with tools, two turns", TURNS),
    Case(*GRAPH, "graph_messages", "graph with tools, two turns", TURNS),
    Case(*GRAPH, "graph_streamed", "graph with tools, streamed", TURNS[:2]),
    Case(*DSPY, "predict", "`Predict`", ["[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"]),
    Case(*DSPY, "json_adapter", "`Predict` with `JSONAdapter`", ['{"answer": true, "certain": true}']),
    Case(
        *DSPY,
        "react",
        "`ReAct`",
        [
            "[[ ## next_thought ## ]]\nAdd.\n\n[[ ## next_tool_name ## ]]\nadd\n\n"
            '[[ ## next_tool_args ## ]]\n{"a": 17, "b": 25}\n\n[[ ## completed ## ]]',
            "[[ ## next_thought ## ]]\nDone.\n\n[[ ## next_tool_name ## ]]\nfinish\n\n"
            "[[ ## next_tool_args ## ]]\n{}\n\n[[ ## completed ## ]]",
            "[[ ## reasoning ## ]]\nAdded.\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]",
        ],
        3,
        "it writes every prompt anew",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chains(case, play):
    played = play(case)
    if case.name == "graph_streamed":
        assert played.value.endswith("42" + ANSWER)  # the tool's result, and what the model makes of it
    elif case.client == "langgraph":
        kinds, text = played.value
        assert kinds == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage", "HumanMessage", "AIMessage"]
        assert text == SURE
    elif case.name in ("predict", "react"):
        assert played.value == 42
    elif case.name == "json_adapter":
        assert played.value == {"answer": True, "certain": True}
    else:
        assert played.value["answer"] in ("yes", "no")
        assert FREE in case.replies or played.value == VERDICT
