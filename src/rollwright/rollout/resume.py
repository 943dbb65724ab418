"""Going on after a stop: what the journal has beyond the recover checkpoint is not sampled again.

One path for what was finished, what was under way and what was trained after the checkpoint:

* every episode of a task that is not done runs again with its past: what it asked is answered from the journal, up to the first new
  request. One that was finished ends without asking a model, and its rows have the tokens, versions and log-probabilities of then;
* an ordinal is the task that it was; one that was rejected or filtered stays so, and one that failed begins anew;
* batches that were taken after the checkpoint are taken again in the same order; see ``replay_order``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
from rollwright.rollout.task_group import Group
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
        rejected: ends of the groups that were rejected or filtered, by ordinal.
        failed: ordinals of failed groups, which start again.
        order: ordinals of the delivered groups, in order of delivery.
        newest_version: newest weight version of their tokens; -1 if there are none.
        tokens: number of sampled tokens in ``episodes``.
        checkpoints: steps whose recover checkpoint is known to match the journal.
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
        """Episodes that have a past."""
        return sum(map(len, self.episodes.values()))

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
