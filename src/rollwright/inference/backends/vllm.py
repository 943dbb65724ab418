"""vLLM's protocol: tokens in and tokens out over ``/inference/v1/generate``, which also reports each token's weight version.

The server must be started with ``--enable-scale-out``, ``--logprobs-mode processed_logprobs`` and ``VLLM_SERVER_DEV_MODE=1``;
``VLLMConfig.build_cmd`` does so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import VLLMConfig
from rollwright.errors import ConfigError, EngineError, WeightUpdateError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.server_backend import BroadcastBackend, ServerFacts
from rollwright.inference.connections import ServerRefusedError, UpdateRefusedError
from rollwright.inference.parameters import ParameterTable, Wire
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse, TopTokens, versions_of_spans
from rollwright.inference.routed_experts import record_of_npy
from rollwright.inference.router import Server
from rollwright.inference.weights.adapter import AdapterRoom
from rollwright.inference.weights.files import checkpoint_names
from rollwright.inference.weights.group import Bucket, GroupPlace, SendingHalf, refuse_other_nccl
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.inference.weights.vllm_group import VLLMGroup
from rollwright.tracking.logging import getLogger

logger = getLogger("VLLMClient")

#: vLLM's pause mode for each ``on_weight_update``. Whether running requests keep their old cache is decided by the reset of the prefix
#: cache after the update.
PAUSE_MODES = {"recompute": "keep", "keep": "keep", "wait": "wait"}
#: vLLM puts this prefix before a client's request id.
_ENGINE_ID_PREFIX = "generate-tokens-"
#: Ranks that ``--max-lora-rank`` accepts.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Command-line option that lets a server receive weights over NCCL.
_TRANSFERS = {"weight-transfer-config": '{"backend": "nccl"}'}

#: NCCL in the list of packages that a server reports.
_NCCL_PACKAGE = re.compile(r"nvidia-nccl-cu\d+(?:==|\s+)([\d.]+)")


def _scores(request: ModelRequest, content: list[Any], prompt: list[Any] | None) -> dict[str, Any]:
    """Return the additional log-probabilities that the request asks for, as fields of a ``ModelResponse``."""
    scores: dict[str, Any] = {}
    count, start = request.top_logprobs or 0, request.prompt_logprobs_from
    if count:
        tops = ([(one["token_id"], one["logprob"]) for one in entry["top_logprobs"]] for entry in content)
        scores["output_top_logprobs"] = [_most_likely(top, count) for top in tops]
    if start is not None:
        scored = list(zip(request.input_ids, prompt or [], strict=True))[start:]
        scores["input_logprobs"] = [None if entry is None else entry[str(token)]["logprob"] for token, entry in scored]
        if count:
            scores["input_top_logprobs"] = [
                None if entry is None else _most_likely([(int(token), one["logprob"]) for token, one in entry.items()], count)
                for _, entry in scored
            ]
    return scores


def _most_likely(tokens: TopTokens, count: int) -> TopTokens:
    return sorted(tokens, key=lambda one: -one[1])[:count]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VLLMFacts(ServerFacts):
    """What a server reports about itself."""

    ranks: int = 1  # of all data-parallel copies together
    transfer: str | None = None  # backend of the weight-transfer engine, if the server has one
    dtype: torch.dtype | None = None
    crashes_on_seeds: bool = False
    nccl: str | None = None  # version of the installed package


def _facts(config: Mapping[str, Any], environment: Mapping[str, Any], system: Mapping[str, Any]) -> VLLMFacts:
    parts = ("parallel", "model", "weight_transfer", "device", "scheduler")
    parallel, model, transfer, device, scheduler = (config.get(f"{part}_config") or {} for part in parts)
    sizes = [int(parallel.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline", "data")]
    workers = int(parallel.get("world_size") or sizes[0] * sizes[1])
    dtype = getattr(torch, str(model.get("dtype")).removeprefix("torch."), None)
    nccl = _NCCL_PACKAGE.search(str(system.get("pip_packages")))
    is_cpu = "cpu" in (device.get("device_type"), device.get("device"))
    return VLLMFacts(
        ranks=workers * sizes[2],
        transfer=transfer.get("backend"),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        batch_invariant=bool(environment.get("VLLM_BATCH_INVARIANT")),
        checkpoint_names=checkpoint_names(model.get("model")),
        crashes_on_seeds=is_cpu and bool(scheduler.get("enable_chunked_prefill")),
        nccl=nccl[1] if nccl else None,
    )


def _adapter_options(room: AdapterRoom) -> dict[str, Any]:
    """Return the options of a server that holds adapters.

    Raises:
        ConfigError: vLLM has no adapters of this rank.
    """
    ranks = [rank for rank in _LORA_RANKS if rank >= room.rank]
    if not ranks:
        raise ConfigError(
            f"actor.lora.rank is {room.rank}, and vLLM (rollout.backend) takes at most {_LORA_RANKS[-1]}: lower it."
        )
    return {"enable-lora": True, "max-loras": room.in_use, "max-cpu-loras": room.loaded, "max-lora-rank": ranks[0]}


class VLLMBackend(BroadcastBackend):
    """Servers that generate at ``/inference/v1/generate``."""

    kind = "vllm"
    generate_path = "/inference/v1/generate"
    records_experts_if = "start it with --enable-return-routed-experts, which vLLM has for mixtures of experts from 0.32 on"
    refused_inputs: Mapping[str, str] = {
        name: remedy for name, remedy in BroadcastBackend.refused_inputs.items() if "logprobs" not in name
    }
    parameters = ParameterTable(
        {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": Wire("min_tokens", shifts_logprobs=True),
            "temperature": "temperature",
            "top_p": Wire("top_p", shifts_logprobs=True),
            "top_k": Wire("top_k", shifts_logprobs=True),
            "min_p": Wire("min_p", shifts_logprobs=True),
            "frequency_penalty": Wire("frequency_penalty", shifts_logprobs=True),
            "presence_penalty": Wire("presence_penalty", shifts_logprobs=True),
            "repetition_penalty": Wire("repetition_penalty", shifts_logprobs=True),
            "logit_bias": Wire("logit_bias", shifts_logprobs=True),
            "json_schema": Wire("structured_outputs", shifts_logprobs=True, inside="json"),
            "regex": Wire("structured_outputs", shifts_logprobs=True, inside="regex"),
            "grammar": Wire(
                None, refusal=lambda gconfig: "which grammars it takes depends on its settings; use json_schema or regex"
            ),
            "stop": "stop",
            "stop_token_ids": "stop_token_ids",
            "ignore_eos": "ignore_eos",
            "skip_special_tokens": "skip_special_tokens",
            "seed": "seed",
        },
        all_tokens=0,
        always={"include_stop_str_in_output": True, "logprobs": 0},
    )

    @classmethod
    def command(cls, launch: ServerLaunch) -> list[str]:
        """See ``VLLMConfig.build_cmd``."""
        section: VLLMConfig = launch.section("vllm", VLLMConfig(), "max_model_len")
        extra = _TRANSFERS if launch.rollout.weight_update == "xccl" else {}
        if not launch.rollout.prefix_cache:
            extra = {**extra, "no-enable-prefix-caching": True}
        if launch.rollout.colocate:
            extra = {**extra, "enable-sleep-mode": True}
        if launch.rollout.routing_replay:
            extra = {**extra, "enable-return-routed-experts": True}
        environment = {"VLLM_BATCH_INVARIANT": "1"} if launch.deterministic else {}
        if launch.rollout.routing_replay:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that records experts
        if launch.adapters is not None:
            extra = extra | _adapter_options(launch.adapters)
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        section = dataclasses.replace(section, extra_args=extra | section.extra_args, env=environment | section.env)
        return VLLMConfig.build_cmd(section, launch.gpus, launch.first_gpu, launch.host, launch.port)

    @property
    def is_batch_invariant(self) -> bool:
        """True if every server is batch-invariant and can be sent seeds; without a seed, a server draws from its own generator."""
        return super().is_batch_invariant and not self.crash_on_seeds

    @property
    def crash_on_seeds(self) -> list[str]:
        """Addresses of the servers that a request with a seed could crash."""
        return sorted(address for address, facts in self.facts.items() if facts.crashes_on_seeds)

    def on_connected(self, server: Server) -> None:
        """Check that the server reports versions and returns the log-probabilities that training needs."""
        try:
            self.ask(server, "GET", "/weight_info", timeout=30.0)
        except ServerRefusedError as error:
            raise EngineError(
                f"The vLLM server at {server.address} does not say the version of its weights ({error}). Start it with "
                "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, as VLLMConfig.build_cmd does."
            ) from error
        info = self.ask(server, "GET", "/server_info?config_format=json", timeout=120.0)
        said = info.get("vllm_config")
        config = said if isinstance(said, dict) else {}  # other versions return text
        mode = (config.get("model_config") or {}).get("logprobs_mode")
        if mode is not None and mode != "processed_logprobs":
            raise EngineError(
                f"The vLLM server at {server.address} gives {mode}, which are not those of the temperature that tokens are "
                "sampled at. Start it with --logprobs-mode processed_logprobs, as VLLMConfig.build_cmd does."
            )
        facts = self.facts[server.address] = _facts(config, info.get("vllm_env") or {}, info.get("system_env") or {})
        if facts.crashes_on_seeds:
            logger.warning(
                "The vLLM server at %s runs on a CPU with chunked prefill, where a request with a seed can end it: seeds are not "
                "sent. Start it with --no-enable-chunked-prefill (vllm.device: cpu) to have them.",
                server.address,
            )

    def _seed(self, request: ModelRequest) -> int | None:
        """Return the seed to send, or None if a seed could crash a server."""
        return None if self.crash_on_seeds else request.effective_seed

    def check(self, request: ModelRequest, where: str) -> bool:
        """See ``ServerBackend.check``; also rejects a seed that could crash a server."""
        if request.gconfig.seed is not None and self.crash_on_seeds:
            raise EngineError(
                f"gconfig.seed={request.gconfig.seed} cannot be honoured: the CPU build of vLLM at "
                f"{', '.join(self.crash_on_seeds)} ends when a request with a seed is prefilled in parts. Start it with "
                "--no-enable-chunked-prefill (vllm.device: cpu), or leave the seed out."
            )
        if request.prompt_logprobs_from is not None and request.gconfig.effective_temperature != 1.0:
            raise EngineError(
                f"prompt_logprobs_from cannot be honoured by {where} at temperature {request.gconfig.temperature:g}: vLLM scores "
                "prompts at temperature 1. Use that, or the built-in engine."
            )
        return super().check(request, where)

    def payload(self, request: ModelRequest, wire_id: str, server: Server) -> dict[str, Any]:
        """See ``ServerBackend.payload``; for vLLM, an adapter is a model name."""
        params = self.parameters.sampling_params(request.gconfig, self._seed(request))
        if request.top_logprobs:
            params["logprobs"] = request.top_logprobs + 1  # one more, because the sampled token is in the list, too
        if request.prompt_logprobs_from is not None:
            params["prompt_logprobs"] = request.top_logprobs or 0
        adapter = {} if request.lora_name is None else {"model": request.lora_name}
        return {
            "request_id": wire_id,
            "token_ids": request.input_ids,
            "sampling_params": {key: value for key, value in params.items() if value is not None},
            **adapter,
        }

    def response(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """See ``ServerBackend.response``; the answer must have exactly one choice, with version spans."""
        (choice,) = data["choices"]
        output_ids = [int(token) for token in choice["token_ids"] or []]
        content = (choice.get("logprobs") or {}).get("content") or []
        if [entry["token_id"] for entry in content] != output_ids:
            raise EngineError(
                f"The vLLM server returned {len(output_ids)} tokens and log-probabilities for {len(content)} other tokens; a request "
                "needs both from one sampling."
            )
        logprobs = [float(entry["logprob"]) for entry in content]
        experts = choice.get("routed_experts") if self.config.routing_replay and output_ids else None
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
            seed=self._seed(request),
            routed_experts=None if experts is None else record_of_npy(experts, len(request.input_ids) + len(output_ids)),
            **_scores(request, content, data.get("prompt_logprobs")),
        )

    # -- control -------------------------------------------------------------------------------------------------------

    def pause_server(self, server: Server) -> None:
        """Pause a server. With ``on_weight_update: wait`` running requests end first, which may take as long as a request."""
        mode = PAUSE_MODES[self.config.on_weight_update]
        limit = self.config.request_timeout if mode == "wait" else None
        self.ask(server, "POST", f"/pause?mode={mode}", timeout=limit)

    def resume_server(self, server: Server) -> None:
        """See ``ServerBackend.resume_server``."""
        self.ask(server, "POST", "/resume")

    def abort_on_server(self, server: Server, wire_ids: list[str]) -> None:
        """See ``ServerBackend.abort_on_server``; vLLM adds a prefix to our ids."""
        self.ask(server, "POST", "/abort_requests", {"request_ids": [_ENGINE_ID_PREFIX + wire_id for wire_id in wire_ids]})

    def read_version(self, server: Server) -> str | None:
        """See ``ServerBackend.read_version``."""
        return self.ask(server, "GET", "/weight_info", timeout=30.0).get("weight_version")

    def label_version(self, server: Server, version: int) -> None:
        """See ``ServerBackend.label_version``."""
        self.ask(server, "POST", "/update_weight_version", {"new_version": str(version)})

    # -- weights -------------------------------------------------------------------------------------------------------

    def held_dtype(self, server: Server) -> torch.dtype | None:
        """Return the type that the server computes in, with ``auto`` resolved."""
        return self.facts[server.address].dtype

    def release_memory(self, server: Server, *, keep_weights: bool) -> None:
        """See ``ServerBackend.release_memory``; vLLM moves weights that are kept to the host's memory."""
        self.ask(server, "POST", f"/sleep?level={1 if keep_weights else 2}")

    def restore_memory(self, server: Server, parts: Sequence[str], *, kept_weights: bool) -> None:
        """See ``ServerBackend.restore_memory``."""
        self.ask(server, "POST", f"/wake_up?{'&'.join(f'tags={part}' for part in parts)}")

    def load_from_disk(self, server: Server, directory: str, version: int, digest: str | None) -> None:
        """Reload weights. A server that has a packed copy of a tied output head answers 200 but computes with its old weights, which is
        why an audit compares log-probabilities after every publication."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        self._update_call(server, "collective_rpc", body, version)
        self.label_version(server, version)
        self._forget_old_prefixes(server, version)

    def load_adapter(self, server: Server, name: str, directory: str) -> None:
        """See ``ServerBackend.load_adapter``. vLLM may read the directory again while requests use the adapter."""
        try:
            body = {"lora_name": name, "lora_path": directory}
            self.ask(server, "POST", "/v1/load_lora_adapter", body, timeout=self.config.weight_update_timeout)
        except ServerRefusedError as error:
            hint = ""
            if error.status == 404:
                hint = " Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as VLLMConfig.build_cmd does."
            raise UpdateRefusedError(
                f"The vLLM server at {server.address} did not load adapter {name}: {error}{hint}"
            ) from error

    def unload_adapter(self, server: Server, name: str) -> None:
        """See ``ServerBackend.unload_adapter``; requests that run keep the adapter."""
        self.ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def _update_call(self, server: Server, path: str, body: dict[str, Any] | None, version: int) -> None:
        try:
            self.ask(server, "POST", f"/{path}", body, timeout=self.config.weight_update_timeout)
        except ServerRefusedError as error:
            raise WeightUpdateError(f"The vLLM server at {server.address} did not load version {version}: {error}") from error

    def _forget_old_prefixes(self, server: Server, version: int) -> None:
        recompute = "true" if self.config.on_weight_update == "recompute" else "false"
        self._update_call(server, f"reset_prefix_cache?reset_running_requests={recompute}", None, version)

    # -- the weight-transfer engine (weights/broadcast.py) -------------------------------------------------------------

    def ranks_of(self, server: Server, meta: WeightUpdateMeta) -> int:
        """See ``BroadcastBackend.ranks_of``. vLLM numbers every worker of every data-parallel copy, starting at ``rank_offset``."""
        return self.facts[server.address].ranks

    def group_backend(self, servers: list[Server], meta: WeightUpdateMeta) -> str:
        """Return ``nccl``, which the servers must have been started for.

        Raises:
            WeightUpdateError: ``meta`` names Gloo, the trainer has no GPU, or a server has no weight-transfer engine for NCCL or another
                version of NCCL.
        """
        if meta.backend == "gloo" or not torch.cuda.is_available():
            raise WeightUpdateError(
                "vLLM receives weights over NCCL alone, which needs a GPU in the trainer and in the servers: publish by disk, or by "
                "shared memory."
            )
        lacking = [server.address for server in servers if self.facts[server.address].transfer != "nccl"]
        if lacking:
            raise WeightUpdateError(
                f"The vLLM servers at {', '.join(lacking)} were not started to receive weights over NCCL: start them with "
                '--weight-transfer-config \'{"backend": "nccl"}\', as rollout.weight_update: xccl does, or publish by disk.'
            )
        for server in servers:
            refuse_other_nccl(self.facts[server.address].nccl, f"the vLLM server at {server.address}")
        return "nccl"

    def invitation(self) -> str:
        """Return NCCL's unique id."""
        return VLLMGroup.invitation()

    def sending_half(self, place: GroupPlace) -> SendingHalf:
        """See ``BroadcastBackend.sending_half``."""
        return VLLMGroup(place, self.config.weight_update_timeout)

    def join_group(self, server: Server, place: GroupPlace) -> None:
        """See ``BroadcastBackend.join_group``."""
        joining = {
            "nccl_unique_id_b64": place.invitation,
            "rank_offset": place.rank_offset,
            "world_size": place.world_size,
        }
        try:
            body = {"init_info": joining}
            self.ask(server, "POST", "/init_weight_transfer_engine", body, timeout=self.config.weight_update_timeout)
        except ServerRefusedError as error:
            raise WeightUpdateError(f"The vLLM server at {server.address} did not join the group: {error}") from error

    def begin_receiving(self, server: Server, version: int) -> None:
        """Start an update, after finishing any update that a trainer left unfinished."""
        try:
            self._update_call(server, "start_weight_update", {}, version)
        except WeightUpdateError as error:
            if "already active" not in str(error):
                raise
            self._update_call(server, "finish_weight_update", {}, version)
            self._update_call(server, "start_weight_update", {}, version)

    def receive_bucket(self, server: Server, group_name: str, bucket: Bucket, version: int) -> None:
        """See ``BroadcastBackend.receive_bucket``."""
        info = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        self._update_call(server, "update_weights", {"update_info": info}, version)

    def end_receiving(self, server: Server, version: int) -> None:
        """Have the server convert the new weights to the form that it computes with, and label them with ``version``."""
        self._update_call(server, "finish_weight_update", {"weight_version": str(version)}, version)
        self._forget_old_prefixes(server, version)


class VLLMClient(RemoteInferenceEngine):
    """A remote engine of vLLM servers."""

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(VLLMBackend, config, addresses=addresses)
