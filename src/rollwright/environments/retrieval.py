"""The ``Retriever`` protocol, and the search tools of agents: one over HTTP and one in this process.

A ``Retriever`` maps queries to row numbers and scores: by words (``bm25``), by vectors (``dense``), or both (``HybridRetriever``).
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollwright.environments.bm25 import open_index
from rollwright.environments.corpus import Corpus, SearchHits
from rollwright.environments.encoders import EncoderSettings, named_encoder
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import Registry

DEFAULT_TOPK = 3
#: Number of rows above which an in-process search runs in a thread instead of on the event loop.
_THREAD_ROWS = 20_000


class Retriever(Protocol):
    """An index over a corpus. ``search`` may be called from several threads at once."""

    name: str

    def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """Return the ``topk`` best rows for each query, or fewer if fewer match."""
        ...


class ToolError(RollwrightError):
    """A tool call failed for a reason that the agent should read: bad arguments, a rejected request, an unreachable service."""


class SearchTool(Protocol):
    """Search tool of an agent. Both methods raise ``ToolError`` with a message that the model can read."""

    async def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """Return the ``topk`` best documents: corpus rows that have ``wikipedia_title`` and ``contents``."""
        ...

    async def access(self, url: str) -> dict[str, str] | None:
        """Return ``{"url", "contents"}`` of a page, or None if the page is unknown."""


class HybridRetriever:
    """Merges the results of several retrievers by reciprocal rank fusion: a row's score is the sum of ``weight / (k + rank)`` over their
    lists (Cormack, Clarke and Büttcher, SIGIR 2009, where all weights are 1).

    Ties go to the row that the first retriever ranks higher, then to the lower row number.

    Args:
        retrievers: indexes over the same corpus.
        k: a larger value gives lower ranks more weight.
        depth: number of rows taken from each retriever, at least ``topk``. Up to this value, the order does not depend on ``topk``.
        weights: weight of each retriever's list. Default: 1 each.
    """

    def __init__(
        self, retrievers: Sequence[Retriever], k: int = 60, depth: int = 100, weights: Sequence[float] | None = None
    ) -> None:
        self.name = "hybrid of " + " and ".join(retriever.name for retriever in retrievers)
        self._retrievers = retrievers
        self._k = k
        self._depth = depth
        self._weights = weights or [1.0] * len(retrievers)

    def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """See ``Retriever``."""
        lists = [retriever.search(queries, max(topk, self._depth)) for retriever in self._retrievers]
        return [self._fuse(hits, topk) for hits in zip(*lists, strict=True)]

    def _fuse(self, lists: Sequence[SearchHits], topk: int) -> SearchHits:
        scores: dict[int, float] = {}
        for hits, weight in zip(lists, self._weights, strict=True):
            for rank, row in enumerate(hits.rows.tolist(), start=1):
                scores[row] = scores.get(row, 0.0) + weight / (self._k + rank)
        first = {row: rank for rank, row in enumerate(lists[0].rows.tolist())}
        rows = sorted(scores, key=lambda row: (-scores[row], first.get(row, len(first)), row))[:topk]
        return SearchHits(np.asarray(rows, np.int64), np.asarray([scores[row] for row in rows], np.float32))


#: Names of the retrievers that ``open_retriever`` opens.
RETRIEVERS = ("bm25", "dense", "hybrid")


def open_retriever(
    corpus: str | Path,
    retriever: str | None = None,
    encoder: EncoderSettings | None = None,
    index_root: str | Path | None = None,
    embeddings: str | Path | None = None,
    bm25_weight: float | None = None,
) -> tuple[Corpus, Retriever]:
    """Open a corpus file and an index over it, which is built and stored if there is none.

    Args:
        corpus: JSON-lines file; see ``bm25.open_index``.
        retriever: one of ``RETRIEVERS``. The default is ``"hybrid"`` with an encoder and ``"bm25"`` without one.
        encoder: the encoder of ``dense`` and ``hybrid``.
        index_root, embeddings: see ``dense.open_dense_index``.
        bm25_weight: weight of BM25's list in ``hybrid``, where that of dense search is 1. Default: 1.

    Raises:
        ConfigError: the settings do not fit together, or do not fit the index.
        DataError: the corpus or an index cannot be read.
    """
    chosen = retriever or ("hybrid" if encoder else "bm25")
    if chosen not in RETRIEVERS:
        raise ConfigError(f"The retriever {retriever!r} is unknown; known are {', '.join(RETRIEVERS)}.")
    if (chosen == "bm25") != (encoder is None):
        raise ConfigError(
            f"The retriever {chosen!r} needs an encoder: name the directory of one."
            if encoder is None
            else "The retriever 'bm25' uses no encoder: leave the encoder out, or choose 'dense' or 'hybrid'."
        )
    if bm25_weight is not None and (chosen != "hybrid" or not 0.0 < bm25_weight < float("inf")):
        raise ConfigError(f"bm25_weight {bm25_weight} is a number above 0 for the retriever 'hybrid'; this one is {chosen!r}.")
    if embeddings is not None and encoder is None:
        raise ConfigError("The embeddings of a dense index need the encoder that made them: name its directory.")
    if encoder is None:
        return open_index(corpus, index_root)
    from rollwright.environments.dense import open_dense_index

    documents, vectors = open_dense_index(corpus, encoder, index_root, embeddings)
    if chosen == "dense":
        return documents, vectors
    return documents, HybridRetriever([open_index(corpus, index_root)[1], vectors], weights=[bm25_weight or 1.0, 1.0])


@dataclass(frozen=True)
class LocalSearchTool:
    """A search tool over a corpus and its index in this process."""

    corpus: Corpus
    retriever: Retriever

    async def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """See ``SearchTool``. Large corpora are searched in a thread."""
        if len(self.corpus) > _THREAD_ROWS:
            [hits] = await asyncio.to_thread(self.retriever.search, [query], topk)
        else:
            [hits] = self.retriever.search([query], topk)
        return [self.corpus.document(int(row)) for row in hits.rows]

    async def access(self, url: str) -> dict[str, str] | None:
        """See ``SearchTool``."""
        return self.corpus.page(url)


class RetrievalClient:
    """A search tool that calls a retrieval service (``rollwright retrieve``, or any service that has the same API) over HTTP.

    Args:
        address: ``host:port`` or a URL.
        timeout: timeout in seconds, which applies separately to connecting, reading and writing.
        api_key: key to send as a bearer token. If None, no key is sent.
    """

    def __init__(self, address: str, timeout: float = 60.0, api_key: str | None = None) -> None:
        self.base_url = address.rstrip("/") if "://" in address else f"http://{address.rstrip('/')}"
        self.timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    async def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """See ``SearchTool``."""
        return (await self.retrieve([query], topk))[0]

    async def retrieve(self, queries: list[str], topk: int | None = None, return_scores: bool = False) -> list[list[Any]]:
        """Send ``POST /retrieve`` and return the documents of each query, each with its score if ``return_scores`` is True."""
        return await self._post("/retrieve", {"queries": queries, "topk": topk, "return_scores": return_scores})

    async def access(self, url: str) -> dict[str, str] | None:
        """See ``SearchTool``."""
        return (await self._post("/access", {"urls": [url]}))[0]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        import httpx2

        # An HTTP client belongs to the event loop on which it was first used, and workflows may run on several loops.
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = httpx2.AsyncClient(
                base_url=self.base_url,
                timeout=self.timeout,
                headers=self._headers,
                limits=httpx2.Limits(max_connections=256, max_keepalive_connections=64),
                trust_env=False,  # requests to the service do not use the environment's proxy
            )
            self._clients[loop] = client
        try:
            response = await client.post(path, json=body)
        except httpx2.HTTPError as error:
            raise ToolError(
                f"The retrieval service at {self.base_url} did not answer {path} ({type(error).__name__}: {error}). "
                "Is `rollwright retrieve` running there?"
            ) from error
        if response.status_code >= 400:
            try:
                reason = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):  # not a response of the service, but perhaps a proxy's page
                reason = response.text[:300]
            raise ToolError(f"The retrieval service at {self.base_url} refused {path} ({response.status_code}): {reason}")
        return response.json()["result"]


#: Search tools that a config names as ``{name: argument}`` or ``{name: {arguments}}``.
SEARCH_TOOLS: Registry[Callable[..., SearchTool]] = Registry(
    "search tool", ConfigError, variable="SEARCH_TOOLS", entry_points="rollwright.search_tools"
)
SEARCH_TOOLS["service"] = RetrievalClient


@SEARCH_TOOLS.register("corpus")
def corpus_tool(
    corpus: str | Path,
    retriever: str | None = None,
    encoder: str | Path | None = None,
    encoder_style: str | None = None,
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_tokens: int | None = None,
    index_dir: str | Path | None = None,
    embeddings: str | Path | None = None,
    bm25_weight: float | None = None,
) -> LocalSearchTool:
    """Build a tool that searches a JSON-lines corpus in this process.

    Args:
        corpus: the file.
        retriever: ``bm25``, ``dense`` or ``hybrid``; see ``open_retriever``.
        encoder: directory of an encoder; the next five arguments are those of ``encoder_settings``.
        index_dir: directory of indexes; see ``stored_index``.
        embeddings: folder of an existing dense index.
        bm25_weight: see ``open_retriever``.

    Raises:
        ConfigError: see ``open_retriever`` and ``encoder_settings``.
    """
    settings = named_encoder(encoder, encoder_style, pooling, query_prefix, passage_prefix, max_tokens)
    return LocalSearchTool(*open_retriever(corpus, retriever, settings, index_dir, embeddings, bm25_weight))


def make_search_tool(spec: Any) -> SearchTool:
    """Build the search tool that a config names.

    Args:
        spec: one of:

            * a tool, which is returned unchanged;
            * ``"host:port"`` or the URL of a service, which is sent the key in ``ROLLWRIGHT_API_KEY``, if any;
            * ``{"service": address, "api_key": key}``, a service that has its own key;
            * ``{"corpus": file}`` or ``{"corpus": {arguments}}``, an index in this process (see ``corpus_tool``);
            * ``{name: arguments}``, a tool in ``SEARCH_TOOLS``.

    Raises:
        ConfigError: ``spec`` is none of these, or the tool does not accept the arguments.
    """
    if hasattr(spec, "search"):
        return spec
    if isinstance(spec, str):
        return RetrievalClient(spec, api_key=os.environ.get("ROLLWRIGHT_API_KEY"))
    if isinstance(spec, Mapping) and {"service"} <= set(spec) <= {"service", "api_key"}:
        return RetrievalClient(spec["service"], api_key=spec.get("api_key"))
    if isinstance(spec, Mapping) and len(spec) == 1:
        [(kind, value)] = spec.items()
        return SEARCH_TOOLS.build(kind, **value) if isinstance(value, Mapping) else SEARCH_TOOLS.build(kind, value)
    raise ConfigError(
        f"search_tool is {spec!r}, which names no tool. Give 'host:port' of a retrieval service, {{service: 'host:port', "
        "api_key: KEY}, {corpus: FILE}, {NAME: {arguments}} of a registered search tool, or an object with `search(query, topk)`, "
        "async or plain."
    )
