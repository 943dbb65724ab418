"""Runs recorded episodes again: the workflow's code is answered from the journal, and its rows are compared with the recorded ones.

Unless an engine is given, no model is loaded and nothing is sampled: a request that the journal does not contain is an error that names
the task, the call and the first token that differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from rollwright.errors import ReplayError
from rollwright.experience.contract import Trajectory
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.records import ImageDigest, with_images
from rollwright.experience.journal.writing import EpisodeWriter, row_digests
from rollwright.experience.recorder import common_length
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rollout.episode import run
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import GroupFactory

AT_ONCE = 64  # episodes that run concurrently


@dataclass
class Replayed:
    """Result of running an episode again.

    Attributes:
        verdict: ``equal``, ``differs`` (see ``why``) or ``failed`` (see ``error``).
        rewards: rewards of the replayed rows.
        recorded_rewards: rewards of the recorded rows.
        repeats: True if the episode was sampled again and its tokens equal the recorded ones.
    """

    name: str
    verdict: str
    why: str = ""
    rewards: list[float] = field(default_factory=list)
    recorded_rewards: list[float] = field(default_factory=list)
    error: BaseException | None = None
    repeats: bool = False


class NoModel(InferenceEngine):
    """Engine of an episode that is answered only from the journal."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Raise a ``ReplayError``, because a replay samples nothing."""
        raise ReplayError("a replay has no model: this request did not go through the sample's engine.")

    def get_version(self) -> int:
        """Return the version of the weights when the episode began."""
        return self._version

    def set_version(self, version: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self, rid: str | None = None) -> None: ...


class Replayer:
    """Runs recorded episodes again.

    Args:
        choose: returns the workflow, its arguments and the group size for a recorded episode.
        seed: the run's seed.
        sandbox: where Python code written by the model runs.
        engine: samples again instead of using the journal's answers. If None, nothing is sampled.
        fresh: durable calls whose names begin with one of these prefixes are made again.
        compares_rewards: also compare rewards with the recorded ones.
        find_image: returns the image of a task by its digest.
    """

    def __init__(
        self,
        choose: Callable[[RecordedEpisode], tuple[Any, dict[str, Any] | None, int]],
        *,
        seed: int,
        sandbox: str = "bubblewrap",
        engine: InferenceEngine | None = None,
        fresh: tuple[str, ...] = (),
        compares_rewards: bool = True,
        find_image: Callable[[ImageDigest], Any] = lambda image: image,
    ) -> None:
        self.choose = choose
        self.seed = seed
        self.sandbox = sandbox
        self.engine = engine
        self.fresh = fresh
        self.compares_rewards = compares_rewards
        self.find_image = find_image
        self._factory = GroupFactory()

    def replay(self, episodes: Iterable[RecordedEpisode]) -> Iterator[Replayed]:
        """Yield the result of each episode, in order; up to ``AT_ONCE`` run concurrently."""
        waiting = iter(episodes)
        with asyncio.Runner() as runner:
            while some := list(islice(waiting, AT_ONCE)):
                yield from runner.run(self._together(some))

    async def _together(self, episodes: list[RecordedEpisode]) -> list[Replayed]:
        return list(await asyncio.gather(*(self._one(episode) for episode in episodes)))

    async def _one(self, recorded: RecordedEpisode) -> Replayed:
        then = [row.reward for row in recorded.end.rows] if recorded.end is not None else []
        try:
            rows = await self._run(recorded)
        except Exception as error:  # whatever the workflow raises, the other episodes continue
            return Replayed(recorded.name, "failed", f"{type(error).__name__}: {error}", [], then, error)
        now = [] if rows is None else rows["rewards"].tolist()
        if self.engine is not None:  # the weights that sampled it may no longer exist
            return Replayed(recorded.name, "equal", "", now, then, repeats=_repeats(recorded, rows))
        why = self._difference(recorded, rows, now, then)
        return Replayed(recorded.name, "differs" if why else "equal", why, now, then)

    async def _run(self, recorded: RecordedEpisode) -> Trajectory | None:
        begin, task = recorded.begin, recorded.task()
        if task is None:
            raise ReplayError(f"{recorded.name}: its task is not in the journal ({begin.task_error}), so it cannot run again.")
        task = with_images(task, self.find_image)
        workflow, kwargs, group_size = self.choose(recorded)
        group = self._factory.make(task, workflow, kwargs, None, group_size, begin.is_eval)
        recorded.ignored = self.fresh
        episode = EpisodeWriter(None, recorded.rewind() if self.engine is None else None, is_replay=self.engine is None)
        name = SampleName(begin.ordinal, begin.index, begin.attempt, begin.is_eval)
        sample = SampleEngine(
            self.engine or NoModel(begin.version),
            name,
            run_seed=self.seed,
            loop=asyncio.get_running_loop(),
            workflow=group.workflow_name,
            episode=episode,
        )
        sample.samples_asked = begin.samples_asked

        try:
            return await asyncio.create_task(run(sample, group.workflow, group.data, sandbox=self.sandbox))
        finally:
            sample.close("has ended")
            if episode.diverged is not None:  # the workflow may have caught the error
                raise episode.diverged

    def _difference(self, recorded: RecordedEpisode, rows: Trajectory | None, now: list[float], then: list[float]) -> str:
        """Describe how the replayed rows differ from the recorded ones; empty if equal."""
        if recorded.end is None:
            return ""
        if len(now) != len(then):
            return f"{len(now)} rows, and {len(then)} were recorded"
        for number, (row, digest) in enumerate(zip(recorded.end.rows, row_digests(rows) if rows else [], strict=True)):
            if row.digest != digest and rows is not None:
                return f"row {number}: {_first_difference(rows, number, recorded)}"
        if self.compares_rewards and now != then:
            return f"rewards {now}, and {then} were recorded"
        return ""


def _repeats(recorded: RecordedEpisode, rows: Trajectory | None) -> bool:
    """Return whether the rows have the recorded tokens."""
    if recorded.end is None or rows is None or len(recorded.end.rows) != len(rows["rewards"]):
        return False
    lengths = rows["attention_mask"].sum(1).tolist()
    ids = [row[:length].numpy() for row, length in zip(rows["input_ids"], lengths, strict=True)]
    return all(np.array_equal(now, recorded.row_ids(entry)) for now, entry in zip(ids, recorded.end.rows, strict=True))


def _first_difference(rows: Trajectory, number: int, recorded: RecordedEpisode) -> str:
    assert recorded.end is not None
    length = int(rows["attention_mask"][number].sum())
    entry = recorded.end.rows[number]
    for name, now, then in (
        ("token", rows["input_ids"][number, :length].numpy(), recorded.row_ids(entry)),
        ("loss_mask", rows["loss_mask"][number, :length].numpy().astype(bool), recorded.row_mask(entry)),
    ):
        at = common_length(now, then)
        if at < max(len(now), len(then)):
            return f"{name} {at} is the first that differs ({len(now)} tokens, and {len(then)} were recorded)"
    return "its log-probabilities or versions are not the recorded ones"
