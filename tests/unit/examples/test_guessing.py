"""Guessing numbers: splits, verdicts, what the best play earns, and worked games that are what the workflow makes of them."""

import asyncio
import functools

import pytest
from worlds.guessing import NUMBERS, Game, best_reward, episode, games, verdict

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError
from rollwright.inference.request import ModelResponse
from rollwright.workflows.multi_turn import MultiTurnWorkflow


def test_every_number_of_an_interval_is_a_game_of_one_split():
    found = {split: games(split) for split in ("train", "valid", "test")}
    for task in (task for split in found.values() for task in split):
        first, last = map(int, task["messages"][0]["content"].split("-"))
        assert first <= int(task["answer"]) <= last == first + NUMBERS - 1 <= 99
    names = [task["query_id"] for split in found.values() for task in split]
    assert len(set(names)) == len(names) == 76 * NUMBERS
    with pytest.raises(DataError, match="were asked for, split 'test' has"):
        games("test", size=1000)


def test_intervals_may_have_any_number_of_numbers():
    found = [task for split in ("train", "valid", "test") for task in games(split, numbers=7)]
    assert len({task["query_id"] for task in found}) == len(found) == 84 * 7
    assert {"10-16:10", "93-99:99"} <= {task["query_id"] for task in found}
    for numbers in (0, 91):
        with pytest.raises(DataError, match=f"numbers is {numbers}; an interval has 1 to 90"):
            games(numbers=numbers)


def test_the_share_of_players_who_halve_is_kept_and_they_win():
    rows = games(size=200, worked=True, halving_share=0.3)
    first = [part["segments"][1]["text"].removesuffix("<|end|>") for part in rows]
    middle = [int(text[6:]) == int(text[:2]) + NUMBERS // 2 for text in first]
    assert sum(middle) == 60
    assert all(
        row["segments"][-1]["text"].endswith(f" {row['answer']}<|end|>") for row, it in zip(rows, middle, strict=True) if it
    )
    with pytest.raises(DataError, match="halving_share is 2"):
        games(halving_share=2)


@pytest.mark.parametrize(
    ("guess", "said"),
    [
        ("12", "higher"),
        ("9-99 41\n", "lower"),
        ("-", "no number"),
        ("", "no number"),
        ("²", "no number"),
        ("9" * 9999, "lower"),
    ],
)
def test_verdicts(guess, said):
    assert verdict(guess, 0.0, {"answer": "29"}) == said


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_no_plan_earns_more_than_halving(discount):
    @functools.cache
    def earns(numbers, turns):  # the best of all plans, first guess by first guess
        if numbers == 0 or turns == 0:
            return 0.0
        return max(1 + discount * (earns(place, turns - 1) + earns(numbers - 1 - place, turns - 1)) for place in range(numbers))

    assert best_reward(4, discount) == pytest.approx(earns(NUMBERS, 4) / NUMBERS)
    assert best_reward(3, discount) == pytest.approx(earns(NUMBERS, 3) / NUMBERS)


def test_a_worked_game_is_what_the_workflow_makes_of_it():
    tokenizer = build_character_tokenizer("0123456789- ", pieces=["higher", "lower", "no number"])
    for number, task in enumerate(games("valid", size=20)):
        segments = episode(task, halves=number % 2 == 0)
        said = [part["text"] for part in segments if part["train"]]

        class Player:
            async def agenerate(self, request, said=said):
                ids = tokenizer.encode(said.pop(0), add_special_tokens=False)
                return ModelResponse(request.input_ids, ids, [-0.5] * len(ids), [0] * len(ids))

        workflow = MultiTurnWorkflow(
            "numeric_reward", GenerationHyperparameters(max_new_tokens=9), tokenizer, feedback_fn=verdict
        )
        row = asyncio.run(workflow.arun_episode(Player(), task))
        encoded = [(tokenizer.encode(part["text"], add_special_tokens=False), int(part["train"])) for part in segments]
        assert row["input_ids"][0].tolist() == [token for ids, _ in encoded for token in ids]
        assert row["loss_mask"][0].tolist() == [trained for ids, trained in encoded for _ in ids]
        guesses = len([part for part in segments if part["train"]])
        won = segments[-1]["text"].endswith(f" {task['answer']}<|end|>")
        assert row["rewards"].tolist() == pytest.approx([won * 0.9 ** (guesses - 1)])


@pytest.mark.parametrize("moment", range(4))
def test_a_restored_game_goes_on_identically(moment):
    [task] = games("valid", size=1)
    said = [part["text"].removesuffix("<|end|>") for part in episode({**task, "answer": "0"}) if part["train"]]
    game = Game(task)
    for reply in said[:moment]:
        game.step(reply)
    there = game.snapshot()
    rest = [*said[moment:], "-", task["answer"], "12"]
    first = [game.step(reply) for reply in rest]
    assert first[-2][1:3] == (1.0, True)
    for again in (game, Game(task)):
        again.restore(there)
        assert again.snapshot() == there
        assert [again.step(reply) for reply in rest] == first


def test_a_game_says_what_the_workflow_says():
    [task] = games("valid", size=1)
    segments, game = episode(task), Game(task)
    for seen, reply in zip(segments[::2], segments[1::2], strict=True):
        assert seen["text"] == f"<|user|>{game.observation()}<|end|><|assistant|>"
        result = game.step(reply["text"].removesuffix("<|end|>"))
    assert result.done
