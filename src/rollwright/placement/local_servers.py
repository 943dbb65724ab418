"""Inference servers on this machine: started as the config says, restarted if they are lost, and ended with the run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rollwright.atomic import write_json
from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import ServerConfig
from rollwright.errors import ConfigError
from rollwright.inference.backends import BACKENDS, ServerLaunch
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.launcher import Launcher
from rollwright.inference.weights.adapter import AdapterRoom
from rollwright.inference.weights.group import nccl_version_of, refuse_other_nccl
from rollwright.tracking.logging import getLogger

logger = getLogger("LocalCluster")

_SHARED_MEMORY = Path("/dev/shm")
_OWNED = "owned"  # a file in a shared directory, locked by the process that made it
_DRAFT_SECONDS = 600.0  # a draft older than this was left behind by a killed process


class LocalServers(Launcher):
    """Inference servers on this machine. They end with this object or with this process.

    Attributes:
        addresses: ``host:port`` of each server after the first start.
        weights_root: a directory that the servers may load weights from; ``close`` removes it.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        *,
        model_path: str,
        logs: str | Path,
        count: int = 1,
        tensor_parallel: int = 1,
        base_gpu: int = 0,
        threads: int | None = None,
        weights_roots: tuple[str, ...] = (),
        deterministic: bool = False,
        host: str = "127.0.0.1",
        adapters: AdapterRoom | None = None,
        **sections: Any,
    ) -> None:
        """Start ``count`` servers of ``rollout.backend`` and wait until they are healthy.

        Args:
            rollout: section with the backend, the engine's limits and ``setup_timeout``.
            model_path: the model to load, unless the server's section names one.
            logs: directory for the servers' logs.
            count: number of servers.
            tensor_parallel: GPUs per server.
            base_gpu: first GPU.
            threads: compute threads of each ``rollwright serve-model``.
            weights_roots: further directories that ``rollwright serve-model`` may load weights from.
            deterministic: whether answers must not depend on the rest of the batch.
            adapters: the adapters that the servers have to hold. None if whole models are published.
            host: address that the servers listen on; set ``rollout.api_key`` if this is not a loopback address.
            sections: the config sections that describe servers, by backend: ``sglang``, ``vllm``.

        Raises:
            ConfigError: the backend has no servers.
            WeightUpdateError: weights are to be broadcast, and the servers' environment has another version of NCCL than this one.
            EngineError: a server did not become healthy.
        """
        backend = BACKENDS.get(rollout.backend)
        if not issubclass(backend, ServerBackend):
            raise ConfigError(
                f"rollout.backend {rollout.backend!r} has no servers to start: it computes in the trainer's process."
            )
        section = sections.get(rollout.backend)
        if rollout.weight_update == "xccl" and isinstance(section, ServerConfig) and section.python:
            refuse_other_nccl(nccl_version_of(section.python, section.env), f"the environment of {section.python}")
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
        if parent is not None:
            remove_abandoned(parent)
        made = Path(tempfile.mkdtemp(prefix=".rollwright-", dir=parent))
        self._owned = (made / _OWNED).open("w")
        fcntl.flock(self._owned, fcntl.LOCK_EX)
        self.weights_root = made.rename(
            made.with_name(made.name[1:])
        )  # locked before it gets the name that ``remove_abandoned`` looks for
        super().__init__(logs, host=host)
        roots = [str(self.weights_root), *weights_roots]
        key_file: Path | None = None
        if rollout.api_key:
            key_file = self.weights_root / "key.yaml"
            write_json(key_file, {"api-key": rollout.api_key}, mode=0o600)  # JSON is YAML

        def command(host: str, port: int, index: int) -> list[str]:
            first = base_gpu + index * tensor_parallel
            facts = host, port, rollout, model_path, first, tensor_parallel, threads, roots, sections, key_file, deterministic
            return backend.command(ServerLaunch(*facts, adapters))

        environment = {"OMP_WAIT_POLICY": "PASSIVE"}
        if rollout.api_key:  # in the environment, because every user of this machine can read command lines
            environment |= {"ROLLWRIGHT_API_KEY": rollout.api_key, "VLLM_API_KEY": rollout.api_key}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        try:
            name = re.split("[.:]", rollout.backend)[-1]  # of an import path, only the class name
            self.start(command, count, name=name, environment=environment, shared=self.weights_root)
            self.addresses = self.wait_healthy(rollout.setup_timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers and remove what was shared with them."""
        super().close()
        shutil.rmtree(self.weights_root, ignore_errors=True)
        self._owned.close()


def remove_abandoned(parent: Path) -> None:
    """Remove the shared directories of processes that were killed together with their supervisors, for example by Ray."""
    for path in parent.glob(f"rollwright-*/{_OWNED}"):
        try:
            if path.parent.lstat().st_uid != os.geteuid():  # every user may write to ``parent``
                continue
            with path.open("a") as owned:
                fcntl.flock(owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # its owner is alive, or another process has just removed it
            continue
    for draft in parent.glob(".rollwright-*"):
        with contextlib.suppress(OSError):
            found = draft.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _DRAFT_SECONDS:
                shutil.rmtree(draft)
