"""Services for task-style workflows: the OpenAI front, and servers of models that are not trained.

Both start on first use, and end with ``close``, with the object or with the process. On a Ray cluster, each process that runs episodes
has its own front, and the servers are placed like other processes (``placement.ray_rollout``). A lost server is restarted, perhaps at
another address; its clients then use the new address.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.config.modes import AuxiliaryModelConfig
from rollwright.config.servers import LocalServerConfig
from rollwright.errors import ConfigError, EngineError, LostProcessError
from rollwright.inference.launcher import Launcher
from rollwright.processes.pool import processor_count


@dataclass
class MovingModelConfig(AuxiliaryModelConfig):
    """A model whose server may be restarted at another address.

    Attributes:
        address_file: file with the ``host:port`` of the latest start. All nodes see it.
    """

    address_file: str = ""


class TaskServices:
    """The front and the auxiliary models of one run, shared by training and evaluation.

    Args:
        config: the run's config.
        tokenizer: the policy's tokenizer.
        logs: directory for the servers' logs; by default the run's ``logs`` directory.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, logs: str | Path | None = None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._logs = Path(logs or Path(config.cluster.fileroot, config.experiment_name, config.trial_name, "logs"))
        self._lock = threading.Lock()
        self._opened = ExitStack()
        weakref.finalize(self, self._opened.close)
        self._front: Any = None
        self._clients: list[Any] | None = None

    @property
    def openai_front(self) -> Any:
        """The run's ``OpenAIFront``, or None if ``rollout.openai_front`` is off."""
        with self._lock:
            if self._front is None and self._config.rollout.openai_front:
                import rollwright.inference.front.openai_clients  # noqa: F401 - reports a missing package before the first sample
                from rollwright.inference.front.openai_front import OpenAIFront

                self._front = OpenAIFront(self._tokenizer, self._config.actor.path)
                self._opened.callback(self._front.close)
            return self._front

    @property
    def auxiliary_models(self) -> list[Any]:
        """An ``openai.OpenAI`` client for each entry of ``auxiliary_models``, in order. Each client's ``model_path`` names its model.

        Raises:
            ConfigError: the openai package is missing, or a server names no model.
            EngineError: a server did not become healthy.
        """
        with self._lock:
            if self._clients is None:
                self._clients = self._connect(self._config.auxiliary_models)
            return self._clients

    def close(self) -> None:
        """End the front and the servers. Idempotent."""
        with self._lock:
            self._front = self._clients = None
            self._opened.close()

    def __enter__(self) -> TaskServices:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self, models: list[AuxiliaryModelConfig]) -> list[Any]:
        if not models:
            return []
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ConfigError(
                "auxiliary_models are reached through the openai package, which is not installed: pip install "
                "'rollwright[openai]'."
            ) from error
        launcher = Launcher(self._logs)
        self._opened.callback(launcher.close)
        served = serve(models, launcher)
        if launcher.servers:
            watch = launcher.watch(max(model.setup_timeout for model in models), name="auxiliary")
            watch.start()
            self._opened.callback(watch.close)
        places = itertools.count()
        clients = []
        for given, model in zip(models, served, strict=True):
            client_class = openai.OpenAI
            if given.model_path:
                client_class = _following_client(partial(_address, launcher, next(places)), model.setup_timeout)
            elif isinstance(model, MovingModelConfig):
                client_class = _following_client(Path(model.address_file).read_text, model.setup_timeout)
            client = client_class(
                base_url=model.base_url,
                api_key=model.api_key or "none",
                timeout=model.timeout,
                max_retries=model.max_retries,
            )
            client.model_path = model.model or _first_model(client)  # type: ignore[attr-defined]
            clients.append(client)
        return clients


def serve(
    models: Sequence[AuxiliaryModelConfig], launcher: Launcher, threads: int | None = None, key: str | None = None
) -> list[AuxiliaryModelConfig]:
    """Start a server for each model that has none.

    Args:
        models: each with a ``model_path`` or a ``base_url``.
        launcher: starts and ends the servers.
        threads: threads of a server whose section sets none; by default half of this machine's cores.
        key: API key of the servers; by default a new one.

    Returns:
        The models, each with a ``base_url``.
    """
    key = key or secrets.token_urlsafe(24)
    for model in models:
        if model.model_path:
            own = model.threads or threads or max(1, processor_count() // 2)
            environment = {"ROLLWRIGHT_API_KEY": key, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(own)}
            launcher.start(_command(model, own), name="auxiliary", environment=environment)
    served = iter(launcher.wait_healthy(max(model.setup_timeout for model in models)))
    return [
        replace(model, model_path="", base_url=f"http://{next(served)}/v1", api_key=key, model=model.model_path)
        if model.model_path
        else model
        for model in models
    ]


def _command(model: AuxiliaryModelConfig, threads: int) -> Any:
    local = LocalServerConfig.like(model, threads=threads)
    return lambda host, port, index: LocalServerConfig.build_cmd(local, host=host, port=port)


def _address(launcher: Launcher, place: int) -> str | None:
    """Return a server's address, or None once the servers have been ended."""
    try:
        return launcher.server(place).address
    except LostProcessError:
        return None


def _following_client(address: Callable[[], str | None], timeout: float) -> Any:
    """Make a client class for a server that may be restarted at another address.

    Args:
        address: returns the server's current address, or None once the server has been ended for good.
        timeout: seconds to wait for a lost server.
    """
    import openai

    class Following(openai.OpenAI):
        @property
        def base_url(self) -> Any:
            found = address()
            return self._base_url if found is None else type(self._base_url)(f"http://{found}/v1/")

        def request(self, *arguments: Any, **settings: Any) -> Any:
            lost_at: float | None = None
            while True:
                try:
                    return super().request(*arguments, **settings)
                except openai.APIConnectionError as error:
                    lost_at = lost_at or time.monotonic()
                    is_over = address() is None or time.monotonic() > lost_at + timeout
                    if is_over or isinstance(error, openai.APITimeoutError):
                        raise
                time.sleep(0.5)

    return Following


def _first_model(client: Any) -> str:
    try:
        return client.models.list().data[0].id
    except Exception as error:  # any, because the server may be the user's own
        raise EngineError(
            f"the auxiliary model at {client.base_url} does not say its name ({type(error).__name__}: {error}); set its model, "
            "or check base_url and api_key."
        ) from error
