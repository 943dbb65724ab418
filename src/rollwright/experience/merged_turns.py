"""Turns of a conversation merged into rows: calls that extend one another are one experience."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rollwright.experience.experience import Experience
from rollwright.experience.recorder import RequestRecord


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
    return [experience_of(calls, reward, call_rewards) for calls in sequences_of(records)]


def sequences_of(records: Iterable[RequestRecord]) -> list[list[RequestRecord]]:
    """The calls that extend one another, as lists; see ``experiences_of``."""
    sequences: list[list[RequestRecord]] = []
    for record in records:
        if not record.output_bytes:
            continue
        extended = [
            calls
            for calls in sequences
            if calls[-1].temperature == record.temperature
            and record.prompt.continues(calls[-1].prompt, calls[-1].output_bytes)
            and _shows_the_same(record.multi_modal, calls[-1].multi_modal)
        ]
        if extended:
            max(extended, key=lambda calls: len(calls[-1].prompt) + len(calls[-1].output)).append(record)
        else:
            sequences.append([record])
    return sequences


def _shows_the_same(images: dict[str, Any] | None, before: dict[str, Any] | None) -> bool:
    """Whether ``images`` are those of an earlier call, and perhaps more behind them; each tensor has them in its first axis."""
    if images is before or not before:
        return True
    if images is None or images.keys() != before.keys():
        return False
    return all(torch.equal(images[name][: len(value)], value) for name, value in before.items())


def experience_of(
    calls: list[RequestRecord], reward: float | None = None, call_rewards: Mapping[int, float] | None = None
) -> Experience:
    """The experience of calls each of which goes on from the one before; arguments as for ``experiences_of``."""
    prompt_length, last = len(calls[0].prompt), calls[-1]
    tokens = torch.from_numpy(np.concatenate([last.prompt.array, last.output]).astype(np.int64))
    length = len(tokens) - prompt_length
    logprobs, versions = torch.zeros(length), torch.full((length,), -1, dtype=torch.int32)
    mask, token_rewards = torch.zeros(length, dtype=torch.bool), torch.zeros(length)
    for record in calls:
        begin = len(record.prompt) - prompt_length
        end = begin + len(record.output)
        mask[begin:end] = True
        logprobs[begin:end] = torch.from_numpy(record.output_logprobs)
        versions[begin:end] = torch.from_numpy(record.output_versions.copy())
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
        multi_modal_inputs=last.multi_modal or None,
    )
