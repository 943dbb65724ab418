import pytest
from worlds.encyclopedia import DISJOINT_WORLDS, World, episode, questions, tool, vocabulary, write_corpus

from rollwright.data.tokenizer import build_word_tokenizer
from rollwright.errors import DataError


def test_a_seed_is_a_world_and_worlds_share_no_name():
    assert World(3, 50).articles == World(3, 50).articles
    names = [{name for kind in World(seed, 100).names.values() for name in kind} for seed in (1, 2, 41)]
    assert all(len(each) == 400 for each in names)
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    with pytest.raises(DataError, match="share names"):
        tool([1, 1 + DISJOINT_WORLDS])


def test_answers_follow_from_the_articles_and_from_nothing_else():
    for task in questions(size=60, worlds=[5], world_size=40):
        assert len(task["searches"]) == len(task["evidence"]) == task["hops"]
        [answer] = task["answer"]
        assert answer in task["evidence"][-1]
        assert answer not in task["question"]
        known = task["question"]
        for name, article in zip(task["searches"], task["evidence"], strict=True):
            assert name in known  # each query can be copied from what was read so far
            known = article


async def test_searching_for_a_name_finds_its_article():
    search = tool([1, 2], world_size=60)
    for task in questions(size=80, worlds=[1, 2], world_size=60):
        for name, article in zip(task["searches"], task["evidence"], strict=True):
            [document] = await search.search(name, 1)
            assert document["contents"] == article
            assert (await search.access(document["url"]))["contents"] == article
    assert await search.search("qqq", 1) == []


def test_worked_episodes_are_short_and_need_no_character_tokens():
    tokenizer = build_word_tokenizer(vocabulary())
    pieces = set(vocabulary()) | {"?", ".", "\n"}
    for task in questions(size=60, worlds=[7], world_size=40):
        text = "".join(segment["text"] for segment in episode(task))
        tokens = tokenizer.tokenize(text)
        assert set(tokens) <= pieces
        assert "".join(tokens) == text
        assert len(tokens) <= (50 if task["hops"] == 1 else 80)
        assert [segment["train"] for segment in episode(task)][::2] == [False] * task["hops"] + [False]


def test_the_share_of_two_hops_is_kept_and_too_many_questions_are_refused():
    hops = [task["hops"] for task in questions(size=40, two_hop_share=0.25, world_size=30)]
    assert hops[:8] == [1, 1, 1, 2] * 2
    assert {task["hops"] for task in questions(size=40, two_hop_share=0.0, world_size=30)} == {1}
    assert {task["hops"] for task in questions(size=40, two_hop_share=1.0, world_size=30)} == {2}
    with pytest.raises(DataError, match="questions of 1 hops were asked for"):
        questions(size=1000, two_hop_share=0.0, world_size=5)
    with pytest.raises(DataError, match="between 0 and 1"):
        questions(two_hop_share=2)


def test_the_corpus_file_is_one_that_the_service_reads(tmp_path):
    from rollwright.environments.corpus import Corpus

    assert write_corpus(tmp_path / "c.jsonl", [1], world_size=10) == 30
    assert len(Corpus.from_file(tmp_path / "c.jsonl")) == 30
