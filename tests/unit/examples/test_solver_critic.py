"""A solver and a critic of the number game: the right verdict, rows and rewards of both, and warm-up games that the workflow would play."""

import asyncio
import functools

import pytest
from parts import FixedEngine, sampled
from worlds.guessing import RISKY, SAFE, Game, proposals, right_verdict, talks
from worlds.solver_critic import SolverCritic

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.inference.request import ModelResponse

TOKENIZER = build_character_tokenizer("0123456789- ", pieces=["higher", "lower", "no number", SAFE, RISKY])
TASK = {"messages": [{"role": "user", "content": "20-34"}], "answer": "29", "query_id": "20-34:29"}


class Says(FixedEngine):
    """An engine that gives the answers of a list, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def agenerate(self, request):
        self.asked.append(TOKENIZER.decode(request.input_ids, skip_special_tokens=False))
        ids = TOKENIZER.encode(f"{self.answers.pop(0)}<|end|>", add_special_tokens=False)
        return ModelResponse(list(request.input_ids), ids, [-0.5] * len(ids), [0] * len(ids), "stop")


def play(*answers, task=TASK, **arguments):
    """Play one game, or ``n_samples`` games; returns the rows, checked, and what the engine was asked."""
    gconfig = {"max_new_tokens": 9, "n_samples": arguments.pop("n_samples", 1)}
    engine, workflow = Says(*answers), SolverCritic(gconfig, TOKENIZER, **arguments)

    async def run():
        sample = sampled(engine)
        return normalise(await workflow.arun_episode(sample, task), sample.recorder, workflow="solver_critic")

    rows = asyncio.run(run())
    check_trajectory(rows)
    assert not engine.answers
    return rows, engine.asked


def texts(rows):
    tokens = zip(rows["input_ids"], rows["attention_mask"], strict=True)
    return [TOKENIZER.decode(ids[mask].tolist(), skip_special_tokens=False) for ids, mask in tokens]


@functools.cache
def findable(numbers, turns):
    """How many numbers the best of all plans finds, first guess by first guess."""
    if numbers <= 0 or turns == 0:
        return 0
    return max(1 + findable(place, turns - 1) + findable(numbers - 1 - place, turns - 1) for place in range(numbers))


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 14, 15])
def test_a_guess_is_safe_if_the_best_plan_may_begin_with_it(count, turns):
    left = range(30, 30 + count)
    for guess in (None, *range(28, 47)):
        place = -1 if guess is None else guess - 30
        is_best = 0 <= place < count and 1 + findable(place, turns) + findable(count - 1 - place, turns) == findable(
            count, turns + 1
        )
        assert right_verdict(left, guess, turns) == (SAFE if is_best else RISKY)


def test_a_solver_that_hears_an_objection_guesses_once_more():
    rows, asked = play("20-34 20", RISKY, "20-34 27", "28-34 29", SAFE, max_turns=4)
    assert texts(rows) == [
        "<|user|>20-34<|end|><|assistant|>20-34 20<|end|><|user|>risky<|end|><|assistant|>20-34 27<|end|>"
        "<|user|>higher<|end|><|assistant|>28-34 29<|end|>",
        "<|user|>0 14<|end|><|assistant|>risky<|end|>",
        "<|user|>1 5<|end|><|assistant|>safe<|end|>",
    ]
    assert rows["role"] == ["solver", "critic", "critic"]
    assert rows["rewards"].tolist() == pytest.approx([0.9, 1.0, 0.0])  # 29 is not in the middle: the second verdict is wrong
    assert rows["turn_ids"].tolist() == [0, 0, 1]
    assert rows["role_ids"][1] == rows["role_ids"][2] != rows["role_ids"][0]
    assert rows["loss_mask"].sum(dim=1).tolist() == [27, 2, 2]
    assert asked[1] == "<|user|>0 14<|end|><|assistant|>"  # all that the critic sees


def test_a_reply_without_a_number_is_risky_and_misses():
    rows, _ = play("-", RISKY, "20-34", "29", "no number")
    assert rows["rewards"].tolist() == pytest.approx([0.9, 1.0, 0.0])


def test_the_last_guess_is_not_judged():
    rows, _ = play("20-34 27", SAFE, "29", max_turns=2)
    assert rows["role"] == ["solver", "critic"]
    assert rows["rewards"].tolist() == pytest.approx([0.9, 1.0])


def test_a_solver_plays_alone():
    rows, asked = play("20-34 27", "28-34 31", "28-30 29", critic=False)
    assert rows["role"] == ["solver"]
    assert rows["rewards"].tolist() == pytest.approx([0.81])
    assert len(asked) == 3


def test_games_that_nobody_repeats_are_one_sample_each():
    rows, _ = play("29", "27", SAFE, SAFE, "29", SAFE, n_samples=2)
    assert rows["sample_ids"].tolist() == [0, 0, 1, 1, 1]
    assert rows["rewards"][[0, 2]].tolist() == pytest.approx([1.0, 0.9])


def test_worked_games_are_those_that_the_workflow_plays():
    kinds = set()
    for task in talks("valid", size=40, numbers=7, max_turns=3):
        said = [part["text"].removesuffix("<|end|>") for part in task["segments"] if part["train"]]
        whole = "".join(part["text"] for part in task["segments"])
        if said[0] in (SAFE, RISKY):
            kinds.add("verdict")
            continue
        heard = [part["text"] for part in task["segments"] if not part["train"]]
        kinds.add("objection" if RISKY in whole else "plain")
        rows, _ = play(*with_verdicts(said, heard), task=task)
        assert texts(rows)[0] == whole
    assert kinds == {"verdict", "objection", "plain"}


@pytest.mark.parametrize("halves", [False, True])
def test_after_an_objection_the_other_guess_is_made(halves):
    middle = {False: [], True: []}
    for task in talks(size=150, halving_share=float(halves), numbers=7, max_turns=3):
        texts_of_task = [part["text"].removesuffix("<|end|>") for part in task["segments"]]
        for heard, reply in zip(texts_of_task[0::2], texts_of_task[1::2], strict=True):
            if reply in (SAFE, RISKY):
                continue
            first, last, guess = map(int, reply.replace("-", " ").split(" "))
            assert guess in (first, (first + last) // 2)
            if first < last - 1:
                middle[RISKY in heard].append(guess != first)
    assert len(middle[True]) > 50
    assert set(middle[False]) == {halves}
    assert set(middle[True]) == {not halves}


def test_the_warm_up_does_not_tell_which_verdict_is_right():
    right = {task["messages"][0]["content"]: task["answer"] for task in proposals()}
    hits = {sides: [] for sides in right}
    for task in talks(size=3000, numbers=7, max_turns=3):
        heard, said = (part["text"].removesuffix("<|end|>") for part in task["segments"][:2])
        sides = heard.removeprefix("<|user|>").split("<")[0]
        if said in (SAFE, RISKY) and sides in right:
            hits[sides].append(said == right[sides])
    for told in hits.values():
        assert len(told) > 50
        assert sum(told) / len(told) == pytest.approx(0.5, abs=0.12)


def test_the_critic_alone_is_asked_about_every_guess_of_the_players():
    assert {task["messages"][0]["content"]: task["answer"] for task in proposals()} == {
        "3 3": SAFE,
        "1 1": SAFE,
        "0 6": RISKY,
        "0 5": RISKY,
    }


@pytest.mark.parametrize(
    ("reply", "sides"), [("20-34 27", "7 7"), ("20", "0 14"), ("34", "14 0"), ("35", "no number"), ("-", "no number")]
)
def test_a_critic_sees_how_many_numbers_a_guess_leaves(reply, sides):
    assert Game(TASK).sides(reply) == sides


def with_verdicts(said, heard, max_turns=3):
    """The replies of a worked game, with the critic's verdict after each proposal but the last guess."""
    turn = 0
    for place, reply in enumerate(said):
        yield reply
        if RISKY not in heard[place]:
            turn += 1
            if turn < max_turns:
                yield RISKY if place + 1 < len(heard) and RISKY in heard[place + 1] else SAFE
