"""The slot cache, the prefix cache and the scheduler under random schedules and little memory."""

from __future__ import annotations

import random

import torch
from builtin_models import reference_logprobs, step, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.kv_cache import KVCache, LayerShape, PrefixCache, PrefixIndex
from rollwright.inference.request import ModelRequest


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 150)), min_size=1, max_size=8), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_laying_out_anew_keeps_what_is_used(wishes, seed):
    choose = random.Random(seed)
    layers = [LayerShape(2, 4, 4), LayerShape(2, 4, 4), LayerShape(1, 4, 6)]
    cache = KVCache(layers, 400 * 42 * 4, 6, torch.float32, torch.device("cpu"))
    used: list[int] = []
    written: dict[tuple[int, int], torch.Tensor] = {}
    for rows, length in wishes:
        had = cache.rows, cache.length
        rows = max(rows, len(used))
        if not cache.make_room(rows, length, used):
            assert rows * max(length, cache.length if used else 0) > 400
            assert (cache.rows, cache.length) == had
            continue
        assert rows <= cache.rows
        assert length <= cache.length
        assert cache.rows * cache.length <= 400
        for (row, layer), expected in written.items():
            torch.testing.assert_close(cache.keys[layer][row, :, : used[row]], expected)
            torch.testing.assert_close(cache.values[layer][row, :, : used[row], :4], -expected)
        used += [0] * (rows - len(used))
        for row in range(rows):
            used[row] = choose.randint(max(used[row], 1), max(used[row], length))
            for layer in range(3):
                value = torch.randn(layers[layer].heads, used[row], 4)
                cache.keys[layer][row, :, : used[row]] = value
                cache.values[layer][row, :, : used[row], :4] = -value
                written[row, layer] = value


@given(st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=70), min_size=1, max_size=8), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_the_index_finds_true_common_prefixes(sequences, common):
    index = PrefixIndex()
    sequences = [[1] * common + s for s in sequences]
    for number, tokens in enumerate(sequences[:-1]):
        index.add(number, tokens)
    query = sequences[-1]

    def shared(tokens: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(tokens, query, strict=False)) if a != b), min(len(tokens), len(query)))

    holder, length = index.find(query)
    longest = max((shared(s) for s in sequences[:-1]), default=0)
    if holder is None:
        assert longest < 16
    else:
        assert length == shared(sequences[holder])
        assert length // 16 == longest // 16
    for number in range(len(sequences) - 1):
        index.discard(number)
    assert index.find(query) == (None, 0)
    assert not index._holders


def test_kept_prefixes_stay_within_their_bytes_and_the_oldest_go_first():
    cache = PrefixCache(3 * 20 * 4)
    for start in range(4):
        cache.keep([start] * 20, [torch.zeros(20)])
        cache.find([0] * 20)  # keeps the first one young
    assert cache.bytes == 240
    assert [cache.find([s] * 20)[1] for s in range(4)] == [20, 0, 20, 20]
    cache.keep([3] * 20 + [4] * 5, [torch.zeros(25)])
    assert len(cache) == 2  # the longer one replaced its prefix and the oldest made room
    cache.keep([9] * 61, [torch.zeros(61)])
    assert cache.find([9] * 61) == (None, 0)  # too large to keep


def test_little_memory_means_preemption_not_failure():
    model = tiny_model("qwen3")
    choose = random.Random(1)
    per_token = 2 * 2 * 2 * 8 * 4
    gconfig = GenerationHyperparameters(max_new_tokens=90, temperature=0.7, ignore_eos=True)
    sent = [ModelRequest([choose.randrange(3, 96) for _ in range(choose.randrange(1, 30))], gconfig, seed=i) for i in range(7)]
    with BuiltinEngine(
        model, max_running_requests=8, context_length=130, kv_cache_bytes=200 * per_token, prefix_cache=False
    ) as engine:
        responses = engine.generate(sent)
        assert engine.stats()["preemptions"] > 0
        cache = engine._runner.cache
        assert sum(flat.numel() * 4 for flat in cache._flat.values()) <= 200 * per_token
    for request, response in zip(sent, responses, strict=True):
        expected = reference_logprobs(model, request.input_ids, response.output_tokens, 0.7)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)


MODEL = tiny_model("qwen3")


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_random_schedules_end_with_true_logprobs_and_versions(seed):
    """Requests that share prefixes, groups, aborts, publications and little memory, in any order."""
    choose = random.Random(seed)
    engine = BuiltinEngine(
        MODEL,
        max_running_requests=choose.randint(1, 6),
        prefill_tokens=choose.choice([5, 30, 500]),
        context_length=120,
        kv_cache_bytes=choose.choice([170, 400, 4000]) * 256,
        prefix_cache=choose.random() < 0.7,
        on_weight_update=choose.choice(["recompute", "keep"]),
    )
    engine.pause()
    shared = [choose.randrange(3, 96) for _ in range(30)]
    futures, sent, aborted, version = [], [], set(), 0
    for _ in range(12):
        action = choose.random()
        if action < 0.5:
            prompt = shared[: choose.randint(0, 30)] + [choose.randrange(3, 96) for _ in range(choose.randint(1, 30))]
            gconfig = GenerationHyperparameters(max_new_tokens=choose.randint(1, 40), temperature=0.7)
            group = [ModelRequest(prompt, gconfig, rid=f"{len(sent)}") for _ in range(choose.randint(1, 4))]
            sent += group
            futures += engine.submit(group)
        elif action < 0.6 and sent:
            rid = choose.choice(sent).rid
            aborted.add(rid)
            engine.abort(rid)
        elif action < 0.7:
            version += 1
            engine.publish(version)
        else:
            step(engine, choose.randint(1, 12))
    engine.resume()
    responses = [f.result(60) for f in futures]
    engine.destroy()
    for request, response in zip(sent, responses, strict=True):
        output = response.output_tokens
        assert len(output) == len(response.output_logprobs) == len(response.output_versions)
        assert response.output_versions == sorted(response.output_versions)
        if response.stop_reason == "length":
            assert len(output) == request.gconfig.max_new_tokens
        elif response.stop_reason == "stop":
            assert output[-1] == response.stop_match == 2
        else:
            assert request.rid in aborted
        if output:
            expected = reference_logprobs(MODEL, request.input_ids, output, 0.7)
            torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)
