"""One of the ranks that train on a Ray cluster, called by the controller (``ray_ranks``)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rollwright.config.experiment import FinetuneSpec, section_of
from rollwright.config.sections import RolloutConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.experience.contract import MULTI_MODAL
from rollwright.experience.packed import rows_of, unpack_bytes
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.engine import WeightReceiver
from rollwright.inference.network import find_free_ports
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.weights.adapter import adapter_room
from rollwright.placement.rank_processes import load_ranks
from rollwright.placement.ranks import CALLS, TrainedRow, TrainRanks, trained_rows
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.model import resolve_device
from rollwright.training.publish_and_audit import Publication

#: Version of the weights, and the latest publication.
RankState = tuple[int, Publication | None]
#: A rank's rows: packed parts, the position of each row in the parts (``packed.rows_of``), and packed columns that the controller added.
PackedShare = tuple[list[Any], list[tuple[int, int]], bytes]


class TrainRank:
    """Joins the other ranks, loads its shard of the model, and executes the controller's calls.

    Args:
        place: this process's ``placement.ray_host.Place``.
    """

    def __init__(self, place: Any) -> None:
        self._address = place.address
        self._thread = ThreadPoolExecutor(1)  # for all calls, because torch keeps state per thread
        self._ranks: TrainRanks
        self._config: Any
        self._client: RemoteInferenceEngine | None = None

    def meeting_place(self) -> tuple[str, int]:
        """Return a host and port for the ranks' rendezvous, for use if this is rank 0."""
        return self._address, find_free_ports(1)[0]

    async def open(
        self, config: Any, spec: dict[str, Any], recover: str, rank: int, world: int, meeting: tuple[str, int]
    ) -> str:
        """Join the other ranks and load this rank's shard of the model. Returns the model's compute dtype."""
        variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}
        os.environ.update({name: str(value) for name, value in variables.items()})
        if interface := _interface_of(self._address):  # the host name may resolve to an address outside the cluster
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)

        def load() -> str:
            if config.cluster.threads is not None:
                torch.set_num_threads(config.cluster.threads)
            self._config = config
            with parallel.watched():
                parallel.join_processes(resolve_device(section_of(config).device))
                self._ranks = load_ranks(config, FinetuneSpec(**spec), Path(recover), shares_weights=False)
            return str(self._ranks.engine.compute_dtype).removeprefix("torch.")

        return await asyncio.get_running_loop().run_in_executor(self._thread, load)

    async def connect(self, rollout: RolloutConfig, addresses: list[str]) -> None:
        """On rank 0, connect to the servers that weights are published to. Collective."""

        def connect() -> None:
            engine: Any = WeightReceiver()  # a stand-in for rank 0's engine; never called
            if parallel.rank() == 0:
                backend = servers_of(rollout.backend)
                assert backend is not None
                room = adapter_room(self._config)
                engine = self._client = RemoteInferenceEngine(
                    backend, rollout, addresses=addresses, servers_are_replaced=True, adapters=room
                )
                engine.initialize()
            self._ranks.engine.connect_engine(engine)

        await asyncio.get_running_loop().run_in_executor(self._thread, connect)

    def use_servers(self, addresses: list[str]) -> None:
        """On rank 0, publish to these servers from now on. Also takes effect while a call runs."""
        if self._client is not None:  # otherwise ``connect`` gets them
            self._client.use_servers(addresses)

    def holders(self) -> tuple[int, list[str]] | None:
        """On rank 0, return the published version and the servers that hold it. Also answers while a call runs."""
        return None if self._client is None else (self._client.get_version(), self._client.weight_holders)

    def awaits_proof(self) -> bool:
        """On rank 0, return whether a server waits for a canary. Also answers while a call runs."""
        return self._client is not None and self._client.awaits_proof(self._ranks.engine.version)

    async def call(
        self, name: str, share: PackedShare | None, arguments: dict[str, Any]
    ) -> tuple[Any, list[TrainedRow], RankState]:
        """Execute one of ``CALLS``.

        Args:
            name: name of the call.
            share: this rank's rows; None for a call without rows.
            arguments: arguments of the call.

        Returns:
            The result (on rank 0, else None), the values computed for the tokens of each row, and the weights' version and publication.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, name, share, arguments)

    def _make(self, name: str, share: PackedShare | None, arguments: dict[str, Any]) -> tuple[Any, list[TrainedRow], RankState]:
        call, result, computed = CALLS[name], None, list[TrainedRow]()
        if name in ("save", "save_critic") and parallel.rank() == 0:
            trained = section_of(self._config)
            arguments["tokenizer"] = load_tokenizer(self._config.tokenizer_path or trained.path, trained.trust_remote_code)
        with parallel.watched():
            if share is None:
                result = call.make(self._ranks, **arguments)
            else:
                rows = tensor_container_to(_unpacked(*share), self._ranks.engine.device)
                result = call.make(self._ranks, rows, **arguments)
                computed = trained_rows(rows) if name == "policy_step" else []
        if name == "load_recover":  # the engine's state is not sent
            step, state = result
            result = step, {key: value for key, value in state.items() if key != arguments["part"]}
        engine = self._ranks.engine
        publication = engine.publication if isinstance(engine, FSDPPPOActor) else None
        return result if parallel.rank() == 0 else None, computed, (engine.version, publication)


def _unpacked(parts: list[Any], places: list[tuple[int, int]], written: bytes) -> Trajectory:
    """Unpack the rows of a share, keeping only the columns that a rank computes with."""
    rows = rows_of(parts, places)
    return {key: value for key, value in rows.items() if isinstance(value, torch.Tensor) or key == MULTI_MODAL} | unpack_bytes(
        written
    )[0]


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address, or None if none is found."""
    if address.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
