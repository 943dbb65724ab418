"""What a retriever is, and the search tools that agents hold: one over HTTP, one in this process.

A lexical index (``bm25``) and a dense one differ only behind ``Retriever``: queries in, row numbers and scores out.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollwright.environments.bm25 import open_index
from rollwright.environments.corpus import Corpus, SearchHits
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import Registry

DEFAULT_TOPK = 3
#: Rows above which an in-process search leaves the event loop for a thread.
_THREAD_ROWS = 20_000


class Retriever(Protocol):
    """An index over a corpus. ``search`` may be called from several threads at once."""

    name: str

    def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """The ``topk`` best rows of each query; fewer where fewer match at all."""
        ...


class ToolError(RollwrightError):
    """A tool call failed in a way that the agent should read about: bad arguments, a refusal, a lost service."""


class SearchTool(Protocol):
    """What a search agent calls. Both methods raise ``ToolError`` with a message fit for the model to read."""

    async def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """The ``topk`` best documents: corpus rows with ``wikipedia_title`` and ``contents``."""
        ...

    async def access(self, url: str) -> dict[str, str] | None:
        """``{"url", "contents"}`` of a page, or None where it is not known."""


@dataclass(frozen=True)
class LocalSearchTool:
    """A corpus and its index in this process."""

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
    """A retrieval service (``rollwright retrieve``, or any with the same API) over HTTP.

    Args:
        address: ``host:port`` or a URL.
        timeout: seconds for one request, connecting included.
        api_key: sent as a bearer token where the service asks for one.
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
        """``POST /retrieve``: the documents of each query, each with its score where asked for."""
        return await self._post("/retrieve", {"queries": queries, "topk": topk, "return_scores": return_scores})

    async def access(self, url: str) -> dict[str, str] | None:
        """See ``SearchTool``."""
        return (await self._post("/access", {"urls": [url]}))[0]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        import httpx2

        # An HTTP client belongs to the loop that it was first used on; workflows may run on several.
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = httpx2.AsyncClient(
                base_url=self.base_url,
                timeout=self.timeout,
                headers=self._headers,
                limits=httpx2.Limits(max_connections=256, max_keepalive_connections=64),
                trust_env=False,  # a service of one's own is not behind the proxy of the environment
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
            except (ValueError, KeyError, TypeError):  # not an error of ours: a proxy's page, say
                reason = response.text[:300]
            raise ToolError(f"The retrieval service at {self.base_url} refused {path} ({response.status_code}): {reason}")
        return response.json()["result"]


#: Search tools that a config names as ``{name: argument}`` or ``{name: {arguments}}``.
SEARCH_TOOLS: Registry[Callable[..., SearchTool]] = Registry(
    "search tool", ConfigError, variable="SEARCH_TOOLS", entry_points="rollwright.search_tools"
)
SEARCH_TOOLS["service"] = RetrievalClient


@SEARCH_TOOLS.register("corpus")
def corpus_tool(corpus: str | Path) -> LocalSearchTool:
    """A corpus of JSON lines and its index, in this process."""
    return LocalSearchTool(*open_index(Path(corpus)))


def make_search_tool(spec: Any) -> SearchTool:
    """The tool that a config names.

    Args:
        spec: a tool (kept as it is); ``"host:port"`` or a URL: a service, which is sent the key of ``ROLLWRIGHT_API_KEY`` where
            that is set; ``{"service": address, "api_key": key}``: one with a key of its own; ``{"corpus": file}``: an index in
            this process; ``{name: arguments}``: a tool of ``SEARCH_TOOLS``.

    Raises:
        ConfigError: it is none of these, or the tool does not take its arguments.
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
