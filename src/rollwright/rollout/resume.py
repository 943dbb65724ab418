"""Resuming a run: nothing that the journal recorded after the last checkpoint is sampled again.

Finished episodes, interrupted ones and those trained after the checkpoint are treated alike:

* every episode of an unfinished task runs again with its past (``PastEpisodes``): its requests are answered from the journal up to the
  first new one. A finished episode ends without a model call, and its rows have the recorded tokens, versions and log-probabilities;
* an ordinal keeps its task; a rejected or filtered task remains rejected, and a failed task starts over;
* batches that were delivered after the checkpoint are delivered again in the same order (``ReplayOrder``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

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
from rollwright.rollout.task_group import Group, TaskSource
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

#: Ends of a group that depended on timing, the trainer or a fault; a resumed run decides them again. All other ends follow from the
#: recorded answers: a workflow or a filter rejected the group.
DECIDED_ANEW = ("delivered", "failed", "dropped/stale", "dropped/over_sampling", "dropped/abandoned")


@dataclass
class PastEpisodes:
    """What earlier processes of a run recorded about unfinished tasks.

    Attributes:
        episodes: (ordinal, sample index) -> the attempt that got furthest.
        rejected: ends of the groups that were rejected or filtered, by ordinal.
        failed: ordinals of failed groups, which start again.
        order: ordinals of the delivered groups, in order of delivery.
        newest_version: newest weight version of the tokens in ``episodes``; -1 if there are none.
        tokens: number of sampled tokens in ``episodes``.
        checkpoints: steps whose recovery checkpoint is known to match the journal.
        lost: files of the journal that are missing or truncated.
        redacted: the journal's function that removes secrets from packed values.
    """

    episodes: dict[int, dict[int, RecordedEpisode]] = field(default_factory=dict)
    rejected: dict[int, GroupEnd] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    newest_version: int = -1
    tokens: int = 0
    checkpoints: set[int] = field(default_factory=set)
    lost: list[Gap] = field(default_factory=list)
    redacted: Callable[[bytes], bytes] = lambda packed: packed

    @property
    def count(self) -> int:
        """Number of recorded episodes in ``episodes``."""
        return sum(map(len, self.episodes.values()))

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the task that a drawn row's ordinal had before the stop, or the row itself if both are equal.

        The two can differ if a selector that learns from rewards draws the tasks. If the journal has no complete copy of the earlier task,
        the ordinal's past is discarded and the row is used.
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


def read_past(
    directories: Iterable[str | Path],
    is_open: Callable[[int], bool],
    journal: Journal | None = None,
    task_files: TaskFiles | None = None,
) -> PastEpisodes:
    """Read what earlier processes recorded. Memory grows only with the episodes of unfinished tasks.

    Args:
        directories: directories of the journals.
        is_open: returns whether the task of an ordinal is unfinished.
        journal: journal of this process, which redacts the same secrets as the earlier ones. None redacts nothing.
        task_files: index of the files that hold these tasks, for callers that read often. None reads all files.
    """
    found: dict[tuple[int, int], list[RecordedEpisode]] = defaultdict(list)
    ends: dict[int, GroupEnd] = {}
    delivered: dict[int, None] = {}
    checkpoints: set[int] = set()
    listed: dict[Path, Files] = {}  # journal -> the latest list of its files
    failed: dict[int, float] = {}  # ordinal -> time of its latest failure

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
    past = PastEpisodes(rejected={ordinal: end for ordinal, end in ends.items() if end.state not in DECIDED_ANEW})
    if journal is not None:
        past.redacted = journal.redacted
    past.checkpoints = checkpoints
    past.lost = [gap for path, files in listed.items() for gap in lost_files(path, files)]
    past.order = [ordinal for ordinal in delivered if ordinal not in past.rejected]
    past.failed = {ordinal for ordinal, end in ends.items() if end.state == "failed"} - delivered.keys()
    for (ordinal, index), episodes in sorted(found.items()):
        furthest = _furthest(episodes, failed.get(ordinal, 0.0))
        if furthest is not None and ordinal not in past.rejected:
            past.episodes.setdefault(ordinal, {})[index] = furthest
            past.newest_version = max(past.newest_version, furthest.newest_version)
            past.tokens += furthest.tokens
    return past


def _furthest(episodes: list[RecordedEpisode], failed: float) -> RecordedEpisode | None:
    """Choose the episode of a sample to continue from; each attempt started with the answers of the previous one.

    After a divergence or a failure of the group the sample started over, so earlier episodes do not count. Episodes are ordered by the
    clocks of their hosts, because nothing else orders the records of several workers. If the clocks disagree, a sample starts over
    needlessly, or continues a diverged episode, diverges again and starts over. Both cost tokens, but no trained token is wrong.
    """
    diverged = (each.begin.time for each in episodes if each.end is not None and each.end.outcome == "diverged")
    anew = max(diverged, default=0.0)
    later = (each for each in episodes if each.begin.time > max(anew, failed))
    return max(
        later, key=lambda each: (each.begin.attempt, each.is_finished, len(each.calls) + len(each.results)), default=None
    )


def _is_same(row: dict[str, Any], packed: bytes, redacted: Callable[[bytes], bytes]) -> bool:
    """Return whether a row equals the packed task, ignoring ordinals."""
    try:
        now = unpack_task(redacted(pack_task(row)))
    except (TypeError, OverflowError):
        return False
    return _without_ordinal(now) == _without_ordinal(unpack_task(packed))


def _without_ordinal(task: dict[str, Any]) -> bytes:
    return pack_task({key: value for key, value in task.items() if key != "ordinal"})


# -- the order of the batches -------------------------------------------------------------------------------------------


class ReplayOrder:
    """Repeats the batches that a run delivered after its last checkpoint, in the same order.

    The steps that a crash undid are repeated with the same groups, so a resumed run trains on the same data as the interrupted one. The
    scheduler calls the first two methods, and the executor calls the third:

    * ``next_batch``, when a batch leaves, returns the batch that was delivered next once its groups are ready;
    * ``holds``, when a sample starts, makes a sample of a later batch wait if its recorded tokens come from a version that the resumed
      trainer has not reached yet. The wait ends when that version is published or another batch is requested;
    * ``draw`` draws failed tasks after the replayed batches, which were formed without them.

    If a group can no longer come, the order is given up and new batches are formed; rejected and filtered tasks remain rejected. Without
    arguments there is nothing to replay.

    Args:
        delivered: ordinals of the groups that were delivered after the checkpoint, in order.
        failed: ordinals of tasks that failed.
        rejected: ends of the groups that were rejected or filtered, by ordinal.

    Attributes:
        remaining: ordinals of the groups that are still to be delivered again, in order (the keys of a dict).
        deferred: failed tasks, held back until the interrupted batches have been replayed.
    """

    def __init__(
        self, delivered: Iterable[int] = (), failed: Iterable[int] = (), rejected: Mapping[int, GroupEnd] | None = None
    ) -> None:
        self.rejected = dict(rejected or {})
        self.deferred: list[dict[str, Any]] = []
        self.remaining = dict.fromkeys(delivered)
        self._failed = set(failed)
        self._awaits_version = False  # the last batch was taken, and its version is not published yet

    def next_batch(
        self, count: int, ready: Set[int], living: Set[int], is_done: Callable[[int], bool], no_more: bool
    ) -> list[int] | None:
        """Return the ordinals of the batch that was delivered next, or None if it is not ready or the order was given up.

        Args:
            count: groups in the batch.
            ready: ordinals of the groups that are ready.
            living: ordinals of the groups that are running or ready.
            is_done: returns whether the task of an ordinal is done.
            no_more: no further group can start.
        """
        wanted = list(islice((ordinal for ordinal in self.remaining if not is_done(ordinal)), count))
        if len(wanted) == count and ready >= set(wanted):
            for ordinal in wanted:
                del self.remaining[ordinal]
            self._awaits_version = not self.remaining
            return wanted
        cannot_come = no_more and not living >= set(wanted)
        if cannot_come:
            logger.warning(
                "batches that were taken after the checkpoint cannot be taken again as they were; they are formed anew"
            )
        if len(wanted) < count or cannot_come:
            self.remaining = {}
        return None

    def holds(self, group: Group, index: int, version: int) -> bool:
        """Return whether a sample must wait for a weight version that the resumed trainer has not reached yet."""
        if not (self.remaining or self._awaits_version) or group.ordinal in self.remaining:
            return False
        return index in group.past and group.past[index].newest_version > version

    def release(self) -> bool:
        """Stop holding samples after the last replayed batch; return whether its version was still awaited."""
        was_waiting, self._awaits_version = self._awaits_version, False
        return was_waiting

    def draw(self, source: TaskSource, count: int) -> list[dict[str, Any]]:
        """Draw up to ``count`` tasks from a source; failed tasks are deferred until the batches have been replayed."""
        if self.deferred and (source.is_over or not self.remaining):
            source.put_back(self.deferred)
            self.deferred, self._failed = [], set()
        rows = source.draw(count)
        if self.remaining and self._failed:
            self.deferred += [row for row in rows if row.get("ordinal") in self._failed]
            rows = [row for row in rows if row.get("ordinal") not in self._failed]
        return rows
