"""Command lines of inference servers, by their configs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollwright.config.sections import SGLangConfig, VLLMConfig
from rollwright.errors import ConfigError

logger = logging.getLogger("rollwright.config.servers")

#: Prompt tokens of one step of vLLM's CPU build, at least the longest prompt.
_PREFILL_TOKENS = 4096


@dataclass
class LocalServerConfig:
    """Arguments of ``rollwright serve-model``; see build_cmd."""

    model_path: str = field(default="", metadata={"help": "Model directory or name."})
    device: str = field(default="auto", metadata={"help": "Device of the engine."})
    dtype: str = field(default="auto", metadata={"help": "Compute type."})
    context_length: int | None = field(default=None, metadata={"help": "Prompt and new tokens together.", "ge": 2})
    max_running_requests: int | None = field(default=None, metadata={"help": "Sequences decoded together.", "ge": 1})
    kv_cache_bytes: int | None = field(default=None, metadata={"help": "Memory of the engine's cache.", "ge": 1})
    threads: int | None = field(default=None, metadata={"help": "Compute threads; None: one for each core.", "ge": 1})
    weights_roots: list[str] = field(default_factory=list, metadata={"help": "Where updates from files may be read."})
    random_seed: int = field(default=1, metadata={"help": "Seed of requests that bring none."})
    log_level: str = field(default="warning", metadata={"help": "The server's log level."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model."})
    extra_args: dict[str, Any] = field(default_factory=dict, metadata={"help": "Further options, by their names."})

    @staticmethod
    def build_cmd(config: LocalServerConfig, *, host: str = "127.0.0.1", port: int = 30000) -> list[str]:
        """The command that serves ``config.model_path`` with the built-in engine.

        Raises:
            ConfigError: no model is named.
        """
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "device": config.device,
            "dtype": config.dtype,
            "context-length": config.context_length,
            "max-running-requests": config.max_running_requests,
            "kv-cache-bytes": config.kv_cache_bytes,
            "threads": config.threads,
            "weights-root": config.weights_roots,
            "random-seed": config.random_seed,
            "log-level": config.log_level,
            "trust-remote-code": config.trust_remote_code,
            **config.extra_args,
        }
        model = _model(config.model_path, "rollwright serve-model")
        return [sys.executable, "-m", "rollwright", "serve-model", model, *option_list(options)]


def _model(path: str, server: str) -> str:
    if not path:
        raise ConfigError(f"{server} has no model: set model_path to a directory or a Hugging Face name.")
    return path


def option_list(options: Mapping[str, Any]) -> list[str]:
    """Command-line options: underscores become dashes, True a bare flag, lists are repeated, None and False are left out."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list | tuple):
            for item in value:
                arguments += [flag, str(item)]
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments


def sglang_command(
    config: SGLangConfig, *, tp_size: int, base_gpu_id: int, host: str, port: int, dist_init_addr: str | None
) -> list[str]:
    """The command of a server that speaks SGLang's protocol; which one is ``config.implementation``, and is logged.

    Raises:
        ConfigError: no model is named, or the built-in engine is asked for tensor parallelism.
    """
    if config.implementation == "builtin":
        if tp_size != 1:
            raise ConfigError(
                f"sglang.implementation is builtin, which has no tensor parallelism: tp_size is {tp_size}, use 1."
            )
        logger.info("SGLang's protocol at %s:%d is served by the built-in engine (sglang.implementation: builtin)", host, port)
        local = LocalServerConfig(
            model_path=config.model_path,
            dtype=config.dtype,
            context_length=config.context_length,
            max_running_requests=config.max_running_requests,
            random_seed=config.random_seed,
            log_level=config.log_level,
            trust_remote_code=config.trust_remote_code,
            extra_args=dict(config.extra_args),
        )
        return LocalServerConfig.build_cmd(local, host=host, port=port)
    logger.info(
        "SGLang's protocol at %s:%d is served by SGLang, GPU %d on (sglang.implementation: sglang)", host, port, base_gpu_id
    )
    options: dict[str, Any] = {
        "model-path": _model(config.model_path, "SGLang"),
        "host": host,
        "port": port,
        "tp-size": tp_size,
        "base-gpu-id": base_gpu_id,
        "dist-init-addr": dist_init_addr,
        "dtype": config.dtype,
        "context-length": config.context_length,
        "mem-fraction-static": config.mem_fraction_static,
        "max-running-requests": config.max_running_requests,
        "log-level": config.log_level,
        "decode-log-interval": config.decode_log_interval,
        "random-seed": config.random_seed,
        "trust-remote-code": config.trust_remote_code,
        **config.extra_args,
    }
    if options.get("skip_tokenizer_init") or options.get("skip-tokenizer-init"):
        raise ConfigError(
            "sglang.extra_args.skip_tokenizer_init: requests with stop strings fail without a tokenizer; leave it out."
        )
    return [sys.executable, "-m", "sglang.launch_server", *option_list(options)]


def vllm_command(config: VLLMConfig, *, tp_size: int, base_gpu_id: int, host: str, port: int) -> list[str]:
    """The command of a vLLM server with the token endpoint, its versions and processed log-probabilities switched on.

    Raises:
        ConfigError: no model is named.
    """
    environment = {"VLLM_SERVER_DEV_MODE": "1", **{name: str(value) for name, value in config.env.items()}}
    whole_prompts: dict[str, Any] = {}
    if config.device == "cpu":
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; its default is most of the memory
        tokens = max(_PREFILL_TOKENS, config.max_model_len or _PREFILL_TOKENS)
        whole_prompts = {"no-enable-chunked-prefill": True, "max-num-batched-tokens": tokens}
    if base_gpu_id:
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str(base_gpu_id + index) for index in range(tp_size)))
    options: dict[str, Any] = {
        "model": _model(config.model_path, "vLLM"),
        "host": host,
        "port": port,
        "tensor-parallel-size": tp_size if tp_size > 1 else None,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "gpu-memory-utilization": config.gpu_memory_utilization,
        "max-num-seqs": config.max_num_seqs,
        "enforce-eager": config.enforce_eager or config.device == "cpu",
        "trust-remote-code": config.trust_remote_code,
        **whole_prompts,
        "enable-scale-out": True,
        "logprobs-mode": "processed_logprobs",
        **config.extra_args,
    }
    python = config.python or sys.executable
    assignments = [f"{name}={value}" for name, value in environment.items()]
    logger.info("vLLM at %s:%d runs in %s", host, port, python)
    return ["env", *assignments, python, "-m", "vllm.entrypoints.openai.api_server", *option_list(options)]
