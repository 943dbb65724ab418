"""Arithmetic: right answers, honest work, splits that share nothing."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.data.arithmetic import arithmetic
from rollwright.errors import DataError


def test_rows_have_what_training_needs():
    row = next(row for row in arithmetic() if row["query_id"] == "72+63")
    assert row == {
        "messages": [{"role": "user", "content": "72+63="}],
        "answer": "135",
        "completion": "2+3=5 7+6=13 <answer>135</answer>",
        "query_id": "72+63",
    }
    assert arithmetic(worked=False, size=1, answer_format="#{answer}")[0]["completion"].startswith("#")


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["+", "-", "*", "+-", "+-*"]),
    st.integers(1, 9),
    st.integers(0, 10**6),
    st.sampled_from(["train", "valid", "test"]),
)
def test_answers_and_every_worked_step_are_right(operation, digits, seed, split):
    for row in arithmetic(split, size=3, digits=digits, min_digits=1 if digits > 1 else None, operation=operation, seed=seed):
        assert str(eval(row["query_id"])) == row["answer"]  # noqa: S307 (digits and a sign, made here)
        *steps, end = row["completion"].split(" ")
        assert end == f"<answer>{row['answer']}</answer>"
        assert steps
        for step in steps:
            assert re.fullmatch(r"[\d+*-]+=\d+", step)
            left, right = step.split("=")
            assert eval(left) == int(right)  # noqa: S307


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 5), st.tuples(*[st.integers(0, 99)] * 3))
def test_no_two_splits_share_a_task_whatever_their_seeds(digits, seeds):
    def tasks(split, seed):
        rows = arithmetic(split, size=200, digits=digits, seed=seed)
        return {frozenset(enumerate(sorted(row["query_id"].split("+")))) for row in rows}

    train, valid, test = (tasks(split, seed) for split, seed in zip(("train", "valid", "test"), seeds, strict=True))
    assert not train & valid
    assert not train & test
    assert not valid & test


def test_the_splits_together_are_all_tasks_once():
    rows = [row["query_id"] for split in ("train", "valid", "test") for row in arithmetic(split)]
    assert len(rows) == len(set(rows)) == 8100
    assert 6000 < len(arithmetic("train")) < 7000


def test_a_seed_gives_the_same_tasks_and_another_others():
    assert arithmetic(size=50, seed=3) == arithmetic(size=50, seed=3)
    assert arithmetic(size=50, seed=3) != arithmetic(size=50, seed=4)
    assert arithmetic(size=50, digits=9, seed=3) == arithmetic(size=50, digits=9, seed=3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"split": "dev"},
        {"size": 0},
        {"size": 10**5},
        {"digits": 0},
        {"min_digits": 3},
        {"operation": "/"},
        {"operation": ""},
        {"answer_format": "x"},
    ],
)
def test_refused(arguments):
    with pytest.raises(DataError, match="arithmetic"):
        arithmetic(**arguments)


def test_the_share_of_carries_is_what_was_asked_for():
    rows = arithmetic("train", 200, carries=0.1)
    assert sum("+1=" in row["completion"] for row in rows) == 20
    assert not any("+1=" in row["completion"] for row in arithmetic("train", 50, carries=0.0))
    with pytest.raises(DataError, match="carries is 2"):
        arithmetic("train", 10, carries=2)
