"""Read the episodes of a journal: the calls, results and end of each. Needs no torch.

When an episode runs again, its calls are answered from its ``RecordedEpisode``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.errors import JournalError
from rollwright.experience.journal.reading import Gap, RecordPosition, read_all
from rollwright.experience.journal.records import (
    AnyRecord,
    Arguments,
    Begin,
    Closed,
    DurableResult,
    End,
    ModelCall,
    Row,
    tokens_in,
    unpack_experts,
    unpack_floats,
    unpack_task,
    unpack_versions,
)
from rollwright.experience.recorder import TOKEN_TYPE, joined_experts


@dataclass(eq=False)
class RecordedCall:
    """A model request and its answer."""

    call: ModelCall
    prompt: np.ndarray  # [P] int32
    gconfig: dict[str, Any]
    continues: RecordedCall | None = None  # the call whose record of experts this one continues

    @property
    def output(self) -> np.ndarray:
        """``[N]`` ids of the answer."""
        return np.frombuffer(self.call.output, dtype=TOKEN_TYPE)

    @property
    def logprobs(self) -> np.ndarray:
        """``[N]`` log-probabilities of the answer."""
        return unpack_floats(self.call.logprobs, tokens_in(self.call.output))

    @property
    def versions(self) -> np.ndarray:
        """``[N]`` versions of the answer."""
        return unpack_versions(self.call.versions, tokens_in(self.call.output))

    @property
    def routed_experts(self) -> np.ndarray | None:
        """``[P + N - 1, W]`` record of the experts; None if there is none."""
        return joined_experts(self, lambda each: (each.continues, each._own_experts())) if self.call.experts_width else None

    def _own_experts(self) -> np.ndarray:
        known = 0 if self.continues is None else len(self.continues.prompt) + tokens_in(self.continues.call.output) - 1
        count = len(self.prompt) + tokens_in(self.call.output) - 1 - known
        return unpack_experts(self.call.experts, count, self.call.experts_width)


@dataclass(eq=False)
class RecordedEpisode:
    """One attempt of one sample, read from a journal."""

    begin: Begin
    calls: list[RecordedCall] = field(default_factory=list)
    results: list[DurableResult] = field(default_factory=list)
    end: End | None = None  # None if the episode still runs or its process ended first
    writer: int = 0  # number of the process that wrote it
    names_writer: bool = False  # True if a later process has an episode of the same name
    damage: Gap | None = None  # gap that may have lost records of this episode; later ones are ignored
    ignored: tuple[str, ...] = ()  # name prefixes of durable calls that are made again

    def __post_init__(self) -> None:
        self._places: dict[tuple[int, int], RecordedCall] = {}
        self._numbers: set[int] = set()  # numbers of conversations that were assigned
        self._results: dict[tuple[str, int], deque[DurableResult]] = defaultdict(deque)

    def rewind(self) -> RecordedEpisode:
        """Start answering from the first call again; return self."""
        self._places = {(each.call.conversation, each.call.turn): each for each in self.calls}
        self._numbers = set()
        self._results = defaultdict(deque)
        for result in self.results:
            self._results[result.name, result.key].append(result)
        return self

    @property
    def name(self) -> str:
        """Ordinal and sample (and the version in an evaluation), as ``rollwright replay`` accepts them."""
        begin, writer = self.begin, f"@{self.writer}" if self.names_writer else ""
        if begin.is_eval:
            return f"eval:{begin.ordinal}/{begin.index}@v{begin.version}{writer}"
        return f"{begin.ordinal}/{begin.index}{writer}"

    @property
    def is_finished(self) -> bool:
        """True if the episode was accepted or rejected, so that running it again needs no new request."""
        return self.end is not None and self.end.outcome in ("accepted", "rejected")

    @property
    def can_go_on(self) -> bool:
        """False if the episode must start over, because its task could not be packed or an environment cannot be restored."""
        return self.begin.task is not None and (self.is_finished or all(each.kind != "restart" for each in self.results))

    @cached_property
    def newest_version(self) -> int:
        """Newest version of the sampled tokens; -1 if there are none."""
        return max((int(each.versions.max()) for each in self.calls if each.call.output), default=-1)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(tokens_in(each.call.output) for each in self.calls)

    def task(self) -> dict[str, Any] | None:
        """Return the row of the task, or None if it could not be packed."""
        return None if self.begin.task is None else unpack_task(self.begin.task)

    def conversation_of(self, prompt: np.ndarray, number: int) -> int:
        """Return the number of a conversation that begins with this prompt: the recorded number, even if the order differs now.

        A conversation without a record was never answered; it gets the lowest number that has no record.

        Args:
            prompt: ``[P]`` ids of the conversation's first request.
            number: order in which the conversation appeared.
        """
        recorded = [place[0] for place in self._places if place[1] == 0 and place[0] not in self._numbers]
        recorded.sort(key=lambda each: each != number)  # stable: its own number first, then ascending
        for each in recorded:
            if np.array_equal(prompt, self._places[each, 0].prompt):
                self._numbers.add(each)
                return each
        numbered = self._numbers | {place[0] for place in self._places}
        number = next((below for below in range(number) if below not in numbered), number)
        while number in self._numbers:
            number += 1
        self._numbers.add(number)
        return number

    def call_at(self, place: tuple[int, int]) -> RecordedCall | None:
        """Return the recorded call of a conversation and turn, or None."""
        return self._places.get(place)

    def next_result(self, name: str, key: int) -> DurableResult | None:
        """Return the next recorded result of a durable call, or None; each result is returned once, in order."""
        if name.startswith(self.ignored):
            return None
        waiting = self._results.get((name, key))
        return waiting.popleft() if waiting else None

    def row_ids(self, row: Row) -> np.ndarray:
        """Return the ``[L]`` ids of a row of ``end``."""
        return self._completed(row)

    def row_mask(self, row: Row) -> np.ndarray:
        """Return the ``[L]`` bool mask of the trained tokens of a row of ``end``."""
        mask = np.zeros(row.kept + tokens_in(row.added), dtype=bool)
        for start, stop in zip(row.mask[::2], row.mask[1::2], strict=True):
            mask[start:stop] = True
        return mask

    def add(self, call: ModelCall, gconfig: dict[str, Any]) -> None:
        """Append the next call and complete its prompt.

        Raises:
            JournalError: an earlier call is missing.
        """
        if call.index != len(self.calls):
            raise JournalError(f"{self.name}: call {call.index} follows call {len(self.calls) - 1}: those between are lost.")
        continues = None if call.experts_base < 0 else self.calls[call.experts_base]
        self.calls.append(RecordedCall(call, self._completed(call), gconfig, continues))

    def _completed(self, delta: ModelCall | Row) -> np.ndarray:
        """Return the tokens of a delta: those shared with an earlier call's prompt and output, then the added ones."""
        added = np.frombuffer(delta.added, dtype=TOKEN_TYPE)
        if delta.base < 0:
            return added
        base = self.calls[delta.base]
        return np.concatenate([base.prompt[: delta.kept], base.output[: max(0, delta.kept - len(base.prompt))], added])


#: Predicate that selects episodes, called with the number of the episode's writer and its ``Begin``.
Wanted = Callable[[int, Begin], bool]


def last_of_each_name(directory: str | Path, wanted: Wanted, outcomes: tuple[str, ...]) -> dict[tuple[int, int], bool]:
    """Find the last selected episode of each name. A resumed run can run a sample again, so a name can have several episodes.

    Args:
        directory: directory of the journal.
        wanted: predicate that selects the episodes.
        outcomes: only episodes that ended with one of these outcomes are considered.

    Returns:
        For each episode, as (writer, number), whether a later process also has an episode of this name that was not selected.
    """
    begun: dict[tuple[int, int], Begin] = {}
    chosen: dict[tuple[Any, ...], tuple[int, int]] = {}
    writers: dict[tuple[Any, ...], int] = {}  # the last of each name
    for place, record in read_all(directory):
        if isinstance(record, Begin):
            begun[place.writer, record.episode] = record
        elif isinstance(record, End):
            begin = begun.pop((place.writer, record.episode), None)
            if begin is None or record.outcome not in outcomes:
                continue
            name = (begin.is_eval, begin.ordinal, begin.index, begin.version if begin.is_eval else None)
            writers[name] = place.writer
            if wanted(place.writer, begin):
                chosen[name] = (place.writer, record.episode)
    return {episode: episode[0] < writers[name] for name, episode in chosen.items()}


def read_episodes(
    directory: str | Path,
    wanted: Wanted = lambda writer, begin: True,
    note: Callable[[RecordPosition, AnyRecord], None] = lambda place, record: None,
    files: Iterable[Path] | None = None,
) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a journal, each when its end is read; unfinished episodes come last.

    An episode that may have lost records in damaged bytes is read up to the damage, as if its process had been killed at that point.

    Args:
        directory: directory of the journal.
        wanted: predicate that selects the episodes to decode.
        note: called with each record that belongs to no episode.
        files: files of the journal to read. None reads all.

    Raises:
        JournalError: a file is not a journal, or the generation arguments of a call are in no file.
    """
    open_episodes: dict[tuple[int, int], RecordedEpisode] = {}
    arguments: dict[tuple[int, int], dict[str, Any]] = {}
    damaged: dict[int, Gap] = {}  # last gap of each writer
    for place, record in read_all(directory, files):
        if isinstance(record, Gap):
            damaged[place.writer] = record
            for (writer, _), episode in open_episodes.items():
                if writer == place.writer and episode.damage is None:
                    episode.damage = record
        elif isinstance(record, Arguments):
            arguments[place.writer, record.number] = record.gconfig
        elif isinstance(record, Begin):
            if wanted(place.writer, record):
                open_episodes[place.writer, record.episode] = RecordedEpisode(record, writer=place.writer)
        elif isinstance(record, ModelCall | DurableResult | End):
            episode = open_episodes.get((place.writer, record.episode))
            if episode is None or episode.damage is not None:
                continue  # not wanted, or its beginning was removed, or records before this one may be lost
            if isinstance(record, ModelCall):
                gconfig = arguments.get((place.writer, record.arguments))
                if gconfig is None and place.writer in damaged:
                    episode.damage = damaged[place.writer]
                    continue
                if gconfig is None:
                    raise JournalError(
                        f"{place.path}, before byte {place.end}: call {record.index} of {episode.name} has generation arguments "
                        f"{record.arguments}, which no earlier record of this process is: a file before this one was removed or "
                        "damaged. Put it back, or move this one away."
                    )
                episode.add(record, gconfig)
            elif isinstance(record, DurableResult):
                episode.results.append(record)
            else:
                episode.end = record
                yield open_episodes.pop((place.writer, record.episode)).rewind()
        elif not isinstance(record, Closed):
            note(place, record)
    for episode in open_episodes.values():
        yield episode.rewind()
