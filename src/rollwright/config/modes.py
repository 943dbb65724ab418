"""Sections of single modes: the store (explore, train), the service (serve), the scores of checkpoints (bench), helping models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OperatorConfig:
    """One step of the pipeline between explorer and trainer."""

    name: str = field(default="", metadata={"help": "Registered name or import path of the operator."})
    args: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of its constructor."})


@dataclass
class StoreConfig:
    """A database of experiences."""

    type: str = field(
        default="sql",
        metadata={
            "help": "sql: a database, for any number of processes; queue: the same, first in, first out, each used once; "
            "file: a JSONL file, for one explorer and one trainer.",
            "choices": ["sql", "queue", "file"],
        },
    )
    url: str = field(
        default="",
        metadata={
            "help": "SQLAlchemy URL, such as sqlite:///path.db or postgresql://…, or the file's path; empty: in the run directory."
        },
    )
    train_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Experiences in a training step: whole groups until there are at least so many; None: "
            "train_dataset.batch_size groups.",
            "ge": 1,
        },
    )
    order: str = field(
        default="fifo",
        metadata={
            "help": "Which experiences are trained next: the oldest, the freshest, by decaying priority, or any.",
            "choices": ["fifo", "freshest", "priority", "uniform"],
        },
    )
    uses: int | None = field(
        default=1,
        metadata={"help": "How often each experience is trained on; None: without end (priority and uniform).", "ge": 1},
    )
    priority_fn: str = field(
        default="linear_decay",
        metadata={
            "help": "Priority where order is priority: linear_decay (version - decay x uses), or "
            "linear_decay_use_count_control_randomization (with use_count_limit and sigma)."
        },
    )
    priority_fn_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Arguments of priority_fn, such as decay (2.0)."}
    )
    cooldown_seconds: float = field(
        default=0.0, metadata={"help": "Seconds that a used experience rests before it is used again.", "ge": 0.0}
    )
    lease_seconds: float = field(
        default=60.0,
        metadata={
            "help": "Seconds after which the tasks of an explorer that died go to the others; one that lives renews its leases.",
            "gt": 0.0,
        },
    )
    keep_used: bool = field(
        default=True,
        metadata={
            "help": "Keep experiences that were used as often as they may be, for export; false: their rows are deleted once no kept "
            "recover checkpoint can ask for them again, so that the store does not grow with the run."
        },
    )
    operators: list[OperatorConfig] = field(
        default_factory=list, metadata={"help": "Filters and shapers that experiences pass before they are stored."}
    )


@dataclass
class ServiceConfig:
    """The service of mode ``serve``."""

    host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "Interface to bind; another than this machine's own lets agents elsewhere in, guarded by keys alone."
        },
    )
    port: int = field(
        default=0, metadata={"help": "Port of the service; 0: a free one, written to service.json.", "ge": 0, "le": 65535}
    )
    api_key: str | None = field(
        default=None,
        metadata={
            "help": "Key that opens runs and gives feedback; None: made up, written to service.json. ${oc.env:NAME} keeps it out of the file."
        },
    )
    feedback_seconds: float = field(
        default=3600.0,
        metadata={"help": "Seconds after its last feedback or start that a run waits; then it is dropped.", "gt": 0.0},
    )
    max_open_runs: int = field(default=1024, metadata={"help": "Runs that may be open at once.", "ge": 1})


@dataclass
class BenchConfig:
    """Scores of the checkpoints of a run on its evaluation tasks; generation arguments are those of the tasksets or the evaluator."""

    checkpoints: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Model directories, or names; empty: the model that the run began with, and every checkpoint of the run."
        },
    )
    samples: int = field(default=8, metadata={"help": "Samples of each task.", "ge": 1})
    pass_at: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8], metadata={"help": "Each k of pass@k; those above samples are left out."}
    )
    pass_reward: float = field(default=1.0, metadata={"help": "Reward from which on a sample passes."})


@dataclass
class AuxiliaryModelConfig:
    """One model: a server of our own beside the run (``model_path``), or any URL of the OpenAI protocol (``base_url``)."""

    model_path: str = field(
        default="", metadata={"help": "Directory or Hugging Face name; served beside the run and ended with it."}
    )
    base_url: str = field(default="", metadata={"help": "URL of a server that runs already, such as https://host/v1."})
    model: str = field(default="", metadata={"help": "Name that requests to base_url give; empty: the first that it lists."})
    api_key: str | None = field(default=None, metadata={"help": "Key for base_url. ${oc.env:NAME} keeps it out of the file."})
    timeout: float = field(default=600.0, metadata={"help": "Seconds that one request may take.", "gt": 0.0})
    max_retries: int = field(default=2, metadata={"help": "Times a failed request is sent again.", "ge": 0})
    device: str = field(default="auto", metadata={"help": "Device of the server that is started."})
    dtype: str = field(
        default="auto",
        metadata={"help": "Its compute type.", "choices": ["auto", "float32", "bfloat16", "float16"]},
    )
    context_length: int | None = field(
        default=None, metadata={"help": "Its prompt and new tokens together; None: the model's.", "ge": 2}
    )
    max_running_requests: int = field(default=64, metadata={"help": "Sequences that it decodes together.", "ge": 1})
    kv_cache_bytes: int | None = field(default=None, metadata={"help": "Memory of its cache.", "ge": 1})
    threads: int | None = field(default=None, metadata={"help": "Its compute threads; None: one for each core.", "ge": 1})
    setup_timeout: float = field(default=300.0, metadata={"help": "Seconds that the run waits for its health.", "gt": 0.0})
