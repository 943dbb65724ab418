"""The quick form of the fault injection: a few kills of each topology; ``python -m tests.faults`` is the long one."""

from __future__ import annotations

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("openai")

from .campaign import campaign, holds
from .parts import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def warm():
    process = Warm()
    yield process
    process.close()


#: Seeds whose few faults are of many kinds.
@pytest.mark.parametrize(
    ("topology", "kills", "seed"), [("both-sync", 3, 20), ("both-async", 3, 19), ("explore-train", 5, 27), ("serve", 3, 39)]
)
def test_a_few_kills_lose_and_repeat_nothing(topology, kills, seed, tmp_path, tiny_model, warm):
    report = campaign(topology, kills, seed, tmp_path / "runs", model=tiny_model, warm=warm)
    assert report["kills"] == kills
    assert holds(report), report
