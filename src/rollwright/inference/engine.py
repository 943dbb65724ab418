"""The engine protocol: what every inference engine, in this process or behind a server, can do.

Invariants:

* every response carries the version that sampled each token, as the engine that sampled it says;
* ``agenerate`` may be awaited on any event loop, of any thread; synchronous methods work while a loop runs;
* between ``pause`` and ``resume`` no token is sampled.

An engine has to define the six abstract methods. Everything else has a default, so callers never ask what an engine has.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rollwright.errors import WeightUpdateError
from rollwright.inference.request import ModelRequest, ModelResponse

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rollwright.experience.recorder import Recorder
    from rollwright.inference.weights.stream import WeightStream
    from rollwright.inference.weights.ways import WeightUpdateMeta


#: Largest mean difference of log-probabilities of an engine and a trainer, one of which computes in a 16-bit type.
TOLERANCE_OF_16_BITS = 5e-2


class WeightReceiver:
    """Takes the weights that a trainer publishes: an engine, or what forwards them to engines elsewhere."""

    @property
    def logprob_tolerance(self) -> float | None:
        """Largest mean difference from the trainer's log-probabilities; None: what the trainer's compute type allows."""
        return None

    @property
    def sampler(self) -> WeightReceiver:
        """What samples with the weights: this engine, or the one that it holds."""
        return self

    @property
    def local_model(self) -> nn.Module | None:
        """The model in this process that computes the tokens; None: they are computed elsewhere."""
        return None

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The type that weights are sent in: that in which they are held where tokens are computed, so that no more bytes travel;
        None: it is not known, or engines differ."""
        return None if self.local_model is None else next(self.local_model.parameters()).dtype

    @property
    def weight_way(self) -> str:
        """By which way weights come here where the trainer names none; see ``WeightUpdateMeta.type``."""
        return "memory"

    @property
    def weight_holders(self) -> list[str]:
        """What computes with the weights, by names for people."""
        return [f"{type(self.sampler).__name__} in this process"]

    def publish(self, version: int) -> None:
        """The weights of ``local_model`` were changed in place and are ``version`` now.

        Between the first change and this call the engine must not step: call ``pause`` before.
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
        """Take new weights; when this returns, the next token is sampled with them.

        Args:
            meta: how to transfer them; None uses the engine's default.
            version: version of these weights.
            weights: whole tensors under the names of ``save_pretrained``, or the model's own names if there is a ``local_model``;
                tied tensors may occur twice. A stream is read one tensor at a time.
            config: a Hugging Face config, written next to the weights on disk.

        Raises:
            WeightUpdateError: no engine confirmed, or the engine does not support this transfer.
        """
        raise takes_no_weights(self)

    def probe(self, request: ModelRequest) -> dict[str, ModelResponse] | None:
        """What each engine samples for the audit's request with its present weights, by the engine's name in messages.

        Returns:
            Empty where nobody can be asked; None where they can be asked only after ``resume``.
        """
        return {}

    def when_resumed(self, action: Callable[[], object]) -> None:
        """Call ``action`` now, or at the end of ``resume`` where the engine is paused and answers no probe."""
        action()


def takes_no_weights(engine: object) -> WeightUpdateError:
    """The error of what weights cannot be published to."""
    return WeightUpdateError(
        f"{type(engine).__name__} can be given no weights: it has neither update_weights (servers) nor publish (an engine in "
        "this process)."
    )


class InferenceEngine(WeightReceiver, ABC):
    """Tokens in, tokens and log-probabilities out.

    Attributes:
        context_length: most tokens of a prompt and its output together; None: the engine does not say.
        is_batch_invariant: what a request is answered does not depend on what else is computed (docs/determinism.md).
        recorder: holds every request of the sample that the engine is bound to; None: it is bound to no sample.
    """

    context_length: int | None = None
    is_batch_invariant: bool = False
    recorder: Recorder | None = None

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Make ready: load or connect, and wait until requests are answered."""

    def destroy(self) -> None:
        """Release threads, processes and connections; requests that run raise ``RequestAborted``."""

    @abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion of ``request.input_ids``.

        Raises:
            PromptTooLongError: no room for a new token.
            RequestAborted: the request was aborted or the engine closed.
            EngineError: the request cannot be served as asked.
        """

    async def agenerate_batch(self, requests: list[ModelRequest]) -> list[ModelResponse]:
        """One completion for each request, in their order; where one fails or this is cancelled, the others are cancelled."""
        tasks = [asyncio.ensure_future(self.agenerate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def astream(self, request: ModelRequest) -> AsyncGenerator[ModelResponse, None]:
        """The response as it grows: each holds all tokens of the one before it, and the last is complete.

        By default it comes whole.
        """
        yield await self.agenerate(request)

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

    def go_back(self, version: int, *, finish: bool = False) -> None:
        """Get ready for weights of an earlier version, from a trainer that began again from a checkpoint.

        Args:
            version: of the weights that come next.
            finish: let what runs end by itself.
        """

    def stats(self) -> dict[str, float]:
        """Counts since the start, and what runs and waits now."""
        return {}
