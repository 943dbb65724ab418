"""The recorder: what a sample asked of the engine and what it was answered, token for token.

One recorder belongs to one sample. The engine bound to the sample records every request that it serves, from whatever
thread or event loop; the normaliser reads the records, which hold all that a replay needs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rollwright.errors import EngineError
from rollwright.experience.experience import Experience

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


# ----------------------------------------------------------------------
# From the requests that a sample made to experiences: calls that extend one another are one sequence.
#
# A call whose prompt begins with all tokens of an earlier sequence goes on with it. A call that begins otherwise, that goes on
# from a sequence somebody else already continued, or that is sampled at another temperature (a row has one), is a branch of its
# own: it carries what it shares as context, without loss, so that every sampled token is trained exactly once.


@dataclass
class _Sequence:
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    calls: list[RequestRecord] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # place of each call's last token

    def append(self, record: RequestRecord) -> None:
        context = list(record.prompt_ids[len(self.tokens) :])
        self.tokens += [*context, *record.output_ids]
        self.mask += [0] * len(context) + [1] * len(record.output_ids)
        self.logprobs += [0.0] * len(context) + list(record.logprobs)
        self.versions += [-1] * len(context) + list(record.versions)
        self.calls.append(record)
        self.ends.append(len(self.tokens) - 1)

    def continues(self, record: RequestRecord) -> bool:
        prompt = record.prompt_ids
        return (
            len(self.tokens) <= len(prompt)
            and prompt[: len(self.tokens)] == self.tokens
            and self.calls[-1].temperature == record.temperature
        )


def sequences_of(records: Iterable[RequestRecord]) -> list[list[RequestRecord]]:
    """The calls of each sequence, in order; a call stands in exactly one."""
    return [sequence.calls for sequence in _merge(records)]


def experiences_of(
    records: Iterable[RequestRecord], reward: float | None = None, call_rewards: Mapping[int, float] | None = None
) -> list[Experience]:
    """The experiences of a sample's calls; each sampled token is in the action mask of exactly one.

    ``response_text`` is all that follows the prompt of a sequence's first call, without special tokens.

    Args:
        records: the requests that the sample made, in order.
        reward: reward of every experience, where it is known already.
        call_rewards: rewards of single calls by the record's ``index``; each stands in ``token_rewards`` at its call's last
            token, so that the calls before it in the sequence are credited with it, and those after it are not. None: the
            experiences have no ``token_rewards``.
    """
    return [_experience(sequence, reward, call_rewards) for sequence in _merge(records)]


def _merge(records: Iterable[RequestRecord]) -> list[_Sequence]:
    sequences: list[_Sequence] = []
    for record in records:
        if not record.output_ids:
            continue
        extended = [sequence for sequence in sequences if sequence.continues(record)]
        sequence = max(extended, key=lambda s: len(s.tokens), default=None)
        if sequence is None:
            sequence = _Sequence([], [], [], [])
            sequences.append(sequence)
        sequence.append(record)
    return sequences


def _experience(sequence: _Sequence, reward: float | None, call_rewards: Mapping[int, float] | None) -> Experience:
    prompt_length = sequence.mask.index(1)
    last = sequence.calls[-1]
    token_rewards = None
    if call_rewards is not None:
        token_rewards = torch.zeros(len(sequence.tokens) - prompt_length)
        for record, end in zip(sequence.calls, sequence.ends, strict=True):
            token_rewards[end - prompt_length] = call_rewards.get(record.index, 0.0)
    prompt_text = response_text = None
    if last.tokenizer is not None:
        prompt_text = last.tokenizer.decode(sequence.tokens[:prompt_length], skip_special_tokens=False)
        response_text = last.tokenizer.decode(sequence.tokens[prompt_length:], skip_special_tokens=True)
    return Experience(
        prompt_text=prompt_text,
        response_text=response_text,
        tokens=torch.tensor(sequence.tokens, dtype=torch.long),
        prompt_length=prompt_length,
        logprobs=torch.tensor(sequence.logprobs[prompt_length:], dtype=torch.float32),
        versions=torch.tensor(sequence.versions[prompt_length:], dtype=torch.int32),
        action_mask=torch.tensor(sequence.mask[prompt_length:], dtype=torch.bool),
        token_rewards=token_rewards,
        reward=reward,
        temperature=last.temperature,
        truncated=last.truncated,
    )
