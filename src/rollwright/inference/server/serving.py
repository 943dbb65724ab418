"""Starting the server: the engine, the socket, and an end on every signal."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import uvicorn

from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.network import allow_many_connections
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings
from rollwright.tracking.logging import getLogger

logger = getLogger("ServeModel")


@dataclass
class EngineSettings:
    """What the engine behind a server is started with; see ``BuiltinEngine``."""

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    max_running_requests: int = 256
    max_waiting: int | None = 16384
    kv_cache_bytes: int | None = None
    prefix_cache: bool = True
    random_seed: int = 0
    trust_remote_code: bool = False
    threads: int | None = None

    def start(self) -> BuiltinEngine:
        """Load the model and start the engine."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return BuiltinEngine(
            self.model,
            self.tokenizer,
            max_running_requests=self.max_running_requests,
            context_length=self.context_length,
            kv_cache_bytes=self.kv_cache_bytes,
            prefix_cache=self.prefix_cache,
            device=self.device,
            dtype=self.dtype,
            max_waiting=self.max_waiting,
            seed=self.random_seed,
            trust_remote_code=self.trust_remote_code,
        )


def serve(engine_settings: EngineSettings, settings: ServerSettings, *, log_level: str = "warning") -> None:
    """Serve until SIGINT or SIGTERM.

    The port is bound before the model is loaded, so a port that is taken is said at once.

    Raises:
        ConfigError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise ConfigError(f"{settings.host}:{settings.port} cannot be bound ({error}): choose another --port.") from error
    settings.port = listener.getsockname()[1]
    engine = engine_settings.start()
    app = create_application(engine, settings, model_path=engine_settings.model)
    logger.info("Serving %s at http://%s:%d", settings.model_name, settings.host, settings.port)
    allow_many_connections()
    config = uvicorn.Config(app, log_level=log_level, timeout_keep_alive=30, timeout_graceful_shutdown=5, access_log=False)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.destroy()
        listener.close()
