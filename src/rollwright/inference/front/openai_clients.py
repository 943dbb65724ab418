"""Clients of the ``openai`` package for a run of the OpenAI front.

They do not retry (a retry would be recorded as a second call), have no time limit besides the sample's, use no proxy, and open a
connection for each call, so that none is left open when the run ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollwright.errors import ConfigError, WorkflowError

try:
    import openai
except ModuleNotFoundError as error:
    raise ConfigError(
        "OpenAI clients were asked for and the openai package is not installed: pip install 'rollwright[openai]'."
    ) from error


def _settings(client_class: Any, base_url: str, api_key: str) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "api_key": api_key,
        "max_retries": 0,
        "timeout": None,
        "default_headers": {"Connection": "close"},
        "http_client": client_class(verify=False, trust_env=False, timeout=None),
    }


class RunClient(openai.OpenAI):
    """A synchronous client that raises an error for calls on the event loop that would have to answer them."""

    def __init__(
        self, base_url: str, api_key: str, model_path: str, forbidden_loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        super().__init__(**_settings(openai.DefaultHttpxClient, base_url, api_key))
        self.model_path = model_path
        self._forbidden_loop = forbidden_loop

    def _prepare_request(self, request: Any) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is self._forbidden_loop:
            raise WorkflowError(
                "a synchronous OpenAI client was called on the rollout's event loop, which would then wait for itself: await "
                "get_openai_async_client(), or define run() rather than run_async()."
            )


class AsyncRunClient(openai.AsyncOpenAI):
    """An asynchronous client; ``arguments`` are passed to ``AsyncOpenAI``."""

    def __init__(self, base_url: str, api_key: str, model_path: str, **arguments: Any) -> None:
        super().__init__(**(_settings(openai.DefaultAsyncHttpxClient, base_url, api_key) | arguments))
        self.model_path = model_path
