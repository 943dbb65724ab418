"""Which tasks an explorer runs, and which of them the store has, where a task is claimed again or the trainer goes back."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("sqlalchemy")

from rollwright import GRPOConfig
from rollwright.config.modes import StoreConfig
from rollwright.errors import RolloutError
from rollwright.experience.experience import Experience
from rollwright.experience.operators import PipelineResult
from rollwright.store import ExperienceStore, TaskClaim
from rollwright.trainers.modes import explore
from rollwright.trainers.modes.explore import ClaimedTask, Explorer, GroupSink, LeasedTasks

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
    """An explorer in its loop, whose groups have one sample each. It claims one task at a time."""
    made = object.__new__(Explorer)
    operators = SimpleNamespace(apply=lambda samples: PipelineResult([SAMPLE]))
    monkeypatch.setattr(explore, "samples_of", lambda group, ordinal: [SAMPLE])
    made.rollout = Engine()
    config = GRPOConfig(mode="explore", store=StoreConfig(), experiment_name="run", trial_name="trial")
    config.cluster.fileroot, config.train_dataset.batch_size = str(tmp_path), 2
    config.rollout.max_head_offpolicyness = 8
    with ExperienceStore(f"sqlite:///{tmp_path}/experiences.db", run="run") as made.store:
        made.tasks = LeasedTasks(config, "explore-0", made.store, lambda ordinal: {}, None, 100)
        made.sink = GroupSink(made.rollout, object(), 1, made.store, operators)
        yield made
        made.sink.close()


def claim(explorer: Explorer) -> TaskClaim:
    """Claim the next task."""
    explorer.tasks.claim(len(explorer.sink))
    (claimed,) = explorer.tasks._claimed
    return claimed


def begin(explorer: Explorer, version: int = 0) -> None:
    """Start what was claimed and can start."""
    for task in explorer.tasks.startable(version):
        explorer.sink.begin(task)


def next_finished(explorer: Explorer):
    (finished,) = explorer.sink.finished(60)
    return finished


def test_a_task_that_is_claimed_again_is_not_taken_for_stored(explorer):
    first = claim(explorer)
    begin(explorer)
    explorer.store.tasks.release("explore-0")  # its lease ran out
    again = claim(explorer)
    assert (again.ordinal, again.attempt) == (first.ordinal, 1)
    begin(explorer)
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
    stored = claim(explorer)
    begin(explorer)
    sampled = claim(explorer)
    begin(explorer)
    finish = explorer.store.tasks.finish

    def finish_slowly(*task, **options):
        kept = finish(*task, **options)
        time.sleep(0.5)
        return kept

    monkeypatch.setattr(explorer.store.tasks, "finish", finish_slowly)
    explorer.rollout.let_go(0)
    while not explorer.store.status().finished_tasks:
        time.sleep(0.01)
    waiting = claim(explorer)
    explorer._release_running()
    (finished,) = explorer.sink.finished()  # it was being stored
    assert (finished.claim, finished.stored) == (stored, 1)
    assert len(explorer.sink) == 0
    assert explorer.rollout.running == set()
    begin(explorer)
    assert explorer.rollout.begun == 2  # what was claimed may be another explorer's by now
    assert [each.ordinal for each in explorer.store.tasks.claim("explore-1", 2)] == [sampled.ordinal, waiting.ordinal]


def test_a_task_whose_past_is_newer_than_the_weights_waits_for_them(explorer, monkeypatch):
    past = {0: SimpleNamespace(newest_version=2)}
    monkeypatch.setattr(explorer.tasks, "_with_past", lambda claims, version: [ClaimedTask(each, {}, past) for each in claims])
    claim(explorer)
    begin(explorer)
    assert explorer.rollout.begun == 0
    begin(explorer, version=2)
    assert explorer.rollout.begun == 1
    begin(explorer, version=2)
    assert explorer.rollout.begun == 1


def test_a_task_that_gave_no_group_before_is_finished_at_once(explorer):
    refused = claim(explorer)
    explorer.sink.begin(ClaimedTask(refused, {}, refused="rejected"))
    assert next_finished(explorer).reason == "rejected"
    assert explorer.store.status().finished_tasks == 1
    assert explorer.store.status().drops == {"no_group": 1}


def test_what_stopped_rollout_is_raised_where_the_explorer_looks(explorer):
    claim(explorer)
    begin(explorer)
    explorer.rollout.executor.stopped_by = RolloutError("too many failures")
    explorer.rollout.let_go(0)
    with pytest.raises(RolloutError, match="too many failures"):
        next_finished(explorer)
    assert explorer.store.status().claimed_tasks == 1
