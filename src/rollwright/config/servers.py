"""Inference servers that a run may start: their settings and command lines."""

from __future__ import annotations

import inspect
import logging
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollwright.config import key, key_from
from rollwright.errors import ConfigError
from rollwright.registry import Registry

logger = logging.getLogger("rollwright.config.servers")

#: The kinds of inference engine (``rollwright.inference.backends``), by the names that ``rollout.backend`` takes.
BACKENDS: Registry[type[Any]] = Registry(
    "inference backend",
    variable="BACKENDS",
    built_in={
        "builtin": "rollwright.inference.backends.builtin.engine:BuiltinEngine",
        "builtin_process": "rollwright.inference.backends.sglang:BuiltinServersBackend",
        "sglang": "rollwright.inference.backends.sglang:SGLangBackend",
        "vllm": "rollwright.inference.backends.vllm:VLLMBackend",
    },
    accepts=inspect.isclass,
)


def is_endpoint(path: str) -> bool:
    """Return True if a model's path is the URL of an endpoint instead of a directory or a name."""
    return path.startswith(("http://", "https://"))


@dataclass(frozen=True)
class BuiltCommand:
    """A server command that ``build_cmd`` made in this process."""

    host: str
    command: list[str]
    built_at: float  # seconds since the machine started
    children: Any  # resource usage of this process's ended children at that time


#: The latest command for each port, to detect that a server that the user started with it has died.
BUILT_COMMANDS: dict[int, BuiltCommand] = {}


def _noted(host: str, port: int, command: list[str]) -> list[str]:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    BUILT_COMMANDS[port] = BuiltCommand(
        host, command, time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else 0.0, children
    )
    return command


#: Minimum number of prompt tokens in a step of vLLM's CPU build, which must hold the longest prompt.
_PREFILL_TOKENS = 4096


@dataclass
class ServerConfig:
    """Keys of every server."""

    model_path: str = key("", "Model directory or name; default: the actor's.", public=True)
    dtype: str = key("auto", "Compute type; auto uses rollout.dtype.")
    trust_remote_code: bool = key(False, "Run code that comes with a model.")
    extra_args: dict[str, Any] = key_from(dict, "Further arguments of the server, by the server's own names.")
    python: str | None = key(None, "Interpreter of the environment in which the server is installed. Default: this one.")
    env: dict[str, str] = key_from(dict, "Environment variables of the server.")

    def command(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """Build the command that runs a module in the server's environment.

        Args:
            module: the server, as ``python -m`` takes it.
            arguments: of the server.
            environment: variables, which those of ``env`` replace.
        """
        variables = {**(environment or {}), **self.env}
        before = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        return [*before, self.python or sys.executable, "-m", module, *arguments]


@dataclass
class SGLangConfig(ServerConfig):
    """Arguments of a server that speaks SGLang's protocol; see build_cmd."""

    implementation: str = key(
        "sglang",
        "sglang: SGLang itself (needs a GPU); builtin: rollwright serve-model, which speaks the same protocol.",
        choices=["sglang", "builtin"],
    )
    context_length: int | None = key(None, "Prompt and new tokens together; None uses rollout.context_length.", ge=2)
    mem_fraction_static: float | None = key(None, "Share of GPU memory for weights and cache (SGLang).", gt=0.0, lt=1.0)
    max_running_requests: int | None = key(None, "Sequences decoded together.", ge=1)
    log_level: str = key("warning", "The server's log level.")
    decode_log_interval: int = key(40, "Decode steps between two log lines.", ge=1)
    random_seed: int = key(1, "The server's seed for requests that carry none.")

    @staticmethod
    def build_cmd(
        config: SGLangConfig,
        tp_size: int = 1,
        base_gpu_id: int = 0,
        host: str = "127.0.0.1",
        port: int = 30000,
        dist_init_addr: str | None = None,
    ) -> list[str]:
        """Build the command line of the server, for ``subprocess.Popen``.

        Args:
            config: the section of the experiment.
            tp_size: number of GPUs that share one copy of the model.
            base_gpu_id: index of the first GPU.
            host, port: address on which the server listens.
            dist_init_addr: ``host:port`` at which the nodes of a multi-node server connect.

        Raises:
            ConfigError: no model is set, or tensor parallelism is requested of the built-in engine.
        """
        if config.implementation == "builtin":
            if tp_size != 1:
                raise ConfigError(
                    f"sglang.implementation is builtin, which has no tensor parallelism: tp_size is {tp_size}, use 1."
                )
            logger.info(
                "SGLang's protocol at %s:%d is served by the built-in engine (sglang.implementation: builtin)", host, port
            )
            local = LocalServerConfig.like(config)
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
            **_same_names(config, "implementation"),
            **config.extra_args,
        }
        if options.get("skip_tokenizer_init") or options.get("skip-tokenizer-init"):
            raise ConfigError(
                "sglang.extra_args.skip_tokenizer_init: requests with stop strings fail without a tokenizer; leave it out."
            )
        return _noted(host, port, config.command("sglang.launch_server", *option_list(options)))


@dataclass
class VLLMConfig(ServerConfig):
    """Arguments of a vLLM server; see build_cmd."""

    max_model_len: int | None = key(None, "Prompt and new tokens together; None uses rollout.context_length.", ge=2)
    gpu_memory_utilization: float | None = key(None, "Share of GPU memory.", gt=0.0, le=1.0)
    max_num_seqs: int | None = key(None, "Sequences decoded together.", ge=1)
    device: str = key(
        "auto",
        "auto: as vLLM detects it. cpu: its CPU build, started without compiled graphs and without chunked prefill, because chunked "
        "prefill of a request with a seed ends the server.",
        choices=["auto", "cpu"],
    )
    enforce_eager: bool = key(False, "No compiled graphs.")

    @staticmethod
    def build_cmd(
        config: VLLMConfig, tp_size: int = 1, base_gpu_id: int = 0, host: str = "127.0.0.1", port: int = 8000
    ) -> list[str]:
        """Build the command line of the server, for ``subprocess.Popen``, with the token endpoint, its versions and processed
        log-probabilities enabled.

        Args:
            config: the section of the experiment.
            tp_size: number of GPUs that share one copy of the model.
            base_gpu_id: index of the first GPU.
            host, port: address on which the server listens.

        Raises:
            ConfigError: no model is set, or too few GPUs are visible.
        """
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        whole_prompts: dict[str, Any] = {}
        if config.device == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; its default is most of the memory
            tokens = max(_PREFILL_TOKENS, config.max_model_len or _PREFILL_TOKENS)
            whole_prompts = {"enforce-eager": True, "no-enable-chunked-prefill": True, "max-num-batched-tokens": tokens}
        if base_gpu_id:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus(base_gpu_id, tp_size))
        options: dict[str, Any] = {
            "model": _model(config.model_path, "vLLM"),
            "host": host,
            "port": port,
            "tensor-parallel-size": tp_size if tp_size > 1 else None,
            **_same_names(config, "device"),
            **whole_prompts,
            "enable-scale-out": True,
            "logprobs-mode": "processed_logprobs",
            **config.extra_args,
        }
        logger.info("vLLM at %s:%d runs in %s", host, port, config.python or sys.executable)
        module = "vllm.entrypoints.openai.api_server"
        return _noted(host, port, config.command(module, *option_list(options), environment=environment))


@dataclass
class LocalServerConfig(ServerConfig):
    """Arguments of ``rollwright serve-model``; see build_cmd."""

    device: str = key("auto", "Device of the engine.")
    context_length: int | None = key(None, "Prompt and new tokens together.", ge=2)
    max_running_requests: int | None = key(None, "Sequences decoded together.", ge=1)
    kv_cache_bytes: int | None = key(None, "Memory of the engine's cache.", ge=1)
    prefix_cache: bool = key(True, "Keep the cache of finished requests for the next turn of a conversation.")
    prompt_lookup_tokens: int = key(0, "Tokens that a step drafts from a request's earlier text, while that is faster.", ge=0)
    threads: int | None = key(None, "Compute threads; default: one for each core.", ge=1, le=1024)
    weights_roots: list[str] = key_from(list, "Directories from which weight updates may be read.")
    random_seed: int = key(1, "Seed of requests without one.")
    batch_invariant: bool = key(False, "Make the answer of a request independent of other requests in its batch.")
    log_level: str = key("warning", "The server's log level.")

    @classmethod
    def like(cls, section: Any, **settings: Any) -> LocalServerConfig:
        """Make a config from the settings that another section has under the same names.

        Args:
            section: a dataclass, such as the ``rollout`` section, whose built-in engine has the same settings.
            settings: settings that replace those of the section.
        """
        names = {one.name for one in fields(cls)} & {one.name for one in fields(section)}
        return cls(**{name: getattr(section, name) for name in names} | settings)

    @staticmethod
    def build_cmd(config: LocalServerConfig, *, host: str = "127.0.0.1", port: int = 30000) -> list[str]:
        """Build the command that serves ``config.model_path`` with the built-in engine.

        Raises:
            ConfigError: no model is set.
        """
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "weights-root": config.weights_roots,
            "no-prefix-cache": not config.prefix_cache,
            **_same_names(config, "weights_roots", "prefix_cache"),
            **config.extra_args,
        }
        model = _model(config.model_path, "rollwright serve-model")
        return _noted(host, port, config.command("rollwright", "serve-model", model, *option_list(options)))


def _same_names(config: ServerConfig, *others: str) -> dict[str, Any]:
    """Return the settings that have the same name as the server's option, without ``others``."""
    others += ("model_path", "extra_args", "python", "env")
    return {each.name.replace("_", "-"): getattr(config, each.name) for each in fields(config) if each.name not in others}


def _gpus(first: int, count: int) -> list[str]:
    """Return GPU names for ``CUDA_VISIBLE_DEVICES``; ``first`` and ``count`` refer to the GPUs visible to this process."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and first + count > len(visible):
        raise ConfigError(
            f"GPUs {first} to {first + count - 1} are asked for, and CUDA_VISIBLE_DEVICES={','.join(visible)} lets this process see "
            f"{len(visible)}: widen it, or lower rollout.servers, rollout.tensor_parallel or rollout.first_gpu."
        )
    return (visible or [str(index) for index in range(first + count)])[first : first + count]


def _model(path: str, server: str) -> str:
    if not path:
        raise ConfigError(f"{server} has no model: set model_path to a directory or a Hugging Face name.")
    return path


def option_list(options: Mapping[str, Any]) -> list[str]:
    """Format command-line options: underscores become dashes, True is a bare flag, lists repeat the option, None and False are omitted."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            for item in value if isinstance(value, list | tuple) else [value]:
                arguments += [flag, str(item)]
    return arguments
