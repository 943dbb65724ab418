"""The retrieval service: ``/retrieve``, ``/access`` and ``/health`` over HTTP.

* ``POST /retrieve {"queries": [str], "topk": int | null, "return_scores": bool}`` returns ``{"result": [[document, ...], ...]}``;
  if ``return_scores`` is true, each item is ``{"document": document, "score": float}``.
* ``POST /access {"urls": [str]}`` returns ``{"result": [{"url", "contents"} | null, ...]}``.
* ``GET /health`` describes the corpus.

Requests are parsed on the event loop, and queries are searched in threads. Queries that arrive during a search form the next batch.
Every error is ``{"error": {"message": ...}}`` with a status of 400 or above.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Response
from pydantic import Field

from rollwright.environments.corpus import Corpus, SearchHits
from rollwright.environments.retrieval import DEFAULT_TOPK, Retriever
from rollwright.inference.server.bodies import Body
from rollwright.inference.server.exchange import RequestError, Routes
from rollwright.inference.server.service import make_service
from rollwright.inference.server.settings import ServiceSettings

MAX_QUERIES = 1024
MAX_QUERY_CHARACTERS = 4096
MAX_TOPK = 100
MAX_WAITING_QUERIES = 16_384
#: Queries searched in one call; limits how long later queries wait for a search.
_BATCH_QUERIES = 64


class Retrieve(Body):
    """Body of ``/retrieve``."""

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY_CHARACTERS)]], Field(max_length=MAX_QUERIES)] = Field(
        description=f"a list of at most {MAX_QUERIES} texts of at most {MAX_QUERY_CHARACTERS} characters"
    )
    topk: int = Field(DEFAULT_TOPK, ge=1, le=MAX_TOPK)
    return_scores: bool = False


class Access(Body):
    """Body of ``/access``."""

    urls: Annotated[list[str], Field(max_length=MAX_QUERIES)] = Field(description=f"a list of at most {MAX_QUERIES} texts")


@dataclass
class _Waiting:
    queries: list[str]
    topk: int
    result: asyncio.Future[list[SearchHits]]


class QueryBatcher:
    """Searches in threads. Requests that arrive while all threads are busy form the next batch.

    An idle thread immediately searches the queries that have arrived, without waiting for more.

    Args:
        retriever: the index.
        threads: number of concurrent searches.
    """

    def __init__(self, retriever: Retriever, threads: int = 1) -> None:
        self._retriever = retriever
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="retrieval")
        self._idle = threads
        self._searching: set[asyncio.Task[None]] = set()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_queries = 0

    async def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """Return the hits of each query, best first."""
        if not queries:
            return []
        if self._waiting_queries + len(queries) > MAX_WAITING_QUERIES:
            raise RequestError(f"{self._waiting_queries} queries are waiting already; try again in a moment.", status=503)
        item = _Waiting(queries, topk, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._waiting_queries += len(queries)
        if self._idle:
            self._idle -= 1
            task = asyncio.create_task(self._search_waiting())
            self._searching.add(task)
            task.add_done_callback(self._searching.discard)
        return await item.result

    def close(self) -> None:
        """Stop the threads and drop waiting requests."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _search_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            queries = [query for item in batch for query in item.queries]
            topk = max(item.topk for item in batch)
            try:
                hits = iter(await loop.run_in_executor(self._executor, self._retriever.search, queries, topk))
                outcomes: list[Any] = [[next(hits).first(item.topk) for _ in item.queries] for item in batch]
            except BaseException as error:  # every request of the batch reports it
                outcomes = [error] * len(batch)
            for item, outcome in zip(batch, outcomes, strict=True):
                if item.result.done():
                    continue
                if isinstance(outcome, BaseException):
                    item.result.set_exception(outcome)
                else:
                    item.result.set_result(outcome)
        self._idle += 1

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].queries) <= _BATCH_QUERIES):
            item = self._waiting.popleft()
            self._waiting_queries -= len(item.queries)
            if not item.result.cancelled():
                batch.append(item)
                size += len(item.queries)
        return batch


def create_app(
    corpus: Corpus, retriever: Retriever, settings: ServiceSettings, *, pages: Corpus | None = None, threads: int = 1
) -> FastAPI:
    """Build the service.

    Args:
        corpus: the documents.
        retriever: an index over the documents.
        settings: address, key and limits.
        pages: corpus for ``/access``. None uses ``corpus``.
        threads: number of concurrent searches.
    """
    batcher = QueryBatcher(retriever, threads)
    started = time.time()
    served = {"retrieve": 0, "queries": 0, "access": 0}

    async def retrieve(body: Retrieve) -> Response:
        hits = await batcher.search(body.queries, body.topk)
        served["retrieve"] += 1
        served["queries"] += len(body.queries)
        lists = b",".join(_document_list(corpus, hit, body.return_scores) for hit in hits)
        return Response(b'{"result":[' + lists + b"]}", media_type="application/json")

    async def access(body: Access) -> dict[str, Any]:
        served["access"] += 1
        return {"result": [(pages or corpus).page(url) for url in body.urls]}

    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "corpus": corpus.name,
            "documents": len(corpus),
            "retriever": retriever.name,
            "default_topk": DEFAULT_TOPK,
            "max_topk": MAX_TOPK,
            "uptime_seconds": round(time.time() - started, 3),
            "served": served,
        }

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()

    routes = Routes(
        [("POST", "/retrieve", retrieve, Retrieve), ("POST", "/access", access, Access), ("GET", "/health", health, None)]
    )
    return make_service("rollwright retrieve", [routes], settings, lifespan=lifespan)


def _document_list(corpus: Corpus, hits: SearchHits, with_scores: bool) -> bytes:
    documents = [corpus.document_json(row) for row in hits.rows.tolist()]
    if with_scores:
        documents = [
            b'{"document":%b,"score":%b}' % (document, repr(score).encode())
            for document, score in zip(documents, hits.scores.tolist(), strict=True)
        ]
    return b"[" + b",".join(documents) + b"]"
