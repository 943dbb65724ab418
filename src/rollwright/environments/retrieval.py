"""The ``Retriever`` protocol, and the search tools of agents: one over HTTP and one in this process.

A ``Retriever`` maps queries to row numbers and scores, by a lexical index (``bm25``) or a dense one.
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
def corpus_tool(corpus: str | Path) -> LocalSearchTool:
    """Build a tool that searches a JSON-lines corpus in this process."""
    return LocalSearchTool(*open_index(Path(corpus)))


def make_search_tool(spec: Any) -> SearchTool:
    """Build the search tool that a config names.

    Args:
        spec: one of:

            * a tool, which is returned unchanged;
            * ``"host:port"`` or the URL of a service, which is sent the key in ``ROLLWRIGHT_API_KEY``, if any;
            * ``{"service": address, "api_key": key}``, a service that has its own key;
            * ``{"corpus": file}``, an index in this process;
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
