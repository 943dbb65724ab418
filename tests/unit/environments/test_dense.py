import json
import shutil
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rollwright.environments import dense
from rollwright.environments.corpus import Corpus, SearchHits
from rollwright.environments.dense import DenseRetriever, open_dense_index
from rollwright.environments.encoders import Encoder, encoder_settings
from rollwright.environments.retrieval import HybridRetriever, make_search_tool, open_retriever
from rollwright.errors import ConfigError, DataError
from tests.unit.environments.tiny_encoder import WORDS, save_tiny_encoder

OPTIONS = {"style": "plain", "max_tokens": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture
def corpus_file(tmp_path):
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 8)) for _ in range(200)]
    texts[7] = texts[3] = "old king of the river"
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"contents": text, "url": f"u{row}"}) + "\n" for row, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_are_those_of_the_model_alone(directory, pooling):
    """Against transformers without batches and padding, pooled by hand in float64."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    named = encoder_settings(directory, pooling=pooling, query_prefix="query: ", passage_prefix="passage: ", max_tokens=12)
    encoder = Encoder(named)
    texts = ["red mug", "where is the old king of the town made", "a", "blue " * 40]
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)

    def expected(text):
        ids = tokenizer(text, truncation=True, max_length=12, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(input_ids=ids).last_hidden_state[0].double().numpy()
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        return pooled / np.linalg.norm(pooled)

    found = np.zeros((len(texts), encoder.dimensions))
    for positions, vectors in encoder.passages(texts):
        found[positions] = vectors
    for row, text in enumerate(texts):
        np.testing.assert_allclose(found[row], expected(f"passage: {text}"), atol=1e-6)
        np.testing.assert_allclose(encoder.query(text), expected(f"query: {text}"), atol=1e-6)


def test_a_search_finds_the_rows_of_largest_product_and_ties_go_to_the_lower_row(directory, corpus_file):
    corpus, index = open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    vectors = np.load(next(corpus_file.parent.glob("c.jsonl.index/*-dense-*")) / "embeddings.npy").astype(np.float64)
    query = Encoder(encoder_settings(directory, **OPTIONS)).query("old king of the river").astype(np.float64)
    expected = sorted(range(len(corpus)), key=lambda row: (-vectors[row] @ query, row))
    [hits] = index.search(["old king of the river"], 20)
    assert hits.rows.tolist()[:2] == [3, 7]  # the same text twice
    assert hits.rows.tolist() == expected[:20]
    np.testing.assert_allclose(hits.scores, vectors[hits.rows] @ query, rtol=1e-6)
    assert len(index.search(["red"], 100_000)[0].rows) == 200


def test_a_query_has_the_same_hits_alone_among_others_and_in_threads(directory, corpus_file):
    _, index = open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    queries = [f"{a} {b} {c}" for a in WORDS[:4] for b in WORDS[4:8] for c in WORDS[8:10]]
    alone = [index.search([query], 10)[0] for query in queries]
    _, again = open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    results = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: again.search(queries, 30)})) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results.values():
        for one, other in zip(alone, found, strict=True):
            assert one.rows.tolist() == other.rows[:10].tolist()
            assert one.scores.tobytes() == other.scores[:10].tobytes()


def test_an_index_is_built_once_for_each_corpus_encoder_and_setting(directory, corpus_file, tmp_path):
    def folders():
        return set((corpus_file.parent / "c.jsonl.index").iterdir())

    open_retriever(corpus_file, "hybrid", encoder_settings(directory, **OPTIONS))
    both = folders()
    assert len(both) == 2  # words and vectors
    stamps = [(folder / "complete.json").stat().st_mtime_ns for folder in sorted(both)]
    open_retriever(corpus_file, "dense", encoder_settings(directory, **OPTIONS))
    assert [(folder / "complete.json").stat().st_mtime_ns for folder in sorted(folders())] == stamps
    open_dense_index(corpus_file, encoder_settings(directory, "plain", pooling="cls", max_tokens=64))
    open_dense_index(corpus_file, encoder_settings(save_tiny_encoder(tmp_path / "other", seed=1), **OPTIONS))
    assert len(folders()) == 4
    with corpus_file.open("a") as file:
        file.write('{"contents": "one more"}\n')
    corpus, index = open_retriever(corpus_file, "dense", encoder_settings(directory, **OPTIONS))
    assert len(corpus) == 201
    assert len(folders()) == 1  # those of the earlier content are gone
    assert len(index.search(["one"], 500)[0].rows) == 201


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": "cls"}, "made differently: pooling 'mean', now 'cls'"),
        ({"passage_prefix": "passage: "}, "passage prefix '', now 'passage: '"),
        ({"max_tokens": 32}, "max tokens 64, now 32"),
    ],
)
def test_an_index_of_other_settings_is_refused(directory, corpus_file, change, message):
    open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    folder = next(corpus_file.parent.glob("c.jsonl.index/*-dense-*"))
    with pytest.raises(ConfigError, match=message):
        open_dense_index(corpus_file, encoder_settings(directory, **{**OPTIONS, **change}), embeddings=folder)


def test_an_index_of_another_encoder_dimension_or_corpus_is_refused(directory, corpus_file, tmp_path):
    open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    folder = shutil.copytree(next(corpus_file.parent.glob("c.jsonl.index/*-dense-*")), tmp_path / "copied")
    corpus, index = open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS), embeddings=folder)
    assert corpus.document(int(index.search(["king"], 1)[0].rows[0]))["url"].startswith("u")
    other = encoder_settings(save_tiny_encoder(tmp_path / "other", seed=1), **OPTIONS)
    with pytest.raises(ConfigError, match=r"made differently: encoder digest '\w+', now '\w+'"):
        open_dense_index(corpus_file, other, embeddings=folder)
    wide = encoder_settings(save_tiny_encoder(tmp_path / "wide", hidden=48), **OPTIONS)
    with pytest.raises(ConfigError, match="dimensions 32, now 48"):
        open_dense_index(corpus_file, wide, embeddings=folder)
    with pytest.raises(ConfigError, match=r"shape \[200, 32\], but .*wide makes vectors of 48"):
        DenseRetriever(Encoder(wide), np.load(folder / "embeddings.npy"))
    np.save(folder / "embeddings.npy", np.zeros((3, 32), np.float32))
    with pytest.raises(DataError, match=r"damaged: embeddings.npy has the shape \[3, 32\]"):
        open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS), embeddings=folder)
    (folder / "embeddings.npy").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS), embeddings=folder)
    corpus_file.write_text('{"contents": "another corpus"}\n')
    with pytest.raises(ConfigError, match=r"made differently: corpus digest '\w+', now"):
        open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS), embeddings=folder)
    with pytest.raises(DataError, match="There is no dense index in"):
        open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS), embeddings=tmp_path)


def test_an_encoder_that_is_missing_or_unclear_is_refused(directory, tmp_path):
    with pytest.raises(ConfigError, match=r"There is no encoder in .*nowhere: it has no config.json.*hf download"):
        encoder_settings(tmp_path / "nowhere", "e5")
    with pytest.raises(ConfigError, match="style 'e6' is unknown; known are e5, bge, plain"):
        encoder_settings(directory, "e6")
    with pytest.raises(ConfigError, match=r"into a vector: query_prefix, passage_prefix. Name a style"):
        encoder_settings(directory, pooling="mean")
    with pytest.raises(ConfigError, match="pooling 'max' is unknown; known are mean, cls, last"):
        encoder_settings(directory, "plain", pooling="max")
    with pytest.raises(ConfigError, match=r"max_tokens is 256, but .* takes at most 64"):
        Encoder(encoder_settings(directory, "plain"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Encoder(encoder_settings(empty, "plain"))
    cut = shutil.copytree(directory, tmp_path / "cut")
    weights = load_file(cut / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, cut / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors of the model, such as encoder.layer.0.output.dense.weight"):
        Encoder(encoder_settings(cut, **OPTIONS))


def test_a_directory_that_states_its_pooling_is_believed(directory, tmp_path):
    stated = shutil.copytree(directory, tmp_path / "stated")
    (stated / "1_Pooling").mkdir()
    facts = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (stated / "1_Pooling" / "config.json").write_text(json.dumps(facts))
    assert encoder_settings(stated, "bge").pooling == "cls"
    with pytest.raises(ConfigError, match=r"pooling is 'mean', but .*1_Pooling/config.json says 'cls'"):
        encoder_settings(stated, "e5")
    (stated / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    with pytest.raises(ConfigError, match=r"ends with sentence_transformers.models.Dense"):
        encoder_settings(stated, "bge")


def test_large_corpora_are_searched_through_faiss(directory, corpus_file, monkeypatch):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install 'rollwright[dense]'")
    _, exact = open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    monkeypatch.setattr(dense, "EXACT_ROWS", 100)
    shutil.rmtree(corpus_file.parent / "c.jsonl.index")
    _, index = open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    assert index._candidates is not None
    queries = [f"{word} king" for word in WORDS]
    found, true = index.search(queries, 5), exact.search(queries, 5)
    shares = [len(set(a.rows) & set(b.rows)) / 5 for a, b in zip(found, true, strict=True)]
    assert np.mean(shares) >= 0.9
    for one, other in zip(found, true, strict=True):  # what both find has the same exact score
        scores = dict(zip(other.rows.tolist(), other.scores.tolist(), strict=True))
        assert all(
            scores[row] == score for row, score in zip(one.rows.tolist(), one.scores.tolist(), strict=True) if row in scores
        )
    next(corpus_file.parent.glob("c.jsonl.index/*-dense-*/faiss.index")).write_bytes(b"cut")
    with pytest.raises(DataError, match="The index cannot be read"):
        open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))


def test_large_corpora_without_faiss_are_refused_before_they_are_encoded(directory, corpus_file, monkeypatch):
    monkeypatch.setattr(dense, "EXACT_ROWS", 100)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(DataError, match=r"more than 100 passages needs the package faiss: pip install 'rollwright\[dense\]'"):
        open_dense_index(corpus_file, encoder_settings(directory, **OPTIONS))
    assert not list(corpus_file.parent.glob("c.jsonl.index/*"))


class Ranked:
    def __init__(self, name, *rows):
        self.name, self.rows = name, np.asarray(rows, np.int64)

    def search(self, queries, topk):
        return [SearchHits(self.rows[:topk], -np.arange(len(self.rows[:topk]), dtype=np.float32))] * len(queries)


permutations = st.lists(st.integers(0, 30), unique=True, max_size=20)


@settings(max_examples=80, deadline=None)
@given(words=permutations, vectors=permutations, topk=st.integers(1, 25), weight=st.sampled_from([None, 0.5, 1.0, 3.0]))
def test_hybrid_scores_are_sums_of_reciprocal_ranks(words, vectors, topk, weight):
    expected = {}
    for rows, share in ((words, weight or 1.0), (vectors, 1.0)):
        for rank, row in enumerate(rows):
            expected[row] = expected.get(row, 0) + share / (61 + rank)
    index = HybridRetriever([Ranked("bm25", *words), Ranked("dense", *vectors)], weights=weight and [weight, 1.0])
    [hits] = index.search(["q"], topk)
    assert len(hits.rows) == min(topk, len(expected))
    np.testing.assert_allclose(hits.scores, sorted(expected.values(), reverse=True)[:topk], rtol=1e-6)
    np.testing.assert_allclose(hits.scores, [expected[row] for row in hits.rows.tolist()], rtol=1e-6)


def test_hybrid_ties_go_to_the_first_retriever_and_the_order_does_not_depend_on_topk():
    index = HybridRetriever([Ranked("bm25", 9, 4, 2), Ranked("dense", 4, 9, 1)])
    [hits] = index.search(["q"], 10)
    assert hits.rows.tolist() == [9, 4, 2, 1]
    assert [index.search(["q"], n)[0].rows.tolist() for n in (1, 3)] == [[9], [9, 4, 2]]
    assert index.name == "hybrid of bm25 and dense"


async def test_the_search_tool_of_a_config(directory, corpus_file):
    spec = {"corpus": str(corpus_file), "encoder": str(directory), "encoder_style": "plain", "max_tokens": 64}
    tool = make_search_tool({"corpus": spec})
    assert tool.retriever.name == "hybrid of bm25 and dense"
    found = await tool.search("old king of the river", 2)
    assert [row["url"] for row in found] == ["u3", "u7"]
    assert make_search_tool({"corpus": {**spec, "retriever": "dense"}}).retriever.name == "dense"
    assert make_search_tool({"corpus": {**spec, "bm25_weight": 2}}).retriever.name == "hybrid of bm25 and dense"
    for wrong in ({"bm25_weight": 0}, {"bm25_weight": 2, "retriever": "dense"}):
        with pytest.raises(ConfigError, match="is a number above 0 for the retriever 'hybrid'"):
            make_search_tool({"corpus": {**spec, **wrong}})
    with pytest.raises(ConfigError, match="retriever 'bm25' uses no encoder"):
        make_search_tool({"corpus": {**spec, "retriever": "bm25"}})
    with pytest.raises(ConfigError, match="retriever 'dense' needs an encoder"):
        make_search_tool({"corpus": {"corpus": str(corpus_file), "retriever": "dense"}})
    with pytest.raises(ConfigError, match="retriever 'sparse' is unknown"):
        make_search_tool({"corpus": {**spec, "retriever": "sparse"}})
    with pytest.raises(ConfigError, match="nothing reads pooling: name the encoder's directory"):
        make_search_tool({"corpus": {"corpus": str(corpus_file), "pooling": "mean"}})
    with pytest.raises(ConfigError, match="nothing reads max_tokens"):
        make_search_tool({"corpus": {"corpus": str(corpus_file), "max_tokens": 64}})
    with pytest.raises(ConfigError, match="embeddings of a dense index need the encoder"):
        make_search_tool({"corpus": {"corpus": str(corpus_file), "embeddings": "somewhere"}})


def test_texts_of_a_row_with_a_title_begin_with_it():
    corpus = Corpus.from_rows([{"title": "Mug", "contents": "A cup."}, {"contents": "B"}])
    assert [corpus.text(0), corpus.text(1)] == list(corpus.texts()) == ["Mug\nA cup.", "B"]
