"""Prompt lookup: drafts from a row's earlier text change how many tokens a step gives, and nothing about the tokens."""

from __future__ import annotations

import logging
import random
from collections import Counter

import numpy as np
import pytest
import torch
from adapter_models import published, random_adapter
from builtin_models import VOCABULARY, byte_tokenizer, reference_logprobs, step, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.batch import RowTable, Sequence
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.prompt_lookup import PromptLookup, StepSeconds
from rollwright.inference.backends.builtin.token_matches import TokenMatches
from rollwright.inference.request import ModelRequest


class Free(StepSeconds):
    """As if all steps took the same time, so that every draft is used."""

    def of_plain(self, rows):
        return 9.0

    def of_wide(self, rows, widths):
        return np.ones(len(widths))


def start(model, drafted=5, **settings):
    settings = {"max_running_requests": 6, "kv_cache_bytes": 1 << 22, "threads": 1, "prompt_lookup_tokens": drafted, **settings}
    engine = BuiltinEngine(model, byte_tokenizer(), **settings)
    if drafted:
        engine._stepper.lookup.seconds = Free()
    return engine


def requests(count, longest=60):
    """Prompts that repeat themselves, sharp and flat distributions, all ways to sample, limits of all lengths."""
    drawn, made = random.Random(2), []
    ways = [
        {"greedy": True},
        {"temperature": 0.2},
        {"temperature": 1.0},
        {"temperature": 0.4, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.3, "top_k": 3, "min_new_tokens": 5, "stop_token_ids": [*range(3, 20)]},
        {"temperature": 0.3, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}},
    ]
    for number in range(count):
        piece = [drawn.randrange(3, VOCABULARY) for _ in range(drawn.randrange(2, 9))]
        prompt = (piece * 20)[: drawn.randrange(2, longest)]
        way = {"max_new_tokens": drawn.randrange(1, 50), "ignore_eos": number % 3 > 0, **ways[number % len(ways)]}
        gconfig = GenerationHyperparameters(**way)
        made.append(ModelRequest(prompt, gconfig, seed=number, top_logprobs=2 if number % 7 == 3 else None))
    return made


def content(response):
    return response.output_tokens, response.output_logprobs, response.output_versions, response.stop_reason, response.stop_match


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_with_fixed_bits_no_bit_differs_from_plain_steps(architecture):
    model, asked = tiny_model(architecture), requests(24)
    with start(model, 0, batch_invariant=True) as engine:
        plain = engine.generate(asked)
        steps = engine.stats()["steps"]
    for rows, drafted in ((1, 3), (40, 8)):
        with start(model, drafted, max_running_requests=rows, batch_invariant=True, kv_cache_bytes=1 << 23) as engine:
            found, stats = engine.generate(asked), engine.stats()
        assert list(map(content, found)) == list(map(content, plain))
        assert [r.output_top_logprobs for r in found] == [r.output_top_logprobs for r in plain]
        assert stats["drafted_tokens"] > stats["accepted_tokens"] > 15
        assert stats["generated_tokens"] == sum(r.output_len for r in plain)
    assert stats["steps"] < 0.7 * steps


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "mistral", "gemma2"])
def test_tokens_are_those_of_plain_steps(architecture):
    changes = {"sliding_window": 24} if architecture in ("mistral", "gemma2") else {}
    model, asked = tiny_model(architecture, **changes), requests(18)
    with start(model, 0) as engine:
        plain, steps = engine.generate(asked), engine.stats()["steps"]
    with start(model) as engine:
        found, stats = engine.generate(asked), engine.stats()
    assert stats["accepted_tokens"] > 30
    assert stats["steps"] < steps
    expect_same(found, plain)


def expect_same(found, plain):
    for one, other in zip(found, plain, strict=True):
        assert one.output_tokens == other.output_tokens
        assert (one.stop_reason, one.stop_match, one.output_versions) == (
            other.stop_reason,
            other.stop_match,
            other.output_versions,
        )
        torch.testing.assert_close(torch.tensor(one.output_logprobs), torch.tensor(other.output_logprobs), atol=1e-4, rtol=0)


def test_adapters_and_branches_beside_each_other():
    model, (asked, options) = tiny_model("qwen3"), (requests(12), GenerationHyperparameters(max_new_tokens=20, temperature=0.3))
    for number, request in enumerate(asked):
        request.lora_name = ["", "policy-v1", "policy-v2"][number % 3]
    tokens = [5, 6, 7] * 8
    branches, positions = [0] * 12 + [1] * 6 + [2] * 6, [*range(18), *range(12, 18)]
    asked.append(ModelRequest(tokens, options, seed=3, branch_ids=branches, position_ids=positions, lora_name=""))
    answers = []
    for drafted in (0, 5):
        with start(model, drafted, max_running_requests=20) as engine:
            for version in (1, 2):
                engine.update_weights(version=version, weights=published(random_adapter(model, version, scale=0.05)))
            answers.append(engine.generate(asked))
            accepted = engine.stats().get("accepted_tokens", 0)
    assert accepted > 20
    expect_same(answers[1], answers[0])


def test_a_stop_string_within_drafted_tokens_ends_the_output_there():
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    options = GenerationHyperparameters(max_new_tokens=40, greedy=True, ignore_eos=True)
    prompt = [11, 12, 13] * 5
    with start(model, 0) as plain, start(model, 8) as engine:
        (whole,) = plain.generate([ModelRequest(prompt, options)])
        texts = [tokenizer.decode(whole.output_tokens[begin : begin + 3]) for begin in range(36)]
        once = [text for text, count in Counter(texts).items() if count == 1][-3:]
        heard, found = [], []
        for text in {*once, texts[30]}:
            asked = ModelRequest(prompt, options.new(stop=[text], min_new_tokens=20 if text == texts[30] else 0))
            (expected,) = plain.generate([asked])
            (future,) = engine.submit([asked], lambda *token: heard.append(token[1]))
            found = future.result()
            assert content(found)[0] == content(expected)[0]
            assert (found.stop_reason, found.stop_match) == (expected.stop_reason, expected.stop_match) == ("stop", text)
            assert heard == found.output_tokens
            heard.clear()
        assert engine.stats()["accepted_tokens"] > 10


def test_a_full_cache_and_a_full_context():
    model, asked = tiny_model("qwen3"), requests(16, longest=30)
    for request in asked:
        request.gconfig = request.gconfig.new(max_new_tokens=110)
    settings = {"prefix_cache": False, "context_length": 128, "kv_cache_bytes": 256 * 400}  # 400 tokens
    with start(model, 0, **settings) as engine:
        plain = engine.generate(asked)
        assert engine.stats()["preemptions"] > 0
    with start(model, 8, **settings) as engine:
        found, stats = engine.generate(asked), engine.stats()
    assert stats["preemptions"] > 0
    assert stats["accepted_tokens"] > 50
    assert any(len(r.input_tokens) + r.output_len == 128 and r.stop_reason == "length" for r in found)
    expect_same(found, plain)


def test_weights_published_between_wide_steps():
    model, newer = tiny_model("llama"), tiny_model("llama", seed=1)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = GenerationHyperparameters(max_new_tokens=60, greedy=True, ignore_eos=True)
    prompts = [[seed + 9, seed + 8, seed + 7] * 4 for seed in range(5)]
    with start(model) as engine:
        engine.pause()
        futures = engine.submit([ModelRequest(prompt, options, seed=seed) for seed, prompt in enumerate(prompts)])
        step(engine, 4)
        engine.update_weights(version=1, weights=newer.state_dict())
        engine.resume()
        responses = [future.result() for future in futures]
        assert engine.stats()["accepted_tokens"] > 20
    models = {0: tiny_model("llama"), 1: newer}
    models[0].load_state_dict(old)
    for prompt, response in zip(prompts, responses, strict=True):
        versions = response.output_versions
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        for version, of_version in models.items():
            expected = reference_logprobs(of_version, prompt, response.output_tokens)
            mine = torch.tensor(versions) == version
            found = torch.tensor(response.output_logprobs).double()
            torch.testing.assert_close(found[mine], expected[mine], atol=2e-4, rtol=0)


def test_an_abort_keeps_what_was_drawn():
    with start(tiny_model("llama")) as engine:
        engine.pause()
        options = GenerationHyperparameters(max_new_tokens=100, greedy=True, ignore_eos=True)
        futures = engine.submit([ModelRequest([9, 8, 7] * 4, options), ModelRequest([3, 4] * 5, options)])
        step(engine, 5)
        generated = engine.stats()["generated_tokens"]
        engine.abort()
        responses = [future.result() for future in futures]
    assert sum(response.output_len for response in responses) == generated > 12
    assert {response.stop_reason for response in responses} == {"abort"}


def test_what_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match=r"prompt_lookup_tokens=4 is not possible with batch_invariant.*GPT2LMHeadModel"):
        start(tiny_model("gpt2"), 4, batch_invariant=True)
    with pytest.raises(ConfigError, match="prompt_lookup_tokens is -1; set it to 0 or more"):
        start(tiny_model("llama"), -1)


# ------------------------------------------------------------------ drafts


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9), st.integers(1, 7))
def test_a_draft_is_what_followed_the_longest_recent_match(tokens, count, cut):
    matches = TokenMatches()
    for begin in range(0, len(tokens), cut):
        matches.extend(tokens[begin : begin + cut])
    drafted, length = matches.find(count)
    end = len(tokens)
    places = [place for place in range(2, end) if tokens[place - 2 : place] == tokens[-2:]][-8:]

    def common(place):
        return next((n for n in range(min(place, 32)) if tokens[place - 1 - n] != tokens[end - 1 - n]), min(place, 32))

    if not places:
        assert (drafted, length) == ([], 0)
        return
    best = max(places, key=lambda place: (common(place), place))
    period = end - best
    assert length == common(best)
    assert drafted == [tokens[best + index % period] for index in range(count)]


class Steps:
    """Rows whose texts repeat, or not, and steps whose seconds are given by a function of rows and tokens."""

    def __init__(self, seconds, *, repeats, rows=4, most=6):
        self.seconds, self.repeats, self.rows = seconds, repeats, rows
        self.lookup = PromptLookup(most, 512)
        self.table = RowTable(rows)
        self.sequences = []
        for row in range(rows):
            tokens = [1, 2, 3, 4, 5 + row] * 4
            options = GenerationHyperparameters(max_new_tokens=100_000)
            self.sequences.append(Sequence(ModelRequest(tokens, options), tokens, len(tokens), 200_000))
            self.table.enter(row, self.sequences[-1], 100)
        self.plain = self.wide = self.looked = 0

    def run(self, count):
        random.seed(1)
        for _ in range(count):
            drafts = self.lookup.drafts(self.sequences, self.table, 1 << 20)
            self.looked += bool(drafts)
            tokens = self.rows + sum(draft.used for draft in drafts)
            for draft in drafts:
                repeated = random.random() < self.repeats
                draft.drawn = (draft.used or 1) if repeated else 0
            self.plain += tokens == self.rows
            self.wide += tokens > self.rows
            self.lookup.learn(drafts, self.rows, self.seconds(self.rows, tokens))
            self.table.append(slice(0, self.rows), np.array([1, 2, 3, 4]), np.zeros(4), 0)
        return self


def test_drafts_are_used_where_they_pay(caplog):
    with caplog.at_level(logging.INFO):
        steps = Steps(lambda rows, tokens: 1.0 + 0.01 * tokens, repeats=0.9).run(400)
    assert steps.wide > 390
    assert "% of " in caplog.text
    assert caplog.text.count("Prompt lookup:") == 1


def test_drafts_are_left_where_tokens_cost_as_much_as_steps_or_are_never_drawn():
    dear = Steps(lambda rows, tokens: 0.3 * tokens, repeats=0.9).run(2000)
    wrong = Steps(lambda rows, tokens: 1.0 + 0.01 * tokens, repeats=0.0).run(2000)
    for steps in (dear, wrong):
        assert steps.wide < 50
        assert steps.looked < 500  # and looking stops for most steps


def test_drafts_come_back_when_the_text_begins_to_repeat():
    steps = Steps(lambda rows, tokens: 1.0 + 0.01 * tokens, repeats=0.0).run(1500)
    before, steps.repeats = steps.wide, 0.95
    steps.run(1500)
    assert steps.wide - before > 1000
