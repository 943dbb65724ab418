"""The recorder: what a sample asked of the engine and what it was answered, token for token.

One recorder belongs to one sample. The engine bound to the sample records every request that it serves, from whatever
thread or event loop; the normaliser reads the records, which hold all that a replay needs. ``experiences_of`` makes
experiences of them without a workflow's help.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from rollwright.errors import EngineError
from rollwright.experience.experience import Experience

#: Type of token ids as bytes, for comparing long sequences at memory speed.
TOKEN_TYPE = np.dtype("<i4")


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
    prompt_bytes: bytes = field(init=False, repr=False, compare=False)
    output_bytes: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made with the record, spread over the requests, so that normalising a finished sample is only comparing.
        self.prompt_bytes = np.asarray(self.prompt_ids, dtype=TOKEN_TYPE).tobytes()
        self.output_bytes = np.asarray(self.output_ids, dtype=TOKEN_TYPE).tobytes()

    @property
    def truncated(self) -> bool:
        """True where a length limit ended the response."""
        return self.stop_reason == "length"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tokenizer and the bytes, in JSON's types."""
        left_out = ("tokenizer", "gconfig", "prompt_bytes", "output_bytes")
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        return {**out, "gconfig": None if self.gconfig is None else asdict(self.gconfig)}


class Recorder:
    """All requests of one sample, in the order in which they were answered. Safe to use from several threads.

    Attributes:
        outgrew_context: a request was refused because its prompt left no room in the context.
    """

    def __init__(self) -> None:
        self.outgrew_context = False
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
        """Take the next turn of a conversation, before its request is sent; hand it to ``record`` with the response.

        Returns the conversation's place in order of first appearance, and the turn in it; seeds derive from both.
        """
        with self._lock:
            conversation = self._conversations.setdefault(rid, len(self._conversations))
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
        conversation, turn = self.open_turn(request.rid) if place is None else place
        record = RequestRecord(
            index=-1,
            rid=request.rid,
            conversation=conversation,
            turn=turn,
            prompt_ids=list(response.input_tokens or request.input_ids),
            output_ids=output_ids,
            logprobs=logprobs,
            versions=versions,
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
            metadata=dict(request.metadata),
            tokenizer=request.tokenizer,
        )
        with self._lock:
            record.index = len(self._records)
            self._records.append(record)
        return record


def experiences_of(
    records: Iterable[RequestRecord], reward: float | None = None, call_rewards: Mapping[int, float] | None = None
) -> list[Experience]:
    """The experiences of a sample's calls; each sampled token is in the action mask of exactly one.

    Calls that extend one another are one sequence: a call whose prompt begins with all tokens of an earlier sequence goes on
    with it. A call that begins otherwise, that goes on from a sequence that another call already continued, or that is sampled
    at another temperature (a row has one), is a branch of its own: it carries what it shares as context, without loss.

    ``response_text`` is all that follows the prompt of a sequence's first call, without special tokens.

    Args:
        records: the requests that the sample made, in order.
        reward: reward of every experience, where it is known already.
        call_rewards: rewards of single calls by the record's ``index``; each stands in ``token_rewards`` at its call's last
            token, so that the calls before it in the sequence are credited with it, and those after it are not. None: the
            experiences have no ``token_rewards``.
    """
    sequences: list[list[RequestRecord]] = []
    for record in records:
        if not record.output_ids:
            continue
        extended = [
            calls
            for calls in sequences
            if calls[-1].temperature == record.temperature
            and record.prompt_bytes.startswith(calls[-1].prompt_bytes + calls[-1].output_bytes)
        ]
        if extended:
            max(extended, key=lambda calls: len(calls[-1].prompt_bytes) + len(calls[-1].output_bytes)).append(record)
        else:
            sequences.append([record])
    return [_experience(calls, reward, call_rewards) for calls in sequences]


def _experience(calls: list[RequestRecord], reward: float | None, call_rewards: Mapping[int, float] | None) -> Experience:
    """The experience of calls each of which goes on from the one before."""
    prompt_length, last = len(calls[0].prompt_ids), calls[-1]
    tokens = torch.tensor([*last.prompt_ids, *last.output_ids], dtype=torch.int64)
    length = len(tokens) - prompt_length
    logprobs, versions = torch.zeros(length), torch.full((length,), -1, dtype=torch.int32)
    mask, token_rewards = torch.zeros(length, dtype=torch.bool), torch.zeros(length)
    for record in calls:
        begin = len(record.prompt_ids) - prompt_length
        end = begin + len(record.output_ids)
        mask[begin:end] = True
        logprobs[begin:end] = torch.tensor(record.logprobs)
        versions[begin:end] = torch.tensor(record.versions, dtype=torch.int32)
        token_rewards[end - 1] = (call_rewards or {}).get(record.index, 0.0)
    tokenizer = last.tokenizer
    return Experience(
        prompt_text=tokenizer.decode(tokens[:prompt_length].tolist(), skip_special_tokens=False)
        if tokenizer is not None
        else None,
        response_text=tokenizer.decode(tokens[prompt_length:].tolist(), skip_special_tokens=True)
        if tokenizer is not None
        else None,
        tokens=tokens,
        prompt_length=prompt_length,
        logprobs=logprobs,
        versions=versions,
        action_mask=mask,
        token_rewards=None if call_rewards is None else token_rewards,
        reward=reward,
        temperature=last.temperature,
        truncated=last.truncated,
    )
