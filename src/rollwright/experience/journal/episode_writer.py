"""The journal of one episode as it is written: calls and results while it runs, its rows at its end, as deltas of its calls.

An episode that runs again has a ``past`` (``episodes.py``): its calls are answered from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from rollwright.errors import ReplayError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.files import Journal
from rollwright.experience.journal.records import (
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
)
from rollwright.experience.recorder import RequestRecord
from rollwright.experience.token_buffers import TOKEN_TYPE, Tokens

if TYPE_CHECKING:
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
