"""Rows read back token by token: branches, rewritten prompts, rows that do not begin with a call; and hostile text."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.records import Begin, End, ModelCall
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.experience.recorder import Recorder
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.viewer import sample_view
from rollwright.viewer.reading import chat_of, rows_of
from rollwright.viewer.run import Run
from rollwright.viewer.tokens import Vocabulary, _characters
from rollwright.viewer.transcript import chat
from rollwright.viewer.tree import prefix_tree

GCONFIG = GenerationHyperparameters(max_new_tokens=4)


def write_episode(journal: Journal, calls, row=None, index=0):
    """Calls as ``(conversation, prompt, output, layout)``; the log-probability of a token is its negative number."""
    writer, recorder = EpisodeWriter(journal), Recorder()
    facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
    writer.begin(ordinal=0, index=index, task=None, task_error="", **facts)
    for conversation, prompt, output, layout, *metadata in calls:
        positions, branches = layout or (None, None)
        request = ModelRequest(input_ids=prompt, gconfig=GCONFIG, rid=conversation, position_ids=positions, branch_ids=branches)
        request.metadata |= dict(*metadata)
        said = [-float(token) for token in output]
        writer.call(
            recorder.record(
                request, ModelResponse(output_tokens=output, output_logprobs=said, output_versions=[3] * len(output))
            )
        )
    if row is None:
        writer.end("failed", "ValueError: broken")
        return
    ids, mask = row
    values = [-float(token) if trained else 0.0 for token, trained in zip(ids, mask, strict=True)]
    rows = {
        "input_ids": torch.tensor([ids]),
        "loss_mask": torch.tensor([mask], dtype=torch.bool),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "logprobs": torch.tensor([values]),
        "versions": torch.tensor([[3 if trained else -1 for trained in mask]], dtype=torch.int32),
        "rewards": torch.tensor([1.0]),
        "truncated": torch.tensor([False]),
    }
    writer.end("accepted", rows=rows)


BRANCHED = [
    ("a", [1, 2, 3], [4, 5], None),
    ("a", [1, 2, 3, 4, 5, 10], [11, 12], ([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1])),
    ("a", [1, 2, 3, 4, 5, 20], [21, 22], ([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 2])),
    (
        "a",
        [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 22, 30],
        [31],
        ([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8], [0] * 5 + [1] * 3 + [2] * 3 + [0]),
    ),
]
BRANCHED_ROW = [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 22, 30, 31]


def test_isolated_branches_have_their_tokens_and_hang_from_the_trunk(tmp_path):
    journal = Journal(tmp_path)
    write_episode(journal, BRANCHED, (BRANCHED_ROW, [0, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1]))
    journal.close()
    (episode,) = read_episodes(tmp_path)
    (row,) = rows_of(episode)
    assert row.ids.tolist() == BRANCHED_ROW
    assert row.branches is not None
    assert row.branches.tolist() == [0] * 5 + [1] * 3 + [2] * 3 + [0, 0]
    assert row.positions is not None
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]
    np.testing.assert_array_equal(row.logprobs[row.mask], -row.ids[row.mask].astype(float))
    assert set(row.versions[row.mask].tolist()) == {3}
    tree = prefix_tree([("0/0", 0, row)], str)
    shown = [(node["start"], node["tokens"], node["branch"], node["trained"], node["parent"]) for node in tree["nodes"]]
    assert shown == [
        (0, 3, 0, False, None),
        (3, 2, 0, True, 0),
        (5, 1, 1, False, 1),
        (6, 2, 1, True, 2),
        (8, 1, 2, False, 1),
        (9, 2, 2, True, 4),
        (11, 1, 0, False, 1),
        (12, 1, 0, True, 6),
    ]


def test_tokens_behind_a_rewritten_prompt_are_those_of_their_call(tmp_path):
    journal = Journal(tmp_path)
    calls = [("a", [1, 2], [40, 41], None), ("a", [1, 7, 8], [50, 51], None)]
    write_episode(journal, calls, ([9, 9, 40, 41, 6, 50, 51], [0, 0, 1, 1, 0, 1, 1]))
    journal.close()
    (row,) = rows_of(next(read_episodes(tmp_path)))
    assert row.logprobs[row.mask].tolist() == [-40, -41, -50, -51]


def test_an_episode_without_rows_is_shown_as_it_was_asked_last(tmp_path):
    journal = Journal(tmp_path)
    write_episode(journal, [("a", [1], [2], None), ("a", [1, 2, 3], [4], None), ("b", [7], [8], None)])
    journal.close()
    first, second = rows_of(next(read_episodes(tmp_path)))
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2, 3, 4], [7, 8])
    assert np.isnan(first.logprobs).tolist() == [True, False, True, False]
    assert not first.mask.any()


@pytest.fixture
def vocabulary(tmp_path):
    build_character_tokenizer("abc <", tmp_path / "tokenizer", pieces=["<|im_start|>user\n", "<script>"])
    return Vocabulary(tmp_path / "tokenizer" / "tokenizer.json")


def test_texts_of_tokens_join_to_the_text(vocabulary):
    ids = [vocabulary._tokenizer.token_to_id(token) for token in ("<|end|>", "a", "<script>", " ", "b")] + [999]
    assert vocabulary.texts(ids) == ["<|end|>", "a", "<script>", " ", "b", "⟨999⟩"]
    assert "".join(vocabulary.texts(ids)) == vocabulary.text(ids)
    assert ids[0] in vocabulary.special
    assert ids[1] not in vocabulary.special


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([b"a", "ü".encode()[:1], "ü".encode()[1:], b"b"], ["a", "", "ü", "b"]),
        (["€".encode()[:2]], ["\ufffd"]),
        ([b"\xff", b"a"], ["\ufffd", "a"]),
        ([b"x" + "😀".encode()[:3], "😀".encode()[3:] + b"y"], ["x", "😀y"]),
    ],
)
def test_characters_of_several_tokens_are_in_the_last_of_them(parts, texts):
    assert _characters(parts) == texts


def test_the_tokenizer_of_another_run_is_not_used(tmp_path):
    """A run without a tokenizer shows ids: not the texts of another run beside it. A stage uses the model of its run."""
    build_character_tokenizer("abc <", tmp_path / "trial" / "model", pieces=[])
    journal = Journal(tmp_path / "trial" / "grpo" / "journal")
    write_episode(journal, [("a", [1, 2], [3], None)], ([1, 2, 3], [0, 0, 1]))
    journal.close()
    with Run(tmp_path / "trial" / "grpo") as run:
        assert run.text([4]) == "⟨4⟩"
    (tmp_path / "trial" / "run.json").write_text("{}")
    with Run(tmp_path / "trial" / "grpo") as run:
        assert run.text([4]) != "⟨4⟩"


def test_any_text_is_read_back_from_byte_level_tokens(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(0x500))) + "中文 \u202e😀"
    ids = tokenizer.encode(text).ids
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.text(ids) == "".join(vocabulary.texts(ids)) == tokenizer.decode(ids) == text


def test_marks_of_roles_are_messages(tmp_path):
    journal = Journal(tmp_path)
    write_episode(journal, [("a", [1, 2, 3], [4], None)])
    journal.close()
    pieces = {
        1: "<|im_start|>system\nBe brief.<|im_end|>\n",
        2: "<|im_start|>user\nHello<|im_end|>\n",
        3: "<|im_start|>assistant\n",
        4: "Hi<|im_end|>",
    }
    messages = chat_of(next(read_episodes(tmp_path)), lambda ids: "".join(pieces[token] for token in ids))
    assert [(message["role"], message["text"]) for message in messages] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi"),
    ]


@pytest.mark.parametrize(
    ("key", "told"),
    [("side_conversation", "side conversation (title), not trained"), ("sub_agent", "sub-agent (title)")],
)
def test_what_a_program_asks_beside_its_main_conversation_is_named(tmp_path, key, told):
    journal = Journal(tmp_path / "journal")
    write_episode(journal, [("a", [1, 2], [3], None), ("b", [4], [5], None, {key: "title"})], ([1, 2, 3], [0, 0, 1]))
    journal.close()
    with Run(tmp_path) as run:
        run.refresh()
        sample = run.sample("0/0")
    assert [row["ids"] for row in sample["rows"]] == [[1, 2, 3]]
    assert [told in message["about"] for message in chat(sample)] == [False, False, True, True]
    assert [told in request["about"] for request in sample_view.requests(sample)] == [False, True]


def test_hostile_records_are_data(tmp_path):
    """Long lines, control characters, halves of surrogate pairs, odd keys and numbers: all is plain JSON."""
    journal = Journal(tmp_path / "journal")
    ids = b"".join(token.to_bytes(4, "little") for token in [2**31 - 1, 0] * 100_000)
    journal.write(
        Begin(
            0,
            0,
            0,
            0,
            False,
            0,
            "<script>alert(1)</script>\x1b[31m",
            1,
            b"\x81\xa1x\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
            "",
            0.0,
        )
    )
    logprobs = np.full(200_000, -np.inf, "<f4").tobytes()
    journal.write(ModelCall(0, 0, 0, 0, -1, 0, b"", ids, logprobs, 0, 1.0, "stop", None, 1, 7, 0.0, 1.0, 1.0, 0.1))
    journal.write(End(0, "failed", "ValueError: \ud800 \x00 </script>", [], 1.0, "Traceback …\x07"))
    journal.close()
    with Run(tmp_path) as run:
        run.refresh()
        sample = run.sample("0/0#0")
        assert json.loads(json.dumps(sample, allow_nan=False))["calls"][0]["logprobs"][:2] == [None, None]
        assert sample["attempts"][0]["class"] == "ValueError"
        assert len(sample["rows"][0]["texts"]) == 200_000
        json.dumps([run.group("0"), run.search(status="failed"), run.timeline(), run.info()], allow_nan=False)
