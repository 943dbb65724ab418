"""What rows and documents of other shapes do to a search agent: they work, or say what they lack."""

from __future__ import annotations

import asyncio

import pytest
from parts import FixedEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError, PromptTooLongError, RewardError, WorkflowError
from rollwright.inference.request import ModelResponse
from rollwright.workflows.search_agent import SearchAgentWorkflow, show_document

TOKENIZER = build_character_tokenizer()


class Answering(FixedEngine):
    """Answers 1997 to everything."""

    async def agenerate(self, request):
        ids = TOKENIZER.encode("<answer> 1997 </answer>", add_special_tokens=False)
        return ModelResponse(request.input_ids, ids, [-0.5] * len(ids), [0] * len(ids), "stop")


def reward_of(row, **settings) -> float:
    agent = SearchAgentWorkflow(
        GenerationHyperparameters(max_new_tokens=64), TOKENIZER, **{"max_tokens": 2048, "search_tool": None, **settings}
    )
    trajectory = asyncio.run(agent.arun_episode(Answering(), row))
    assert trajectory is not None
    return trajectory["rewards"].item()


@pytest.mark.parametrize("answer", ["1997", 1997, [1984, 1997], ["x", None, "1997"]])
def test_answers_may_be_texts_numbers_or_lists_of_them(answer):
    assert reward_of({"question": "When?", "answer": answer}) == 1.0


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"question": "When?", "answer": {"value": "1997"}}, RewardError, "is a mapping .value."),
        ({"question": "When?", "answer": []}, RewardError, "no reference answer"),
        ({"question": "When?"}, WorkflowError, "no 'answer'"),
        ({"question": None, "answer": "1997"}, WorkflowError, "no 'question' that is text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}], "answer": "1"},
            WorkflowError,
            "'messages' that end with one",
        ),
    ],
)
def test_rows_that_lack_something_are_told(row, error, message):
    with pytest.raises(error, match=message):
        reward_of(row)


def test_a_limit_that_the_prompt_fills_is_told():
    """The reward of every episode was 0, in silence."""
    with pytest.raises(PromptTooLongError, match="max_tokens=20 limits prompt and turns together"):
        reward_of({"question": "When?", "answer": "1997"}, max_tokens=20)


def test_a_document_without_contents_is_no_page_that_says_nothing():
    with pytest.raises(DataError, match=r"no 'contents' \(it has text\)"):
        show_document({"text": "a mug"})
