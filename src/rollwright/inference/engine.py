"""The engine protocol: what every inference engine, in this process or behind a server, can do.

Invariants:

* every response carries the version that sampled each token, as the engine that sampled it says;
* ``agenerate`` may be awaited on any event loop, of any thread; synchronous methods work while a loop runs;
* between ``pause`` and ``resume`` no token is sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollwright.inference.request import ModelRequest, ModelResponse


class InferenceEngine(ABC):
    """Tokens in, tokens and log-probabilities out."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - an engine may have nothing to do
        """Make ready: load or connect, and wait until requests are answered."""

    def destroy(self) -> None:  # noqa: B027
        """Give back threads, processes and connections; requests that run raise ``RequestAborted``."""

    @abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion of ``request.input_ids``.

        Raises:
            PromptTooLongError: no room for a new token.
            RequestAborted: the request was aborted or the engine closed.
            EngineError: the request cannot be served as asked.
        """

    @abstractmethod
    def get_version(self) -> int:
        """Version of the weights that the next token is sampled with."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Confirm a published version: the current one is a no-op, another is a ``WeightUpdateError``."""

    @abstractmethod
    def pause(self) -> None:
        """Stop sampling; returns when no step runs any more. Requests keep what they have."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after ``pause``."""

    @abstractmethod
    def abort(self, rid: str | None = None) -> None:
        """End the requests of one conversation, or all; they return what they have, with stop_reason "abort"."""
