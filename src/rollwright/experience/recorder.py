"""The recorder: every request that a sample made and the engine's answer, token for token.

One recorder belongs to one sample. The engine bound to the sample records each request that it answers, from any thread or event loop;
the normaliser reads the records, which contain everything that a replay needs.

Prompts of a conversation extend one another, so their tokens are stored once: a ``TokenBuffer`` holds the longest prompt of a
conversation, both as the given ints and packed, and each prompt is a ``TokenPrefix`` of it. Each turn costs only the tokens it adds, and
the records of a hundred turns take the memory of the last one. A prompt starts a new buffer if neither it nor its conversation's buffer is
a prefix of the other."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollwright.errors import EngineError

#: Type of packed token ids.
TOKEN_TYPE = np.dtype("<i4")
LARGEST_TOKEN = 2**31 - 1


class TokenBuffer:
    """The tokens of one conversation; append-only.

    Attributes:
        objects: the ids as the given int objects. Comparison with a list of the same objects takes under 1 ns per token.
        array: the packed ids, followed by spare capacity.
    """

    def __init__(self) -> None:
        self.objects: list[int] = []
        self.array = np.empty(64, dtype=TOKEN_TYPE)

    def append(self, ids: list[int]) -> None:
        """Append tokens that are already checked."""
        begin, end = len(self.objects), len(self.objects) + len(ids)
        if end > len(self.array):
            grown = np.empty(max(end, len(self.array) * 3 // 2), dtype=TOKEN_TYPE)
            grown[:begin] = self.array[:begin]
            self.array = grown
        self.array[begin:end] = ids
        self.objects += ids

    def agrees(self, ids: list[Any]) -> bool:
        """Return whether ``ids`` are a prefix of the buffer, or the buffer is a prefix of ``ids``."""
        known = self.objects
        if len(ids) <= len(known):
            return known[: len(ids)] == ids
        # Lists compare item by item until two differ, identical objects without a call. A mark at the end shows whether the comparison
        # gets there. Comparing with a slice of ``ids`` would cost four times as much.
        mark = _Mark()
        known.append(mark)  # type: ignore[arg-type]
        try:
            known < ids  # type: ignore[operator]  # noqa: B015
        except TypeError:  # not comparable with a number; rejected as a token later
            return False
        finally:
            known.pop()
        return mark.was_reached


class _Mark:
    """Records that a comparison reached it; unequal to and less than everything."""

    def __init__(self) -> None:
        self.was_reached = False

    def __eq__(self, other: object) -> bool:
        self.was_reached = True
        return False

    def __lt__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays of tokens."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


@dataclass(eq=False, repr=False, slots=True)
class TokenPrefix:
    """The first ``length`` tokens of a buffer. Immutable."""

    buffer: TokenBuffer
    length: int

    @classmethod
    def of(cls, ids: list[int]) -> TokenPrefix:
        """Put tokens into a buffer of their own."""
        buffer = TokenBuffer()
        buffer.append(ids)
        return cls(buffer, len(ids))

    @property
    def array(self) -> np.ndarray:
        """``[length]`` int32; read-only."""
        return self.buffer.array[: self.length]

    def tolist(self) -> list[int]:
        """Copy the tokens to a list."""
        return self.buffer.objects[: self.length]

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"TokenPrefix({self.tolist()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenPrefix.of, (self.tolist(),)

    def equals(self, ids: list[Any]) -> bool:
        """Return whether the list contains exactly these tokens."""
        return len(ids) == self.length and self.buffer.agrees(ids)

    def begins_with(self, other: TokenPrefix) -> bool:
        """Return whether ``other`` is a prefix of these tokens."""
        if self.length < other.length:
            return False
        return self.buffer is other.buffer or bool(np.array_equal(self.array[: other.length], other.array))

    def continues(self, prompt: TokenPrefix, output: bytes) -> bool:
        """Return whether these tokens begin with ``prompt`` followed by the packed tokens ``output``."""
        end = prompt.length + len(output) // TOKEN_TYPE.itemsize
        return self.length >= end and self.buffer.array[prompt.length : end].tobytes() == output and self.begins_with(prompt)


_BUFFERS: weakref.WeakValueDictionary[str, TokenBuffer] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def conversation_tokens(conversation: str, ids: list[Any], check: Callable[[list[Any], int], list[int]]) -> TokenPrefix:
    """Store ``ids`` in the buffer of their conversation, or in a new buffer if they do not extend it. The list is not modified.

    A buffer lives as long as one of its conversation's requests or records.

    Args:
        conversation: id of the conversation.
        ids: token ids.
        check: called with the tokens that are not in the buffer yet and the position of the first; returns them as ints or raises.
    """
    with _LOCK:
        buffer = _BUFFERS.get(conversation)
        if buffer is None or not buffer.agrees(ids):
            buffer = TokenBuffer()
        known = len(buffer.objects)
        if len(ids) > known:
            buffer.append(check(ids[known:], known))
        _BUFFERS[conversation] = buffer
        return TokenPrefix(buffer, len(ids))


@dataclass(eq=False)
class RequestRecord:
    """One request and its response, packed. A workflow cannot change it; lists are made on access."""

    index: int  # order in which responses arrived in this sample
    rid: str  # conversation
    conversation: int  # order in which conversations first appeared in this sample
    turn: int  # number of earlier requests of this conversation
    prompt: TokenPrefix
    output_bytes: bytes = field(repr=False)  # packed ids, including the stop token or the tokens of the stop string
    output_logprobs: np.ndarray  # natural, at sampling, temperature-scaled; float32 if exact
    output_versions: np.ndarray  # weight version that sampled each token
    temperature: float  # temperature of the log-probabilities (1.0 if greedy)
    stop_reason: str  # "stop" | "length" | "abort"
    stop_match: str | int | None = None
    seed: int | None = None
    gconfig: Any = None  # a copy of the generation arguments
    started: float = 0.0  # seconds since the epoch
    finished: float = 0.0
    latency: float = 0.0  # seconds, as the engine measured it
    ttft: float = 0.0  # seconds to the first token
    position_ids: list[int] | None = None
    branch_ids: list[int] | None = None
    logprobs_shifted: bool = False  # taken after top-p, top-k or penalties
    server: str = ""  # server that answered; empty for an engine in this process
    continues: RequestRecord | None = field(default=None, repr=False)  # the request whose record of experts this one continues
    own_experts: np.ndarray | None = field(default=None, repr=False)  # the record of experts from there on
    metadata: dict[str, Any] = field(default_factory=dict)
    multi_modal: dict[str, Any] | None = field(default=None, repr=False)  # processed images that the model received
    tokenizer: Any = field(default=None, repr=False)  # tokenizer of the request, for readable messages

    @property
    def prompt_ids(self) -> list[int]:
        """``[P]`` ids of the prompt."""
        return self.prompt.tolist()

    @property
    def output(self) -> np.ndarray:
        """``[N]`` ids of the response."""
        return np.frombuffer(self.output_bytes, dtype=TOKEN_TYPE)

    @property
    def output_ids(self) -> list[int]:
        """``[N]`` ids of the response."""
        return self.output.tolist()

    @property
    def logprobs(self) -> list[float]:
        """``[N]`` log-probabilities of the response."""
        return self.output_logprobs.tolist()

    @property
    def versions(self) -> list[int]:
        """``[N]`` versions of the response."""
        return self.output_versions.tolist()

    @property
    def truncated(self) -> bool:
        """True if a length limit ended the response."""
        return self.stop_reason == "length"

    @property
    def routed_experts(self) -> np.ndarray | None:
        """``[P + N - 1, W]`` record of the experts (``inference/routed_experts.py``); None if there is none.

        What an earlier turn of the conversation computed has the record of that turn.
        """
        return None if self.own_experts is None else joined_experts(self, lambda each: (each.continues, each.own_experts))


def joined_experts(last: Any, part_of: Callable[[Any], tuple[Any, np.ndarray | None]]) -> np.ndarray:
    """Join a record of experts that continues those of earlier requests.

    Args:
        last: the last request.
        part_of: returns the request that a request continues, or None, and the request's own part.
    """
    parts = []
    while last is not None:
        last, own = part_of(last)
        parts.append(own)
    return np.concatenate(parts[::-1])


class Recorder:
    """All requests of one sample, in the order in which they were answered. Thread-safe.

    Attributes:
        outgrew_context: True if a request was rejected because its prompt left no room in the context.
    """

    def __init__(self) -> None:
        self.outgrew_context = False
        self._lock = threading.Lock()
        self._records: list[RequestRecord] = []
        self._conversations: dict[str, int] = {}
        self._turns: Counter[str] = Counter()
        self._last: dict[str, RequestRecord] = {}  # the last request of each conversation

    @property
    def records(self) -> list[RequestRecord]:
        """Copy of the list of records so far."""
        with self._lock:
            return list(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def open_turn(self, rid: str, number_of: Callable[[int], int] | None = None) -> tuple[int, int]:
        """Reserve the next turn of a conversation before its request is sent; pass the result to ``record`` as ``place``.

        Args:
            rid: id of the conversation.
            number_of: maps the order of first appearance of a new conversation to its number. If None, the order is the number.

        Returns:
            Number of the conversation, and turn in the conversation. Seeds derive from both.
        """
        with self._lock:
            conversation = self._conversations.get(rid)
            if conversation is None:
                conversation = len(self._conversations)
                conversation = self._conversations[rid] = conversation if number_of is None else number_of(conversation)
            self._turns[rid] += 1
            return conversation, self._turns[rid] - 1

    def record(
        self,
        request: Any,
        response: Any,
        *,
        place: tuple[int, int] | None = None,
        started: float | None = None,
        finished: float | None = None,
    ) -> RequestRecord:
        """Record one answered request.

        Args:
            request, response: a ``ModelRequest`` and its ``ModelResponse``, whose lists are copied.
            place: result of ``open_turn`` for the request. None reserves the next turn of its conversation.
            started, finished: seconds since the epoch. None derives them from the clock and the response's latency.

        Raises:
            EngineError: the engine did not return one log-probability and one version for each token.
        """
        count = len(response.output_tokens)
        if not count == len(response.output_logprobs) == len(response.output_versions):
            raise EngineError(
                f"the engine returned {count} tokens with {len(response.output_logprobs)} log-probabilities and "
                f"{len(response.output_versions)} versions for conversation {request.rid}; an engine gives one of each for every "
                "token that it sampled."
            )
        finished = time.time() if finished is None else finished
        logprobs, versions = _packed(response.output_logprobs, list(response.output_versions))
        conversation, turn = self.open_turn(request.rid) if place is None else place
        record = RequestRecord(
            index=-1,
            rid=request.rid,
            conversation=conversation,
            turn=turn,
            prompt=response.prompt(request),
            output_bytes=np.array(response.output_tokens, dtype=TOKEN_TYPE).tobytes(),
            output_logprobs=logprobs,
            output_versions=versions,
            temperature=float(response.temperature),
            stop_reason=response.stop_reason,
            stop_match=response.stop_match,
            seed=response.seed if response.seed is not None else request.seed,
            gconfig=request.gconfig.new(),
            started=finished - response.latency if started is None else started,
            finished=finished,
            latency=response.latency,
            ttft=response.ttft,
            position_ids=None if request.position_ids is None else list(request.position_ids),
            branch_ids=None if request.branch_ids is None else list(request.branch_ids),
            logprobs_shifted=response.logprobs_shifted,
            server=response.server,
            metadata=dict(request.metadata),
            multi_modal=request.multi_modal,
            tokenizer=request.tokenizer,
        )
        self._add_experts(record, response.routed_experts)
        with self._lock:
            record.index = len(self._records)
            self._records.append(record)
            self._last[record.rid] = record
        return record

    def _add_experts(self, record: RequestRecord, experts: np.ndarray | None) -> None:
        """Add a response's record of experts, without the tokens that an earlier turn has recorded.

        Raises:
            EngineError: it has not one row for each token but the last.
        """
        if experts is None:
            return
        wanted = len(record.prompt) + len(record.output) - 1
        if experts.ndim != 2 or len(experts) != wanted:
            raise EngineError(
                f"the engine returned a record of experts of shape {list(experts.shape)} for conversation {record.rid}; it needs a "
                f"row for each token but the last, {wanted}."
            )
        with self._lock:
            before = self._last.get(record.rid)
        known = 0
        if (
            before is not None
            and before.own_experts is not None
            and record.prompt.continues(before.prompt, before.output_bytes)
        ):
            record.continues, known = before, len(before.prompt) + len(before.output) - 1
        record.own_experts = experts[known:]


def _packed(logprobs: list[float], versions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Pack log-probabilities as float32 if that is exact, otherwise as float64; equal versions share one int32 in memory."""
    whole = np.array(logprobs, dtype=np.float64)
    single = whole.astype(np.float32)
    exact = single if single.astype(np.float64).tobytes() == whole.tobytes() else whole
    if versions and versions.count(versions[0]) == len(versions):
        return exact, np.broadcast_to(np.array(versions[0], dtype=np.int32), (len(versions),))
    return exact, np.array(versions, dtype=np.int32)
