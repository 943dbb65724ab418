"""The search tool that a config names: a service, a corpus of one's own, or a procedural encyclopedia."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollwright.environments.retrieval import LocalSearchTool, RetrievalClient, SearchTool
from rollwright.errors import ConfigError


def make_search_tool(spec: Any) -> SearchTool:
    """The tool that a config names.

    Args:
        spec: a tool (kept as it is); ``"host:port"`` or a URL: a service, which is sent the key of ``ROLLWRIGHT_API_KEY`` where
            that is set; ``{"service": address, "api_key": key}``: one with a key of its own; ``{"corpus": file}``: an index in
            this process; ``{"encyclopedia": {...}}``: one over procedural worlds (arguments of
            ``environments.encyclopedia.tool``).

    Raises:
        ConfigError: it is none of these.
    """
    if hasattr(spec, "search"):
        return spec
    if isinstance(spec, str):
        return RetrievalClient(spec, api_key=os.environ.get("ROLLWRIGHT_API_KEY"))
    if hasattr(spec, "items") and {"service"} <= set(spec) <= {"service", "api_key"}:
        return RetrievalClient(spec["service"], api_key=spec.get("api_key"))
    if hasattr(spec, "items") and len(spec) == 1:
        [(kind, value)] = spec.items()
        if kind == "corpus":
            from rollwright.environments.bm25 import open_index

            return LocalSearchTool(*open_index(Path(value)))
        if kind == "encyclopedia":
            from rollwright.environments.encyclopedia import tool

            try:
                return tool(**dict(value))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"search_tool encyclopedia: {value!r} cannot be its arguments ({error}). Give worlds and world_size, as in "
                    "{encyclopedia: {worlds: '1-40', world_size: 100}}."
                ) from error
    raise ConfigError(
        f"search_tool is {spec!r}, which names no tool. Give 'host:port' of a retrieval service, {{service: 'host:port', "
        "api_key: KEY}, {corpus: FILE}, {encyclopedia: {worlds: ...}}, or an object with `search(query, topk)`, async or plain."
    )
