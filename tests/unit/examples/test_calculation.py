"""Products for a script: answers, splits, and worked episodes that are what the workflow would make of them."""

import asyncio

import pytest
from worlds.calculation import OUTPUT_TEMPLATE, episode, products, question

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError
from rollwright.inference.request import ModelResponse
from rollwright.workflows.tool_integrated import ToolIntegratedWorkflow


def test_products_are_right_and_splits_share_none():
    rows = products("train", size=300, digits=2) + products("test", size=100, digits=2)
    for row in rows:
        left, right = row["question"].removesuffix("=").split("*")
        assert int(left) * int(right) == int(row["answer"])
        assert len(left) == len(right) == 2
    named = [frozenset(row["query_id"].split("*")) for row in rows]
    assert not set(named[:300]) & set(named[300:])


def test_the_share_of_scripts_is_kept():
    rows = products(size=100, worked=True, script_share=0.3)
    assert sum(len(row["segments"]) == 4 for row in rows) == 30
    assert all(row["segments"][-1]["text"] == f"<answer>{row['answer']}</answer>" for row in rows)
    with pytest.raises(DataError, match="script_share is 2"):
        products(script_share=2)


def test_products_of_full_length():
    rows = products(size=300, full_length=True)
    assert {len(row["answer"]) for row in rows} == {6}
    assert len({row["query_id"] for row in rows}) == 300
    assert {len(row["answer"]) for row in products(size=300)} == {5, 6}
    with pytest.raises(DataError, match="were asked for"):
        products(size=90, digits=1, full_length=True)


@pytest.mark.parametrize("script", [True, False])
def test_a_worked_episode_is_what_the_workflow_makes_of_it(script):
    tokenizer = build_character_tokenizer(pieces=["<python>", "</python>", "<answer>", "</answer>"])
    task = products(size=1)[0]
    segments = episode(task, script)
    said = [part["text"] for part in segments if part["train"]]

    class Author:
        async def agenerate(self, request):
            ids = tokenizer.encode(said.pop(0), add_special_tokens=False)
            return ModelResponse(request.input_ids, ids, [-0.5] * len(ids), [0] * len(ids))

    workflow = ToolIntegratedWorkflow(
        "exact_match_reward",
        GenerationHyperparameters(max_new_tokens=20),
        tokenizer,
        system_prompt="",
        data_extract_prompt_fn=question,
        output_template=OUTPUT_TEMPLATE,
    )
    row = asyncio.run(workflow.arun_episode(Author(), task))
    encoded = [(tokenizer.encode(part["text"], add_special_tokens=False), int(part["train"])) for part in segments]
    assert row["input_ids"][0].tolist() == [token for ids, _ in encoded for token in ids]
    assert row["loss_mask"][0].tolist() == [trained for ids, trained in encoded for _ in ids]
    assert row["rewards"].tolist() == [1.0]
