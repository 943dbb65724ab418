"""Mode ``serve``: where an agent in use reaches the policy, and how long a run waits for feedback."""

from __future__ import annotations

from dataclasses import dataclass, field


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
