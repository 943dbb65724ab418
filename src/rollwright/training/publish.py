"""Handing new weights to the engines that sample with them.

Between the first optimizer step of an update and publication an engine that shares the trainer's weights does not step:
``before_first_step`` pauses it, ``publish`` gives it the next version and lets it go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rollwright.errors import WeightUpdateError
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel

if TYPE_CHECKING:
    from rollwright.inference.remote import RemoteClient
    from rollwright.inference.weights import WeightUpdateMeta
    from rollwright.training.engine import TrainEngine

logger = getLogger("publish")


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

    def succeeded_by(self, other: Publisher) -> Publisher:
        """Hand over to another way in the middle of an update: an engine that was paused stays so until it publishes."""
        if isinstance(other, SharedWeights):
            return self
        if self._paused:
            self._paused = False
            self.engine.resume()
        return other


class CopiedWeights:
    """The engine in this process has weights of its own, and copies the trainer's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def before_first_step(self) -> None:
        """Nothing: the engine has weights of its own."""

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Have the engine copy the present weights as ``version``."""
        self.engine.load_weights(trainer.full_weights(), version)


class SentWeights:
    """Servers are sent the weights by the way that a ``WeightUpdateMeta`` names, and asked what they compute with them."""

    def __init__(self, engine: Any, meta: WeightUpdateMeta | None) -> None:
        self.engine = engine
        self.meta = meta

    def before_first_step(self) -> None:
        """Nothing: servers have weights of their own."""

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Send the whole weights (from the first rank); the servers have confirmed the version on return."""
        weights = trainer.full_weights()
        # The audit scores a probe with the trainer, which over several ranks only all of them together can do.
        auditor = trainer if parallel.world_size() == 1 else None
        if parallel.rank() == 0:
            self.engine.update_weights(self.meta, version=version, weights=weights, trainer=auditor)
        parallel.wait_for_all()


def publisher_for(trainer: TrainEngine, engine: Any, meta: WeightUpdateMeta | None) -> Publisher:
    """The way from a trainer to an engine.

    Args:
        trainer: whose weights are published.
        engine: a connected engine, or None: the servers that this process is connected to, else those whose addresses are
            in the environment.
        meta: the way; None: shared where the engine computes with the trainer's own tensors, copied where it is in this
            process, else as the client chooses.

    Raises:
        WeightUpdateError: there is no engine to publish to, or the way does not fit it.
    """
    engine = engine if engine is not None else _find_servers(meta)
    if hasattr(engine, "update_weights"):
        return SentWeights(engine, meta)
    if not hasattr(engine, "publish"):
        raise WeightUpdateError(
            f"{type(engine).__name__} can be given no weights: it has neither update_weights (servers) nor publish (an engine "
            "in this process)."
        )
    if parallel.world_size() > 1:
        raise WeightUpdateError(
            "An engine in the trainer's process cannot share weights that are sharded over several processes: use servers "
            "(rollout.backend sglang or vllm)."
        )
    copied = meta is not None and meta.type == "memory"
    return CopiedWeights(engine) if copied or not _shares_weights(engine, trainer) else SharedWeights(engine)


def _shares_weights(engine: Any, trainer: TrainEngine) -> bool:
    model = getattr(getattr(engine, "client", engine), "model", trainer.model)
    mine, theirs = next(trainer.model.parameters()), next(model.parameters())
    return mine.data_ptr() == theirs.data_ptr()


def _find_servers(meta: WeightUpdateMeta | None) -> Any:
    from rollwright.inference.network import find_server_addresses
    from rollwright.inference.remote import connected_clients

    if parallel.rank() == 0 and (clients := connected_clients()):
        if len({frozenset(client.addresses) for client in clients}) > 1:
            names = "; ".join(", ".join(client.addresses) for client in clients)
            raise WeightUpdateError(
                f"This process is connected to several sets of servers ({names}): name the one that samples for this trainer "
                "with actor.connect_engine(engine)."
            )
        logger.info(
            "publishing to the %s servers that this process samples from: %s",
            clients[-1].kind,
            ", ".join(clients[-1].addresses),
        )
        return clients[-1]  # of several clients of the same servers, the one that connected last
    addresses = find_server_addresses()
    if not addresses:
        raise WeightUpdateError(
            "update_weights found no inference engine: call actor.connect_engine(engine), or give the servers' addresses in "
            "ROLLWRIGHT_LLM_SERVER_ADDRS."
        )
    backend = meta.allocation.gen_backend if meta is not None and meta.allocation is not None else None
    client: RemoteClient
    if backend == "vllm":
        from rollwright.inference.vllm import VLLMClient

        client = VLLMClient(addresses=addresses)
    else:
        from rollwright.inference.sglang import SGLangClient

        client = SGLangClient(addresses=addresses)
    logger.info("publishing to the %s servers of the environment: %s", client.kind, ", ".join(addresses))
    client.initialize()
    return client
