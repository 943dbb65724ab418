from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollwright.inference.server.text_stream import TextStream, completion_text, held_back


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Every byte is a token, so characters outside ASCII span several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces(tokenizer, text, sizes, **settings):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, **settings)
    found, position = [], 0
    while position < len(tokens):
        size = sizes[len(found) % len(sizes)]
        found.append(stream.push(tokens[position : position + size]))
        position += size
    return [*found, stream.finish()], tokens


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab é漢🙂\n<>", max_size=24),
    stop=st.lists(st.sampled_from(["ab", "<b>", "漢", "🙂a"]), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_pieces_join_to_the_text_before_the_first_stop_string(byte_tokenizer, text, stop, sizes):
    found, tokens = pieces(byte_tokenizer, text, sizes, stop=stop)
    whole = completion_text(byte_tokenizer, tokens, stop=stop)
    assert "".join(found) == whole
    assert "\ufffd" not in "".join(found)
    cut = min((text.find(mark) for mark in stop if mark in text), default=len(text))
    assert whole == text[:cut]


def test_text_that_may_begin_a_stop_string_is_held_back(byte_tokenizer):
    found, _ = pieces(byte_tokenizer, "a</answer", [1], stop=["</answer>"])
    assert found[0] == "a"
    assert set(found[1:-1]) == {""}
    assert found[-1] == "</answer"
    kept, _ = pieces(byte_tokenizer, "a</answer>b", [1], stop=["</answer>"], keep_stop=True)
    assert "".join(kept) == "a</answer>b"


def test_held_back():
    assert held_back("abc<", ["<tool_call>"]) == 1
    assert held_back("abc<tool", ["<tool_call>"]) == 5
    assert held_back("abc", ["<tool_call>"]) == 0
    assert held_back("abc", []) == 0
