import json
import math
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.environments import bm25
from rollwright.environments.bm25 import BM25Retriever, open_index


def reference_scores(texts, query, k1=1.5, b=0.75):
    """Lucene's BM25 in float64, from its definition."""
    documents = [Counter(bm25.terms(text)) for text in texts]
    lengths = [sum(document.values()) for document in documents]
    mean_length = sum(lengths) / len(lengths)
    scores = np.zeros(len(texts))
    for term in bm25.terms(query):
        frequency = sum(term in document for document in documents)
        idf = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
        for row, document in enumerate(documents):
            if term in document:
                scores[row] += idf * document[term] / (document[term] + k1 * (1 - b + b * lengths[row] / mean_length))
    return scores


words = st.sampled_from(["red", "green", "blue", "ochre", "towns", "town", "king"])
texts = st.lists(st.lists(words, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(texts=texts, query=st.lists(words, min_size=1, max_size=5).map(" ".join), topk=st.integers(1, 15))
def test_scores_and_order_are_those_of_the_formula(texts, query, topk):
    [hits] = BM25Retriever.build(texts).search([query], topk)
    expected = reference_scores(texts, query)
    matching = int((expected > 0).sum())
    assert len(hits.rows) == min(topk, matching)
    np.testing.assert_allclose(hits.scores, np.sort(expected)[::-1][: len(hits.rows)], rtol=1e-5)
    np.testing.assert_allclose(hits.scores, expected[hits.rows], rtol=1e-5)
    assert len(set(hits.rows.tolist())) == len(hits.rows)


def test_equal_scores_go_to_the_lower_row_and_unknown_words_find_nothing():
    index = BM25Retriever.build(["apple pear", "apple pear", "plum", "apple pear"])
    by_name, unknown = index.search(["apple", "zzz"], 2)
    assert by_name.rows.tolist() == [0, 1]
    assert len(unknown.rows) == 0


def test_threads_do_not_disturb_each_other():
    texts = [f"word{i % 50} word{i % 7} common" for i in range(2000)]
    index = BM25Retriever.build(texts)
    queries = [f"word{i} common" for i in range(50)]
    alone = [hits.rows.tolist() for hits in index.search(queries, 5)]
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: [hits.rows.tolist() for hits in index.search(queries, 5)]}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[n] == alone for n in range(4))


def test_the_index_is_kept_and_built_again_only_when_the_corpus_changes(tmp_path, monkeypatch):
    path = tmp_path / "c.jsonl"
    path.write_text('{"contents": "old words"}\n')
    open_index(path)
    [folder] = [f for f in (tmp_path / "c.jsonl.index").iterdir()]
    stamp = (folder / "complete.json").stat().st_mtime_ns
    corpus, index = open_index(path)
    assert (folder / "complete.json").stat().st_mtime_ns == stamp
    assert len(index.search(["old"], 3)[0].rows) == 1

    path.write_text('{"contents": "new words"}\n')
    corpus, index = open_index(path)
    assert len(index.search(["old"], 3)[0].rows) == 0
    assert corpus.document(int(index.search(["new"], 3)[0].rows[0]))["contents"] == "new words"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The cities of Röntgen", ["city", "rontgen"]),
        ("The Who", ["the", "who"]),
        ("buses glass news 1901", ["buse", "glass", "new", "1901"]),
        ("", []),
    ],
)
def test_terms(text, terms):
    assert bm25.terms(text) == terms


def test_a_corpus_row_can_be_any_json(tmp_path):
    rows = [{"contents": "x", "id": 1, "nested": {"a": [1, None]}}]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus, _ = open_index(path)
    assert corpus.document(0) == rows[0]
