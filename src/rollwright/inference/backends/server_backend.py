"""The protocol of one kind of inference server: its command line, its requests and its control calls.

A backend knows only the protocol. ``RemoteInferenceEngine`` finds and watches the servers, sends the requests and publishes weights, and
calls the backend for the parts that depend on the protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import BACKENDS
from rollwright.errors import ConfigError, EngineError, WeightUpdateError
from rollwright.inference.parameters import ParameterTable
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet

if TYPE_CHECKING:
    import torch

    from rollwright.inference.backends import ServerLaunch
    from rollwright.inference.weights.group import Bucket, GroupPlace, SendingHalf
    from rollwright.inference.weights.transfer import WeightUpdateMeta


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server reports about itself.

    Attributes:
        batch_invariant: True if the answer to a request does not depend on what else the server computes.
        run: name of the run that the key in requests belongs to, if the server knows the keys of several runs. The names of the run's
            adapters have to begin with it.
        checkpoint_names: names of the weights in the server's initial checkpoint, if known. Some servers report success even for
            weights that have other names.
    """

    batch_invariant: bool = False
    run: str | None = None
    checkpoint_names: frozenset[str] | None = None


class ServerBackend(ABC):
    """One kind of inference server. Subclass it to support servers that have their own protocol.

    Attributes:
        kind: name of the servers in messages.
        generate_path: path of the generation endpoint.
        parameters: how generation parameters are sent.
        refused_inputs: request fields that these servers do not accept, with the alternative to suggest.
        transports: ways to receive weights (``WeightUpdateMeta.type``).
        needs_gpu: True if each server computes on ``rollout.tensor_parallel`` GPUs.
        finds_servers: True if a run can use servers that are already running; if False, every run starts its own.
        pauses_running_requests: True if a pause interrupts requests even under ``on_weight_update: wait``; the engine then waits for its
            own requests before it pauses a server.
        ask: makes one synchronous call to a server; see ``ServerSet.ask``.
        records_experts_if: what a server has to be started with, so that its answers have ``routed_experts`` (``rollout.routing_replay``).
        facts: what the servers reported in ``on_connected``, by address.
    """

    kind = "remote"
    generate_path = "/generate"
    parameters = ParameterTable({})
    refused_inputs: Mapping[str, str] = {
        "position_ids": "use the built-in engine or rollwright serve-model",
        "branch_ids": "use the built-in engine or rollwright serve-model",
        "multi_modal": "use the built-in engine in this process",
        "image_data": "use the built-in engine or an SGLang server",
        "top_logprobs": "use the built-in engine, SGLang or vLLM",
        "prompt_logprobs_from": "use the built-in engine, SGLang or vLLM",
    }
    transports: tuple[str, ...] = ("shared", "disk")
    needs_gpu = True
    finds_servers = True
    pauses_running_requests = False
    records_experts_if = "its backend does not return them, so set rollout.routing_replay to false"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "ways" in vars(cls):
            raise ConfigError(f"{cls.__name__}.ways: this attribute of a backend is called `transports` now; rename it.")

    def __init__(self, config: RolloutConfig, servers: ServerSet) -> None:
        self.config = config
        self.servers = servers
        self.ask = servers.ask
        self.facts: dict[str, Any] = {}

    # -- servers -------------------------------------------------------------------------------------------------------

    @classmethod
    def command(cls, launch: ServerLaunch) -> list[str]:
        """Return the command line of one server.

        Raises:
            ConfigError: these servers cannot be started here.
        """
        raise ConfigError(
            f"rollout.backend {launch.rollout.backend!r} has no servers to start: {cls.__name__} has no command. Start servers and "
            "name them in rollout.addresses."
        )

    @property
    def is_batch_invariant(self) -> bool:
        """True if every server reports that it is batch-invariant."""
        return bool(self.facts) and all(facts.batch_invariant for facts in self.facts.values())

    def on_connected(self, server: Server) -> None:  # noqa: B027
        """Inspect a server that has just become healthy, for the first time or after a failure."""

    @abstractmethod
    def pause_server(self, server: Server) -> None:
        """Stop sampling. Running requests keep their tokens."""

    @abstractmethod
    def resume_server(self, server: Server) -> None:
        """Continue after ``pause_server``."""

    def release_memory(self, server: Server, *, keep_weights: bool) -> None:
        """Have a paused server without running requests give back the memory of its cache, and of its weights.

        Args:
            server: the server.
            keep_weights: the weights are needed again, so that a server may at most move them to the host's memory.

        Raises:
            EngineError: the server cannot.
        """
        raise EngineError(f"{self.kind} servers cannot give their memory back: leave rollout.colocate out.")

    def restore_memory(self, server: Server, parts: Sequence[str], *, kept_weights: bool) -> None:
        """Allocate again what ``release_memory`` gave back.

        Args:
            server: the server.
            parts: ``weights``, whose content is undefined afterwards unless they were kept, ``kv_cache``, or both.
            kept_weights: what ``keep_weights`` was.
        """
        raise EngineError(f"{self.kind} servers cannot give their memory back: leave rollout.colocate out.")

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, request: ModelRequest, where: str) -> bool:
        """Check that these servers can serve a request as specified.

        Args:
            request: the request.
            where: description of the servers in messages.

        Returns:
            True if the returned log-probabilities will differ from those that training needs.

        Raises:
            EngineError: the servers cannot serve the request; the message names the field.
        """
        for name, remedy in self.refused_inputs.items():
            if getattr(request, name) is not None:
                raise EngineError(f"{name} cannot travel to {where}; {remedy}.")
        return self.parameters.check(request.gconfig, where, accept_shifted=self.config.accept_shifted_logprobs)

    @abstractmethod
    def payload(self, request: ModelRequest, wire_id: str, server: Server) -> dict[str, Any]:
        """Build the body of a generation request; ``abort_on_server`` identifies the request by ``wire_id``."""

    @abstractmethod
    def response(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """Parse a server's answer, including the weight version that sampled each token."""

    def abort_on_server(self, server: Server, wire_ids: list[str]) -> None:  # noqa: B027
        """End requests early; they return the tokens sampled so far. The default implementation lets them finish."""

    # -- weights -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def read_version(self, server: Server) -> str | None:
        """Return the server's version label of its weights."""

    def label_version(self, server: Server, version: int) -> None:
        """Label the server's weights with a version. Needed only if servers start with a label that is not a number."""
        raise EngineError(f"The {self.kind} server at {server.address} has no number for its weights, and takes none.")

    def version_number(self, label: Any) -> int:
        """Convert a server's version label to a number.

        Raises:
            EngineError: the label is not a number, which means that something else has changed the server's weights.
        """
        try:
            return int(label)
        except (TypeError, ValueError):
            raise EngineError(
                f"The {self.kind} server names its weights {label!r}, which is no version number: something else changed them. "
                "Publish weights again, or restart the server."
            ) from None

    def checks_digest(self, server: Server) -> bool:
        """Return whether a server compares the files that it loads with their digest, as ``rollwright serve-model`` does."""
        return False

    @abstractmethod
    def load_from_disk(self, server: Server, directory: str, version: int, digest: str | None) -> None:
        """Have one server load safetensors from a directory. Afterwards ``read_version`` returns ``version``.

        Args:
            server: a paused server.
            directory: a model directory with ``*.safetensors``.
            version: version of these weights.
            digest: digest of the files' content (``weights.files.content_digest``), for a server that checks it (``checks_digest``).
                With other servers, only the audit would find a difference.

        Raises:
            EngineError: the server did not load the weights.
        """

    def load_adapter(self, server: Server, name: str, directory: str) -> None:
        """Have one server load an adapter beside what it holds. Requests may run meanwhile.

        Args:
            server: the server.
            name: name that requests will give in ``ModelRequest.lora_name``; no adapter on the server has it.
            directory: a PEFT directory, unchanged as long as the server holds the adapter.

        Raises:
            UpdateRefusedError: the server did not load the adapter.
        """
        raise WeightUpdateError(
            f"The {self.kind} servers take no adapters: {type(self).__name__} has no load_adapter. Train all weights (leave "
            "actor.lora out), or use SGLang, vLLM or rollwright serve-model."
        )

    def unload_adapter(self, server: Server, name: str) -> None:  # noqa: B027 - servers without ``load_adapter`` have none
        """Have one server drop an adapter. The call may block until no request uses the adapter."""

    def loaded_adapters(self, server: Server) -> list[str]:
        """Return the names of the adapters that a server holds: the models in ``/v1/models`` that have a ``parent``."""
        models = self.ask(server, "GET", "/v1/models", timeout=30.0).get("data") or []
        return [str(model["id"]) for model in models if model.get("parent")]

    def checksums(self, server: Server) -> dict[str, str]:
        """Return a checksum of each tensor that a server computes with, by the server's name for it; empty if it gives none."""
        return {}

    def held_dtype(self, server: Server) -> torch.dtype | None:
        """Return the type of a server's weights, or None if it is unknown."""
        return None

    def weights_roots(self, launched: list[str]) -> list[str]:
        """Return the directories that every server may read weights from; an empty list means any.

        Args:
            launched: directories shared with servers that were started for this engine.
        """
        return launched


class BroadcastBackend(ServerBackend):
    """Servers that also receive weights over a distributed group (``xccl``, ``weights/broadcast.py``)."""

    transports = ("shared", "disk", "xccl")

    @abstractmethod
    def ranks_of(self, server: Server, meta: WeightUpdateMeta) -> int:
        """Return the number of ranks that a server has in the group."""

    @abstractmethod
    def group_backend(self, servers: list[Server], meta: WeightUpdateMeta) -> str:
        """Return ``nccl`` or ``gloo``: the one that ``meta`` names, or the one that suits the servers' devices."""

    def invitation(self) -> str:
        """Return what servers need, besides the address, to connect to the sender of a new group."""
        return ""

    @abstractmethod
    def sending_half(self, place: GroupPlace) -> SendingHalf:
        """Form the group as rank 0, and return when all ranks have joined."""

    @abstractmethod
    def join_group(self, server: Server, place: GroupPlace) -> None:
        """Have a server's ranks join, and return when the group is formed."""

    def begin_receiving(self, server: Server, version: int) -> None:
        """Prepare a server to receive buckets of weights."""

    @abstractmethod
    def receive_bucket(self, server: Server, group_name: str, bucket: Bucket, version: int) -> None:
        """Have a server receive a bucket of weights, and return when the server has loaded it."""

    def end_receiving(self, server: Server, version: int) -> None:
        """Finish the update on a server after the last bucket."""

    def forget_group(self, server: Server, name: str) -> None:
        """Have a server leave a group, if it can do so without waiting for ranks that are gone."""


def servers_of(backend_name: str) -> type[ServerBackend] | None:
    """Return the class of a backend that has servers, or None if the backend's engine runs in the trainer's process.

    Raises:
        ConfigError: there is no such backend.
    """
    backend = BACKENDS.get(backend_name)
    return backend if issubclass(backend, ServerBackend) else None
