"""The third engine of the table of generation parameters: what each field does in the built-in one, or that it is refused."""

import re
from dataclasses import fields

import pytest
from server_parts import tiny_engine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.request import ModelRequest

LENGTH = 12
SEEDS = range(8)


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(context_length=64) as engine:
        yield engine


@pytest.fixture
def sample(engine):
    """Output tokens for each seed."""

    def sample(**settings):
        gconfig = GenerationHyperparameters(**{"max_new_tokens": LENGTH, "ignore_eos": True, **settings})
        requests = [ModelRequest(input_ids=[5, 9], gconfig=gconfig, seed=seed) for seed in SEEDS]
        return [response.output_tokens for response in engine.generate(requests)]

    return sample


def n_samples(sample, engine):
    with pytest.raises(EngineError, match="n_samples"):
        sample(n_samples=2)


def max_new_tokens(sample, engine):
    assert {len(tokens) for tokens in sample(max_new_tokens=3)} == {3}


def min_new_tokens(sample, engine):
    anything = list(range(len(engine.tokenizer)))
    assert {len(tokens) for tokens in sample(stop_token_ids=anything, min_new_tokens=4, ignore_eos=False)} == {4}


def greedy(sample, engine):
    assert len({tuple(tokens) for tokens in sample(greedy=True)}) == 1


def temperature(sample, engine):
    assert sample(temperature=0.0) == sample(greedy=True)
    assert sample(temperature=0.3) != sample(temperature=1.0)


def top_p(sample, engine):
    assert sample(top_p=1e-6) == sample(greedy=True)


def top_k(sample, engine):
    assert sample(top_k=1) == sample(greedy=True)
    assert sample(top_k=-1) == sample(top_k=1 << 30) == sample()


def frequency_penalty(sample, engine):
    assert sample(greedy=True, frequency_penalty=2.0) != sample(greedy=True)


def min_p(sample, engine):
    assert sample(min_p=1.0) == sample(greedy=True)


def presence_penalty(sample, engine):
    assert sample(greedy=True, presence_penalty=2.0) != sample(greedy=True)


def repetition_penalty(sample, engine):
    assert sample(greedy=True, repetition_penalty=10.0) != sample(greedy=True)


def logit_bias(sample, engine):
    assert sample(logit_bias={7: 1e4}) == [[7] * LENGTH] * len(SEEDS)


def json_schema(sample, engine):
    outputs = sample(json_schema='{"enum": [12, 34]}', ignore_eos=False)
    assert {engine.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs} == {"12", "34"}


def regex(sample, engine):
    outputs = sample(regex="a+b", ignore_eos=False, max_new_tokens=40)
    assert all(re.fullmatch("a+b", engine.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in outputs)


def grammar(sample, engine):
    outputs = sample(grammar='start: "yes" | "no"', ignore_eos=False)
    assert {engine.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs} == {"yes", "no"}


def stop(sample, engine):
    first = engine.tokenizer.decode(sample(greedy=True)[0][:1])
    assert {len(tokens) for tokens in sample(greedy=True, stop=[first])} == {1}


def stop_token_ids(sample, engine):
    first = sample(greedy=True)[0][0]
    assert {len(tokens) for tokens in sample(greedy=True, stop_token_ids=[first])} == {1}


def ignore_eos(sample, engine):
    end = engine.tokenizer.eos_token_id
    assert {len(tokens) for tokens in sample(max_new_tokens=60)} == {60}
    assert any(
        tokens[-1] == end and len(tokens) < 60 for tokens in sample(max_new_tokens=60, ignore_eos=False, temperature=3.0)
    )


def skip_special_tokens(sample, engine):
    """Acts where text is made of tokens: in the server's answers."""
    assert sample(skip_special_tokens=False) == sample()


def seed(sample, engine):
    assert len({tuple(tokens) for tokens in sample(seed=3)}) == 1
    assert len({tuple(tokens) for tokens in sample()}) > 1


CASES = {case.__name__: case for case in (n_samples, max_new_tokens, min_new_tokens, greedy, temperature, top_p, top_k, min_p,
                                          frequency_penalty, presence_penalty, repetition_penalty, logit_bias,
                                          json_schema, regex, grammar, stop, stop_token_ids, ignore_eos, skip_special_tokens, seed)}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(GenerationHyperparameters)])
def test_each_field_has_its_effect_or_is_refused(sample, engine, name):
    CASES[name](sample, engine)
