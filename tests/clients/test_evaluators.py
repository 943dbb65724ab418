"""Evaluators: lm-eval, Inspect, and the environments of verifiers."""

from __future__ import annotations

import pytest
import torch
from client_cases import Case
from directed_model import CALL, FREE, THOUGHT

ANSWER = "17 + 25 is 42."
LM_EVAL, INSPECT = ("lm_eval", "evaluators_lm_eval"), ("inspect-ai", "evaluators_inspect")
VERIFIERS = ("verifiers", "evaluators_verifiers")
LOOP = [THOUGHT + CALL, THOUGHT + ANSWER]
APART = "every question is asked alone"

CASES = [
    Case(*LM_EVAL, "generate_until", "`generate_until`", [" 42\n", " 12\n"], 2, APART),
    Case(*LM_EVAL, "multiple_choice", "`multiple_choice`", [FREE] * 6, 6, "every choice is scored alone"),
    Case(*LM_EVAL, "chat", "`generate_until`", ["42", "12"], 2, APART),
    Case(
        *INSPECT,
        "default",
        "task with a tool",
        ["hello, world", *LOOP],
        2,
        "it tries the server with a question of its own first",
    ),
    Case(*INSPECT, "chat", "task with a tool", LOOP),
    Case(*INSPECT, "messages", "task with a tool", LOOP),
    Case(*VERIFIERS, "evaluation", "`vf-eval`, an agent with a tool", LOOP),
    Case(*VERIFIERS, "train", "`vf-eval` with its train client, an agent with a tool", LOOP),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_evaluators(case, play, world):
    played = play(case)
    if case.client == "inspect-ai":
        assert played.value == [1.0, ["user", "assistant", "tool", "assistant"], ANSWER]
    elif case.client == "verifiers":
        assert "42" in str(played.value)
    elif case.name == "multiple_choice":
        check_choices(world, played)
    else:
        results, _ = played.value
        assert results["exact_match,number"] == 1.0


@torch.no_grad()
def check_choices(world, played) -> None:
    """What lm-eval takes for the choices' log-likelihoods is what the model gives."""
    _, answers = played.value
    tokenizer, model = world.engine.tokenizer, world.engine.model
    questions = (("17 + 25 =", ("41", "42", "52")), ("8 + 4 =", ("12", "11", "22")))
    for (question, choices), said in zip(questions, answers, strict=True):
        for choice, ((value, _greedy),) in zip(choices, said, strict=True):
            begun = tokenizer.encode(question, add_special_tokens=False)
            ids = tokenizer.encode(f"{question} {choice}", add_special_tokens=False)
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = logprobs[torch.arange(len(begun) - 1, len(ids) - 1), ids[len(begun) :]].sum()
            assert float(value) == pytest.approx(float(expected), abs=1e-3)
