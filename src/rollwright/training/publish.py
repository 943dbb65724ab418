"""Handing new weights to the engines that sample with them.

Between the first optimizer step of an update and publication an engine that shares the trainer's weights does not step:
``before_first_step`` pauses it, ``publish`` gives it the next version and lets it go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rollwright.errors import WeightUpdateError

if TYPE_CHECKING:
    from rollwright.training.engine import TrainEngine


class Publisher(Protocol):
    """A way for weights to reach engines."""

    def before_first_step(self) -> None:
        """The weights are about to change."""

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Give the engines the trainer's present weights as ``version``; they have confirmed it on return."""


class SharedWeights:
    """The engine in this process computes with the trainer's own tensors: nothing is copied."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._paused = False

    def before_first_step(self) -> None:
        """Stop the engine's steps until ``publish``."""
        if not self._paused:
            self.engine.pause()
            self._paused = True

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Tell the engine that its weights are those of ``version`` now, and let it go on."""
        self.engine.publish(version)
        if self._paused:
            self._paused = False
            self.engine.resume()


class SentWeights:
    """Engines elsewhere are sent the weights by the way that a ``WeightUpdateMeta`` names."""

    def __init__(self, engine: Any, meta: Any) -> None:
        self.engine = engine
        self.meta = meta

    def before_first_step(self) -> None:
        """Nothing: these engines have weights of their own."""

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Send the whole weights; the engine confirms the version."""
        self.engine.update_weights(self.meta, version=version, weights=trainer.full_weights(), trainer=trainer)


def publisher_for(trainer: TrainEngine, engine: Any, meta: Any) -> Publisher:
    """The way from a trainer to an engine.

    Args:
        trainer: whose weights are published.
        engine: a connected engine, or None: servers are found by the addresses in the environment.
        meta: a ``WeightUpdateMeta``, or None: shared where the engine is in this process.

    Raises:
        WeightUpdateError: there is no engine to publish to.
    """
    if engine is not None and hasattr(engine, "publish"):
        return SharedWeights(engine)
    if engine is not None and hasattr(engine, "update_weights"):
        return SentWeights(engine, meta)
    raise WeightUpdateError(
        "update_weights found no inference engine: call actor.connect_engine(engine), or give the servers' addresses in "
        "ROLLWRIGHT_LLM_SERVER_ADDRS."
    )
