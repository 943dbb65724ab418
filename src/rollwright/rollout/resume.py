"""Going on after a stop: the executor's part of a recover checkpoint, and what the journal has beyond it, which is not sampled again.

One path for what was finished, what was under way and what was trained after the checkpoint:

* every episode of a task that is not done runs again with its past: what it asked is answered from the journal, up to the first new
  request. One that was finished ends without asking a model, and its rows have the tokens, versions and log-probabilities of then;
* an ordinal is the task that it was; one that was rejected or filtered stays so, and one that failed begins anew;
* batches that were taken after the checkpoint are taken again in the same order: steps that were lost are made again of the same groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwright.errors import RolloutError
from rollwright.experience.journal.episodes import RecordedEpisode, read_episodes
from rollwright.experience.journal.reading import Gap, RecordPosition, TaskFiles, lost_files
from rollwright.experience.journal.records import (
    AnyRecord,
    Begin,
    Checkpoint,
    Files,
    GroupEnd,
    images_in,
    pack_task,
    unpack_task,
)
from rollwright.experience.journal.writing import Journal
from rollwright.rollout.runner import Runner
from rollwright.rollout.task_group import Group, GroupFactory, TaskSource
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

#: Ends of a group that the clock, the trainer or a fault decided; a run that goes on decides them anew. The others follow from what was
#: answered: a workflow or a filter refused it.
DECIDED_ANEW = ("delivered", "failed", "dropped/stale", "dropped/over_sampling", "dropped/abandoned")


@dataclass
class PastEpisodes:
    """What earlier processes of a run recorded of unfinished tasks.

    Attributes:
        episodes: (ordinal, sample index) -> the attempt that got furthest.
        given_up: groups that were rejected or filtered, by ordinal.
        failed: ordinals of failed groups, which start again.
        later: failed tasks, deferred until the interrupted batches have been replayed.
        order: ordinals of the delivered groups, in order of delivery.
        newest_version: newest weight version of their tokens; -1 if there are none.
        tokens: number of sampled tokens in ``episodes``.
        checkpoints: steps whose recover checkpoint is known to match the journal.
        lost: files of the journal that are missing or truncated.
        redacted: the journal's function that removes secrets from packed values.
    """

    episodes: dict[int, dict[int, RecordedEpisode]] = field(default_factory=dict)
    given_up: dict[int, GroupEnd] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    later: list[dict[str, Any]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    newest_version: int = -1
    tokens: int = 0
    checkpoints: set[int] = field(default_factory=set)
    lost: list[Gap] = field(default_factory=list)
    redacted: Callable[[bytes], bytes] = lambda packed: packed

    @property
    def count(self) -> int:
        """Episodes that have a past."""
        return sum(map(len, self.episodes.values()))

    def draw(self, source: TaskSource, count: int, is_again: bool) -> list[dict[str, Any]]:
        """Rows of a source, each the task that its ordinal was. What failed comes behind the batches that were taken without it.

        Args:
            source: where they are drawn.
            count: how many there are at most.
            is_again: such batches are still to be taken.
        """
        if self.later and (source.is_over or not is_again):
            source.put_back(self.later)
            self.later, self.failed = [], set()
        rows = source.draw(count)
        if is_again and self.failed:
            self.later += [row for row in rows if row.get("ordinal") in self.failed]
            rows = [row for row in rows if row.get("ordinal") not in self.failed]
        return [self.row(row) for row in rows]

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The task that the ordinal of ``row`` was, should another be drawn for it now.

        A selector that learns from rewards draws by what it has seen. Where the journal cannot hold that task, the past of the
        ordinal is forgotten.
        """
        ordinal = row.get("ordinal")
        then = next(iter(self.episodes.get(ordinal, {}).values()), None)  # type: ignore[arg-type]
        if ordinal is None or then is None or then.begin.task is None or _is_same(row, then.begin.task, self.redacted):
            return row
        recorded = then.task() or {}
        if b"***" in then.begin.task or any(images_in(recorded)):
            logger.warning(
                "task %d was another one before the stop, of which the journal has no whole copy: it begins anew", ordinal
            )
            del self.episodes[ordinal]
            return row
        logger.info("task %d is the one that it was before the stop, though another was drawn for it now", ordinal)
        return {**recorded, "ordinal": ordinal}

    def give(self, group: Group) -> Group:
        """Let the group's samples go on from their pasts, once. Returns the group."""
        if group.in_stream and group.ordinal in self.episodes:
            group.past = self.episodes.pop(group.ordinal)
        return group


def state_of(runner: Runner, factory: GroupFactory, drawn: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The executor's part of a recover checkpoint: a consistent cut. ``drawn`` are tasks of which no group was made yet."""
    delivery = runner.delivery
    complete = [group for group in delivery.ready if not group.is_eval]
    elsewhere = set(complete) if runner.elsewhere is not None else set()  # their tasks run again, from the journal
    untrained = {*delivery.running, *runner.stream, *delivery.in_training, *elsewhere}
    return {
        "version": delivery.staleness.version,
        "failed_lately": list(runner.failures.outcomes),
        "next_ordinal": factory.next_ordinal,
        "next_task_id": factory.next_task_id,
        "frontier": delivery.frontier.frontier,
        "beyond": delivery.frontier.beyond,
        "pending": [*(group.task for group in sorted(untrained, key=lambda group: group.ordinal)), *map(dict, drawn)],
        "finished": [
            {"task": group.task, "trajectory": group.join(), "admitted": group.admitted, "size": group.size}
            for group in complete
            if group not in elsewhere
        ],
    }


def load_state(runner: Runner, factory: GroupFactory, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Stand where ``state_of`` was taken; returns the tasks that were drawn and not done, in order.

    Raises:
        RolloutError: tasks are in flight.
    """
    delivery = runner.delivery
    if runner.stream or delivery.staleness.running or delivery.ready:
        raise RolloutError("load_state_dict: tasks are in flight already; load the state before the first one.")
    runner.failures.outcomes.extend(state.get("failed_lately", ()))
    factory.next_ordinal, factory.next_task_id = state["next_ordinal"], state["next_task_id"]
    finished, again = state["finished"], list[dict[str, Any]]()
    if runner.elsewhere is not None:  # workers run these again from the journal
        finished, again = [], [entry["task"] for entry in finished]
    restored = [factory.restored(entry) for entry in finished]
    delivery.restore(state["version"], state["frontier"], state["beyond"], restored)
    return [dict(row) for row in (*sorted(again, key=lambda task: task["ordinal"]), *state["pending"])]


def recall(runner: Runner, directories: Iterable[str | Path]) -> PastEpisodes:
    """Have a runner go on with what earlier processes recorded beyond the state that it was loaded with."""
    delivery = runner.delivery
    past = read_past(directories, lambda ordinal: not delivery.frontier.is_done(ordinal), runner.journal)
    if runner.journal is not None:
        runner.journal.goes_on_to = max([*past.episodes, *past.order, *past.given_up, *past.failed], default=-1)
    for group in delivery.ready:  # the checkpoint has their rows
        past.episodes.pop(group.ordinal, None)
    delivery.again, runner.given_up = dict.fromkeys(past.order), dict(past.given_up)
    if past.episodes or past.order:
        logger.info(
            "going on from the journal: %d episodes have a past, of %d tokens; %d groups were taken after the checkpoint, and are again",
            past.count,
            past.tokens,
            len(past.order),
        )
    return past


def read_past(
    directories: Iterable[str | Path],
    is_open: Callable[[int], bool],
    journal: Journal | None = None,
    task_files: TaskFiles | None = None,
) -> PastEpisodes:
    """Read what earlier processes recorded; memory grows with the episodes of open tasks only.

    Args:
        directories: of journals.
        is_open: says of an ordinal whether its task is still to be done.
        journal: of this process, which hides the same secrets as those before it; None: there were none to hide.
        task_files: knows the files that hold these tasks, where this is asked often; None: all are read.
    """
    found: dict[tuple[int, int], list[RecordedEpisode]] = defaultdict(list)
    ends: dict[int, GroupEnd] = {}
    delivered: dict[int, None] = {}
    checkpoints: set[int] = set()
    listed: dict[Path, Files] = {}  # journal -> the last list of its files
    failed: dict[int, float] = {}  # when each did last

    def note(place: RecordPosition, record: AnyRecord) -> None:
        if isinstance(record, Checkpoint):
            checkpoints.add(record.step)
        elif isinstance(record, Files) and record.time >= getattr(listed.get(place.path.parent), "time", 0.0):
            listed[place.path.parent] = record
        if isinstance(record, GroupEnd) and not record.is_eval and is_open(record.ordinal):
            ends[record.ordinal] = record
            if record.state == "delivered":
                delivered.setdefault(record.ordinal)
            elif record.state == "failed":
                failed[record.ordinal] = record.time

    def is_wanted(writer: int, begin: Begin) -> bool:
        return not begin.is_eval and is_open(begin.ordinal)

    for directory in directories:
        files = None if task_files is None else task_files.of(directory, is_open)
        for episode in read_episodes(directory, is_wanted, note, files):
            found[episode.begin.ordinal, episode.begin.index].append(episode)
    past = PastEpisodes(given_up={ordinal: end for ordinal, end in ends.items() if end.state not in DECIDED_ANEW})
    if journal is not None:
        past.redacted = journal.redacted
    past.checkpoints = checkpoints
    past.lost = [gap for path, files in listed.items() for gap in lost_files(path, files)]
    past.order = [ordinal for ordinal in delivered if ordinal not in past.given_up]
    past.failed = {ordinal for ordinal, end in ends.items() if end.state == "failed"} - delivered.keys()
    for (ordinal, index), episodes in sorted(found.items()):
        furthest = _furthest(episodes, failed.get(ordinal, 0.0))
        if furthest is not None and ordinal not in past.given_up:
            past.episodes.setdefault(ordinal, {})[index] = furthest
            past.newest_version = max(past.newest_version, furthest.newest_version)
            past.tokens += furthest.tokens
    return past


def _furthest(episodes: list[RecordedEpisode], failed: float) -> RecordedEpisode | None:
    """Of the episodes of one sample the one to go on from: each began with what the one before it had been answered.

    One that diverged, or whose group failed, began anew: neither it nor those before it count. Which were before goes by the clocks of
    the hosts, as nothing else orders what several workers wrote. Where these differ, one begins anew that could go on, or goes on from
    what diverged, diverges again and begins anew: that costs tokens, and none that are trained are wrong.
    """
    diverged = (each.begin.time for each in episodes if each.end is not None and each.end.outcome == "diverged")
    anew = max(diverged, default=0.0)
    later = (each for each in episodes if each.begin.time > max(anew, failed))
    return max(
        later, key=lambda each: (each.begin.attempt, each.is_finished, len(each.calls) + len(each.results)), default=None
    )


def _is_same(row: dict[str, Any], packed: bytes, redacted: Callable[[bytes], bytes]) -> bool:
    """Whether a row is the task that was packed then; its ordinal may stand in it or not."""
    try:
        now = unpack_task(redacted(pack_task(row)))
    except (TypeError, OverflowError):
        return False
    return _without_ordinal(now) == _without_ordinal(unpack_task(packed))


def _without_ordinal(task: dict[str, Any]) -> bytes:
    return pack_task({key: value for key, value in task.items() if key != "ordinal"})
