"""Sections of single modes: the store (explore, train), the service (serve), scores of checkpoints (bench), and auxiliary models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollwright.config import key, key_from


@dataclass
class OperatorConfig:
    """One step of the pipeline between explorer and trainer."""

    name: str = key("", "Registered name or import path of the operator.")
    args: dict[str, Any] = key_from(dict, "Arguments of its constructor.")


@dataclass
class StoreConfig:
    """A database of experiences."""

    type: str = key(
        "sql",
        "sql: a database, for any number of processes; queue: the same, first in, first out, each used once; "
        "file: a JSONL file, for one explorer and one trainer.",
        choices=["sql", "queue", "file"],
    )
    url: str = key(
        "", "SQLAlchemy URL, such as sqlite:///path.db or postgresql://…, or the file's path; default: in the run directory."
    )
    train_batch_size: int | None = key(
        None,
        "Experiences in a training step: whole groups until there are at least this many; default: train_dataset.batch_size groups.",
        ge=1,
    )
    order: str = key(
        "fifo",
        "Which experiences are trained on next: the oldest, the newest, those of the highest decaying priority, or random ones.",
        choices=["fifo", "freshest", "priority", "uniform"],
    )
    uses: int | None = key(1, "How often each experience is trained on. None disables the limit (priority and uniform).", ge=1)
    priority_fn: str = key(
        "linear_decay",
        "Priority function if order is priority: linear_decay (version - decay x uses), or "
        "linear_decay_use_count_control_randomization (with use_count_limit and sigma).",
    )
    priority_fn_args: dict[str, Any] = key_from(dict, "Arguments of priority_fn, such as decay (2.0).")
    cooldown_seconds: float = key(0.0, "Seconds before a used experience may be used again.", ge=0.0)
    lease_seconds: float = key(
        60.0,
        "Seconds after which the tasks of a dead explorer go to the others. A live one renews its leases.",
        gt=0.0,
    )
    keep_used: bool = key(
        True,
        "Keep experiences whose uses are exhausted, for export. false deletes their rows once no kept recovery checkpoint needs them, "
        "so that the store does not grow with the run.",
    )
    operators: list[OperatorConfig] = key_from(list, "Filters and shapers that experiences pass before they are stored.")


@dataclass
class ServiceConfig:
    """The service of mode ``serve``."""

    host: str = key(
        "127.0.0.1",
        "Interface to bind. With an address other than loopback, agents on other machines can connect; only keys protect the service.",
    )
    port: int = key(0, "Port of the service; 0 picks a free one, which is written to service.json.", ge=0, le=65535)
    api_key: str | None = key(
        None,
        "Key for opening runs and giving feedback. Default: a random one, written to service.json. ${oc.env:NAME} keeps it out of the file.",
        secret=True,
    )
    feedback_seconds: float = key(3600.0, "Seconds without feedback after which a run is dropped.", gt=0.0)
    max_open_runs: int = key(1024, "Runs that may be open at once.", ge=1)
    max_body_bytes: int = key(8 << 20, "Largest body of a request, including the agents' calls.", ge=1024)
    allowed_hosts: list[str] = key_from(
        list, "Further host names that requests may use for the service, such as that of a proxy in front of it."
    )
    receive_seconds: float = key(
        60.0, "Seconds within which a request, headers and body, must arrive; otherwise its connection is closed.", gt=0.0
    )


@dataclass
class BenchConfig:
    """Scores of a run's checkpoints on its evaluation tasks, with the generation arguments of the tasksets or the evaluator."""

    checkpoints: list[str] = key_from(
        list, "Model directories or names. Default: the initial model and every checkpoint of the run."
    )
    samples: int = key(8, "Samples of each task.", ge=1)
    pass_at: list[int] = key_from(lambda: [1, 2, 4, 8], "Values of k for pass@k; those above samples are left out.")
    pass_reward: float = key(1.0, "Minimum reward of a sample that passes.")


@dataclass
class AuxiliaryModelConfig:
    """A model that is not trained: a server that the run starts (``model_path``), or any URL of the OpenAI protocol (``base_url``)."""

    model_path: str = key("", "Directory or Hugging Face name; served during the run.", public=True)
    base_url: str = key("", "URL of a running server, such as https://host/v1.")
    model: str = key("", "Model name in requests to base_url. Default: the first that the server lists.")
    api_key: str | None = key(None, "Key for base_url. ${oc.env:NAME} keeps it out of the file.", secret=True)
    timeout: float = key(600.0, "Seconds that one request may take.", gt=0.0)
    max_retries: int = key(2, "How often a failed request is sent again.", ge=0)
    device: str = key("auto", "Device of the server that is started.")
    dtype: str = key("auto", "Its compute type.", choices=["auto", "float32", "bfloat16", "float16"])
    context_length: int | None = key(None, "Maximum number of prompt and new tokens together. Default: the model's.", ge=2)
    max_running_requests: int = key(64, "Sequences that it decodes together.", ge=1)
    kv_cache_bytes: int | None = key(None, "Memory of its cache.", ge=1)
    threads: int | None = key(None, "Its compute threads; default: one for each core.", ge=1, le=1024)
    setup_timeout: float = key(300.0, "Seconds to wait until it is healthy.", gt=0.0)
