"""The recorder: what a sample asked of the engine and what it was answered, token for token.

One recorder belongs to one sample. The engine bound to the sample records every request that it serves, from whatever
thread or event loop; the normaliser reads the records, which hold all that a replay needs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rollwright.errors import EngineError

#: Token ids as bytes, for comparing long sequences at memory speed.
TOKEN_TYPE = np.dtype("<i4")


def token_bytes(ids: Any) -> bytes:
    """Token ids as 4-byte integers."""
    return np.asarray(ids, dtype=TOKEN_TYPE).tobytes()


@dataclass
class RequestRecord:
    """One request and its response. Lists are the record's own: nothing that a workflow does changes them."""

    index: int  # order in which responses came back in this sample
    rid: str  # conversation
    conversation: int  # order in which conversations first appeared in this sample
    turn: int  # requests of the same conversation before this one
    prompt_ids: list[int]
    output_ids: list[int]  # with the stop token or the tokens of the stop string
    logprobs: list[float]  # natural, at sampling, temperature-scaled
    versions: list[int]  # weight version that sampled each token
    temperature: float  # that logprobs are at (1.0 where greedy)
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
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = field(default=None, repr=False, compare=False)  # of the request, to make messages readable

    @property
    def truncated(self) -> bool:
        """True where a length limit ended the response."""
        return self.stop_reason == "length"

    @cached_property
    def prompt_bytes(self) -> bytes:
        """``prompt_ids`` as bytes."""
        return token_bytes(self.prompt_ids)

    @cached_property
    def output_bytes(self) -> bytes:
        """``output_ids`` as bytes."""
        return token_bytes(self.output_ids)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tokenizer, in JSON's types."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("tokenizer", "gconfig")}
        out["gconfig"] = asdict(self.gconfig) if is_dataclass(self.gconfig) else self.gconfig  # type: ignore[arg-type]
        return out


class Recorder:
    """All requests of one sample, in the order in which they were answered. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[RequestRecord] = []
        self._conversations: dict[str, int] = {}
        self._turns: Counter[str] = Counter()

    @property
    def records(self) -> list[RequestRecord]:
        """A copy of the list of records so far."""
        with self._lock:
            return list(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def open_turn(self, rid: str) -> tuple[int, int]:
        """Take the next turn of a conversation, before its request is sent.

        Returns:
            The conversation's place in order of first appearance, and the turn in it; seeds derive from both. Hand them to
            ``record`` with the response.
        """
        with self._lock:
            return self._open_turn(rid)

    def _open_turn(self, rid: str) -> tuple[int, int]:
        conversation = self._conversations.setdefault(rid, len(self._conversations))
        turn = self._turns[rid]
        self._turns[rid] += 1
        return conversation, turn

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
            request: a ``ModelRequest``.
            response: its ``ModelResponse``; its lists are copied.
            place: what ``open_turn`` gave for the request; None: the next turn of its conversation.
            started, finished: seconds since the epoch; from the response's latency and the clock where left out.

        Raises:
            EngineError: the response's log-probabilities or versions do not cover its tokens: the engine is at fault.
        """
        output_ids = list(response.output_tokens)
        logprobs, versions = list(response.output_logprobs), list(response.output_versions)
        if not len(output_ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"the engine returned {len(output_ids)} tokens with {len(logprobs)} log-probabilities and {len(versions)} "
                f"versions for conversation {request.rid}; an engine gives one of each for every token that it sampled."
            )
        finished = time.time() if finished is None else finished
        gconfig = request.gconfig
        record = RequestRecord(
            index=-1,
            rid=request.rid,
            conversation=-1,
            turn=-1,
            prompt_ids=list(response.input_tokens or request.input_ids),
            output_ids=output_ids,
            logprobs=logprobs,
            versions=versions,
            temperature=float(response.temperature),
            stop_reason=response.stop_reason,
            stop_match=response.stop_match,
            seed=response.seed if response.seed is not None else request.seed,
            gconfig=gconfig.new() if hasattr(gconfig, "new") else gconfig,
            started=finished - response.latency if started is None else started,
            finished=finished,
            latency=response.latency,
            ttft=response.ttft,
            position_ids=None if request.position_ids is None else list(request.position_ids),
            branch_ids=None if request.branch_ids is None else list(request.branch_ids),
            logprobs_shifted=response.logprobs_shifted,
            metadata=dict(request.metadata),
            tokenizer=request.tokenizer,
        )
        # Made here, spread over the requests, so that normalising a finished sample is only comparing.
        _ = record.prompt_bytes, record.output_bytes
        with self._lock:
            record.conversation, record.turn = self._open_turn(request.rid) if place is None else place
            record.index = len(self._records)
            self._records.append(record)
        return record
