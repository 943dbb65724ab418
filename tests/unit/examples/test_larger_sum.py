"""Two sums side by side: splits, rewards, and worked episodes that are what the workflow makes of them, layout and all."""

import asyncio

import pytest
import torch
from worlds.larger_sum import conclusion_reward, episode, tasks

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError
from rollwright.inference.request import ModelResponse
from rollwright.trainers.loops.supervised import supervised_batch
from rollwright.workflows.parallel_generation import ParallelGenerationWorkflow

TOKENIZER = build_character_tokenizer(pieces=["<Goal>", "</Goal>", "<Path>", "</Path>", "<Conclusion>", "</Conclusion>"])


def test_answers_are_right_and_splits_share_no_task():
    rows = {split: tasks(split, size=200) for split in ("train", "valid", "test")}
    for row in (row for split in rows.values() for row in split):
        first, second = (sum(map(int, one.split("+"))) for one in row["query_id"].split())
        assert first != second
        assert int(row["answer"]) == max(first, second)
    assert len({row["query_id"] for split in rows.values() for row in split}) == 600
    with pytest.raises(DataError, match="no split 'all'"):
        tasks("all")


@pytest.mark.parametrize(
    ("digits", "one", "worked"),
    [(1, "7+5", "7+5=12 12"), (2, "47+25", "7+5=12 4+2+1=7 72"), (3, "950+149", "0+9=9 5+4=9 9+1=10 1099")],
)
def test_numbers_have_as_many_digits_as_asked(digits, one, worked):
    assert all(
        len(number) == digits for row in tasks(size=50, digits=digits) for number in row["query_id"].replace("+", " ").split()
    )
    task = {"messages": [{"role": "user", "content": f"{one} {one}"}], "answer": ""}
    assert f" {one} {worked}</Path>" in [part["text"] for part in episode(task)]


def test_more_tasks_than_there_are_is_an_error():
    assert len(tasks("test", size=328, digits=1)) == 328
    with pytest.raises(DataError, match="with 1 digits, test has 1 to 328 tasks"):
        tasks("test", size=329, digits=1)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<Path>\n1. 80</Path>\n<Conclusion>\n80</Conclusion>\n", 1.0),
        ("<Conclusion>\n 80 </Conclusion>", 1.0),
        ("<Path>\n1. 80</Path>\n<Conclusion>\n72</Conclusion>\n", 0.0),
        ("<Path>\n1. 80</Path>\n", 0.0),
    ],
)
def test_only_the_conclusion_counts(completion, reward):
    assert conclusion_reward("", completion, [], [], answer="80", query_id="x") == reward


@pytest.mark.parametrize("isolated", [True, False])
def test_a_worked_episode_is_what_the_workflow_makes_of_it(isolated):
    for task in tasks("valid", size=5):
        segments = episode(task, isolated)
        goal, *paths, conclusion = [part["text"] for part in segments if part["train"]]

        class Author:
            async def agenerate(self, request, goal=goal, paths=paths, conclusion=conclusion):
                asked = TOKENIZER.decode(request.input_ids)
                number = asked.rsplit("\n", 1)[1]
                said = {"1.": paths[0], "2.": paths[1]}.get(number, goal if asked.endswith("<Goal>\n") else conclusion)
                ids = TOKENIZER.encode(said, add_special_tokens=False)
                return ModelResponse(request.input_ids, ids, [-0.5] * len(ids), [0] * len(ids))

        workflow = ParallelGenerationWorkflow(
            conclusion_reward,
            GenerationHyperparameters(),
            TOKENIZER,
            branch_attention="isolated" if isolated else "plain",
            train_closing_tags=True,
        )
        row = asyncio.run(workflow.arun_episode(Author(), task))
        worked = supervised_batch([{"segments": segments}], TOKENIZER)
        columns = ["input_ids", "loss_mask", *(["position_ids", "branch_ids"] if isolated else [])]
        assert set(worked) == {*columns, "attention_mask"}
        assert all(torch.equal(row[column], worked[column]) for column in columns)
        assert row["rewards"].tolist() == [1.0]
