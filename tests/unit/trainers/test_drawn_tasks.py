"""Tasks by their ordinal are the same in every process, in whatever order they are asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.data.loader import TaskLoader
from rollwright.errors import DataError
from rollwright.trainers import drawn_tasks
from rollwright.trainers.drawn_tasks import DrawnTasks

ROWS = [{"question": str(number)} for number in range(10)]


def source():
    return TaskLoader(ROWS, 4, shuffle=True, drop_last=True, seed=3)


def expected(count: int) -> list[dict]:
    loader, rows = source(), []
    while len(rows) < count:
        for batch in loader:
            rows.extend(batch)
    return rows[:count]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_an_ordinal_is_the_same_task_whatever_was_asked_before(ordinals):
    tasks, wanted = DrawnTasks(source), expected(41)
    for ordinal in ordinals:
        assert tasks.row(ordinal) == wanted[ordinal]


def test_what_was_forgotten_is_drawn_anew(monkeypatch):
    monkeypatch.setattr(drawn_tasks, "REMEMBERED", 5)
    tasks, wanted = DrawnTasks(source), expected(31)
    tasks.row(30)
    assert tasks.row(2) == wanted[2]
    assert tasks.row(30) == wanted[30]


def test_a_source_without_batches_is_told():
    with pytest.raises(DataError, match="no batch"):
        DrawnTasks(lambda: []).row(0)
