"""The inference backends: the kinds of engine that a run may sample from, in the table ``BACKENDS``.

An entry is the class of an engine. A ``RemoteClient`` is the client of servers; it says by class attributes and methods what its
servers need: the launch command, the table of generation parameters, the ways to receive weights, and GPUs. Any other engine
computes in the trainer's process, and is made as ``entry(model, tokenizer)``.

``rollout.backend`` names an entry: one of the table, one that a plugin registered with ``@BACKENDS.register("name")``, or an
import path such as ``my_package.my_module:MyClient``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import BACKENDS

__all__ = ["BACKENDS", "ServerLaunch"]


@dataclass(frozen=True)
class ServerLaunch:
    """What a run asks of a server that is to be started; a backend's ``command`` makes a command line of it.

    Attributes:
        host, port: where it listens.
        rollout: the ``rollout`` section.
        model_path: of the model, where the server's own section names none.
        first_gpu, gpus: its GPUs.
        threads: compute threads; None: its own choice.
        weights_roots: directories that it may load weights from.
        sections: the sections of the experiment that describe servers, by backend (``sglang``, ``vllm``).
        key_file: YAML with the ``api-key`` that requests will carry, for servers that read it neither from ROLLWRIGHT_API_KEY
            nor from VLLM_API_KEY; None: they carry none.
        deterministic: what a request is answered must not depend on what else is computed.
    """

    host: str
    port: int
    rollout: RolloutConfig
    model_path: str
    first_gpu: int = 0
    gpus: int = 1
    threads: int | None = None
    weights_roots: list[str] = field(default_factory=list)
    sections: Mapping[str, Any] = field(default_factory=dict)
    key_file: Path | None = None
    deterministic: bool = False
