"""Explorers of one run evaluate a version once, whoever comes first; weights that a trainer took back are evaluated anew."""

from __future__ import annotations

import pytest

from rollwright.store import Announcement
from rollwright.trainers.modes.shared_run import EvaluationTurns


def announced(version: int, epoch: int = 1, since: int = 0) -> Announcement:
    return Announcement(version, f"v{version}", epoch, since)


@pytest.fixture
def turns(tmp_path):
    return EvaluationTurns(tmp_path / "evaluation.lock")


def test_a_version_is_evaluated_by_one_explorer_once(turns):
    another = EvaluationTurns(turns.path)
    assert turns.last(announced(4)) is None
    with turns.taken(announced(4)) as mine, another.taken(announced(4)) as theirs:
        assert (mine, theirs) == (True, False)
    with another.taken(announced(4)) as theirs:
        assert not theirs  # it was evaluated
    assert another.last(announced(4)) == 4
    with another.taken(announced(8)) as theirs:
        assert theirs
    assert turns.last(announced(8)) == 8


def test_an_evaluation_that_failed_did_not_happen(turns):
    with pytest.raises(RuntimeError), turns.taken(announced(4)):
        raise RuntimeError
    assert turns.last(announced(4)) is None
    with turns.taken(announced(4)) as mine:
        assert mine


def test_versions_that_were_taken_back_count_no_more(turns):
    with turns.taken(announced(8)):
        pass
    assert turns.last(announced(9, epoch=2, since=9)) == 8  # the trainer went on after it
    again = announced(8, epoch=2, since=7)
    assert turns.last(again) == 6
    with turns.taken(again) as mine:
        assert mine


def test_what_an_announcement_says_of_the_weights_that_are_loaded():
    loaded = announced(6)
    assert announced(6).names_weights_of(loaded)
    assert not announced(6, epoch=2).names_weights_of(loaded)
    assert not announced(0).takes_back(None)
    assert not announced(7).takes_back(loaded)
    assert announced(4).takes_back(loaded)  # it is at 4 again, which was announced before
    assert announced(7, epoch=2, since=5).takes_back(loaded)  # past 6, but another 6
    assert not announced(7, epoch=2, since=7).takes_back(loaded)
