"""Which tasks an explorer runs, and which of them the store has, where a task is claimed again or the trainer goes back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("sqlalchemy")

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import RolloutError
from rollwright.experience.experience import Experience
from rollwright.experience.operators import PipelineResult
from rollwright.rollout.resume import PastEpisodes
from rollwright.store import ExperienceStore
from rollwright.trainers import explore
from rollwright.trainers.explore import Explorer


class Engine:
    """A group is sampled when it is let go; all that are not end with the engine."""

    def __init__(self) -> None:
        self.executor, self.ended = SimpleNamespace(stopped_by=None), threading.Event()
        self.let_go: list[threading.Event] = []  # of each task, in the order in which they began

    def submit(self, task, workflow, **_):
        self.let_go.append(threading.Event())
        return self.let_go[-1]

    def wait_for_task(self, task):
        while not task.wait(0.01):
            if self.ended.is_set():
                raise RolloutError("the engine was closed")
        return None

    def destroy(self) -> None:
        self.ended.set()


@pytest.fixture
def explorer(tmp_path, monkeypatch):
    """An explorer in its loop, whose groups have one sample each."""
    made = object.__new__(Explorer)
    made.name, made.groups, made.missed, made.loaded, made._ending = "explore-0", 0, 0, None, False
    made.claimed, made.running, made.finishing = [], {}, set()
    made.config = SimpleNamespace(gconfig=GenerationHyperparameters(n_samples=1))
    made.workflow, made.operating = object(), threading.Lock()
    made.tasks = SimpleNamespace(row=lambda ordinal: {})
    sample = [Experience(tokens=[1, 2], prompt_length=1, logprobs=[-0.5], reward=1.0)]
    made.pipeline = SimpleNamespace(apply=lambda samples: PipelineResult([sample]))
    monkeypatch.setattr(explore, "samples_of", lambda group, ordinal: [sample])
    monkeypatch.setattr(made, "_past_of", lambda claims: PastEpisodes(), raising=False)
    monkeypatch.setattr(made, "_start_engine", lambda: setattr(made, "rollout", Engine()), raising=False)
    made._start_engine()
    with (
        ExperienceStore(f"sqlite:///{tmp_path}/experiences.db", run="run") as made.store,
        ThreadPoolExecutor(8) as made.pool,
    ):
        yield made
        made.rollout.destroy()


def begin(explorer: Explorer) -> None:
    expected = len(explorer.rollout.let_go) + len(explorer.claimed)
    explorer._begin_claimed()
    while len(explorer.rollout.let_go) < expected:
        time.sleep(0.01)


def claim(explorer: Explorer, count: int):
    explorer.claimed = explorer.store.claim_tasks(explorer.name, count)
    return list(explorer.claimed)


def test_a_task_that_is_claimed_again_is_not_taken_for_stored(explorer):
    (first,) = claim(explorer, 1)
    begin(explorer)
    explorer.store.release_claims(explorer.name)  # its lease ran out
    (again,) = claim(explorer, 1)
    assert (again.ordinal, again.attempt) == (first.ordinal, 1)
    begin(explorer)
    of_first, of_again = explorer.running
    explorer.rollout.let_go[0].set()
    assert of_first.result(60).reason == "claim was lost"
    with ThreadPoolExecutor(1) as waits:
        asked = waits.submit(explorer._stored)
        try:
            assert asked.result(10) == {of_first}  # it does not wait for what is sampled
        finally:
            explorer.rollout.let_go[1].set()
    assert of_again.result(60).stored == 1
    explorer.finishing.discard(explorer.running.pop(of_first))
    assert explorer._stored() == {of_again}


def test_where_the_trainer_goes_back_stored_groups_are_counted_and_nothing_that_was_released_runs(explorer):
    (stored,) = claim(explorer, 1)
    begin(explorer)
    (sampled,) = claim(explorer, 1)
    begin(explorer)
    done, _ = explorer.running
    explorer.rollout.let_go[0].set()
    assert done.result(60).stored == 1
    (waiting,) = claim(explorer, 1)
    explorer._begin_anew()
    assert list(explorer.running) == [done]
    assert explorer.finishing == {stored}
    explorer._begin_claimed()
    assert list(explorer.running) == [done]  # what was claimed may be another explorer's by now
    assert [each.ordinal for each in claim(explorer, 2)] == [sampled.ordinal, waiting.ordinal]
