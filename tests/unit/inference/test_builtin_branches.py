"""Isolated branches: what the engine samples equals a training forward with the branch mask and positions."""

from __future__ import annotations

import random

import pytest
import torch
from builtin_models import tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest


@torch.no_grad()
def masked_logprobs(model, tokens, branches, positions, first, temperature):
    """Log-probabilities of ``tokens[first:]`` by one forward with an explicit mask, the rule written out token by token."""
    length = len(tokens)
    allowed = [
        [j <= i and (branches[j] == 0 or branches[j] == branches[i] or branches[i] == 0) for j in range(length)]
        for i in range(length)
    ]
    mask = torch.zeros(1, 1, length, length).masked_fill(~torch.tensor(allowed), torch.finfo(torch.float32).min)
    logits = model(torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions])).logits[0].double()
    return (logits / temperature).log_softmax(-1)[torch.arange(first - 1, length - 1), tokens[first:]]


def branched_request(seed: int, gconfig) -> ModelRequest:
    """A trunk, two finished branches that begin at the trunk's end, and the start of a third, or a closing trunk part."""
    choose = random.Random(seed)
    trunk, *parts = ([choose.randrange(3, 96) for _ in range(choose.randrange(1, 25))] for _ in range(4))
    last_branch = choose.choice([0, 3])
    tokens, branches, positions = list(trunk), [0] * len(trunk), list(range(len(trunk)))
    for branch, part in zip((1, 2, last_branch), parts, strict=False):
        start = len(trunk) if branch else max(positions) + 1
        tokens += part
        branches += [branch] * len(part)
        positions += range(start, start + len(part))
    return ModelRequest(tokens, gconfig, seed=seed, position_ids=positions, branch_ids=branches)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("prefill_tokens", [2048, 17])
def test_branches_are_exact_among_plain_requests(architecture, prefill_tokens):
    model = tiny_model(architecture)
    gconfig = GenerationHyperparameters(max_new_tokens=10, temperature=0.7, ignore_eos=True)
    branched = [branched_request(seed, gconfig) for seed in range(6)]
    plain = [ModelRequest(r.input_ids, gconfig, seed=i) for i, r in enumerate(branched)]  # the same ids, another layout
    mixed = [request for pair in zip(plain, branched, strict=True) for request in pair]
    with BuiltinEngine(model, max_running_requests=5, prefill_tokens=prefill_tokens) as engine:
        for _ in range(2):  # the second time with a filled prefix cache
            for request, response in zip(mixed, engine.generate(mixed), strict=True):
                length, count = len(request.input_ids), response.output_len
                branches = request.branch_ids or [0] * length
                positions = request.position_ids or list(range(length))
                expected = masked_logprobs(
                    model,
                    request.input_ids + response.output_tokens,
                    branches + [branches[-1]] * count,
                    positions + [positions[-1] + 1 + i for i in range(count)],
                    length,
                    0.7,
                )
                torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)
        assert engine.stats()["reused_tokens"] > 0


def test_paths_share_the_trunk_and_nothing_else():
    model = tiny_model("qwen3")
    trunk, gconfig = list(range(10, 60)), GenerationHyperparameters(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    paths = [
        ModelRequest([*trunk, 5 + b], gconfig, seed=b, position_ids=list(range(51)), branch_ids=[0] * 50 + [b])
        for b in (1, 2, 3)
    ]
    with BuiltinEngine(model) as engine:
        engine.generate([ModelRequest(trunk, gconfig, seed=9)])
        before = engine.stats()["prefill_tokens"]
        engine.generate(paths)
        assert engine.stats()["prefill_tokens"] - before == 3


def test_branch_and_plain_logprobs_do_differ():
    model = tiny_model("qwen3")
    gconfig = GenerationHyperparameters(max_new_tokens=6, ignore_eos=True)
    branched = next(r for r in (branched_request(s, gconfig) for s in range(20)) if r.branch_ids[-1] == 3)
    with BuiltinEngine(model) as engine:
        one, other = engine.generate([branched, ModelRequest(branched.input_ids, gconfig, seed=branched.seed)])
    assert abs(one.output_logprobs[0] - other.output_logprobs[0]) > 1e-3 or one.output_tokens != other.output_tokens
