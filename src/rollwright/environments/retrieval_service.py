"""The retrieval service: ``/retrieve``, ``/access`` and ``/health`` over HTTP.

* ``POST /retrieve {"queries": [str], "topk": int | null, "return_scores": bool}`` gives ``{"result": [[document, ...], ...]}``;
  with scores each item is ``{"document": document, "score": float}``.
* ``POST /access {"urls": [str]}`` gives ``{"result": [{"url", "contents"} | null, ...]}``.
* ``GET /health`` says what is served.

Requests are parsed on the event loop and searched off it: queries that arrive while a search runs are searched together next.
An error is ``{"error": {"message": ...}}`` with a status of 400 or above, also where the path is unknown or the search failed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from rollwright.environments.corpus import Corpus
from rollwright.environments.retrieval import DEFAULT_TOPK, Retriever, SearchHits
from rollwright.errors import ConfigError
from rollwright.inference.server.exchange import RequestError

MAX_QUERIES = 1024
MAX_QUERY_CHARACTERS = 4096
MAX_TOPK = 100
MAX_BODY_BYTES = 8 << 20
MAX_WAITING_QUERIES = 16_384
#: Queries searched in one call; bounds how long a search keeps later arrivals waiting.
_BATCH_QUERIES = 64
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class RetrieveRequest(BaseModel):
    """Body of ``/retrieve``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY_CHARACTERS)]], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


class AccessRequest(BaseModel):
    """Body of ``/access``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    urls: Annotated[list[str], Field(max_length=MAX_QUERIES)]


@dataclass
class _Waiting:
    queries: list[str]
    topk: int
    result: asyncio.Future[list[SearchHits]]


class QueryBatcher:
    """Searches off the event loop, ``threads`` at a time; what arrives meanwhile is searched together next.

    No request waits for company: an idle searcher takes what is there at once.
    """

    def __init__(self, retriever: Retriever, threads: int = 1) -> None:
        self._retriever = retriever
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="retrieval")
        self._idle = threads
        self._searching: set[asyncio.Task[None]] = set()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_queries = 0

    async def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """The hits of each query, best first."""
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
        """Stop the threads; what is waiting is not searched."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _search_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            queries = [query for item in batch for query in item.queries]
            topk = max(item.topk for item in batch)
            try:
                hits = iter(await loop.run_in_executor(self._executor, self._retriever.search, queries, topk))
                outcomes: list[Any] = [[next(hits).first(item.topk) for _ in item.queries] for item in batch]
            except BaseException as error:  # whatever it is, each query of the batch is answered with it
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


_Body = TypeVar("_Body", bound=BaseModel)


async def _body(request: Request, model: type[_Body]) -> _Body:
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise RequestError(
            f"The body has {length} bytes; at most {MAX_BODY_BYTES} are read. Send fewer queries at a time.", status=413
        )
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise RequestError(f"The body has over {MAX_BODY_BYTES} bytes. Send fewer queries at a time.", status=413)
    try:
        return model.model_validate_json(bytes(content))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        if problems[0]["type"] == "json_invalid":
            raise RequestError(f"The body is not valid JSON: {problems[0]['msg']}.") from None
        fields = ", ".join(f"{name}{'' if field.is_required() else '?'}" for name, field in model.model_fields.items())
        text = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:5])
        raise RequestError(f"{text}. {request.url.path} takes {{{fields}}}.", status=422) from None


def create_app(
    corpus: Corpus, retriever: Retriever, *, api_key: str | None = None, pages: Corpus | None = None, threads: int = 1
) -> FastAPI:
    """The service as an ASGI application.

    Args:
        corpus: the documents.
        retriever: an index over them.
        api_key: where set, requests other than ``/health`` must carry it as a bearer token.
        pages: where ``/access`` looks; None: the corpus itself.
        threads: searches that run at once.
    """
    app = FastAPI(title="Rollwright retrieval", openapi_url=None)
    batcher = QueryBatcher(retriever, threads)
    started = time.time()
    served = {"retrieve": 0, "queries": 0, "access": 0}
    app.state.batcher = batcher

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if api_key and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            raise RequestError("This service needs its key: send 'Authorization: Bearer KEY'.", status=401)

    @app.exception_handler(RequestError)
    async def refuse(_request: Request, error: RequestError) -> Response:
        return _error(error.status, str(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return _error(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}. There are POST /retrieve, POST /access and GET /health.",
        )

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, f"{request.url.path} failed ({type(error).__name__}: {error}); see the service's log.")

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        authorize(request)
        body = await _body(request, RetrieveRequest)
        hits = await batcher.search(body.queries, body.topk or DEFAULT_TOPK)
        served["retrieve"] += 1
        served["queries"] += len(body.queries)
        lists = b",".join(_document_list(corpus, hit, body.return_scores) for hit in hits)
        return Response(b'{"result":[' + lists + b"]}", media_type="application/json")

    @app.post("/access")
    async def access(request: Request) -> Response:
        authorize(request)
        body = await _body(request, AccessRequest)
        served["access"] += 1
        result = [(pages or corpus).page(url) for url in body.urls]
        return Response(json.dumps({"result": result}, ensure_ascii=False).encode(), media_type="application/json")

    @app.get("/health")
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

    return app


def _error(status: int, message: str) -> Response:
    return Response(json.dumps({"error": {"message": message}}), status_code=status, media_type="application/json")


def _document_list(corpus: Corpus, hits: SearchHits, with_scores: bool) -> bytes:
    documents = [corpus.document_json(row) for row in hits.rows.tolist()]
    if with_scores:
        scores = hits.scores.tolist()
        documents = [
            b'{"document":%b,"score":%b}' % (doc, repr(score).encode()) for doc, score in zip(documents, scores, strict=True)
        ]
    return b"[" + b",".join(documents) + b"]"


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Listening sockets; a loopback host listens on both its families, so that the name localhost reaches it too.

    Raises:
        ConfigError: the port is taken or the host is not this machine's.
    """
    sockets: list[socket.socket] = []
    for name in ["127.0.0.1", "::1"] if host in _LOOPBACK else [host]:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        address = (name, port or (sockets[0].getsockname()[1] if sockets else 0))
        try:
            listener = socket.create_server(address, family=family, backlog=2048)
        except OSError as error:
            if sockets:
                continue  # this machine has no IPv6, or no loopback address of it
            reason = str(error.strerror).partition(" (while")[0]
            raise ConfigError(
                f"The retrieval service cannot listen on {host}:{port} ({reason}). Choose another --port."
            ) from error
        listener.setblocking(False)
        sockets.append(listener)
    return sockets


def serve(app: FastAPI, sockets: list[socket.socket], log_level: str = "warning") -> None:
    """Serve until a signal ends the process."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level=log_level, access_log=False, lifespan="off", proxy_headers=False))
    try:
        server.run(sockets=sockets)
    finally:
        app.state.batcher.close()


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to listen beyond this machine without a key.

    Raises:
        ConfigError: ``host`` is not a loopback address and there is no key.
    """
    if host not in _LOOPBACK and not api_key:
        raise ConfigError(
            f"--host {host} can be reached from other machines: set --api-key (or ROLLWRIGHT_API_KEY), or use 127.0.0.1."
        )
