"""An inference engine behind HTTP servers. Each of its parts has an owner: the servers, the requests, their weights, their protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.network import parse_addresses
from rollwright.inference.remote_requests import RemoteRequests
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.adapter import AdapterRoom
from rollwright.inference.weights.publication import WeightPublication
from rollwright.inference.weights.server_adapters import ServerAdapters
from rollwright.inference.weights.server_weights import ServerWeights
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

#: The engines of this process that are connected to servers, oldest first. A trainer that was given no engine publishes to these.
CONNECTED_ENGINES: list[RemoteInferenceEngine] = []
#: Arguments of ``initialize`` in ported programs that say nothing about servers.
_IGNORED_ARGUMENTS = {"engine_id", "train_data_parallel_size", "ft_spec"}


class RemoteInferenceEngine(InferenceEngine):
    """Inference engine that samples on HTTP servers of one backend.

    Attributes:
        config: the ``rollout`` section.
        servers: finds, watches and calls the servers.
        backend: the servers' protocol.
        weights: the version that the servers hold; pauses servers, restores their weights, and follows another publisher.
        requests: sends requests and reads the answers.
        publication: transfers new weights.
    """

    def __init__(
        self,
        backend: type[ServerBackend],
        config: RolloutConfig | None = None,
        *,
        addresses: Iterable[str] | None = None,
        servers_are_replaced: bool = False,
        only_asks: bool = False,
        takes_weights: bool = True,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """Args:
        backend: kind of the servers.
        config: addresses, key, time limits, and what happens to running requests on a weight update.
        addresses: addresses of the servers. None reads them from the config, then from the environment.
        servers_are_replaced: see ``ServerWeights``.
        only_asks: see ``ServerWeights``.
        takes_weights: False for servers of another model, which no trainer publishes to.
        adapters: set if adapters are published to the servers, by this engine or by another one.
        """
        self.config = config or RolloutConfig()
        self._takes_weights = takes_weights
        self.servers = ServerSet(self.config, backend.kind, addresses)
        self.backend = backend(self.config, self.servers)
        held = ServerAdapters(self.backend, self.servers, adapters)
        self.weights = ServerWeights(
            self.backend, self.servers, held, servers_are_replaced=servers_are_replaced, only_asks=only_asks
        )
        self.requests = RemoteRequests(self.backend, self.servers, self.weights)
        self.publication = WeightPublication(self.backend, self.servers, self.weights)

    @property
    def kind(self) -> str:
        """Name of the servers in messages."""
        return self.backend.kind

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, in service or not."""
        return [server.address for server in self.servers.router.servers]

    # -- from start to end ---------------------------------------------------------------------------------------------

    def initialize(
        self,
        *args: Any,
        addresses: str | Iterable[str] | None = None,
        addr: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the servers, wait until each is healthy, and read the version of their weights. Idempotent.

        Args:
            args: ignored.
            addresses: servers, as a list or a comma-separated string. None uses those given on construction, in the config or in
                the environment.
            addr: another name of ``addresses``.
            kwargs: arguments about the trainer in ported programs (``engine_id``, ``train_data_parallel_size``, ``ft_spec``); ignored.

        Raises:
            ConfigError: an argument is unknown, or an address is malformed.
            EngineError: no server is known, one has ended, or one is not healthy within ``setup_timeout``.
        """
        if unknown := sorted(set(kwargs) - _IGNORED_ARGUMENTS):
            raise ConfigError(f"initialize() has no argument {unknown[0]!r}; give addresses, or set rollout.addresses.")
        if addresses is not None and addr is not None:
            raise ConfigError("initialize() was given two lists of servers: give one of addresses and addr.")
        if self.servers.is_open:
            return
        named = addr if addresses is None else addresses
        router = self.servers.open(parse_addresses(named) if isinstance(named, str) else named)
        try:
            self.weights.connect()
        except BaseException:
            self.destroy()
            raise
        self.servers.watch(self.weights.bring_back, lambda: self.weights.is_paused)
        if self._takes_weights:
            CONNECTED_ENGINES.append(self)
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def destroy(self) -> None:
        """Stop watching the servers, close every connection and remove what was shared with the servers.

        Servers keep running unless they were started for this engine (``own``).
        """
        if self in CONNECTED_ENGINES:
            CONNECTED_ENGINES.remove(self)
        self.weights.adapters.close()
        self.servers.close()
        self.publication.close()

    def own(self, launched: Any) -> None:
        """Take ownership of servers that were started for this engine: close them when the engine is destroyed.

        Args:
            launched: an object with ``close()``; with ``check(address=None)``, which raises if that server has ended, or without an
                address if all servers have; and with ``weights_root``, a directory that is shared with the servers.
        """
        self.servers.launched.append(launched)

    def use_servers(self, addresses: Iterable[str]) -> None:
        """See ``Router.replace``."""
        self.servers.router.replace(addresses)

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def is_batch_invariant(self) -> bool:  # type: ignore[override]
        """True if no server's answer to a request depends on what else it computes."""
        return self.backend.is_batch_invariant

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See ``RemoteRequests.generate``."""
        return await self.requests.generate(request)

    def probe(self, request: ModelRequest) -> dict[str, ModelResponse] | None:
        """See ``RemoteRequests.probe``."""
        return self.requests.probe(request)

    def abort(self, rid: str | None = None) -> None:
        """See ``RemoteRequests.abort``."""
        self.requests.abort(rid)

    # -- weights -------------------------------------------------------------------------------------------------------

    def get_version(self) -> int:
        """Return the version of the weights that the next token is sampled with."""
        return self.weights.version

    def set_version(self, version: int) -> None:
        """See ``ServerWeights.set_version``."""
        self.weights.set_version(version)

    def pause(self) -> None:
        """See ``ServerWeights.pause``."""
        self.weights.pause()

    def resume(self) -> None:
        """See ``ServerWeights.resume``."""
        self.weights.resume()

    def rest(self) -> None:
        """See ``InferenceEngine.rest``."""
        self.weights.release_memory()

    def checksums(self) -> dict[str, dict[str, str]]:
        """See ``ServerBackend.checksums``; of the servers that the proof concerns."""
        named, failed = self.servers.settled(self.backend.checksums, self.weights.proofs.updated)
        for server, error in failed.items():
            logger.warning("The server at %s gave no checksums of its weights: %s", server.address, error)
        return {self.requests.name_of(server): checksums for server, checksums in named.items()}

    def proof(self) -> AbstractContextManager[None]:
        """See ``ServerWeights.proof``."""
        return self.weights.proof()

    def awaits_proof(self, version: int) -> bool:
        """See ``ServerWeights.awaits_proof``."""
        return self.weights.awaits_proof(version)

    def when_resumed(self, action: Callable[[], object]) -> None:
        """See ``ServerWeights.when_resumed``."""
        self.weights.when_resumed(action)

    def receive_weights(self, weights: WeightStream, version: int, meta: WeightUpdateMeta | None, config: Any) -> None:
        """See ``WeightPublication.update``."""
        self.publication.update(meta, version, weights, config)

    @property
    def weight_transport(self) -> str:
        """See ``WeightPublication.default_meta``."""
        return self.publication.default_meta().type

    @property
    def lacks_weights(self) -> bool:
        """See ``ServerWeights.are_lacking``."""
        return self.weights.are_lacking

    @property
    def weight_holders(self) -> list[str]:
        """Addresses of the servers in service."""
        return [server.address for server in self.servers.router.in_service()]

    @property
    def records_experts(self) -> bool:
        """The value of ``rollout.routing_replay``."""
        return self.config.routing_replay

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """``rollout.weight_dtype``, or for ``auto`` the type that the servers in service report (None if they differ)."""
        if self.config.weight_dtype != "auto":
            return getattr(torch, self.config.weight_dtype)
        held = {self.backend.held_dtype(server) for server in self.servers.router.in_service()}
        return held.pop() if len(held) == 1 else None

    @property
    def logprob_tolerance(self) -> float | None:
        """``rollout.logprob_tolerance``."""
        return self.config.logprob_tolerance
