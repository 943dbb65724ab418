"""The journal of one episode: written while it runs, and read back as what it was asked and answered.

An episode that runs again has a ``past``: its calls are answered from there.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from rollwright.errors import JournalError, ReplayError
from rollwright.experience.journal.files import Journal, Place, read_records
from rollwright.experience.journal.records import (
    AnyRecord,
    Arguments,
    Begin,
    Call,
    End,
    Result,
    Row,
    pack_floats,
    pack_value,
    pack_versions,
    tokens_in,
    unpack_floats,
    unpack_versions,
)
from rollwright.experience.journal.tasks import unpack_task
from rollwright.experience.recorder import RequestRecord
from rollwright.experience.token_buffers import TOKEN_TYPE, Tokens

if TYPE_CHECKING:  # a reader of journals needs no torch
    from rollwright.experience.contract import Trajectory

_WIDTH = TOKEN_TYPE.itemsize


class EpisodeWriter:
    """What a running episode writes to the journal, and what it is answered from. Calls may end in several threads.

    Args:
        journal: where it is written; None: nowhere, as in a replay.
        past: of the same episode, run before: durable calls and model requests are answered from there.
        is_replay: calls that the past does not have are not made anew: they are errors.
    """

    def __init__(self, journal: Journal | None, past: RecordedEpisode | None = None, *, is_replay: bool = False) -> None:
        self.past = past
        self.is_replay = is_replay
        self.diverged: Exception | None = None  # the first request that was not the one of the past
        self.to_restore: dict[object, Callable[[], object]] = {}  # states of environments, before the first new call
        self._journal = journal
        self._number = -1 if journal is None else journal.next_episode()
        self._calls: list[tuple[Tokens, bytes]] = []  # prompt and output
        self._last: dict[int, int] = {}  # conversation -> its last call
        self._restored: set[object] = set()
        self._is_closed = False
        self._lock = threading.Lock()  # an index is given and its call written at once: readers count calls

    def before_new_call(self, name: str) -> None:
        """A durable call comes that the past does not have.

        Raises:
            ReplayError: this is a replay, which must not act on the world.
        """
        if self.is_replay and self.past is not None and not name.startswith(self.past.ignored):
            error = ReplayError(
                f"{self.past.name} does not run as it was recorded: the journal has no further call of {name} with these "
                "arguments. Something that it depends on has changed, or is neither seeded nor durable. Give a call that may be made "
                "again kind='pure'."
            )
            self.diverged = self.diverged or error
            raise error
        self.restore()

    def restore(self) -> None:
        """The first call comes that the past does not have: environments get the states that they had then."""
        waiting, self.to_restore = self.to_restore, {}
        for environment, restore in waiting.items():
            if environment not in self._restored:  # what is answered later, side by side with new calls, is of an earlier state
                self._restored.add(environment)
                restore()

    def begin(self, **facts: Any) -> None:
        """The episode begins; ``facts`` are the fields of ``Begin``."""
        if self._journal is not None:
            self._journal.write(Begin(episode=self._number, time=time.time(), **facts))

    def call(self, record: RequestRecord) -> None:
        """A model request was answered, by the engine or from the past: an episode in the journal is whole by itself."""
        if self._journal is None or self._is_closed:
            return
        with self._lock:
            self._write_call(self._journal, record)

    def _write_call(self, journal: Journal, record: RequestRecord) -> None:
        base, kept, added = self._delta(record.prompt, record.conversation)
        layout = None if record.position_ids is None else [record.position_ids, record.branch_ids or []]
        call = Call(
            self._number,
            len(self._calls),
            record.conversation,
            record.turn,
            base,
            kept,
            added,
            record.output_bytes,
            pack_floats(record.output_logprobs),
            pack_versions(record.output_versions),
            record.temperature,
            record.stop_reason,
            record.stop_match,
            record.seed,
            journal.arguments(record.gconfig, Arguments),
            record.started,
            record.finished,
            record.latency,
            record.ttft,
            layout,
            record.logprobs_shifted,
            pack_value(_packable(record.metadata)) if record.metadata else None,
            server=record.server,
        )
        self._written(call, record.prompt, record.output_bytes)

    def refused(self, request: Any, place: tuple[int, int], error: Exception) -> None:
        """A model request was refused since its prompt leaves no room; it would be again."""
        if self._journal is None or self._is_closed:
            return
        kept = None if self.past is None else self.past.call_at(place)
        prompt, now = request.tokens, time.time()
        times = (now, now) if kept is None else (kept.call.started, kept.call.finished)
        arguments = self._journal.arguments(request.gconfig, Arguments)
        nothing = (b"", b"", b"", 1.0, "refused", None, request.seed, arguments, *times, 0.0, 0.0)
        with self._lock:
            base, kept, added = self._delta(prompt, place[0])
            call = Call(self._number, len(self._calls), *place, base, kept, added, *nothing, refused=str(error))
            self._written(call, prompt, b"")

    def _written(self, call: Call, prompt: Tokens, output: bytes) -> None:
        assert self._journal is not None
        self._calls.append((prompt, output))
        self._last[call.conversation] = call.index
        self._journal.write(call)

    def _delta(self, prompt: Tokens, conversation: int) -> tuple[int, int, bytes]:
        """Which call's prompt and output ``prompt`` has most in common with, how many tokens, and what follows."""
        best, kept, last = -1, 0, self._last.get(conversation, -1)
        if last >= 0 and prompt.continues(*self._calls[last]):
            before, output = self._calls[last]
            best, kept = last, before.length + tokens_in(output)
        elif self._calls:
            for index in {last, len(self._calls) - 1, 0} - {-1}:
                if (shared := _shared(prompt, *self._calls[index])) > kept:
                    best, kept = index, shared
        return best, kept, prompt.buffer.array[kept : prompt.length].tobytes()

    def result(self, name: str, key: int, kind: str, started: float, **outcome: bytes | list[str] | None) -> None:
        """A durable call ended."""
        if self._journal is not None and not self._is_closed:
            value, error, state = (outcome.get(part) for part in ("value", "error", "state"))
            now = time.time()
            self._journal.write(Result(self._number, name, key, kind, value, error, state, now, now - started))  # type: ignore[arg-type]

    def answered(self, kept: Result) -> None:
        """A durable call was answered from the past."""
        if self._journal is not None and not self._is_closed:
            self._journal.write(msgspec.structs.replace(kept, episode=self._number))

    def close(self) -> None:
        """Write no more calls: what comes is of an episode that was ended, and would not be asked again."""
        self._is_closed = True

    def end(self, outcome: str, reason: str = "", rows: Trajectory | None = None, traceback: str = "") -> None:
        """The episode ended; ``rows`` are complete."""
        if self._journal is not None:
            entries = [] if rows is None else rows_of(rows, self._calls)
            self._journal.write(End(self._number, outcome, reason, entries, time.time(), traceback))


def _shared(prompt: Tokens, before: Tokens, output: bytes) -> int:
    """How many tokens a prompt has in common with an earlier call's prompt and output, from the first on."""
    end = len(before)
    shared = min(len(prompt), end) if prompt.buffer is before.buffer else prompt.shared_with(before.array)
    return shared if shared < end else end + _shared_with_output(prompt.array[end:], output)


def _shared_with_output(ids: np.ndarray, output: bytes) -> int:
    said = np.frombuffer(output, dtype=TOKEN_TYPE)[: len(ids)]
    differs = ids[: len(said)] != said
    return int(differs.argmax()) if differs.any() else len(said)


def _packable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = (bool, int, float, str, type(None))
    return {str(name): value if isinstance(value, kept) else repr(value)[:200] for name, value in metadata.items()}


def rows_of(rows: Trajectory, calls: list[tuple[Tokens, bytes]]) -> list[Row]:
    """The rows of a complete trajectory as deltas of the calls that they end with."""
    rewards, truncated = rows["rewards"].tolist(), rows["truncated"].tolist()
    entries = []
    for row, (ids, mask, digest) in enumerate(_packed_rows(rows)):
        base, kept = _last_call(ids, calls)
        entries.append(Row(base, kept, ids[kept * _WIDTH :], _edges(mask), rewards[row], bool(truncated[row]), digest))
    return entries


def _edges(mask: bytes) -> list[int]:
    """Where runs of ones begin and end."""
    edges, wanted, at = [], b"\1", mask.find(b"\1")
    while at >= 0:
        edges.append(at)
        wanted = b"\0" if wanted == b"\1" else b"\1"
        at = mask.find(wanted, at)
    if len(edges) % 2:
        edges.append(len(mask))
    return edges


def _last_call(ids: bytes, calls: list[tuple[Tokens, bytes]]) -> tuple[int, int]:
    """The call whose prompt and output a row has most in common with, from the first token on, and how many tokens."""
    base, kept, length = -1, 0, tokens_in(ids)
    for index in range(len(calls) - 1, -1, -1):
        prompt, output = calls[index]
        end = prompt.length + tokens_in(output)
        if kept >= min(end, length):
            continue
        if ids.startswith(output, prompt.length * _WIDTH) and ids.startswith(prompt.array.tobytes()):
            base, kept = index, end
            if output:
                break
        elif (shared := _shared_with_row(ids, prompt, output)) > kept:
            base, kept = index, shared
        if kept == length:
            break
    return base, kept


def _shared_with_row(packed: bytes, prompt: Tokens, output: bytes) -> int:
    ids = np.frombuffer(packed, dtype=TOKEN_TYPE)
    shared = prompt.shared_with(ids)
    return shared if shared < len(prompt) else shared + _shared_with_output(ids[shared:], output)


def row_digests(rows: Trajectory) -> list[bytes]:
    """A digest of each row's ids, mask, log-probabilities and versions."""
    return [digest for _, _, digest in _packed_rows(rows)]


def _packed_rows(rows: Trajectory) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Ids and mask of each row without its padding, packed, and a digest of them with log-probabilities and versions.

    One conversion for all rows, then bytes: an array of a row costs more than what is done with it.
    """
    ids_BL, mask_BL = rows["input_ids"].numpy().astype(TOKEN_TYPE), rows["loss_mask"].numpy().astype(bool)
    columns = (ids_BL, mask_BL, rows["logprobs"].numpy(), rows["versions"].numpy())
    for row, present in enumerate(rows["attention_mask"].numpy()):
        length = np.count_nonzero(present)
        if length == len(present):
            parts = [column_BL[row].tobytes() for column_BL in columns]
        else:
            parts = [column_BL[row, :length].tobytes() for column_BL in columns]
        yield parts[0], parts[1], xxhash.xxh3_128_digest(b"".join(parts))


# -- read back ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RecordedCall:
    """A model request and its answer."""

    call: Call
    prompt: np.ndarray  # [P] int32
    gconfig: dict[str, Any]

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


@dataclass(eq=False)
class RecordedEpisode:
    """One attempt of one sample, as the journal has it."""

    begin: Begin
    calls: list[RecordedCall] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    end: End | None = None  # None: it was not at an end when its process was, or it runs
    writer: int = 0  # number of the process that wrote it
    names_writer: bool = False  # a later process has an episode of the same name
    ignored: tuple[str, ...] = ()  # durable calls whose name begins so are made anew

    def __post_init__(self) -> None:
        self._places: dict[tuple[int, int], RecordedCall] = {}
        self._numbers: set[int] = set()  # of conversations that were given to one
        self._results: dict[tuple[str, int], deque[Result]] = defaultdict(deque)

    def rewind(self) -> RecordedEpisode:
        """Answer from the first call on, again. Returns itself."""
        self._places = {(each.call.conversation, each.call.turn): each for each in self.calls}
        self._numbers = set()
        self._results = defaultdict(deque)
        for result in self.results:
            self._results[result.name, result.key].append(result)
        return self

    @property
    def name(self) -> str:
        """Ordinal and sample, of an evaluation also the version, as ``rollwright replay`` takes them."""
        begin, writer = self.begin, f"@{self.writer}" if self.names_writer else ""
        if begin.is_eval:
            return f"eval:{begin.ordinal}/{begin.index}@v{begin.version}{writer}"
        return f"{begin.ordinal}/{begin.index}{writer}"

    @property
    def is_finished(self) -> bool:
        """True where it came to rows, or was rejected: it runs again without a new request."""
        return self.end is not None and self.end.outcome in ("accepted", "rejected")

    @property
    def can_go_on(self) -> bool:
        """False where it has to begin anew: images and other objects of its task, or an environment that cannot be restored."""
        return self.begin.task is not None and (self.is_finished or all(each.kind != "restart" for each in self.results))

    @cached_property
    def newest_version(self) -> int:
        """Of its tokens; -1 where it has none."""
        return max((int(each.versions.max()) for each in self.calls if each.call.output), default=-1)

    @property
    def tokens(self) -> int:
        """That were sampled in it."""
        return sum(tokens_in(each.call.output) for each in self.calls)

    def task(self) -> dict[str, Any] | None:
        """The row; None where it holds what a journal cannot."""
        return None if self.begin.task is None else unpack_task(self.begin.task)

    def conversation_of(self, prompt: np.ndarray, number: int) -> int:
        """The number of a conversation that begins with this prompt: the recorded one that did, though they may come in another order.

        Numbers below that no record has are of conversations that were never answered: what has no record is one of them.

        Args:
            prompt: ``[P]`` ids of its first request.
            number: in order of appearance, which is its number where none that is left began so.
        """
        recorded = [place[0] for place in self._places if place[1] == 0 and place[0] not in self._numbers]
        recorded.sort(key=lambda each: each != number)  # stable: its own first, then in order
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
        """The call of a conversation and turn."""
        return self._places.get(place)

    def next_result(self, name: str, key: int) -> Result | None:
        """The next result of a durable call; each is given once, in the order in which they came."""
        if name.startswith(self.ignored):
            return None
        waiting = self._results.get((name, key))
        return waiting.popleft() if waiting else None

    def row_ids(self, row: Row) -> np.ndarray:
        """``[L]`` ids of a row of ``end``."""
        added = np.frombuffer(row.added, dtype=TOKEN_TYPE)
        if row.base < 0:
            return added
        base = self.calls[row.base]
        return np.concatenate([base.prompt[: row.kept], base.output[: max(0, row.kept - len(base.prompt))], added])

    def row_mask(self, row: Row) -> np.ndarray:
        """``[L]`` bool, true where a row of ``end`` is trained."""
        mask = np.zeros(row.kept + tokens_in(row.added), dtype=bool)
        for start, stop in zip(row.mask[::2], row.mask[1::2], strict=True):
            mask[start:stop] = True
        return mask

    def add(self, call: Call, gconfig: dict[str, Any]) -> None:
        """The next call; its prompt is made whole."""
        added = np.frombuffer(call.added, dtype=TOKEN_TYPE)
        if call.base >= 0:
            base = self.calls[call.base]
            added = np.concatenate([base.prompt[: call.kept], base.output[: max(0, call.kept - len(base.prompt))], added])
        self.calls.append(RecordedCall(call, added, gconfig))


#: Says of an episode by the number of its writer and its beginning whether it is read.
Wanted = Callable[[int, Begin], bool]


def last_of_each_name(directory: str | Path, wanted: Wanted, outcomes: tuple[str, ...]) -> dict[tuple[int, int], bool]:
    """The episodes (writer and number) that ended last of those with one name: a sample runs again where its run was resumed.

    Args:
        directory: of the journal.
        wanted: says which are looked at.
        outcomes: of the episodes that count.

    Returns:
        For each, whether a later process has an episode of its name, too, which was not wanted.
    """
    begun: dict[tuple[int, int], Begin] = {}
    chosen: dict[tuple[Any, ...], tuple[int, int]] = {}
    writers: dict[tuple[Any, ...], int] = {}  # the last of each name
    for place, record in read_records(directory):
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
    note: Callable[[Place, AnyRecord], None] = lambda place, record: None,
    files: Iterable[Path] | None = None,
) -> Iterator[RecordedEpisode]:
    """The episodes of a journal, each when its end is read; those without an end come last.

    Args:
        directory: of the journal.
        wanted: says which are read; the others cost nothing but the reading of the file.
        note: is given the records that belong to no episode.
        files: of the journal that are read; None: all.

    Raises:
        JournalError: a file is no journal, or the generation arguments of a call are in none.
    """
    open_episodes: dict[tuple[int, int], RecordedEpisode] = {}
    arguments: dict[tuple[int, int], dict[str, Any]] = {}
    for place, record in read_records(directory, files):
        if isinstance(record, Arguments):
            arguments[place.writer, record.number] = record.gconfig
        elif isinstance(record, Begin):
            if wanted(place.writer, record):
                open_episodes[place.writer, record.episode] = RecordedEpisode(record, writer=place.writer)
        elif isinstance(record, Call | Result | End):
            episode = open_episodes.get((place.writer, record.episode))
            if episode is None:
                continue  # not wanted, or its beginning was removed
            if isinstance(record, Call):
                gconfig = arguments.get((place.writer, record.arguments))
                if gconfig is None:
                    raise JournalError(
                        f"{place.path}, before byte {place.end}: call {record.index} of {episode.name} has generation arguments "
                        f"{record.arguments}, which no earlier record of this process is: a file before this one was removed or "
                        "damaged. Put it back, or move this one away."
                    )
                episode.add(record, gconfig)
            elif isinstance(record, Result):
                episode.results.append(record)
            else:
                episode.end = record
                yield open_episodes.pop((place.writer, record.episode)).rewind()
        else:
            note(place, record)
    for episode in open_episodes.values():
        yield episode.rewind()
