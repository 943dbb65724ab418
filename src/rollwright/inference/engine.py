"""The engine protocol: what every inference engine can do, whether in this process or behind servers.

Invariants:

* every response carries the version that sampled each token, as reported by the engine that sampled it;
* ``agenerate`` may be awaited on any event loop, in any thread; synchronous methods work while a loop runs;
* between ``pause`` and ``resume`` no token is sampled.

An engine has to define the six abstract methods. Everything else has a default, so callers never inspect an engine's attributes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from rollwright.errors import WeightUpdateError
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.weights.stream import WeightStream

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rollwright.experience.recorder import Recorder
    from rollwright.inference.weights.transfer import WeightUpdateMeta


Result = TypeVar("Result")

#: Largest accepted mean difference between the log-probabilities of engine and trainer if either computes in a 16-bit type.
TOLERANCE_OF_16_BITS = 5e-2


class WeightReceiver:
    """Receives the weights that a trainer publishes: an engine, or an object that forwards them to engines.

    Attributes:
        local_model: the model in this process that computes the tokens, or None if other processes compute them.
    """

    local_model: nn.Module | None = None

    @property
    def records_experts(self) -> bool:
        """True if responses have ``routed_experts`` (``rollout.routing_replay``)."""
        return False

    @property
    def logprob_tolerance(self) -> float | None:
        """Largest accepted mean difference from the trainer's log-probabilities. If None, the audit derives it from the data types."""
        return None

    @property
    def sampler(self) -> WeightReceiver:
        """The engine that samples with the weights: this one, or the one that it wraps."""
        return self

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Data type in which the engines hold the weights, or None if it is unknown or differs between engines. The trainer sends the
        weights in this type, to save bytes."""
        return None if self.local_model is None else next(self.local_model.parameters()).dtype

    @property
    def weight_transport(self) -> str:
        """How weights are transferred if the trainer does not choose; see ``WeightUpdateMeta.type``."""
        return "memory"

    @property
    def lacks_weights(self) -> bool:
        """True if nothing can be sampled until the current weights are published again."""
        return False

    @property
    def weight_holders(self) -> list[str]:
        """Readable names of the engines that compute with the weights."""
        return [f"{type(self.sampler).__name__} in this process"]

    def publish(self, version: int) -> None:
        """Report that the weights of ``local_model`` were changed in place and are now ``version``.

        The engine must not step between the first change and this call, so call ``pause`` first.
        """
        raise takes_no_weights(self)

    def update_weights(
        self,
        meta: WeightUpdateMeta | None = None,
        *,
        version: int,
        weights: WeightStream | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        config: Any = None,
    ) -> None:
        """Take new weights; after this call, the next token is sampled with them.

        Args:
            meta: how to transfer them. None uses the engine's default.
            version: version of these weights.
            weights: whole tensors under the names that ``save_pretrained`` writes, or the model's own names if there is a
                ``local_model``. Tied tensors may occur twice. A stream is read one tensor at a time.
            config: a Hugging Face config, written next to the weights on disk.

        Raises:
            WeightUpdateError: no engine confirmed, or the engine does not support this transfer.
        """
        self.receive_weights(WeightStream.of(weights), version, meta, config)

    def receive_weights(self, weights: WeightStream, version: int, meta: WeightUpdateMeta | None, config: Any) -> None:
        """Take new weights. ``update_weights`` calls this method, and engines that accept weights override it."""
        raise takes_no_weights(self)

    def probe(self, request: ModelRequest) -> dict[str, ModelResponse] | None:
        """Sample the audit's request on each engine with its current weights.

        Returns:
            Responses by engine name; empty if no engine can answer. None if the engines are paused and can answer only after ``resume``.
        """
        return {}

    @property
    def can_be_probed(self) -> bool:
        """True if the engine answers probes."""
        return type(self).probe is not WeightReceiver.probe

    def checksums(self) -> dict[str, dict[str, str]]:
        """During a proof, return a checksum of each tensor that the engines compute with, by engine and tensor, if they give any."""
        return {}

    def proof(self) -> AbstractContextManager[None]:
        """Return a context for a canary. Inside it, weights and probes concern the engines that no canary has proven yet.

        Engines that come into service later, for example because they were started again, then wait for a canary, too.
        """
        return nullcontext()

    def awaits_proof(self, version: int) -> bool:
        """Return whether an engine waits for a canary that can begin now, with weights of this version."""
        return False

    def when_resumed(self, action: Callable[[], object]) -> None:
        """Call ``action`` now, or at the end of ``resume`` if the engine is paused and cannot answer a probe."""
        action()


def takes_no_weights(engine: object) -> WeightUpdateError:
    """Return the error for an object that weights cannot be published to."""
    return WeightUpdateError(
        f"{type(engine).__name__} can be given no weights: it has neither update_weights (servers) nor publish (an engine in "
        "this process)."
    )


class InferenceEngine(WeightReceiver, ABC):
    """Tokens in, tokens and log-probabilities out.

    Attributes:
        context_length: largest number of tokens of a prompt and its output together, if known.
        is_batch_invariant: True if the answer to a request does not depend on what else is computed (docs/determinism.md).
        recorder: records every request of the sample that the engine is bound to, or None if it is not bound to a sample.
        closed_because: why the sample that the engine is bound to makes no more calls, or None while it may.
        loop: the event loop that serves the sample's requests, or None if any may.
    """

    context_length: int | None = None
    is_batch_invariant: bool = False
    recorder: Recorder | None = None
    closed_because: str | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Load or connect, and wait until the engine answers requests."""

    def destroy(self) -> None:
        """Release threads, processes and connections; running requests raise ``RequestAborted``."""

    @abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion of ``request.input_ids``.

        Raises:
            PromptTooLongError: the prompt leaves no room for a new token.
            RequestAborted: the request was aborted or the engine closed.
            EngineError: the engine cannot serve this request.
        """

    async def agenerate_batch(self, requests: list[ModelRequest]) -> list[ModelResponse]:
        """Sample one completion for each request, in order; if one fails or this call is cancelled, the others are cancelled."""
        return await run_concurrently(self.agenerate(request) for request in requests)

    async def astream(self, request: ModelRequest) -> AsyncGenerator[ModelResponse, None]:
        """Yield the response as it grows. Each response contains all tokens of the previous one, and the last is complete.

        By default only the complete response is yielded.
        """
        yield await self.agenerate(request)

    @abstractmethod
    def get_version(self) -> int:
        """Return the version of the weights that the next token is sampled with."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Confirm a published version. Confirming the current version is a no-op; any other version raises ``WeightUpdateError``."""

    @abstractmethod
    def pause(self) -> None:
        """Stop sampling; returns when no step is running. Requests keep their tokens."""

    @abstractmethod
    def resume(self) -> None:
        """Continue after ``pause``."""

    def rest(self) -> None:
        """Give back memory that sampling needs until ``resume``, if the model trains on the same device; called while paused."""

    @abstractmethod
    def abort(self, rid: str | None = None) -> None:
        """End the requests of one conversation, or all requests. Each returns the tokens sampled so far, with stop_reason "abort"."""

    def go_back(self, version: int, *, finish: bool = False) -> None:
        """Prepare for weights of an earlier version, from a trainer that resumed from a checkpoint.

        Args:
            version: version of the next weights.
            finish: let running requests finish.
        """

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and the numbers of running and waiting requests."""
        return {}


async def run_concurrently(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results in order.

    If one raises or the caller is cancelled, the others are cancelled and awaited. ``asyncio.gather`` alone would let them continue, and
    sample for an episode that has already failed.

    Raises:
        Exception: the first exception that a coroutine raised.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished)
