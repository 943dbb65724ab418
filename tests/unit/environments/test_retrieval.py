import asyncio
import threading

import numpy as np
import pytest

from rollwright.environments import retrieval, retrieval_service
from rollwright.environments.bm25 import BM25Retriever
from rollwright.environments.corpus import Corpus, SearchHits
from rollwright.environments.retrieval import LocalSearchTool, RetrievalClient, make_search_tool
from rollwright.environments.retrieval_service import QueryBatcher
from rollwright.errors import ConfigError
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.settings import check_exposure


class SlowRetriever:
    """Holds its first search until it is let go, and keeps the batches that it was given."""

    name = "slow"

    def __init__(self):
        self.gate, self.started, self.batches = threading.Event(), threading.Event(), []

    def search(self, queries, topk):
        self.batches.append((list(queries), topk))
        self.started.set()
        assert self.gate.wait(60)
        if "broken" in queries:
            raise RuntimeError("index lost")
        return [SearchHits(np.arange(topk), np.full(topk, float(len(query)))) for query in queries]


async def batcher_with_a_search_under_way(**options):
    retriever = SlowRetriever()
    batcher = QueryBatcher(retriever, **options)
    first = asyncio.create_task(batcher.search(["first"], 1))
    await asyncio.to_thread(retriever.started.wait, 60)
    return retriever, batcher, first


async def test_queries_that_arrive_during_a_search_are_searched_together_next():
    retriever, batcher, first = await batcher_with_a_search_under_way()
    later = [asyncio.create_task(batcher.search([f"{'q' * n}"], n)) for n in (1, 3, 2)]
    await asyncio.sleep(0.01)
    retriever.gate.set()
    results = await asyncio.gather(first, *later)
    batcher.close()
    assert retriever.batches == [(["first"], 1), (["q", "qqq", "qq"], 3)]
    assert [len(hits.rows) for [hits] in results] == [1, 1, 3, 2]  # each gets as many as it asked for
    assert [hits.scores[0] for [hits] in results] == [5, 1, 3, 2]  # and its own


async def test_a_failing_search_fails_its_requests_and_no_others():
    retriever, batcher, first = await batcher_with_a_search_under_way()
    broken = asyncio.create_task(batcher.search(["broken"], 1))
    await asyncio.sleep(0.01)
    retriever.gate.set()
    assert await first
    with pytest.raises(RuntimeError, match="index lost"):
        await broken
    assert await batcher.search(["again"], 1)
    batcher.close()


async def test_too_many_waiting_queries_are_turned_away(monkeypatch):
    monkeypatch.setattr(retrieval_service, "MAX_WAITING_QUERIES", 2)
    retriever, batcher, first = await batcher_with_a_search_under_way()
    waiting = asyncio.create_task(batcher.search(["a", "b"], 1))
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError) as error:
        await batcher.search(["c"], 1)
    assert error.value.status == 503
    retriever.gate.set()
    await asyncio.gather(first, waiting)
    batcher.close()


async def test_a_client_that_went_away_is_not_searched_for():
    retriever, batcher, first = await batcher_with_a_search_under_way()
    gone = asyncio.create_task(batcher.search(["gone"], 1))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.sleep(0.01)
    retriever.gate.set()
    await first
    await batcher.search(["next"], 1)
    batcher.close()
    assert retriever.batches == [(["first"], 1), (["next"], 1)]


async def test_a_large_corpus_is_searched_off_the_event_loop(monkeypatch):
    monkeypatch.setattr(retrieval, "_THREAD_ROWS", 1)
    threads = []

    class Index(BM25Retriever):
        def search(self, queries, topk):
            threads.append(threading.current_thread())
            return super().search(queries, topk)

    corpus = Corpus.from_rows([{"contents": "red mug"}, {"contents": "blue mug"}])
    found = await LocalSearchTool(corpus, Index.build(corpus.texts())).search("blue", 1)
    assert found == [{"contents": "blue mug"}]
    assert threads[0] is not threading.current_thread()


def test_a_service_that_asks_for_a_key_gets_it(monkeypatch):
    monkeypatch.setenv("ROLLWRIGHT_API_KEY", "secret")
    assert make_search_tool("localhost:5001")._headers == {"Authorization": "Bearer secret"}
    other = make_search_tool({"service": "localhost:5001", "api_key": "other"})
    assert other._headers == {"Authorization": "Bearer other"}
    assert make_search_tool({"service": "localhost:5001"})._headers == {}


def test_the_tool_that_a_config_names(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"contents": "red mug", "url": "u"}\n')
    local = make_search_tool({"corpus": str(tmp_path / "c.jsonl")})
    assert asyncio.run(local.search("mug", 3)) == [{"contents": "red mug", "url": "u"}]
    assert asyncio.run(local.access("u")) == {"url": "u", "contents": "red mug"}
    remote = make_search_tool("localhost:5001")
    assert isinstance(remote, RetrievalClient)
    assert remote.base_url == "http://localhost:5001"
    assert make_search_tool("https://search.example/").base_url == "https://search.example"
    assert make_search_tool(local) is local
    with pytest.raises(ConfigError, match="names no tool"):
        make_search_tool(5001)
    with pytest.raises(ConfigError, match="search tool 'corpus' was given"):
        make_search_tool({"corpus": {"file": "c.jsonl"}})


def test_other_machines_need_a_key():
    check_exposure("localhost", None)
    check_exposure("0.0.0.0", "key")
    with pytest.raises(ConfigError, match="--api-key"):
        check_exposure("0.0.0.0", None)
