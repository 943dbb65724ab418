"""The rollout engines that users hold: an inference engine and an executor behind one interface.

``rollout.rollout_batch(tasks, workflow=…)`` runs workflows; ``await rollout.agenerate(request)`` sends a request to the engine.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, RolloutError
from rollwright.experience.journal.writing import Journal
from rollwright.inference.backends import BACKENDS
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.engine import InferenceEngine, WeightReceiver
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server_watch import ServerWatch
from rollwright.inference.weights.files import base_and_adapter
from rollwright.rollout.episode import EpisodeWorkers
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.teachers import Teachers
from rollwright.tracking.logging import getLogger

if TYPE_CHECKING:
    from rollwright.inference.weights.transfer import WeightUpdateMeta

logger = getLogger("RolloutEngine")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _executors(
    method: Callable[Concatenate[RolloutExecutor, Arguments], Result],
) -> Callable[Concatenate[RolloutEngine, Arguments], Result]:
    """Make a ``RolloutEngine`` method that calls the executor's method and keeps its signature and docstring."""

    @functools.wraps(method)
    def call(self: RolloutEngine, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return method(self.executor, *args, **kwargs)

    return call


class RolloutEngine(InferenceEngine):
    """The inference engine as the trainer sees it, together with an executor that runs workflows on it.

    Args:
        config: settings of the engine and the executor.
        client: an existing inference engine; it is destroyed with the rollout engine. None calls ``make_client``.
        seed: the run's seed.
        deterministic: see docs/determinism.md.

    Attributes:
        journal: records the episodes; set it before ``initialize``. None disables recording.
        workers: run the episodes in other processes; set it before ``initialize``. None runs them in this one.
        teachers: score the rows of training samples; set it before ``initialize``. They are closed with the engine.
    """

    journal: Journal | None = None
    workers: EpisodeWorkers | None = None
    teachers: Teachers | None = None

    def __init__(
        self,
        config: RolloutConfig | None = None,
        *,
        client: InferenceEngine | None = None,
        seed: int = 1,
        deterministic: bool = False,
    ) -> None:
        self.config = config or RolloutConfig()
        self.seed = seed
        self.deterministic = deterministic
        self._client = client
        self._executor: RolloutExecutor | None = None
        self._pauses = 0
        self._rests = False
        self._pause_lock = threading.Lock()

    # -- from start to end ---------------------------------------------------------------------------------------------

    def make_client(self) -> InferenceEngine:
        """Make the inference engine; called once, by ``initialize``."""
        raise ConfigError(
            f"{type(self).__name__} was given no inference engine: pass client=…, or use a subclass that makes one."
        )

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Load or connect, and wait until requests are answered. Idempotent.

        Args:
            args, kwargs: passed to the inference engine.
        """
        if self._executor is not None:
            return
        if self._client is None:
            self._client = self.make_client()
        self._client.initialize(*args, **kwargs)
        self.context_length = self._client.context_length
        try:
            if self.deterministic and not self._client.is_batch_invariant:
                raise ConfigError(
                    f"deterministic: what {type(self._client).__name__} answers may depend on what else is computed, so the run would "
                    "not repeat. Use the built-in engine, or servers in their batch-invariant mode (rollwright serve-model "
                    "--batch-invariant, SGLang --enable-deterministic-inference, VLLM_BATCH_INVARIANT=1 for vLLM on a GPU)."
                )
            self._executor = RolloutExecutor(
                self._client,
                self.config,
                seed=self.seed,
                deterministic=self.deterministic,
                journal=self.journal,
                workers=self.workers,
                teachers=self.teachers,
            )
        except BaseException:  # invalid settings: stop the servers that were started for the client
            self._client.destroy()
            raise

    def destroy(self) -> None:
        """Cancel running samples, and end the thread and the inference engine. Idempotent."""
        executor, self._executor = self._executor, None
        client, self._client = self._client, None
        if executor is not None:
            executor.destroy()
        if client is not None:
            client.destroy()
        if self.teachers is not None:
            self.teachers.close()
        if self.journal is not None:
            self.journal.close()

    def __enter__(self) -> RolloutEngine:
        self.initialize()
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    @property
    def client(self) -> InferenceEngine:
        """The inference engine."""
        if self._client is None:
            raise RolloutError(f"{type(self).__name__} is not running: call initialize() first.")
        return self._client

    @property
    def executor(self) -> RolloutExecutor:
        """The executor."""
        if self._executor is None:
            raise RolloutError(f"{type(self).__name__} is not running: call initialize() first.")
        return self._executor

    # -- requests ------------------------------------------------------------------------------------------------------

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion outside of any sample; it is not recorded."""
        return await self.client.agenerate(request)

    def abort(self, rid: str | None = None) -> None:
        """Abort the requests of one conversation, or all requests if ``rid`` is None."""
        self.client.abort(rid)

    # -- samples -------------------------------------------------------------------------------------------------------

    submit = _executors(RolloutExecutor.submit)
    wait = _executors(RolloutExecutor.wait)
    wait_for_task = _executors(RolloutExecutor.wait_for_task)
    wait_for_any = _executors(RolloutExecutor.wait_for_any)
    abandon = _executors(RolloutExecutor.abandon)
    rollout_batch = _executors(RolloutExecutor.rollout_batch)
    prepare_batch = _executors(RolloutExecutor.prepare_batch)
    counters = _executors(RolloutExecutor.counters)
    training_counts = _executors(RolloutExecutor.training_counts)
    state_dict = _executors(RolloutExecutor.state_dict)
    load_state_dict = _executors(RolloutExecutor.load_state_dict)

    # -- weights -------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no more samples and sample no more tokens. Calls nest: sampling continues after as many calls of ``resume``.

        In deterministic mode, running samples finish first.
        """
        executor = self.executor
        with self._pause_lock:
            if self._pauses == 0 and self.deterministic:
                executor.settle()
            self._pauses += 1
            if self._pauses > 1:
                return
            executor.pause()
            try:
                self.client.pause()
            except BaseException:
                self._pauses -= 1
                executor.resume()
                raise

    def resume(self) -> None:
        """Continue after ``pause``; a no-op if nothing is paused."""
        executor = self.executor
        with self._pause_lock:
            if self._pauses == 0:
                return
            if self._pauses == 1:
                self.client.resume()
                executor.resume()
            self._pauses -= 1

    def rest(self) -> None:
        """With ``rollout.colocate``, pause and have the servers give back memory until ``wake``, for a step of the model."""
        if self.config.colocate and not self._rests:
            self.pause()
            self._rests = True
            self.client.rest()

    def wake(self) -> None:
        """Continue after ``rest``; a no-op if the engine does not rest."""
        if self._rests:
            self._rests = False
            self.resume()

    def get_version(self) -> int:
        """Return the version of the weights that the next token is sampled with."""
        return self.client.get_version()

    def set_version(self, version: int) -> None:
        """Confirm a published version; delivered batches release their slots.

        Raises:
            WeightUpdateError: the engine has another version.
        """
        self.client.set_version(version)
        self.executor.set_version(version)

    def publish(self, version: int) -> None:
        """Publish shared weights that were changed in place, as ``version``. The engine must be paused before the change."""
        self.client.publish(version)
        self.executor.set_version(version)

    def update_weights(self, meta: WeightUpdateMeta | None = None, **arguments: Any) -> None:
        """Send new weights to the engine; delivered batches release their slots.

        Args:
            meta, arguments: as for ``WeightReceiver.update_weights``.
        """
        self.client.update_weights(meta, **arguments)
        self.executor.set_version(self.client.get_version())

    @property
    def logprob_tolerance(self) -> float | None:
        """The value of ``rollout.logprob_tolerance``."""
        return self.config.logprob_tolerance

    @property
    def records_experts(self) -> bool:
        """The value of ``rollout.routing_replay``."""
        return self.config.routing_replay

    @property
    def sampler(self) -> WeightReceiver:
        """The inference engine, or this engine if there is none yet."""
        return self if self._client is None else self._client

    def stats(self) -> dict[str, float]:
        """Return the counters of the inference engine and, under ``rollout/``, those of the executor."""
        return {**self.client.stats(), **{f"rollout/{name}": value for name, value in self.counters().items()}}


class LocalRolloutEngine(RolloutEngine):
    """The built-in engine in this process.

    Args:
        config: settings; ``config.path`` names the model if ``model`` is None.
        model: a live model that shares its weights with its trainer, or a directory or name. If only a LoRA adapter is in the directory,
            the engine loads the base that it names and samples with the adapter.
        tokenizer: the model's tokenizer, or its directory or name.
        seed: the run's seed.
        deterministic: see docs/determinism.md.
        trust_remote_code: run code from the model's directory.
        base_only: see ``BuiltinEngine``.
    """

    def __init__(
        self,
        config: RolloutConfig | None = None,
        model: Any = None,
        tokenizer: Any = None,
        *,
        seed: int = 1,
        deterministic: bool = False,
        trust_remote_code: bool = False,
        base_only: bool = False,
    ) -> None:
        super().__init__(config, seed=seed, deterministic=deterministic)
        self.model = model
        self.tokenizer = tokenizer
        self._base_only = base_only
        self._trust_remote_code = trust_remote_code

    def make_client(self) -> InferenceEngine:
        """Load the model, or share the given one; a given model is copied if sampling uses another dtype than training."""
        from rollwright.inference.backends.builtin.engine import BuiltinEngine

        config = self.config
        model = self.model if self.model is not None else config.path
        if isinstance(model, str) and not model:
            raise ConfigError("LocalRolloutEngine has no model: pass model=…, or set rollout.path to a directory or name.")
        model, adapter = base_and_adapter(model) if isinstance(model, (str, Path)) else (model, None)
        engine = BuiltinEngine(
            model,
            self.tokenizer,
            max_running_requests=config.max_running_requests,
            context_length=config.context_length,
            kv_cache_bytes=config.kv_cache_bytes,
            prefix_cache=config.prefix_cache,
            prompt_lookup_tokens=config.prompt_lookup_tokens,
            device=config.device,
            dtype=_sampling_dtype(config, self.model),
            on_weight_update=config.on_weight_update,  # type: ignore[arg-type]
            seed=self.seed,
            max_adapters=config.max_head_offpolicyness + 1,
            base_only=self._base_only,
            batch_invariant=self.deterministic,
            routing_replay=config.routing_replay,
            trust_remote_code=self._trust_remote_code,
        )
        if adapter is not None:
            engine.update_weights(version=1, weights=adapter)
        return engine


def _sampling_dtype(config: RolloutConfig, live_model: Any) -> str:
    """Return the dtype to sample in: ``config.dtype``, or bfloat16 if that is ``auto`` and a live model has float32 weights on a GPU.

    float32 would double the bytes of each decode step, and the trainer computes in bfloat16.
    """
    if config.dtype != "auto" or live_model is None or isinstance(live_model, str):
        return config.dtype
    weight = next(live_model.parameters())
    if weight.device.type != "cuda" or weight.dtype != torch.float32 or not torch.cuda.is_bf16_supported():
        return "auto"
    logger.info("sampling with a bfloat16 copy of the float32 weights that are trained; rollout.dtype: float32 shares them")
    return "bfloat16"


class RemoteEngine(RolloutEngine):
    """Rollout engine whose servers are found by ``config.addresses`` or by the addresses in the environment.

    Attributes:
        backend: name of a registered backend or an import path. If empty, ``config.backend`` is used.
        watch: restarts lost servers; set it before ``initialize``. It is None if the servers were started elsewhere.
    """

    backend = ""
    watch: ServerWatch | None = None

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """See ``RolloutEngine.initialize``."""
        if self.watch is not None and self._executor is None:
            self.watch.start()  # a server may be lost before the client connects
        super().initialize(*args, **kwargs)

    def destroy(self) -> None:
        """See ``RolloutEngine.destroy``."""
        if self.watch is not None:
            self.watch.close()
        super().destroy()

    def make_client(self) -> InferenceEngine:
        """Make a client of the servers; ``initialize`` connects it."""
        backend = BACKENDS.get(self.backend or self.config.backend)
        if not issubclass(backend, ServerBackend):
            raise ConfigError(f"rollout.backend {self.config.backend!r} has no servers: it computes in this process.")
        return RemoteInferenceEngine(backend, self.config)

    @property
    def _servers(self) -> RemoteInferenceEngine:
        assert isinstance(self.client, RemoteInferenceEngine)
        return self.client

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of the servers."""
        return self._servers.addresses

    def in_service(self) -> tuple[list[str], int]:
        """Return the addresses of the servers that accept requests, and their version; ``[], 0`` before ``initialize`` has returned."""
        if self._executor is None:
            return [], 0
        return self._servers.weight_holders, self._servers.get_version()


class RemoteSGLangEngine(RemoteEngine):
    """Rollout engine for servers that speak SGLang's protocol: SGLang, or ``rollwright serve-model``."""

    backend = "sglang"


class RemoteVLLMEngine(RemoteEngine):
    """Rollout engine for vLLM servers."""

    backend = "vllm"
