"""SGLang's native protocol, which SGLang and ``rollwright serve-model`` implement."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import LocalServerConfig, SGLangConfig
from rollwright.data.vision import encoded_image
from rollwright.errors import ConfigError, EngineError, WeightUpdateError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.server_backend import BroadcastBackend, ServerFacts
from rollwright.inference.connections import ServerRefusedError, UpdateRefusedError
from rollwright.inference.parameters import ParameterTable, Wire
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse, TopTokens, versions_of_spans
from rollwright.inference.routed_experts import record_of_int32
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.files import checkpoint_names
from rollwright.inference.weights.group import Bucket, GroupPlace, WeightGroup
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.tracking.logging import getLogger

logger = getLogger("SGLangClient")

#: SGLang's pause mode for each ``on_weight_update``. With "wait", no request of this engine is running when it pauses a server, because
#: the engine holds new requests back and first waits for the running ones.
PAUSE_MODES = {"recompute": "retract", "keep": "in_place", "wait": "retract"}
#: HTTP statuses of updates that a server rejects before it reads any weight: wrong key, path or body, or a forbidden directory.
_UNREAD_STATUSES = {401, 403, 404, 405, 413, 422}


@dataclass(frozen=True, kw_only=True)
class SGLangFacts(ServerFacts):
    """What a server reports about itself."""

    is_builtin: bool = False
    deterministic: bool = False
    weights_roots: list[str] | None = None  # None if the server may read any directory
    ranks: int | None = None  # tensor-parallel processes, if known
    pipeline_stages: int = 1
    copies: int = 1  # data-parallel copies
    shares_ranks: bool = False  # the copies share the tensor-parallel ranks (DP attention)
    device: str = "cpu"
    dtype: str | None = None  # as configured on the server, if known
    context_length: int | None = None  # limit of prompt and max_new_tokens together; None if the server cuts the output instead


def _scores(request: ModelRequest, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the additional log-probabilities that the request asks for, as fields of a ``ModelResponse``."""
    scores: dict[str, Any] = {}
    if request.top_logprobs:
        scores["output_top_logprobs"] = [_top(entries) for entries in meta["output_top_logprobs"]]
    if request.prompt_logprobs_from is not None:
        first, count = min(1, request.prompt_logprobs_from), len(request.input_ids) - request.prompt_logprobs_from
        pairs = meta["input_token_logprobs"][first:]
        if [pair[1] for pair in pairs] != request.input_ids[request.prompt_logprobs_from :]:
            raise EngineError(f"The SGLang server scored {len(pairs)} other tokens than the {count} that it was asked for.")
        scores["input_logprobs"] = [pair[0] for pair in pairs]
        if request.top_logprobs:
            scores["input_top_logprobs"] = [_top(entries) for entries in meta["input_top_logprobs"][first:]]
    return scores


def _top(entries: list[Any] | None) -> TopTokens | None:
    return None if entries is None else [(int(token), float(logprob)) for logprob, token, *_ in entries]


class SGLangBackend(BroadcastBackend):
    """Servers that generate at ``/generate``."""

    kind = "sglang"
    pauses_running_requests = True
    records_experts_if = (
        "start it with --enable-return-routed-experts, which SGLang and rollwright serve-model have for mixtures of experts"
    )
    parameters = ParameterTable(
        {
            "max_new_tokens": "max_new_tokens",
            "min_new_tokens": Wire(
                "min_new_tokens",
                shifts_logprobs=True,
                refusal=lambda gconfig: (
                    "its stop strings end a request before min_new_tokens; use stop_token_ids, or min_new_tokens=0"
                    if gconfig.stop
                    else None
                ),
            ),
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "frequency_penalty": Wire("frequency_penalty", shifts_logprobs=True),
            "presence_penalty": Wire("presence_penalty", shifts_logprobs=True),
            "repetition_penalty": Wire("repetition_penalty", shifts_logprobs=True),
            "logit_bias": Wire("logit_bias", shifts_logprobs=True),
            "json_schema": Wire("json_schema", shifts_logprobs=True),
            "regex": Wire("regex", shifts_logprobs=True),
            "grammar": Wire("grammar", refusal=lambda gconfig: "it takes no Lark grammars; use json_schema or regex"),
            "stop": "stop",
            "stop_token_ids": "stop_token_ids",
            "ignore_eos": "ignore_eos",
            "skip_special_tokens": "skip_special_tokens",
            "seed": "sampling_seed",
        },
        always={"no_stop_trim": True},  # output_tokens includes the tokens of the stop string
    )

    def __init__(self, config: RolloutConfig, servers: ServerSet) -> None:
        super().__init__(config, servers)
        self._sessions: dict[str, Literal["none", "open", "closed"]] = {}  # weight-update sessions, by address

    @classmethod
    def command(cls, launch: ServerLaunch) -> list[str]:
        """See ``SGLangConfig.build_cmd``; ``sglang.implementation: builtin`` is ``rollwright serve-model``."""
        section: SGLangConfig = launch.section("sglang", SGLangConfig(), "context_length")
        is_builtin, given = section.implementation == "builtin", section.extra_args
        defaults: dict[str, Any] = {}
        if launch.deterministic:
            defaults["batch-invariant" if is_builtin else "enable_deterministic_inference"] = True
        if not launch.rollout.prefix_cache:
            defaults["no-prefix-cache" if is_builtin else "disable-radix-cache"] = True
        if launch.rollout.routing_replay:
            defaults["enable-return-routed-experts"] = True
        if (room := launch.adapters) is not None and is_builtin:
            defaults |= {"max-adapters": room.loaded}
        elif room is not None:
            defaults |= {
                "enable-lora": True,
                "lora-target-modules": "all",
                "max-lora-rank": room.rank,
                "max-loras-per-batch": room.in_use,
                "max-loaded-loras": room.loaded,
            }
        if launch.rollout.colocate and not is_builtin:
            defaults["enable-memory-saver"] = True
        extra = defaults | given
        if is_builtin:
            extra["weights-root"] = [*given.get("weights-root", []), *launch.weights_roots]
            if launch.threads is not None:
                extra.setdefault("threads", launch.threads)
        elif launch.key_file is not None:  # a file, because every user can see the command line
            if "config" in given:
                raise ConfigError(
                    "sglang.extra_args.config takes the place of the file that gives SGLang its key: write the settings of that file "
                    "into sglang.extra_args instead."
                )
            extra["config"] = str(launch.key_file)
        section = dataclasses.replace(section, extra_args=extra)
        return SGLangConfig.build_cmd(section, launch.gpus, launch.first_gpu, host=launch.host, port=launch.port)

    def on_connected(self, server: Server) -> None:
        """Record what the server reports about itself."""
        self._sessions.pop(server.address, None)  # another server may have its address now
        try:
            info = self.ask(server, "GET", "/server_info", timeout=30.0)
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            raise EngineError(
                f"The server at {server.address} has no /server_info. It has to be SGLang 0.5.6 or newer, whose pauses keep what "
                "runs, or rollwright serve-model (for vLLM: rollout.backend=vllm)."
            ) from error
        is_builtin = info.get("server") == "rollwright"
        if self.config.routing_replay and not info.get("enable_return_routed_experts"):
            raise EngineError(
                f"rollout.routing_replay: the server at {server.address} does not return the experts of its tokens: {self.records_experts_if}."
            )
        models = {} if is_builtin else self.ask(server, "GET", "/v1/models", timeout=30.0)
        self.facts[server.address] = SGLangFacts(
            is_builtin=is_builtin,
            deterministic=bool(info.get("enable_deterministic_inference")),
            batch_invariant=bool(info.get("batch_invariant" if is_builtin else "enable_deterministic_inference")),
            checkpoint_names=None
            if is_builtin
            else checkpoint_names(info.get("model_path")),  # serve-model rejects unknown names
            run=info.get("run") if is_builtin else None,
            weights_roots=info.get("weights_roots") if is_builtin else None,
            ranks=info.get("tp_size"),
            pipeline_stages=int(info.get("pp_size") or 1),
            copies=int(info.get("dp_size") or 1),
            shares_ranks=bool(info.get("enable_dp_attention")),
            device=str(info.get("device") or ("cpu" if is_builtin else "cuda")).partition(":")[0],  # SGLang's default is a GPU
            dtype=info.get("dtype"),
            context_length=next(
                (each["max_model_len"] for each in models.get("data") or () if each.get("max_model_len")), None
            ),
        )

    @property
    def _is_builtin(self) -> bool:
        """True if every server is ``rollwright serve-model``, which supports more than SGLang."""
        return all(facts.is_builtin for facts in self.facts.values())

    def check(self, request: ModelRequest, where: str) -> bool:
        """See ``ServerBackend.check``. SGLang processes images itself; ``serve-model`` supports branches but no images."""
        is_builtin = self._is_builtin
        if is_builtin and request.multi_modal is not None:
            raise EngineError(f"multi_modal inputs cannot travel to {where}; use the built-in engine in this process.")
        for name in () if is_builtin else ("position_ids", "branch_ids", "multi_modal"):
            if getattr(request, name) is not None and not (name == "multi_modal" and request.image_data):
                raise EngineError(
                    f"{where[:1].upper()}{where[1:]} has no {name}; use the built-in engine or rollwright serve-model, or for "
                    "images give image_data."
                )
        if request.prompt_logprobs_from is not None and not is_builtin and request.gconfig.effective_temperature != 1.0:
            raise EngineError(
                f"prompt_logprobs_from cannot be honoured by {where} at temperature {request.gconfig.temperature:g}: SGLang scores "
                "prompts at temperature 1. Use that, or the built-in engine."
            )
        if request.gconfig.seed is not None and not is_builtin and not all(f.deterministic for f in self.facts.values()):
            raise EngineError(
                f"gconfig.seed={request.gconfig.seed} cannot be honoured: {where} draws from its own generator. Start it with "
                "enable_deterministic_inference in sglang.extra_args, or leave the seed out."
            )
        return self.parameters.check(
            request.gconfig, where, gives_contract_logprobs=is_builtin, accept_shifted=self.config.accept_shifted_logprobs
        )

    def payload(self, request: ModelRequest, wire_id: str, server: Server) -> dict[str, Any]:
        """See ``ServerBackend.payload``; ``position_ids`` and ``branch_ids`` are extensions of ``rollwright serve-model``."""
        optional = {
            "image_data": request.image_data and [encoded_image(image) for image in request.image_data],
            "lora_path": request.lora_name,
            "position_ids": request.position_ids,
            "branch_ids": request.branch_ids,
            "top_logprobs_num": request.top_logprobs,
            "return_routed_experts": self.config.routing_replay or None,
            # SGLang's first entry has no value, whatever the index
            "logprob_start_len": None if request.prompt_logprobs_from is None else max(0, request.prompt_logprobs_from - 1),
        }
        return {
            "rid": wire_id,
            "input_ids": request.input_ids,
            "sampling_params": self.parameters.sampling_params(self._within_context(request, server), request.effective_seed),
            "return_logprob": True,
            "stream": False,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def _within_context(self, request: ModelRequest, server: Server) -> GenerationHyperparameters:
        """Limit ``max_new_tokens`` to the context. Other servers do so themselves, but SGLang rejects the request instead."""
        gconfig, context = request.gconfig, self.facts[server.address].context_length
        room = gconfig.max_new_tokens if context is None else context - len(request.input_ids)
        if room >= gconfig.max_new_tokens or room < 1:  # the server rejects a prompt that leaves no room
            return gconfig
        return gconfig.new(max_new_tokens=room, min_new_tokens=min(gconfig.min_new_tokens, room))

    def response(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """See ``ServerBackend.response``."""
        meta = data["meta_info"]
        reason = meta["finish_reason"]
        if reason.get("type") == "abort" and "status_code" in reason and int(reason["status_code"] or 0) >= 400:
            raise EngineError(f"The SGLang server refused the request: {reason.get('message')}")
        pairs = meta.get("output_token_logprobs") or []
        output_ids = [int(pair[1]) for pair in pairs]
        logprobs = [float(pair[0]) if pair[0] is not None else math.nan for pair in pairs]
        given = data.get("output_ids")
        count = meta.get("completion_tokens", len(output_ids)) if given is None else len(given)
        if count != len(output_ids) or (given is not None and list(given) != output_ids):
            raise EngineError(
                f"The SGLang server returned {count} tokens and log-probabilities for {len(output_ids)} other tokens; a "
                "request needs both from one sampling. Check the server's version (0.5.23 is known to agree)."
            )
        experts = meta.get("routed_experts") if self.config.routing_replay and output_ids else None
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=output_ids,
            output_logprobs=logprobs,
            output_versions=self._versions(meta, len(output_ids), version_when_sent),
            routed_experts=None if experts is None else record_of_int32(experts, len(request.input_ids) + len(output_ids)),
            stop_reason=reason["type"],
            stop_match=reason.get("matched"),
            ttft=float(meta.get("ttft") or 0.0),
            seed=request.effective_seed,
            **_scores(request, meta),
        )

    def _versions(self, meta: dict[str, Any], count: int, version_when_sent: int) -> list[int]:
        if meta.get("weight_versions"):
            return versions_of_spans(meta["weight_versions"], count, self.version_number)
        version = self.version_number(meta.get("weight_version"))
        if count and version != version_when_sent:
            raise EngineError(
                f"Weights changed from version {version_when_sent} to {version} during a request, and this SGLang server gives no "
                "weight_versions spans, so the versions of its tokens are unknown. Use SGLang 0.5.23 or newer, or "
                "rollout.on_weight_update=wait."
            )
        return [version] * count

    # -- control -------------------------------------------------------------------------------------------------------

    def pause_server(self, server: Server) -> None:
        """See ``ServerBackend.pause_server``."""
        self.ask(server, "POST", "/pause_generation", {"mode": PAUSE_MODES[self.config.on_weight_update]})

    def resume_server(self, server: Server) -> None:
        """See ``ServerBackend.resume_server``."""
        self.ask(server, "POST", "/continue_generation", {})

    def abort_on_server(self, server: Server, wire_ids: list[str]) -> None:
        """See ``ServerBackend.abort_on_server``."""
        for wire_id in wire_ids:
            self.ask(server, "POST", "/abort_request", {"rid": wire_id})

    def read_version(self, server: Server) -> str | None:
        """See ``ServerBackend.read_version``."""
        return self.ask(server, "GET", "/model_info", timeout=30.0).get("weight_version")

    def label_version(self, server: Server, version: int) -> None:
        """See ``ServerBackend.label_version``."""
        self.ask(server, "POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # -- weights -------------------------------------------------------------------------------------------------------

    def checksums(self, server: Server) -> dict[str, str]:
        """See ``ServerBackend.checksums``. Those of the ranks of a server are joined."""
        try:
            body = {"action": "checksum"}
            answer = self.ask(server, "POST", "/weights_checker", body, timeout=self.config.weight_update_timeout)
        except ServerRefusedError:  # SGLang before it had this route
            return {}
        joined: dict[str, str] = {}
        for part in answer.get("payload") or []:
            for name, checksum in part["checksums"].items():
                joined[name] = f"{joined.get(name, '')}{checksum}"
        return joined

    def held_dtype(self, server: Server) -> torch.dtype | None:
        """Return the configured type. ``auto`` is bfloat16 on a GPU, and unknown (None) otherwise, because it then depends on the model's
        configuration, which the server does not report."""
        facts = self.facts[server.address]
        names = {"half": "float16", "float": "float32", "auto": "bfloat16" if facts.device == "cuda" else ""}
        kind = getattr(torch, names.get(facts.dtype or "", facts.dtype or ""), None)
        return kind if isinstance(kind, torch.dtype) else None

    def release_memory(self, server: Server, *, keep_weights: bool) -> None:
        """See ``ServerBackend.release_memory``; SGLang needs ``--enable-memory-saver``. ``serve-model`` always keeps its weights."""
        keep_weights = keep_weights or self.facts[server.address].is_builtin
        tags = ["kv_cache"] if keep_weights else ["kv_cache", "weights"]
        self.ask(server, "POST", "/release_memory_occupation", {"tags": tags})

    def restore_memory(self, server: Server, parts: Sequence[str], *, kept_weights: bool) -> None:
        """See ``ServerBackend.restore_memory``."""
        kept_weights = kept_weights or self.facts[server.address].is_builtin
        if tags := [part for part in parts if part == "kv_cache" or not kept_weights]:
            self.ask(server, "POST", "/resume_memory_occupation", {"tags": tags})

    def checks_digest(self, server: Server) -> bool:
        """See ``ServerBackend.checks_digest``; SGLang does not. A server that has not answered yet may be ``serve-model``."""
        facts = self.facts.get(server.address)
        return facts is None or facts.is_builtin

    def load_from_disk(self, server: Server, directory: str, version: int, digest: str | None) -> None:
        """See ``ServerBackend.load_from_disk``."""
        body: dict[str, Any] = {
            "model_path": str(directory),
            "weight_version": str(version),
            "flush_cache": self.config.on_weight_update != "keep",  # SGLang cannot flush while requests run
            "abort_all_requests": False,
            "keep_pause": True,
        }
        if digest is not None and self.checks_digest(server):
            body["content_digest"] = digest
        self._post_update(server, "update_weights_from_disk", body)

    def load_adapter(self, server: Server, name: str, directory: str) -> None:
        """See ``ServerBackend.load_adapter``."""
        self._post_adapter(server, "load_lora_adapter", {"lora_name": name, "lora_path": directory})

    def unload_adapter(self, server: Server, name: str) -> None:
        """See ``ServerBackend.unload_adapter``; SGLang waits until no request uses the adapter."""
        self._post_adapter(server, "unload_lora_adapter", {"lora_name": name})

    def _post_adapter(self, server: Server, path: str, body: dict[str, Any]) -> None:
        try:
            answer = self.ask(server, "POST", f"/{path}", body, timeout=self.config.weight_update_timeout)
            refusal = "" if answer.get("success", False) else str(answer.get("error_message") or answer.get("message"))
        except ServerRefusedError as error:
            refusal = str(error)
        if refusal:
            needs = "" if self.facts[server.address].is_builtin else " (SGLang has to be started with --enable-lora)"
            raise UpdateRefusedError(f"The server at {server.address} refused /{path} of {body['lora_name']}: {refusal}{needs}")

    def _post_update(self, server: Server, path: str, body: dict[str, Any]) -> None:
        try:
            answer = self.ask(server, "POST", f"/{path}", body, timeout=self.config.weight_update_timeout)
        except ServerRefusedError as error:
            kind = UpdateRefusedError if error.status in _UNREAD_STATUSES else WeightUpdateError
            raise kind(f"The server at {server.address} refused new weights: {error}") from error
        if not answer.get("success", False):
            raise WeightUpdateError(f"The server at {server.address} did not take new weights: {answer.get('message')}")

    def weights_roots(self, launched: list[str]) -> list[str]:
        """See ``ServerBackend.weights_roots``; ``serve-model`` reports its own directories.

        Raises:
            WeightUpdateError: no directory can be read by every server.
        """
        said = [facts.weights_roots for facts in self.facts.values() if facts.weights_roots is not None]
        if not said:
            return launched
        if shared := [root for root in said[0] if all(root in other for other in said)]:
            return shared
        raise WeightUpdateError(
            "A rollwright server loads no weights from files: start it with --weights-root DIRECTORY, or publish by xccl."
        )

    # -- a distributed group (weights/broadcast.py) --------------------------------------------------------------------

    def ranks_of(self, server: Server, meta: WeightUpdateMeta) -> int:
        """See ``BroadcastBackend.ranks_of``. SGLang numbers ranks by ``rank_offset + tp_rank``; with DP attention, the tensor-parallel
        ranks include the data-parallel ones.

        Raises:
            WeightUpdateError: several of the server's processes would have the same rank, or the allocation contradicts the server.
        """
        facts = self.facts[server.address]
        if facts.pipeline_stages > 1:
            raise WeightUpdateError(
                f"The server at {server.address} has pp_size={facts.pipeline_stages}: SGLang numbers the ranks of a weight group by "
                "rank_offset + tp_rank, so its pipeline stages would meet on one rank. Publish by disk, or use tensor parallelism."
            )
        if facts.copies > 1 and not facts.shares_ranks:
            raise WeightUpdateError(
                f"The server at {server.address} has dp_size={facts.copies}, and SGLang updates data-parallel copies in a group only "
                "with enable_dp_attention. Publish by disk, or start one server for each copy."
            )
        allocated = meta.allocation.gen_instance_size if meta.allocation is not None else 0
        if facts.ranks and allocated and facts.ranks != allocated:
            raise WeightUpdateError(
                f"The allocation {meta.allocation} gives a server {allocated} GPUs, and the one at {server.address} has "
                f"tp_size={facts.ranks}: the group would wait for ranks that never come. Correct the allocation, or leave it out."
            )
        return facts.ranks or allocated or 1

    def group_backend(self, servers: list[Server], meta: WeightUpdateMeta) -> str:
        """Return the requested backend. ``auto`` means NCCL if all servers and the trainer have a GPU, otherwise Gloo.

        SGLang's GPU ranks support Gloo, too.
        """
        if meta.backend == "nccl" and not torch.cuda.is_available():  # fails before the servers start to wait
            raise WeightUpdateError("The nccl backend needs a GPU in the trainer and in the servers; use gloo.")
        if meta.backend != "auto":
            return meta.backend
        devices = {self.facts[server.address].device for server in servers}
        backend = "nccl" if devices == {"cuda"} and torch.cuda.is_available() else "gloo"
        logger.info("weights are broadcast by %s: the servers compute on %s", backend, " and ".join(sorted(devices)))
        return backend

    def sending_half(self, place: GroupPlace) -> WeightGroup:
        """See ``BroadcastBackend.sending_half``."""
        address, ranks = (place.master_address, place.master_port), (place.rank_offset, place.world_size)
        return WeightGroup(*address, *ranks, place.group_name, place.backend, self.config.weight_update_timeout)

    def join_group(self, server: Server, place: GroupPlace) -> None:
        """See ``BroadcastBackend.join_group``."""
        body = {name: value for name, value in dataclasses.asdict(place).items() if name != "invitation"}
        self._post_update(server, "init_weights_update_group", body)

    def begin_receiving(self, server: Server, version: int) -> None:
        """Open a weight-update session, without which newer SGLang takes no bucket; older SGLang and ``serve-model`` have none.

        A session that an unfinished update of this trainer left open is used again: SGLang ends if it is asked to open a second one.
        """
        if self.facts[server.address].is_builtin or self._sessions.get(server.address) in ("none", "open"):
            return
        try:
            self.ask(server, "POST", "/begin_weight_update", {}, timeout=self.config.weight_update_timeout)
        except ServerRefusedError as error:
            if error.status not in (404, 405):
                raise WeightUpdateError(f"The server at {server.address} began no update of its weights: {error}") from error
            self._sessions[server.address] = "none"
        else:
            self._sessions[server.address] = "open"

    def end_receiving(self, server: Server, version: int) -> None:
        """Close the session, in which SGLang prepares the new weights for its kernels."""
        if self._sessions.get(server.address) == "open":
            self._post_update(server, "end_weight_update", {})
            self._sessions[server.address] = "closed"

    def receive_bucket(self, server: Server, group_name: str, bucket: Bucket, version: int) -> None:
        """Send a bucket as one flat tensor; the last bucket names the version."""
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": bucket.is_last and self.config.on_weight_update != "keep",
            "abort_all_requests": False,
        }
        if bucket.is_last:
            body["weight_version"] = str(version)
        self._post_update(server, "update_weights_from_distributed", body)

    def forget_group(self, server: Server, name: str) -> None:
        """Have ``serve-model`` leave the group. SGLang is not asked to, because it might wait for ranks that are gone."""
        if self.facts[server.address].is_builtin:
            with contextlib.suppress(EngineError):  # the server may never have joined, or be gone
                self.ask(server, "POST", "/destroy_weights_update_group", {"group_name": name})


class BuiltinServersBackend(SGLangBackend):
    """Servers that run ``rollwright serve-model``, in processes that every run starts itself."""

    kind = "builtin_process"
    needs_gpu = False
    finds_servers = False

    @classmethod
    def command(cls, launch: ServerLaunch) -> list[str]:
        """See ``LocalServerConfig.build_cmd``; the settings come from the ``rollout`` section."""
        model = launch.rollout.path or launch.model_path
        extra: dict[str, Any] = {} if launch.adapters is None else {"max-adapters": launch.adapters.loaded}
        if launch.rollout.routing_replay:
            extra["enable-return-routed-experts"] = True
        server = LocalServerConfig.like(
            launch.rollout,
            model_path=model,
            threads=launch.threads,
            weights_roots=launch.weights_roots,
            batch_invariant=launch.deterministic,
            extra_args=extra,
        )
        return LocalServerConfig.build_cmd(server, host=launch.host, port=launch.port)


class SGLangClient(RemoteInferenceEngine):
    """A remote engine of SGLang servers."""

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(SGLangBackend, config, addresses=addresses)
