"""The inference backends: the kinds of engine that a run can sample from, in the table ``BACKENDS``.

An entry is a class. A ``ServerBackend`` describes servers: their launch command, their protocol and how they receive weights;
``RemoteInferenceEngine`` connects to them. Any other entry is an engine that computes in the trainer's process and is constructed as
``entry(model, tokenizer)``.

``rollout.backend`` is the name of an entry in the table, including those that plugins register with ``@BACKENDS.register("name")``, or an
import path such as ``my_package.my_module:MyServers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import BACKENDS
from rollwright.inference.weights.adapter import AdapterRoom

__all__ = ["BACKENDS", "ServerLaunch"]


@dataclass(frozen=True)
class ServerLaunch:
    """Settings of a server that a run starts; a backend's ``command`` turns them into a command line.

    Attributes:
        host, port: address to listen on.
        rollout: the ``rollout`` section.
        model_path: the model, unless the server's own section names one.
        first_gpu, gpus: index of the server's first GPU, and number of its GPUs.
        threads: number of compute threads. None leaves the choice to the server.
        weights_roots: directories that the server may load weights from.
        sections: the sections of the experiment that describe servers, by backend (``sglang``, ``vllm``).
        key_file: YAML file with the ``api-key`` that requests will carry, for servers that read the key neither from
            ROLLWRIGHT_API_KEY nor from VLLM_API_KEY. None means that requests carry no key.
        deterministic: require that the answer to a request does not depend on what else is computed.
        adapters: the adapters that the server has to hold. None if a run publishes whole models.
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
    adapters: AdapterRoom | None = None

    def section(self, backend: str, default: Any, context: str) -> Any:
        """Return the section that describes a backend's servers, completed from the ``rollout`` section.

        Args:
            backend: name of the section.
            default: section to use if the experiment has none.
            context: the section's name for the context length.
        """
        section = self.sections.get(backend) or default
        return replace(
            section,
            model_path=section.model_path or self.model_path,
            dtype=self.rollout.dtype if section.dtype == "auto" else section.dtype,
            **{context: getattr(section, context) or self.rollout.context_length},
        )
