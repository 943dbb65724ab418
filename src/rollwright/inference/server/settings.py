"""Settings of HTTP services: address, key and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollwright.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_exposure(host: str, api_key: str | None) -> None:
    """Check that a service that other machines can reach has a key.

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
        default="127.0.0.1", metadata={"help": "Interface to bind. All but the loopback interface need an api_key."}
    )
    port: int = field(default=0, metadata={"help": "Port to listen on. 0 chooses a free one.", "ge": 0, "le": 65535})
    api_key: str | None = field(default=None, metadata={"help": "Bearer token that every request but /health must carry."})
    max_body_bytes: int = field(default=8 << 20, metadata={"help": "Largest request body in bytes.", "ge": 1024})
    allowed_hosts: list[str] = field(
        default_factory=list,
        metadata={"help": "Further host names under which clients may reach the service, such as that of a proxy."},
    )
    receive_seconds: float = field(
        default=60.0,
        metadata={
            "help": "Seconds within which a request, headers and body, must arrive; otherwise its connection is closed.",
            "gt": 0,
        },
    )


@dataclass
class ServerSettings(ServiceSettings):
    """Address, key and limits of an inference server."""

    port: int = field(default=30000, metadata={"help": "Port to listen on. 0 chooses a free one.", "ge": 0, "le": 65535})
    max_body_bytes: int = field(
        default=0,
        metadata={"help": "Largest request body in bytes. 0 allows 1 MiB plus 256 bytes per token of the context.", "ge": 0},
    )
    model_name: str = field(
        default="", metadata={"help": "Name of the model in the OpenAI protocol. Empty uses the model directory."}
    )
    weights_roots: list[str] = field(
        default_factory=list,
        metadata={"help": "Directories below which weights may be loaded. Without any, updates from disk are refused."},
    )
    max_prompt_tokens: int | None = field(
        default=None,
        metadata={"help": "Maximum length of a prompt in tokens. None sets no limit besides the context.", "ge": 1},
    )
    max_samples: int = field(
        default=256, metadata={"help": "Maximum number of completions for one request: prompts times n.", "ge": 1}
    )
    image_hosts: list[str] = field(
        default_factory=list,
        metadata={"help": "Hosts that images of chats may be fetched from. Other images must be data: URLs."},
    )
    max_pending: int = field(
        default=16384,
        metadata={"help": "Maximum number of requests in progress or waiting; further ones get status 429.", "ge": 1},
    )
    max_adapters: int = field(
        default=16, metadata={"help": "Maximum number of LoRA adapters held at once, for each run.", "ge": 1}
    )
    run_keys: dict[str, str] = field(
        default_factory=dict,
        metadata={"help": "Runs that share the server, and the key of each: it loads and names its own adapters only."},
    )
    update_seconds: float = field(
        default=300.0,
        metadata={"help": "Seconds without a call after which an unfinished weight update is undone.", "gt": 0},
    )

    def __post_init__(self) -> None:
        check_exposure(self.host, self.api_key)
        keys = [self.api_key, *self.run_keys.values()]
        if self.run_keys and not self.api_key:
            raise ConfigError(
                "run_keys are given and no api_key: without a key, anybody could change what the runs use. Give --api-key (or set "
                "ROLLWRIGHT_API_KEY) beside --run-key."
            )
        if len(set(keys)) < len(keys) or not all(self.run_keys) or not all(self.run_keys.values()):
            raise ConfigError("Each run needs a name and a key of its own, other than api_key: --run-key NAME=KEY.")
