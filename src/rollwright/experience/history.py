"""From the requests that a sample made to experiences: calls that extend one another are one sequence.

A call whose prompt begins with all tokens of an earlier sequence goes on with it. A call that begins otherwise, that goes on
from a sequence somebody else already continued, or that is sampled at another temperature (a row has one), is a branch of its
own: it carries what it shares as context, without loss, so that every sampled token is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from rollwright.experience.experience import Experience
from rollwright.experience.recorder import RequestRecord


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
