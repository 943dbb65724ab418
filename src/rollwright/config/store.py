"""The experience store: where experiences wait between the process that makes them and the one that trains on them."""

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
