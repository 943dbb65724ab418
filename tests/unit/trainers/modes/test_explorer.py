"""Which tasks an explorer runs, and which of them the store has, where a task is claimed again or the trainer goes back."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("sqlalchemy")

from rollwright.errors import RolloutError
from rollwright.experience.experience import Experience
from rollwright.experience.operators import PipelineResult
from rollwright.store import ExperienceStore
from rollwright.trainers.modes import explore
from rollwright.trainers.modes.explore import ClaimedTask, Explorer, GroupSink

SAMPLE = [Experience(tokens=[1, 2], prompt_length=1, logprobs=[-0.5], reward=1.0)]


class Engine:
    """A group is sampled when the test lets it; tasks that are abandoned, and all others when it is destroyed, give none."""

    def __init__(self) -> None:
        self.executor = SimpleNamespace(stopped_by=None)
        self.running: set[int] = set()
        self.begun = 0
        self._ended: queue.SimpleQueue = queue.SimpleQueue()

    def submit(self, task, workflow, **_):
        self.running.add(self.begun)
        self.begun += 1
        return self.begun - 1

    def let_go(self, number: int) -> None:
        self.running.discard(number)
        self._ended.put({number: {}})

    def wait_for_any(self):
        ended = self._ended.get()
        if ended is None:
            raise RolloutError("the engine was closed")
        return ended

    def abandon(self, numbers) -> None:
        self.running -= set(numbers)

    def destroy(self) -> None:
        self._ended.put(None)


@pytest.fixture
def explorer(tmp_path, monkeypatch):
    """An explorer in its loop, whose groups have one sample each."""
    made = object.__new__(Explorer)
    made.name, made.claimed, made.deferred = "explore-0", [], []
    made.trainer = SimpleNamespace(version=0)
    operators = SimpleNamespace(apply=lambda samples: PipelineResult([SAMPLE]))
    monkeypatch.setattr(explore, "samples_of", lambda group, ordinal: [SAMPLE])
    monkeypatch.setattr(
        made, "_with_past", lambda claims: [ClaimedTask(claim, {"ordinal": claim.ordinal}) for claim in claims], raising=False
    )
    made.rollout = Engine()
    with ExperienceStore(f"sqlite:///{tmp_path}/experiences.db", run="run") as made.store:
        made.sink = GroupSink(made.rollout, object(), 1, made.store, operators)
        yield made
        made.sink.close()


def claim(explorer: Explorer, count: int):
    explorer.claimed = explorer.store.tasks.claim(explorer.name, count)
    return list(explorer.claimed)


def next_finished(explorer: Explorer):
    (finished,) = explorer.sink.finished(60)
    return finished


def test_a_task_that_is_claimed_again_is_not_taken_for_stored(explorer):
    (first,) = claim(explorer, 1)
    explorer._begin_claimed()
    explorer.store.tasks.release(explorer.name)  # its lease ran out
    (again,) = claim(explorer, 1)
    assert (again.ordinal, again.attempt) == (first.ordinal, 1)
    explorer._begin_claimed()
    assert len(explorer.sink) == 2
    explorer.rollout.let_go(0)
    lost = next_finished(explorer)  # it does not wait for what is sampled
    assert (lost.claim, lost.reason, lost.stored) == (first, "claim was lost", 0)
    assert len(explorer.sink) == 1
    explorer.rollout.let_go(1)
    stored = next_finished(explorer)
    assert (stored.claim, stored.stored) == (again, 1)
    assert len(explorer.sink) == 0


def test_where_the_trainer_goes_back_stored_groups_are_counted_and_nothing_that_was_released_runs(explorer, monkeypatch):
    (stored,) = claim(explorer, 1)
    explorer._begin_claimed()
    (sampled,) = claim(explorer, 1)
    explorer._begin_claimed()
    finish = explorer.store.tasks.finish

    def finish_slowly(*task, **options):
        kept = finish(*task, **options)
        time.sleep(0.5)
        return kept

    monkeypatch.setattr(explorer.store.tasks, "finish", finish_slowly)
    explorer.rollout.let_go(0)
    while not explorer.store.status().finished_tasks:
        time.sleep(0.01)
    (waiting,) = claim(explorer, 1)
    explorer._release_running()
    (finished,) = explorer.sink.finished()  # it was being stored
    assert (finished.claim, finished.stored) == (stored, 1)
    assert len(explorer.sink) == 0
    assert explorer.rollout.running == set()
    explorer._begin_claimed()
    assert explorer.rollout.begun == 2  # what was claimed may be another explorer's by now
    assert [each.ordinal for each in claim(explorer, 2)] == [sampled.ordinal, waiting.ordinal]


def test_a_task_whose_past_is_newer_than_the_weights_waits_for_them(explorer, monkeypatch):
    past = {0: SimpleNamespace(newest_version=2)}
    monkeypatch.setattr(explorer, "_with_past", lambda claims: [ClaimedTask(claim, {}, past) for claim in claims])
    claim(explorer, 1)
    explorer._begin_claimed()
    assert (explorer.rollout.begun, len(explorer.deferred)) == (0, 1)
    explorer.trainer.version = 2
    explorer._begin_claimed()
    assert (explorer.rollout.begun, explorer.deferred) == (1, [])


def test_a_task_that_gave_no_group_before_is_finished_at_once(explorer):
    (refused,) = claim(explorer, 1)
    explorer.sink.begin(ClaimedTask(refused, {}, refused="rejected"))
    assert next_finished(explorer).reason == "rejected"
    assert explorer.store.status().finished_tasks == 1
    assert explorer.store.status().drops == {"no_group": 1}


def test_what_stopped_rollout_is_raised_where_the_explorer_looks(explorer):
    claim(explorer, 1)
    explorer._begin_claimed()
    explorer.rollout.executor.stopped_by = RolloutError("too many failures")
    explorer.rollout.let_go(0)
    with pytest.raises(RolloutError, match="too many failures"):
        next_finished(explorer)
    assert explorer.store.status().claimed_tasks == 1
