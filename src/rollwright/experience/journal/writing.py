"""Write a journal: the files of one process, and the calls, results and rows of each episode.

Each record (see ``records``) is written by one ``write`` call, so a killed process loses no record; files are fsynced every
``fsync_seconds``, so a power failure loses at most that much.

``000003-0000.journal`` is the first file of the fourth process that wrote to this journal. Once its file is large, a process starts the
next one at the end of an episode or at a checkpoint. Each file begins with a list of the existing files, so that files removed or truncated
later are noticed. Old files are removed only if ``keep`` is set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from rollwright.atomic import remedy_of
from rollwright.config.sections import JournalConfig
from rollwright.errors import JournalError, ReplayError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.reading import file_numbers, journal_files
from rollwright.experience.journal.records import (
    VERSION,
    AnyRecord,
    Arguments,
    Begin,
    Checkpoint,
    Closed,
    DurableResult,
    End,
    Files,
    ModelCall,
    Row,
    encode,
    frame,
    pack_value,
    pack_versions,
    tokens_in,
)
from rollwright.experience.recorder import TOKEN_TYPE, RequestRecord, TokenPrefix, common_length
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import EpisodeFigures

if TYPE_CHECKING:
    from rollwright.experience.contract import Trajectory

logger = getLogger("journal")

_ARGUMENTS_KEPT = 4096  # distinct generation arguments that are not written again
_SMALLEST_REDACTED = 4  # characters of the shortest secret that is redacted


class Journal:
    """The journal of one process: its current file and the episodes begun in it. Thread-safe.

    No file is created before the first record.

    Args:
        directory: directory of the journal, created with access for its user only.
        config: when to flush, rotate and remove files.
        secrets: secret strings of the config; they are replaced by ``***`` in every string of a record.
    """

    def __init__(self, directory: str | Path, config: JournalConfig | None = None, secrets: Iterable[str] = ()) -> None:
        self.directory = Path(directory)
        self.config = config or JournalConfig()
        self.writer = -1  # number of this process among those that wrote here
        self.size = 0  # bytes of the current file
        self.failure: JournalError | None = None  # the first failed write; later records may be missing
        self._secrets = [secret.encode() for secret in secrets if len(secret) >= _SMALLEST_REDACTED]
        self._segment = -1
        self._file: int | None = None
        self._ended: list[int] = []  # complete files that may not be flushed yet
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        self.next_episode: Callable[[], int] = itertools.count().__next__  # reserves a number for an episode
        self._first: dict[int, int] = {}  # ordinal of a training task -> file in which its first episode begins
        self._checkpoints: list[tuple[int, int]] = []  # frontier of each, and the first file needed to resume from it
        #: Highest ordinal of the episodes that this process continues; files of earlier processes are needed until it is done.
        self.goes_on_to = -1
        self._arguments: dict[bytes, int] = {}  # the latest generation arguments in the current file
        self._next_arguments = 0
        self._flusher: threading.Thread | None = None
        self._unflushed = threading.Event()
        self._is_closed = False
        self._process = os.getpid()

    # -- records in ----------------------------------------------------------------------------------------------------

    def write(self, record: AnyRecord, *, may_hold_secrets: bool = True) -> None:
        """Append a record; on return it survives the death of the process.

        Raises:
            JournalError: the disk is full or gone; a partly written record is removed.
        """
        try:
            body = encode(record)
        except UnicodeEncodeError:  # the message of a workflow's exception may contain any text
            body = encode(type(record)(*map(_as_unicode, msgspec.structs.astuple(record))))
        if may_hold_secrets:
            body = self.redacted(body)
        packed = frame(body)
        with self._lock:
            if self._is_closed or self._process != os.getpid():
                return  # a forked child, or a sample that continues after the end
            if self._file is None:
                self._open_next()
            if self.config.keep is not None and isinstance(record, Begin) and not record.is_eval:
                self._first.setdefault(record.ordinal, self._segment)
            self._append(packed)
            if isinstance(record, End):
                self._end_large_file()
        if not self._unflushed.is_set():
            self._unflushed.set()

    def arguments(self, gconfig: object) -> int:
        """Return the number of these generation arguments, after writing them if the current file does not have them.

        Args:
            gconfig: a dataclass.
        """
        packed = pack_value(gconfig)
        # Without the lock: the file may end meanwhile, but a number is used once per process, and its file is read together with this one.
        if (known := self._arguments.get(packed)) is not None:
            return known
        with self._lock:
            if self._file is None and not self._is_closed:
                self._open_next()
            number = self._arguments.get(packed)
            if number is None:
                if len(self._arguments) >= _ARGUMENTS_KEPT:  # requests with their own seed have their own arguments
                    self._arguments.clear()
                number = self._arguments[packed] = self._next_arguments
                self._next_arguments += 1
                self.write(Arguments(number, msgspec.msgpack.decode(packed)))
            return number

    def _append(self, packed: bytes) -> None:
        assert self._file is not None
        try:
            written = os.write(self._file, packed)
            while written < len(packed):
                written += os.write(self._file, packed[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise self._cannot_be_written(error) from error
        self.size += len(packed)

    def _cannot_be_written(self, error: OSError) -> JournalError:
        """Make the error for a failed write; also store it in ``failure``, because the caller's code may swallow the exception."""
        failure = JournalError(
            f"The journal in {self.directory} cannot be written ({error}), so the episodes' answers would be lost with this "
            f"process: {remedy_of(error)}, then start the run again, which goes on from its last checkpoint."
        )
        self.failure = self.failure or failure
        return failure

    def redacted(self, packed: bytes) -> bytes:
        """Redact secrets in packed values, as in a record."""
        found = [secret for secret in self._secrets if secret in packed]
        return encode(_without(msgspec.msgpack.decode(packed), found)) if found else packed

    # -- files -----------------------------------------------------------------------------------------------------------

    def _open_next(self) -> None:
        try:
            self._open_file()
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def _open_file(self) -> None:
        if self._segment < 0:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._segment += 1
        while self._file is None:
            if self._segment == 0:
                self.writer = 1 + max((file_numbers(path)[0] for path in journal_files(self.directory)), default=-1)
            try:
                self._file = os.open(self._path(self._segment), flags, 0o600)
            except FileExistsError:  # another process took the number
                if self._segment:
                    raise
        self.size = 0
        self._arguments = {}
        try:
            self._append(VERSION)
            self._append(frame(encode(Files(self._sizes(), time.time()))))
        except (JournalError, OSError):  # records cannot be read without a version
            os.close(self._file)
            self._file = None
            raise
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_now_and_then, name="rollwright-journal", daemon=True)
            self._flusher.start()

    def _sizes(self, without: Iterable[Path] = ()) -> dict[str, int]:
        """Return the sizes of the journal's files; for files of other processes they are lower bounds."""
        sizes = {}
        for path in journal_files(self.directory):
            if path not in without:
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    sizes[path.name] = path.stat().st_size
        return sizes

    def _path(self, segment: int) -> Path:
        return self.directory / f"{self.writer:06d}-{segment:04d}.journal"

    def _flush_now_and_then(self) -> None:
        while not self._is_closed:
            self._unflushed.wait()
            time.sleep(self.config.fsync_seconds)
            self._flush_or_say()

    def _flush_or_say(self) -> None:
        try:
            self.flush()
        except JournalError as error:  # the next checkpoint cannot be made if the disk still fails then
            logger.error("%s", error)

    def flush(self) -> None:
        """Flush the files to the disk.

        Raises:
            JournalError: the disk failed.
        """
        self._unflushed.clear()
        with self._flushing:
            with self._lock:
                ended, file = list(self._ended), None if self._file is None else os.dup(self._file)
            try:
                for each in ended:
                    os.fsync(each)
                    with self._lock:
                        self._ended.remove(each)
                    os.close(each)
                if file is not None:
                    os.fsync(file)
            except OSError as error:
                raise JournalError(
                    f"The journal in {self.directory} did not reach the disk ({error}), so a power failure would lose what episodes "
                    "were answered: look after that disk, then start the run again, which goes on from its last checkpoint."
                ) from error
            finally:
                if file is not None:
                    os.close(file)

    def checkpoint(self, step: int, frontier: int) -> None:
        """Flush the journal before a recovery checkpoint becomes visible; end a large file and remove old files.

        Raises:
            JournalError: the disk failed.
        """
        with self._lock:
            self.write(Checkpoint(step, frontier, time.time()))
            self._first = {ordinal: file for ordinal, file in self._first.items() if ordinal >= frontier}
            needed = min([self._segment, *self._first.values()])
        self.flush()
        with self._lock:
            self._end_large_file()
            if self.config.keep is not None:
                self._checkpoints = [*self._checkpoints[-self.config.keep :], (frontier, needed)]
                self._remove_old(self.config.keep)

    def _end_large_file(self) -> None:
        if self._file is not None and self.size >= self.config.rotate_mib * 2**20:
            self._append(frame(encode(Closed(time.time()))))
            self._ended.append(self._file)  # closed after it is flushed
            self._file = None
            self._open_next()

    def _remove_old(self, keep: int) -> None:
        """Remove files that are not needed to resume from the last ``keep`` checkpoints or the one before them."""
        if len(self._checkpoints) <= keep:
            return
        frontier, needed = self._checkpoints[0]
        oldest = (0, 0) if frontier > self.goes_on_to else (self.writer, 0)
        old = [path for path in journal_files(self.directory) if oldest <= file_numbers(path) < (self.writer, needed)]
        if old:  # may include files of earlier processes
            self.write(Files(self._sizes(without=old), time.time()))
        for path in old:
            path.unlink()

    def close(self) -> None:
        """Flush and close the journal; later records are ignored. Idempotent."""
        self._flush_or_say()
        with self._lock:
            if self._file is not None:
                if not self._is_closed and self._process == os.getpid():
                    with contextlib.suppress(JournalError):
                        self._append(frame(encode(Closed(time.time()))))
                os.close(self._file)
                self._file = None
            self._is_closed = True
        with self._flushing:
            while self._ended:  # the disk failed
                os.close(self._ended.pop())
        self._unflushed.set()


def _without(value: object, secrets: list[bytes]) -> object:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret.decode(), "***")
        return value
    if isinstance(value, bytes):
        if any(secret in value for secret in secrets):
            with contextlib.suppress(msgspec.DecodeError):  # packed values; packed tokens contain no text
                return msgspec.msgpack.encode(_without(msgspec.msgpack.decode(value, strict=False), secrets))
        return value
    if isinstance(value, list):
        return [_without(item, secrets) for item in value]
    if isinstance(value, dict):
        return {_without(key, secrets): _without(item, secrets) for key, item in value.items()}
    return value


def _as_unicode(value: Any) -> Any:
    """Replace lone surrogates with ``?`` in a string, or in the strings of a list."""
    if isinstance(value, list):
        return [_as_unicode(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# -- the journal of one episode ----------------------------------------------------------------------------------------

_WIDTH = TOKEN_TYPE.itemsize


class EpisodeWriter:
    """Writes the journal of one running episode; if the episode runs again, ``past`` answers its calls. Thread-safe.

    Args:
        journal: journal to write to. None writes nothing, as in a replay.
        past: earlier run of the same episode; it answers durable calls and model requests.
        is_replay: raise an error for calls that the past does not contain, instead of making them.
    """

    def __init__(self, journal: Journal | None, past: RecordedEpisode | None = None, *, is_replay: bool = False) -> None:
        self.past = past
        self.is_replay = is_replay
        self.diverged: Exception | None = None  # the first difference from the past
        self.to_restore: dict[object, Callable[[], object]] = {}  # environments to restore before the first new call
        self.figures = EpisodeFigures()  # what the episode reports
        self._journal = journal
        self._number = -1 if journal is None else journal.next_episode()
        self._calls: list[tuple[TokenPrefix, bytes]] = []  # prompt and output of each call
        self._last: dict[int, int] = {}  # conversation -> index of its last call
        self._index_of: dict[RequestRecord, int] = {}  # of calls with a record of experts
        self._restored: set[object] = set()
        self._is_closed = False
        self._lock = threading.Lock()  # calls are written in the order of their indices: readers count them

    def before_new_call(self, name: str) -> None:
        """Prepare for a durable call that the past does not contain.

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
        """Restore the recorded states of environments before the first new call."""
        waiting, self.to_restore = self.to_restore, {}
        for environment, restore in waiting.items():
            if environment not in self._restored:  # answers that come later, concurrently with new calls, have an older state
                self._restored.add(environment)
                restore()

    def begin(self, **facts: Any) -> None:
        """Write the beginning of the episode; ``facts`` are the fields of ``Begin``."""
        if self._journal is not None:
            self._journal.write(Begin(episode=self._number, time=time.time(), **facts))

    def call(self, record: RequestRecord) -> None:
        """Write an answered model request, even if the past answered it, so that each episode in the journal is complete by itself."""
        journal = self._journal
        if journal is None or self._is_closed:
            return
        layout = None if record.position_ids is None else [record.position_ids, record.branch_ids or []]
        experts_base = -1 if record.continues is None else self._index_of.get(record.continues, -1)
        experts = record.own_experts if experts_base >= 0 else record.routed_experts
        with self._lock:
            base, kept, added = self._delta(record.prompt, record.conversation)
            call = ModelCall(
                self._number,
                len(self._calls),
                record.conversation,
                record.turn,
                base,
                kept,
                added,
                record.output_bytes,
                record.output_logprobs.tobytes(),
                pack_versions(record.output_versions),
                record.temperature,
                record.stop_reason,
                record.stop_match,
                record.seed,
                journal.arguments(record.gconfig),
                record.started,
                record.finished,
                record.latency,
                record.ttft,
                layout,
                record.logprobs_shifted,
                pack_value(_packable(record.metadata)) if record.metadata else None,
                server=record.server,
                experts=b"" if experts is None else experts.tobytes(),
                experts_width=0 if experts is None else experts.shape[1],
                experts_base=experts_base,
            )
            if experts is not None:
                self._index_of[record] = call.index
            self._written(call, record.prompt, record.output_bytes)

    def refused(self, request: Any, place: tuple[int, int], error: Exception) -> None:
        """Write a model request that was rejected because its prompt leaves no room; a replay rejects it again."""
        if self._journal is None or self._is_closed:
            return
        kept = None if self.past is None else self.past.call_at(place)
        prompt, now = request.tokens, time.time()
        times = (now, now) if kept is None else (kept.call.started, kept.call.finished)
        arguments = self._journal.arguments(request.gconfig)
        nothing = (b"", b"", b"", 1.0, "refused", None, request.seed, arguments, *times, 0.0, 0.0)
        with self._lock:
            base, kept, added = self._delta(prompt, place[0])
            call = ModelCall(self._number, len(self._calls), *place, base, kept, added, *nothing, refused=str(error))
            self._written(call, prompt, b"")

    def _written(self, call: ModelCall, prompt: TokenPrefix, output: bytes) -> None:
        assert self._journal is not None
        self._calls.append((prompt, output))
        self._last[call.conversation] = call.index
        self._journal.write(call)

    def _delta(self, prompt: TokenPrefix, conversation: int) -> tuple[int, int, bytes]:
        """Find an earlier call whose prompt and output begin like ``prompt``.

        Returns:
            Index of the call (-1 if none), length of the common prefix, and the remaining tokens.
        """
        best, kept, last = -1, 0, self._last.get(conversation, -1)
        if last >= 0 and prompt.continues(*self._calls[last]):
            before, output = self._calls[last]
            best, kept = last, before.length + tokens_in(output)
        elif self._calls:
            for index in {last, len(self._calls) - 1, 0} - {-1}:
                if (shared := _shared(prompt.array, *self._calls[index])) > kept:
                    best, kept = index, shared
        return best, kept, prompt.buffer.array[kept : prompt.length].tobytes()

    def result(self, name: str, key: int, kind: str, started: float, **outcome: bytes | list[str] | None) -> None:
        """Write the result of a durable call."""
        if self._journal is not None and not self._is_closed:
            value, error, state = (outcome.get(part) for part in ("value", "error", "state"))
            now = time.time()
            self._journal.write(DurableResult(self._number, name, key, kind, value, error, state, now, now - started))  # type: ignore[arg-type]

    def answered(self, result: DurableResult) -> None:
        """Write a durable call that the past answered."""
        if self._journal is not None and not self._is_closed:
            self._journal.write(msgspec.structs.replace(result, episode=self._number))

    def close(self) -> None:
        """Ignore later calls: they belong to an episode that has ended, and a replay would not make them."""
        self._is_closed = True

    def end(self, outcome: str, reason: str = "", rows: Trajectory | None = None, traceback: str = "") -> None:
        """Write the end of the episode and its complete ``rows``."""
        if self._journal is not None:
            entries = [] if rows is None else rows_of(rows, self._calls)
            self._journal.write(End(self._number, outcome, reason, entries, time.time(), traceback, self.figures.export()))


def _shared(ids: np.ndarray, prompt: TokenPrefix, output: bytes) -> int:
    """Return the length of the common prefix of ``ids`` and an earlier call's prompt and output."""
    shared = common_length(prompt.array, ids)
    if shared < prompt.length:
        return shared
    return shared + common_length(np.frombuffer(output, dtype=TOKEN_TYPE), ids[shared:])


def _packable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = (bool, int, float, str, type(None))
    return {str(name): value if isinstance(value, kept) else repr(value)[:200] for name, value in metadata.items()}


def rows_of(rows: Trajectory, calls: list[tuple[TokenPrefix, bytes]]) -> list[Row]:
    """Encode each row of a complete trajectory as a delta of its last call."""
    rewards, truncated = rows["rewards"].tolist(), rows["truncated"].tolist()
    figures = [_numbers(each.get("metrics", {})) for each in rows["details"]] if "details" in rows else [{}] * len(rewards)
    players = [rows.get(name, [""] * len(rewards)) for name in ("agent", "role")]
    entries = []
    for row, (ids, mask, digest) in enumerate(_packed_rows(rows)):
        base, kept = _last_call(ids, calls)
        about = (rewards[row], bool(truncated[row]), digest, figures[row], *(str(names[row] or "") for names in players))
        entries.append(Row(base, kept, ids[kept * _WIDTH :], _edges(mask), *about))
    return entries


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; a value that is none fails where the run's metrics are averaged."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {str(name): float(value) for name, value in plain.items() if isinstance(value, int | float)}


def _edges(mask: bytes) -> list[int]:
    """Return begin and end of each stretch of ones."""
    edges, wanted, at = [], b"\1", mask.find(b"\1")
    while at >= 0:
        edges.append(at)
        wanted = b"\0" if wanted == b"\1" else b"\1"
        at = mask.find(wanted, at)
    if len(edges) % 2:
        edges.append(len(mask))
    return edges


def _last_call(ids: bytes, calls: list[tuple[TokenPrefix, bytes]]) -> tuple[int, int]:
    """Return the call whose prompt and output share the longest prefix with a row, and the length of that prefix."""
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
        elif (shared := _shared(np.frombuffer(ids, dtype=TOKEN_TYPE), prompt, output)) > kept:
            base, kept = index, shared
        if kept == length:
            break
    return base, kept


def row_digests(rows: Trajectory) -> list[bytes]:
    """Compute a digest of each row's ids, mask, log-probabilities and versions."""
    return [digest for _, _, digest in _packed_rows(rows)]


def _packed_rows(rows: Trajectory) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield packed ids and mask of each row without padding, and a digest of them with log-probabilities and versions.

    All rows are converted at once and then handled as bytes, because an array per row would cost more than the work on it.
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
