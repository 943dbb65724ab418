"""What a service is told when it starts: where it listens, who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollwright.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to listen beyond this machine without a key.

    Raises:
        ConfigError: ``host`` is not a loopback address and there is no key.
    """
    if host not in LOOPBACK and not api_key:
        raise ConfigError(
            f"host {host} can be reached from other machines and there is no api_key: give --api-key (or set "
            "ROLLWRIGHT_API_KEY), or bind 127.0.0.1."
        )


@dataclass
class ServiceSettings:
    """Address, names, key and limit of a service."""

    host: str = field(
        default="127.0.0.1", metadata={"help": "Interface to bind. Another than this machine's own needs an api_key."}
    )
    port: int = field(default=0, metadata={"help": "Port to listen on; 0: a free one.", "ge": 0, "le": 65535})
    api_key: str | None = field(default=None, metadata={"help": "Bearer token that every request but /health must carry."})
    max_body_bytes: int = field(default=8 << 20, metadata={"help": "Largest request body.", "ge": 1024})
    allowed_hosts: list[str] = field(
        default_factory=list,
        metadata={"help": "Names besides its own that the service may be asked by, such as that of a proxy before it."},
    )
    receive_seconds: float = field(
        default=60.0,
        metadata={
            "help": "Seconds within which a request has to arrive, headers and body; after that its connection is closed.",
            "gt": 0,
        },
    )


@dataclass
class ServerSettings(ServiceSettings):
    """Address, key and limits of an inference server."""

    port: int = field(default=30000, metadata={"help": "Port to listen on; 0: a free one.", "ge": 0, "le": 65535})
    max_body_bytes: int = field(
        default=0, metadata={"help": "Largest request body; 0: 1 MiB and 256 bytes for each token of the context.", "ge": 0}
    )
    model_name: str = field(default="", metadata={"help": "Name in the OpenAI protocol; empty: the model directory."})
    weights_roots: list[str] = field(
        default_factory=list,
        metadata={"help": "Weights are loaded only from below these directories; none: updates from disk are refused."},
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longest prompt; None: what the context holds.", "ge": 1}
    )
    max_samples: int = field(default=256, metadata={"help": "Most completions of one request: its prompts times n.", "ge": 1})
    image_hosts: list[str] = field(
        default_factory=list,
        metadata={"help": "Hosts that images of chats may be fetched from; others come as data: URLs."},
    )
    max_pending: int = field(
        default=16384, metadata={"help": "Requests that are answered or wait at once; more get 429.", "ge": 1}
    )
    update_seconds: float = field(
        default=300.0,
        metadata={"help": "Seconds without a call after which an unfinished weight update is undone.", "gt": 0},
    )

    def __post_init__(self) -> None:
        check_exposure(self.host, self.api_key)
