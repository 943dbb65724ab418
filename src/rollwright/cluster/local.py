"""This machine: starts the inference servers that a config asks for, and says where they listen."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import LocalServerConfig, SGLangConfig, VLLMConfig
from rollwright.errors import ConfigError
from rollwright.inference.launcher import Launcher
from rollwright.tracking.logging import getLogger

logger = getLogger("LocalCluster")

_SHARED_MEMORY = Path("/dev/shm")
_BACKENDS = ("builtin_process", "sglang", "vllm")


class LocalServers:
    """Inference servers on this machine, ended with this object or with this process.

    Attributes:
        addresses: ``host:port`` of each, healthy.
        weights_root: a directory that the servers may load weights from; removed at the end, whatever it is.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        *,
        model_path: str,
        logs: str | Path,
        sglang: SGLangConfig | None = None,
        vllm: VLLMConfig | None = None,
        count: int = 1,
        tensor_parallel: int = 1,
        base_gpu: int = 0,
        threads: int | None = None,
        weights_roots: tuple[str, ...] = (),
    ) -> None:
        """Start ``count`` servers of ``rollout.backend`` and wait until they are healthy.

        Args:
            rollout: backend, limits of the engine and ``setup_timeout``.
            model_path: of the model, where the server's config names none.
            logs: directory for their logs.
            sglang, vllm: the server's config.
            count: servers.
            tensor_parallel: GPUs of each.
            base_gpu: the first GPU.
            threads: compute threads of each ``rollwright serve-model``.
            weights_roots: further directories that ``rollwright serve-model`` may load weights from.

        Raises:
            ConfigError: the backend has no servers.
            EngineError: a server did not become healthy.
        """
        if rollout.backend not in _BACKENDS:
            raise ConfigError(
                f"rollout.backend {rollout.backend!r} has no servers to start; use one of {', '.join(_BACKENDS)}."
            )
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
        self.weights_root = Path(tempfile.mkdtemp(prefix="rollwright-", dir=parent))
        self._launcher = Launcher(logs)
        roots = [str(self.weights_root), *weights_roots]
        build = _builder(rollout, sglang, vllm, model_path, tensor_parallel, base_gpu, threads, roots)
        environment = {"OMP_WAIT_POLICY": "PASSIVE"}
        if rollout.api_key:  # in the environment, as command lines can be read by everybody on the machine
            environment |= {"ROLLWRIGHT_API_KEY": rollout.api_key, "VLLM_API_KEY": rollout.api_key}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        try:
            self._launcher.start(build, count, name=rollout.backend, environment=environment, shared=self.weights_root)
            self.addresses = self._launcher.wait_healthy(rollout.setup_timeout)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises:
        EngineError: all servers have ended.
        """
        self._launcher.check()

    def close(self) -> None:
        """End the servers and remove what was shared with them."""
        self._launcher.close()
        shutil.rmtree(self.weights_root, ignore_errors=True)

    def __enter__(self) -> LocalServers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _builder(
    rollout: RolloutConfig,
    sglang: SGLangConfig | None,
    vllm: VLLMConfig | None,
    model_path: str,
    tensor_parallel: int,
    base_gpu: int,
    threads: int | None,
    roots: list[str],
) -> Any:
    def of(section: Any, **changes: Any) -> Any:
        return dataclasses.replace(section, model_path=section.model_path or model_path, **changes)

    if rollout.backend == "builtin_process":
        local = LocalServerConfig(
            model_path=rollout.path or model_path,
            device=rollout.device,
            dtype=rollout.dtype,
            context_length=rollout.context_length,
            max_running_requests=rollout.max_running_requests,
            kv_cache_bytes=rollout.kv_cache_bytes,
            threads=threads,
            weights_roots=roots,
        )
        return lambda host, port, index: LocalServerConfig.build_cmd(local, host=host, port=port)
    if rollout.backend == "sglang":
        section = of(sglang or SGLangConfig())
        if section.implementation == "builtin":
            extra = {**section.extra_args, "weights-root": [*section.extra_args.get("weights-root", []), *roots]}
            if threads is not None:
                extra.setdefault("threads", threads)
            section = dataclasses.replace(section, extra_args=extra)
        return lambda host, port, index: SGLangConfig.build_cmd(
            section, tp_size=tensor_parallel, base_gpu_id=base_gpu + index * tensor_parallel, host=host, port=port
        )
    vllm_section = of(vllm or VLLMConfig())
    return lambda host, port, index: VLLMConfig.build_cmd(
        vllm_section, tp_size=tensor_parallel, base_gpu_id=base_gpu + index * tensor_parallel, host=host, port=port
    )
