"""Small tokenizers in Hugging Face form, and what loading adds to one."""

import copy
import pickle

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BatchEncoding

from rollwright.data.tokenizer import (
    ASCII,
    build_bpe_tokenizer,
    build_character_tokenizer,
    build_word_tokenizer,
    load_tokenizer,
    returning_ids,
)
from rollwright.errors import ConfigError, DataError

CHARACTERS = "0123456789+-*= <>/answer"
MESSAGES = [{"role": "user", "content": "37+58="}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_character_tokenizer(CHARACTERS, path, pieces=["<answer>", "</answer>"])
    return path


def test_any_other_tool_loads_the_same_tokenizer(directory):
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    text = "7+8=15 <answer>95</answer>"
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert theirs.pad_token_id == 0
    assert theirs.eos_token == "<|end|>"
    assert len(theirs.encode("<answer>95</answer>", add_special_tokens=False)) == 4
    assert theirs.tokenize("<answer") == list("<answer")


def test_the_chat_template_gives_ids(directory):
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)
    assert type(ids) is list
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == "<|user|>37+58=<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "<|user|>37+58=<|end|>"
    assert tokenizer.apply_chat_template([MESSAGES, MESSAGES], add_generation_prompt=True) == [ids, ids]
    assert isinstance(tokenizer.apply_chat_template(MESSAGES, return_dict=True), BatchEncoding)


def test_the_chat_template_knows_three_roles(directory):
    tokenizer = load_tokenizer(directory)
    messages = [
        {"role": "system", "content": "a"},
        *MESSAGES,
        {"role": "assistant", "content": "95"},
        {"role": "tool", "content": "1"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|system|>a<|end|><|user|>37+58=<|end|><|assistant|>95<|end|><|user|>1<|end|>"


@pytest.mark.parametrize(
    "through",
    [
        copy.copy,
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),  # noqa: S301 (made here)
        lambda t: cloudpickle.loads(cloudpickle.dumps(t)),
        returning_ids,
    ],
)
def test_ids_survive_copies_and_other_processes(directory, through):
    tokenizer = through(load_tokenizer(directory))
    assert type(tokenizer.apply_chat_template(MESSAGES)) is list
    assert tokenizer.pad_token_id == 0


def test_saving_again_changes_nothing(directory, tmp_path):
    load_tokenizer(directory).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == AutoTokenizer.from_pretrained(directory).get_vocab()
    assert again.chat_template == load_tokenizer(directory).chat_template


@settings(deadline=None)
@given(st.text(st.sampled_from(ASCII), max_size=60))
def test_known_characters_survive(text):
    tokenizer = TOKENIZER
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    if "<" not in text:
        assert len(ids) == len(text)


TOKENIZER = build_character_tokenizer()


def test_unknown_characters_and_special_tokens():
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("aéb", add_special_tokens=False)) == ["a", "<unk>", "b"]
    ids = TOKENIZER.encode("a<|end|>", add_special_tokens=False)
    assert ids[1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode([*ids, 0, 0], skip_special_tokens=True) == "a"
    assert [
        TOKENIZER.convert_tokens_to_ids(t) for t in ("<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
    ] == [0, 1, 2, 3, 4, 5]


def test_words_are_matched_longest_first_anywhere():
    tokenizer = build_word_tokenizer(["tor", "torim", "ka", " vel"], characters="abcdefghijklmnopqrstuvwxyz ")
    assert tokenizer.tokenize("torimka velt") == ["torim", "ka", " vel", "t"]
    assert tokenizer.decode(tokenizer.encode("torimka velt", add_special_tokens=False)) == "torimka velt"


@pytest.mark.parametrize(("characters", "pieces"), [(["ab"], []), ("ab", ["c"]), ("ab", ["<pad>"])])
def test_vocabularies_that_cannot_be(characters, pieces):
    with pytest.raises(DataError):
        build_character_tokenizer(characters, pieces=pieces)


def test_a_missing_pad_token_becomes_the_end_token(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = None
    assert load_tokenizer(tokenizer).pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither a pad nor an end token"):
        load_tokenizer(tokenizer)


def test_a_name_without_a_network_is_looked_for_in_the_cache_alone(monkeypatch):
    """Else the library asks for each file five times, for half a minute, and says so."""
    monkeypatch.setattr("rollwright.data.tokenizer.unreachable_hub", lambda: "https://hub.test cannot be reached (no route)")
    monkeypatch.setattr("huggingface_hub.get_session", lambda *_: pytest.fail("the network was asked"))
    told = (
        "cannot load a tokenizer from nobody/has-this .*: https://hub.test cannot be reached .no route., and its cache has none"
    )
    with pytest.raises(ConfigError, match=told):
        load_tokenizer("nobody/has-this")


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot load a tokenizer from"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer is named"):
        load_tokenizer("")


def test_a_bpe_tokenizer_is_trained_on_texts_and_keeps_every_text(tmp_path):
    texts = ["echo COMPLETE && total is price plus tax\n"] * 3 + ["    return price + tax\n"]
    tokenizer = build_bpe_tokenizer(texts, 320, tmp_path, pieces=["<answer>"])
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*texts, "what it never saw: \t\u00e9\u4e2d\U0001f600 <answer>7</answer>  \n\n", " "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(texts[0])) < 20
    assert len(tokenizer.encode("<answer>", add_special_tokens=False)) == 1
    assert len(tokenizer) <= 321
    assert (
        tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True))
        == "<|user|>37+58=<|end|><|assistant|>"
    )
    assert (tokenizer.pad_token_id, tokenizer.eos_token) == (0, "<|end|>")


@pytest.mark.parametrize(("texts", "tokens"), [([], 400), ([""], 400), (["text"], 262)])
def test_a_bpe_tokenizer_needs_texts_and_room(texts, tokens):
    with pytest.raises(DataError, match="give texts, and more than 262 tokens"):
        build_bpe_tokenizer(texts, tokens)
