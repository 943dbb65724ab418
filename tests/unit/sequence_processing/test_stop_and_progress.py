"""The logits processor for transformers' own generate, and the progress bar."""

import io

import pytest
import torch
from processed_models import small_model, tokenizer
from rich.console import Console

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor, StopAfterAnswer
from rollwright.tracking import logging


@pytest.mark.parametrize("pieces", [["</answer>"], []], ids=["one token", "a token a character"])
def test_only_the_end_token_is_left_right_after_the_tag(pieces):
    characters = build_character_tokenizer(pieces=pieces)
    texts = ["x</answer>", "</answer>x", "</answer", "abcdefghijklmno", "</answer></answer>"]
    rows = [characters(text)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[characters.pad_token_id] * (width - len(row)) + row for row in rows])
    scores = torch.randn(len(rows), len(characters))
    forced = StopAfterAnswer(characters)(ids, scores)
    ended = torch.isinf(forced).sum(1) == len(characters) - 1
    assert ended.tolist() == [True, False, False, False, True]
    assert forced[ended].argmax(1).unique().tolist() == [characters.eos_token_id]
    assert torch.equal(forced[~ended], scores[~ended])


def test_it_works_in_generate_of_transformers():
    model, tag = small_model(), tokenizer().convert_tokens_to_ids("</answer>")
    inputs = tokenizer()(["ab+c="] * 64, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(
        inputs["input_ids"], do_sample=True, max_new_tokens=30, logits_processor=[StopAfterAnswer(tokenizer())]
    )
    found = 0
    for row in output[:, 5:].tolist():
        if tag in row[:-1]:
            found += 1
            assert row[row.index(tag) + 1] == tokenizer().eos_token_id
    assert found


def test_without_an_end_token_nothing_can_be_forced():
    import copy

    endless = copy.deepcopy(tokenizer())
    endless.eos_token = None
    with pytest.raises(ConfigError, match="has none"):
        StopAfterAnswer(endless)


def test_long_work_shows_one_bar_at_a_time(monkeypatch, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(logging, "_console", console)
    processor = SequenceProcessor(small_model(), tokenizer(), GenerationConfig(max_new_tokens=4), progress=True)
    processor.generate_with_logprobs(["a"], 3, seed=1)
    shown = console.file.getvalue()
    assert "generating" in shown
    assert "scoring" in shown
    assert "3/3" in shown
    processor.generate_to_shards(tmp_path / "x", ["a", "b"], 3, seed=1, prompts_per_shard=1)
    shown = console.file.getvalue().removeprefix(shown)
    assert "shards" in shown
    assert "generating" not in shown
