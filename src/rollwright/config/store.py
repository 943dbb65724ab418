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

    url: str = field(
        default="",
        metadata={
            "help": "SQLAlchemy URL, such as sqlite:///path.db or postgresql://…; empty: experiences.db in the run directory."
        },
    )
    order: str = field(
        default="fifo",
        metadata={
            "help": "Which experiences are trained next: the oldest, the freshest, by decaying priority, or any.",
            "choices": ["fifo", "freshest", "priority", "uniform"],
        },
    )
    uses: int = field(default=1, metadata={"help": "How often each experience is trained on.", "ge": 1})
    priority_decay: float = field(
        default=0.1, metadata={"help": "What a use takes off the priority, where order is priority.", "ge": 0.0}
    )
    operators: list[OperatorConfig] = field(
        default_factory=list, metadata={"help": "Filters and shapers that experiences pass before they are stored."}
    )
