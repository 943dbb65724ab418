"""Handing new weights to the engines that sample with them.

Between the first optimizer step of an update and publication an engine that shares the trainer's weights does not step:
``before_first_step`` pauses it, ``publish`` gives it the next version and lets it go on. After each publication the engines'
log-probabilities of a probe are compared with the trainer's, over all its ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.audit import NEW_TOKENS_IN_PROCESS, Agreement
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.audit import audit_engines, can_answer

if TYPE_CHECKING:
    from rollwright.inference.remote import RemoteClient
    from rollwright.inference.weights.ways import WeightUpdateMeta
    from rollwright.training.engine import TrainEngine

logger = getLogger("publish")


class Publisher(Protocol):
    """A way for weights to reach engines."""

    @property
    def agreements(self) -> list[Agreement]:
        """How far each engine was from the trainer in the last audit; empty where there was none yet."""
        ...

    def before_first_step(self) -> None:
        """The weights are about to change."""

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Give the engines the trainer's present weights as ``version``; they have confirmed it on return."""


class SharedWeights:
    """The engine in this process computes with the trainer's own tensors: nothing is copied."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.agreements: list[Agreement] = []
        self._paused = False

    def before_first_step(self) -> None:
        """Stop the engine's steps until ``publish``."""
        if not self._paused:
            self.engine.pause()
            self._paused = True

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Tell the engine that its weights are those of ``version`` now, see that they are, and let it go on.

        Raises:
            WeightUpdateError: it does not compute what the trainer computes; it stays paused.
        """
        self.engine.publish(version)
        self.agreements = audit_engines(self.engine, trainer, version, NEW_TOKENS_IN_PROCESS)
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
        self.agreements: list[Agreement] = []

    def before_first_step(self) -> None:
        """Nothing: the engine has weights of its own."""

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Have the engine copy the present weights as ``version``, and see that it computes with them.

        Raises:
            WeightUpdateError: it does not.
        """
        self.engine.load_weights(trainer.full_weights(), version)
        self.agreements = audit_engines(self.engine, trainer, version, NEW_TOKENS_IN_PROCESS)


class SentWeights:
    """Servers are sent the weights by the way that a ``WeightUpdateMeta`` names, and asked what they compute with them.

    Paused servers answer no probe. Where one process trains, the client asks them when it resumes. The ranks of a sharded
    trainer have to score the probe together, so there they do it when they next come together: before the next first step,
    which is before anything that those servers sampled is trained on.
    """

    def __init__(self, engine: Any, meta: WeightUpdateMeta | None) -> None:
        self.engine = engine
        self.meta = meta
        self._agreements: list[Agreement] = []
        self._due: tuple[TrainEngine, int] | None = None  # a version that the ranks have not audited yet

    @property
    def agreements(self) -> list[Agreement]:
        """Of the last audit, whoever made it."""
        return self._agreements or getattr(getattr(self.engine, "client", self.engine), "agreements", [])

    def before_first_step(self) -> None:
        """The servers have weights of their own, but their audit may still be due.

        Raises:
            WeightUpdateError: a server does not compute with the weights that were published.
        """
        self._audit_if_due()

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Send the whole weights (from the first rank); the servers have confirmed the version on return.

        Raises:
            WeightUpdateError: on every rank, where the servers refused or do not compute with the weights.
        """
        weights = trainer.full_weights()
        is_alone = parallel.world_size() == 1

        def send() -> None:
            self.engine.update_weights(self.meta, version=version, weights=weights, trainer=trainer if is_alone else None)

        parallel.from_first_rank(send, trainer.device)
        if not is_alone:
            self._due = trainer, version
            self._audit_if_due()

    def _audit_if_due(self) -> None:
        if self._due is None:
            return
        trainer, version = self._due
        if parallel.from_first_rank(lambda: can_answer(self.engine), trainer.device):
            self._due = None
            self._agreements = audit_engines(self.engine, trainer, version)


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
    from rollwright.inference.server_pool import connected_clients

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
        from rollwright.inference.backends.vllm import VLLMClient

        client = VLLMClient(addresses=addresses)
    else:
        from rollwright.inference.backends.sglang import SGLangClient

        client = SGLangClient(addresses=addresses)
    logger.info("publishing to the %s servers of the environment: %s", client.kind, ", ".join(addresses))
    client.initialize()
    return client
