"""The quick form of the fault injection: a few kills of each topology; ``python -m tests.faults`` is the long one."""

from __future__ import annotations

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("openai")

from .campaign import campaign, holds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


#: Seeds whose few faults are of many kinds. ``both-critic`` is ``both-sync`` with a critic, so that the long form alone has that.
@pytest.mark.parametrize(
    ("topology", "kills", "seed"),
    [
        ("both-critic", 3, 20),
        ("both-lora", 2, 3),
        ("both-async", 3, 19),
        ("both-ranks", 2, 1),
        ("explore-train", 5, 27),
        ("serve", 3, 39),
        ("long-episodes", 4, 1),
    ],
)
def test_a_few_kills_lose_and_repeat_nothing(topology, kills, seed, tmp_path, tiny_model, warm):
    report = campaign(topology, kills, seed, tmp_path / "runs", model=tiny_model, warm=warm)
    assert report["kills"] == kills
    assert holds(report), report


def test_episodes_that_begin_anew_would_be_found_by_their_lengths(tmp_path, tiny_model, warm):
    """What the proof of lengths is for: unfinished episodes begin anew, and are drawn shorter than they were."""
    report = campaign("long-episodes", 4, 1, tmp_path / "runs", model=tiny_model, warm=warm, kind="restart")
    assert not holds(report)
    assert "episodes are not as long as they were when they first began" in report["wrong"][0]
    assert report["episodes"]["calls"] < report["episodes"]["first_drawn"]
    assert (report["lost"], report["duplicated"], report["left_behind"]) == (0, 0, [])
