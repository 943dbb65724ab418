"""A client of vLLM servers: tokens in and out over ``/inference/v1/generate``, which also says each token's version.

The server has to be started with ``--enable-scale-out``, ``--logprobs-mode processed_logprobs`` and
``VLLM_SERVER_DEV_MODE=1``; ``VLLMConfig.build_cmd`` does so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.connections import ServerRefusedError
from rollwright.inference.parameters import check_parameters, vllm_sampling_params
from rollwright.inference.request import ModelRequest, ModelResponse, versions_of_spans
from rollwright.inference.router import Server
from rollwright.inference.weights.publication import PublishingClient
from rollwright.tracking.logging import getLogger

logger = getLogger("VLLMClient")

#: vLLM's names of what happens to requests that run while weights change. Whether they keep their old cache is decided by
#: the reset of the prefix cache after the update.
PAUSE_MODES = {"recompute": "keep", "keep": "keep", "wait": "wait"}
#: vLLM puts this before the request id that a client gives.
_ENGINE_ID_PREFIX = "generate-tokens-"


def _setting(config: Any, section: str, name: str) -> Any:
    """One setting of the server's config, or None where it does not say."""
    part = config.get(section) if isinstance(config, dict) else None
    return part.get(name) if isinstance(part, dict) else None


class VLLMClient(PublishingClient):
    """Tokens in and out over ``/inference/v1/generate``."""

    kind = "vllm"
    generate_path = "/inference/v1/generate"

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._dies_of_seeds: set[str] = set()

    def _on_connected(self, server: Server) -> None:
        try:
            self.connections.request("GET", f"{server.url}/weight_info", timeout=30.0)
        except ServerRefusedError as error:
            raise EngineError(
                f"The vLLM server at {server.address} does not say the version of its weights ({error}). Start it with "
                "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, as VLLMConfig.build_cmd does."
            ) from error
        config = self.connections.request("GET", f"{server.url}/server_info?config_format=json", timeout=120.0).get(
            "vllm_config"
        )
        mode = _setting(config, "model_config", "logprobs_mode")
        if mode is not None and mode != "processed_logprobs":
            raise EngineError(
                f"The vLLM server at {server.address} gives {mode}, which are not those of the temperature that tokens are "
                "sampled at. Start it with --logprobs-mode processed_logprobs, as VLLMConfig.build_cmd does."
            )
        is_cpu = "cpu" in (_setting(config, "device_config", "device_type"), _setting(config, "device_config", "device"))
        if is_cpu and _setting(config, "scheduler_config", "enable_chunked_prefill"):
            self._dies_of_seeds.add(server.address)
            logger.warning(
                "The vLLM server at %s runs on a CPU with chunked prefill, where a request with a seed can end it: seeds are not "
                "sent. Start it with --no-enable-chunked-prefill (vllm.device: cpu) to have them.",
                server.address,
            )

    def _seed(self, request: ModelRequest) -> int | None:
        """The seed that is sent: none where it could end the server."""
        if self._dies_of_seeds:
            return None
        return request.seed if request.gconfig.seed is None else request.gconfig.seed

    def _check(self, request: ModelRequest, server: str) -> bool:
        for name, remedy in {
            "position_ids": "use the built-in engine or rollwright serve-model",
            "branch_ids": "use the built-in engine or rollwright serve-model",
            "multi_modal": "use the built-in engine in this process",
            "image_data": "use the built-in engine or an SGLang server",
        }.items():
            if getattr(request, name) is not None:
                raise EngineError(f"{name} cannot travel to the vLLM server at {server}; {remedy}.")
        if request.gconfig.seed is not None and self._dies_of_seeds:
            raise EngineError(
                f"gconfig.seed={request.gconfig.seed} cannot be honoured: the CPU build of vLLM at "
                f"{', '.join(sorted(self._dies_of_seeds))} ends when a request with a seed is prefilled in parts. Start it with "
                "--no-enable-chunked-prefill (vllm.device: cpu), or leave the seed out."
            )
        return check_parameters(request.gconfig, "vllm", where=server, accept_shifted=self.config.accept_shifted_logprobs)

    def _payload(self, request: ModelRequest, wire_id: str, server: Server) -> dict[str, Any]:
        seed = self._seed(request)
        payload: dict[str, Any] = {
            "request_id": wire_id,
            "token_ids": request.input_ids,
            "sampling_params": {
                key: value for key, value in vllm_sampling_params(request.gconfig, seed).items() if value is not None
            },
        }
        if request.lora_name is not None:
            payload["model"] = request.lora_name
        return payload

    def _response(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        (choice,) = data["choices"]
        output_ids = [int(token) for token in choice["token_ids"] or []]
        content = (choice.get("logprobs") or {}).get("content") or []
        if [entry["token_id"] for entry in content] != output_ids:
            raise EngineError(
                f"The vLLM server returned {len(output_ids)} tokens and log-probabilities for {len(content)} other tokens; a request "
                "needs both from one sampling."
            )
        logprobs = [float(entry["logprob"]) for entry in content]
        if any(not math.isfinite(value) or value <= -9999.0 for value in logprobs):
            raise EngineError(f"The vLLM server returned log-probabilities that are not finite: {logprobs[:8]}.")
        spans = choice.get("weight_versions")
        if not spans and output_ids:
            raise EngineError(
                "The vLLM server gives no weight_versions, so the versions of its tokens are unknown. Use a version whose "
                "/inference/v1/generate returns them (0.32 does)."
            )
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=output_ids,
            output_logprobs=logprobs,
            output_versions=versions_of_spans(spans or [], len(output_ids), self.version_number),
            stop_reason=choice["finish_reason"],
            stop_match=choice.get("stop_reason"),
            temperature=request.gconfig.effective_temperature,
            rid=request.rid,
            seed=self._seed(request),
        )

    # -- control -------------------------------------------------------------------------------------------------------

    def _pause_server(self, server: Server) -> None:
        mode = PAUSE_MODES[self.config.on_weight_update]
        limit = None if mode == "wait" else self._control_seconds  # what runs may take as long as a request may
        self.connections.request("POST", f"{server.url}/pause?mode={mode}", timeout=limit)

    def _resume_server(self, server: Server) -> None:
        self.connections.request("POST", f"{server.url}/resume", timeout=self._control_seconds)

    def _abort_on_server(self, server: Server, wire_ids: list[str] | None) -> None:
        ids = [] if wire_ids is None else [_ENGINE_ID_PREFIX + wire_id for wire_id in wire_ids]
        body = {"request_ids": ids}
        self.connections.request("POST", f"{server.url}/abort_requests", body, timeout=self._control_seconds)

    def _read_version(self, server: Server) -> str | None:
        return self.connections.request("GET", f"{server.url}/weight_info", timeout=30.0).get("weight_version")

    def _label_version(self, server: Server, version: int) -> None:
        body = {"new_version": str(version)}
        self.connections.request("POST", f"{server.url}/update_weight_version", body, timeout=self._control_seconds)

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights_from_disk(self, directory: str, version: int, digest: str | None = None) -> list[str]:
        """Have every server reload its weights from a directory that it can read.

        vLLM does not know the content's digest, and a server that keeps a packed copy of a tied output head answers 200 and
        computes with old weights: the audit that follows every publication compares log-probabilities for that reason.

        Args:
            directory: a model directory with ``*.safetensors``.
            version: of these weights.
            digest: not used by vLLM.

        Returns:
            Addresses of the servers that confirmed.

        Raises:
            WeightUpdateError: no server took the weights.
        """

        def update(server: Server) -> None:
            self._load_from_disk(server, directory, version)

        return self.apply_update(version, update, restore=update)

    def _load_from_disk(self, server: Server, directory: str, version: int) -> None:
        url = server.url
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        try:
            self.connections.request("POST", f"{url}/collective_rpc", body)
            self._label_version(server, version)
            recompute = "true" if self.config.on_weight_update == "recompute" else "false"
            self.connections.request("POST", f"{url}/reset_prefix_cache?reset_running_requests={recompute}")
        except ServerRefusedError as error:
            raise WeightUpdateError(f"The vLLM server at {server.address} did not load version {version}: {error}") from error
        held = self._read_version(server)
        if str(held) != str(version):
            raise WeightUpdateError(f"The vLLM server at {server.address} says it holds {held!r} after an update to {version}.")

    def broadcast_weights(self, named: Any, version: int, meta: Any) -> list[str]:
        """Refused: vLLM's weight transfer engines speak protocols of their own.

        Raises:
            WeightUpdateError: always; it names the ways that work.
        """
        raise WeightUpdateError("vLLM servers take weights from files: use WeightUpdateMeta.from_disk(path) or .shared().")
