"""Rules about keys that only some engines have: the built-in one, servers that are started here, and servers that run."""

from __future__ import annotations

from rollwright.config.experiment import PPOConfig
from rollwright.config.faults import refuse, refuse_set


def _engine_is_ours(config: PPOConfig) -> bool:
    return config.rollout.backend in ("builtin", "builtin_process")


_OTHER_BACKEND = (
    ", but rollout.backend is {config.rollout.backend} and rollout.weight_update {config.rollout.weight_update}; take it out"
)
_NO_SUCH_ENGINE = "is {value}, which the {config.rollout.backend} engine does not have; set rollout.backend to sglang or vllm"
_SERVERS_RUN = "is about servers that are started here, but rollout.addresses names some that run; keep one"

ENGINE_RULES = (
    refuse_set(
        PPOConfig,
        [f"rollout.{name}" for name in ("weight_update", "weight_update_timeout", "weight_dtype", "request_retries")],
        lambda config: config.rollout.backend == "builtin",
        f"is of servers{_OTHER_BACKEND}",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.weight_update_path"],
        lambda config: config.rollout.weight_update == "disk" and config.rollout.backend == "builtin",
        f"is of servers{_OTHER_BACKEND}",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.weight_update_path"],
        lambda config: config.rollout.weight_update != "disk",
        f"is where weight_update: disk writes{_OTHER_BACKEND}",
    ),
    refuse_set(
        PPOConfig,
        [f"rollout.{name}" for name in ("device", "max_running_requests", "kv_cache_bytes", "prompt_lookup_tokens")],
        lambda config: config.rollout.backend in ("sglang", "vllm"),
        f"is of the built-in engine{_OTHER_BACKEND}",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.addresses", "rollout.api_key"],
        lambda config: config.rollout.backend.startswith("builtin"),
        "names a server, but rollout.backend is {config.rollout.backend}; set it to sglang or vllm",
    ),
    refuse_set(PPOConfig, ["rollout.servers"], lambda config: config.rollout.backend == "builtin", _NO_SUCH_ENGINE),
    refuse_set(PPOConfig, ["rollout.tensor_parallel", "rollout.first_gpu"], _engine_is_ours, _NO_SUCH_ENGINE),
    refuse_set(
        PPOConfig,
        ["rollout.servers"],
        lambda config: config.rollout.addresses and config.rollout.backend != "builtin",
        _SERVERS_RUN,
    ),
    refuse_set(
        PPOConfig,
        ["rollout.tensor_parallel", "rollout.first_gpu"],
        lambda config: config.rollout.addresses and not _engine_is_ours(config),
        _SERVERS_RUN,
    ),
    refuse(
        PPOConfig,
        "rollout.context_length",
        lambda config: (
            config.rollout.context_length is not None and config.rollout.context_length <= config.gconfig.max_new_tokens
        ),
        "is {value} for prompt and completion together, which leaves no room for a prompt beside gconfig.max_new_tokens "
        "({config.gconfig.max_new_tokens})",
    ),
    refuse(
        PPOConfig,
        "vllm.device",
        lambda config: config.deterministic and config.rollout.backend == "vllm" and config.vllm.device == "cpu",
        "is cpu, where vLLM has no batch-invariant mode; use a GPU, or rollout.backend builtin",
    ),
    refuse(
        PPOConfig,
        "rollout.over_sampling",
        lambda config: config.deterministic and config.rollout.over_sampling > 0,
        "cuts the slowest samples by the clock, which a deterministic run does not",
    ),
)
