from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollwright.inference.backends.builtin.stop_strings import StopStrings
from rollwright.inference.server.text_stream import TextStream, completion_text, held_back


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Every byte is a token, so characters outside ASCII span several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sampled(tokenizer, text, stop, minimum):
    """The tokens of ``text`` up to the one that completes a stop string, as an engine samples them, and that string."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    watch = StopStrings(tokenizer, stop)
    for count, token in enumerate(tokens, 1):
        if match := watch.find(token, count >= minimum):
            return tokens[:count], match
    return tokens, None


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab é漢🙂\n<>", max_size=24),
    stop=st.lists(st.sampled_from(["ab", "<b>", "漢", "🙂a", "a"]), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    minimum=st.integers(0, 12),
)
def test_pieces_are_the_text_as_far_as_it_is_certain(byte_tokenizer, text, stop, sizes, minimum):
    tokens, match = sampled(byte_tokenizer, text, stop, minimum)
    whole = completion_text(byte_tokenizer, tokens, stop_match=match)
    stream, pieces, position = TextStream(byte_tokenizer, stop=stop), [], 0
    while position < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.push(tokens[position : position + size]))
        position += size
    assert whole.startswith("".join(pieces))
    assert "\ufffd" not in "".join(pieces)
    if match is None:
        assert whole == byte_tokenizer.decode(tokens)
    else:
        everything = byte_tokenizer.decode(tokens)
        assert everything.startswith(whole + match)
    if not stop and not whole.endswith("\ufffd"):
        assert "".join(pieces) == whole
    if not minimum:
        assert whole == text[: min((text.find(mark) for mark in stop if mark in text), default=len(text))]


def test_a_stop_string_that_came_too_early_stays_in_the_text(byte_tokenizer):
    tokens, match = sampled(byte_tokenizer, "xa1xa2", ["xa"], 4)
    assert match == "xa"
    assert completion_text(byte_tokenizer, tokens, stop_match=match) == "xa1"
    stream = TextStream(byte_tokenizer, stop=["xa"])
    assert [stream.push([token]) for token in tokens] == ["", "", "xa1", "", ""]


def test_a_stop_string_that_was_whole_below_the_minimum_does_not_end_it_later(byte_tokenizer):
    watch = StopStrings(byte_tokenizer, ["x", "abcd"])
    tokens = byte_tokenizer.encode("xyz", add_special_tokens=False)
    assert [watch.find(token, index > 0) for index, token in enumerate(tokens)] == [None, None, None]


def test_text_that_may_begin_a_stop_string_is_held_back(byte_tokenizer):
    tokens = byte_tokenizer.encode("a</answer", add_special_tokens=False)
    stream = TextStream(byte_tokenizer, stop=["</answer>"])
    assert [stream.push([token]) for token in tokens] == ["a", *[""] * 8]
    assert completion_text(byte_tokenizer, tokens) == "a</answer"


def test_held_back():
    assert held_back("abc<", ["<tool_call>"]) == 1
    assert held_back("abc<tool", ["<tool_call>"]) == 5
    assert held_back("abc", ["<tool_call>"]) == 0
    assert held_back("abc", []) == 0
