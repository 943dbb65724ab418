"""Stop strings in decoded text, whatever tokens they fall into."""

from __future__ import annotations

import pytest
import torch
from builtin_models import byte_tokenizer, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.stop_strings import StopStrings
from rollwright.inference.request import ModelRequest

TOKENIZER = byte_tokenizer()


def first_match(tokens: list[int], stop: list[str]) -> tuple[int, str] | None:
    """The slow way: decode everything after each token."""
    for end in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:end]).rstrip("\ufffd")
        found = [(text.find(s), s) for s in stop if s in text]
        if found:
            return end, min(found)[1]
    return None


@given(
    st.lists(st.sampled_from(["a", "b", "c", " ", " a", "é", "漢", "🙂", "abc", "\n"]), max_size=14),
    st.lists(st.sampled_from(["ab", "bc ", "é", "c漢", "🙂", " a", "漢🙂", "cab", "\n\n"]), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_incremental_search_equals_decoding_everything(pieces, stop):
    tokens = TOKENIZER.encode("".join(pieces))
    watch, found = StopStrings(TOKENIZER, stop), None
    for index, token in enumerate(tokens):
        if match := watch.find(token):
            found = index + 1, match
            break
    assert found == first_match(tokens, stop)


def test_a_special_token_may_be_a_stop_string():
    watch = StopStrings(TOKENIZER, ["<eos>"])
    tokens = [*TOKENIZER.encode("abc"), 0]
    assert [watch.find(token) for token in tokens][-1] == "<eos>"


def test_below_the_minimum_text_is_followed_but_nothing_matches():
    watch = StopStrings(TOKENIZER, ["ab"])
    tokens = TOKENIZER.encode("c") + TOKENIZER.encode("a") + TOKENIZER.encode("b") + TOKENIZER.encode("ab")
    found = [watch.find(token, may_stop=index >= 3) for index, token in enumerate(tokens)]
    assert found == [None, None, None, "ab"]


def test_the_engine_keeps_the_stop_strings_tokens():
    model = tiny_model("qwen3", vocab_size=len(TOKENIZER))
    base = GenerationHyperparameters(max_new_tokens=40, ignore_eos=True, seed=2)
    with BuiltinEngine(model, TOKENIZER) as engine:
        free = engine.generate([ModelRequest([5, 6], base)])[0].output_tokens
        printable = [i for i in range(2, 38) if "\ufffd" not in TOKENIZER.decode(free[i - 1 : i + 2])]
        stop = TOKENIZER.decode(free[printable[0] - 1 : printable[0] + 2])
        end, _ = first_match(free, [stop])
        response = engine.generate([ModelRequest([5, 6], base.new(stop=["never so", stop]))])[0]
        assert response.output_tokens == free[:end]
        assert (response.stop_reason, response.stop_match) == ("stop", stop)
        torch.testing.assert_close(len(response.output_logprobs), end)


def test_stop_strings_without_a_tokenizer_are_refused():
    with BuiltinEngine(tiny_model("qwen3")) as engine, pytest.raises(EngineError, match="tokenizer"):
        engine.generate([ModelRequest([5], GenerationHyperparameters(stop=["x"]))])
