"""The built-in engine: accepts requests from any thread or event loop, runs steps in one thread, and changes weights between steps.

Invariants:

* weights, versions and queues change only between steps, so a token's version is the version of the weights that sampled it;
* after ``pause`` returns, no step runs until ``resume``;
* every submitted request ends with a response, with the exception that broke its step, or with ``RequestAborted``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch import Tensor

from rollwright.errors import (
    ConfigError,
    EngineError,
    EngineStepError,
    QueueFullError,
    RequestAborted,
    WeightUpdateError,
)
from rollwright.inference.backends.builtin.adapters import Adapter, AdapterTable
from rollwright.inference.backends.builtin.batch import DecodeBatch, RowTable, Sequence
from rollwright.inference.backends.builtin.batch_invariance import invariant_runner
from rollwright.inference.backends.builtin.loading import cache_bytes_by_default, load_model_for_inference, paired
from rollwright.inference.backends.builtin.low_rank import bypass_injected, carries_live_adapters
from rollwright.inference.backends.builtin.model import ModelRunner
from rollwright.inference.backends.builtin.requests import Batches, Outbox, RequestIntake, resolve, stream
from rollwright.inference.backends.builtin.scheduler import Finished, Stepper, answer
from rollwright.inference.compute_threads import fastest_number, release_workers
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.weights.adapter import version_name
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

_IDLE_SECONDS = 0.002  # after this long without a step, the cores are left to other threads of the process
_MEASURED_ROWS, _MEASURED_TOKENS = 32, 64  # size of the decode step that is timed with each number of threads

OnWeightUpdate = Literal["recompute", "keep", "wait"]


class BuiltinEngine(InferenceEngine):
    """Continuous batching of a Hugging Face causal language model in this process.

    Args:
        model_or_path: a model, a directory or a name. The weights of a model object are shared with its trainer unless ``dtype``
            differs.
        tokenizer: a tokenizer or its path; decodes for stop strings and defines the end token. None loads the tokenizer from the
            model's path.
        max_running_requests: maximum number of sequences decoded at once; others wait.
        context_length: maximum number of tokens of prompt and output together. None uses the model's own limit.
        kv_cache_bytes: maximum memory for keys and values of running and finished sequences together. None uses half of the free
            memory on a GPU, and on CPU a quarter of it, at most 4 GiB.
        prefix_cache: keep the keys and values of finished sequences, so that a conversation's next turn can start from them.
        device: device of a model that is loaded from a path; a model object stays on its own device.
        dtype: type of the weights. A model object of another type is copied, and the trainer sends new weights to the copy.
            ``auto`` shares a model object as it is.
        on_weight_update: what happens to running requests when weights change: ``recompute`` their cache and continue, ``keep`` the
            old cache and continue, or ``wait`` until they end before the change, while new requests are held back.
        max_waiting: maximum number of queued requests beyond those that can run; further requests raise ``QueueFullError``. None
            sets no limit.
        prefill_tokens: maximum number of prompt tokens computed between two decode steps, so that long prompts do not stall running
            requests.
        seed: seed from which requests without their own seed get theirs, in order of submission.
        version: version of the weights at the start.
        threads: number of compute threads on CPU. None uses the number that decodes fastest, measured at the start, or torch's number
            if ``batch_invariant`` is set.
        max_adapters: maximum number of LoRA adapters that are held at once. Of published versions, the newest ones are kept, and older
            ones for as long as a request uses them.
        base_only: compute a model object without the adapters that PEFT injected in it, because its trainer publishes them. Otherwise
            they are sampled with as they are until the first adapter is published.
        batch_invariant: answer a request with the same bits whether it runs alone or among others (docs/determinism.md). If only one
            thread achieves that in a batch, ``threads`` is 1.
        routing_replay: return the experts that each token was sent to (``ModelResponse.routed_experts``).
        prompt_lookup_tokens: maximum number of tokens that a step takes from a request's earlier text and verifies, if that is faster
            (docs/engine.md). 0 computes one token of each request in a step.
        trust_remote_code: run code from the model's directory.
    """

    context_length: int

    def __init__(
        self,
        model_or_path: Any,
        tokenizer: Any = None,
        *,
        max_running_requests: int = 64,
        context_length: int | None = None,
        kv_cache_bytes: int | None = None,
        prefix_cache: bool = True,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        on_weight_update: OnWeightUpdate = "recompute",
        max_waiting: int | None = None,
        prefill_tokens: int = 2048,
        seed: int = 0,
        version: int = 0,
        threads: int | None = None,
        max_adapters: int = 4,
        base_only: bool = False,
        batch_invariant: bool = False,
        routing_replay: bool = False,
        prompt_lookup_tokens: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        if on_weight_update not in ("recompute", "keep", "wait"):
            raise ConfigError(f"on_weight_update is {on_weight_update!r}; use 'recompute', 'keep' or 'wait'.")
        self.on_weight_update: OnWeightUpdate = on_weight_update
        if max_running_requests < 1 or prefill_tokens < 1 or max_adapters < 1:
            raise ConfigError("max_running_requests, prefill_tokens and max_adapters must be at least 1.")
        self.model, self.tokenizer = load_model_for_inference(model_or_path, tokenizer, device, dtype, trust_remote_code)
        self.local_model = self.model
        if base_only:
            bypass_injected(self.model)
        if kv_cache_bytes is None:
            kv_cache_bytes = cache_bytes_by_default(next(self.model.parameters()).device)
        kept_bytes = kv_cache_bytes // 4 if prefix_cache else 0
        limits = max_running_requests, context_length, kv_cache_bytes - kept_bytes
        if batch_invariant:
            threads = threads or torch.get_num_threads()
            self._runner, threads = invariant_runner(self.model, limits, prefill_tokens, threads, routing_replay)
            max_running_requests = self._runner.cache.max_rows
            kept_bytes = 0 if self._runner.prompts_alone else kept_bytes
        else:
            self._runner = ModelRunner(self.model, *limits, records_experts=routing_replay)
        self.is_batch_invariant = batch_invariant
        self.context_length = self._runner.context_length
        self._stepper = Stepper(self._runner, max_running_requests, kept_bytes, prefill_tokens, version, prompt_lookup_tokens)
        self._max_waiting = max_waiting
        self._max_running = max_running_requests
        self.adapters = AdapterTable(max_adapters, self._runner.prepare_adapter, self._forget_adapters)
        self._intake = RequestIntake(self._runner, self.tokenizer, seed, self.adapters)

        self._prober: tuple[tuple[int, int], Stepper] | None = None  # answers probes of one size

        # ``_state`` guards the fields below. The one caller that changes weights or queues holds ``_control``.
        self._state = threading.Condition()
        self._control = threading.RLock()
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[Sequence] = deque()
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = weakref.WeakKeyDictionary()
        self._controllers = 0
        self._is_stepping = False
        self._is_paused = False
        self._is_closed = False
        threads = threads or fastest_threads(self._runner, max_running_requests)
        release_workers()  # this thread has just measured ``fastest_threads``
        is_set, own_threads = threading.Event(), torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, args=(threads, is_set), name="rollwright-engine", daemon=True)
        self._thread.start()
        is_set.wait()
        torch.set_num_threads(own_threads)  # threads that begin to compute later get the number that was set last
        atexit.register(self.destroy)  # a thread that computes in torch while Python exits would abort the process

    # ------------------------------------------------------------------ requests

    @property
    def records_experts(self) -> bool:
        """See ``WeightReceiver.records_experts``."""
        return self._runner.records_experts

    def submit(
        self, requests: Iterable[ModelRequest], on_token: Callable[[Sequence, int, float, int], None] | None = None
    ) -> list[Future[ModelResponse]]:
        """Queue requests together, in this order, without a step in between.

        Args:
            requests: the requests.
            on_token: called in the engine's thread for each sampled token; see ``Sequence``.

        Raises:
            RequestAborted: the engine is closed.
            EngineError: a request cannot be served, or the queue is full; no request is queued then.
        """
        sequences, futures = [self._intake.sequence(request) for request in requests], list[Future[ModelResponse]]()
        for sequence in sequences:
            sequence.on_token, sequence.future = on_token, Future()
            # The callback does not acquire ``_state``, because it may run in a thread that holds it. A paused engine removes
            # the sequence when the engine resumes.
            sequence.future.add_done_callback(lambda future, s=sequence: future.cancelled() and self._cancelled.append(s))
            futures.append(sequence.future)
        (error,) = self._queue([sequences])
        if error is not None:
            raise error
        return futures

    def _queue(self, batches: Batches) -> list[EngineError | None]:
        """Queue each batch as a whole or not at all. No step runs between the batches.

        Returns:
            For each batch, the error that rejects it, or None.
        """
        release_workers()  # a thread that has computed and now sends requests is about to wait
        errors, scheduler = list[EngineError | None](), self._stepper.scheduler
        with self._state:
            for sequences in batches:
                unfinished = len(self._inbox) + len(scheduler.sequences())
                if self._is_closed:
                    errors.append(RequestAborted("The engine is closed; start another."))
                elif self._max_waiting is not None and unfinished + len(sequences) > self._max_running + self._max_waiting:
                    refusal = (
                        f"The engine's queue is full: it has {unfinished} requests and is asked for {len(sequences)} more, "
                        f"max_running_requests is {self._max_running} and max_waiting is {self._max_waiting}. Send later, send "
                        "fewer at once, or raise max_waiting."
                    )
                    errors.append(QueueFullError(refusal))
                else:
                    errors.append(None)
                    self._inbox.extend(sequences)
            self._state.notify_all()
        return errors

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion. Cancelling the awaiting task frees the request's row."""
        return (await self.agenerate_batch([request]))[0]

    async def agenerate_batch(self, requests: list[ModelRequest]) -> list[ModelResponse]:
        """Queue requests together and sample one completion for each. Returns the responses in the order of the requests."""
        sequences = [self._intake.sequence(request) for request in requests]
        loop = asyncio.get_running_loop()
        if (outbox := self._outboxes.get(loop)) is None:
            outbox = self._outboxes[loop] = Outbox(self._queue, self._max_running)
        futures = outbox.send(sequences)
        try:
            return [await future for future in futures]
        finally:
            for sequence, future in zip(sequences, futures, strict=True):
                future.cancel()
                if future.cancelled():
                    self._cancelled.append(sequence)

    def astream(self, request: ModelRequest) -> AsyncGenerator[ModelResponse, None]:
        """Yield the growing response: each response has all tokens of the previous one, and the last is complete.

        Leaving the iteration early frees the request's row.
        """
        return stream(self.submit, request)

    def generate(self, requests: list[ModelRequest]) -> list[ModelResponse]:
        """Do the same as ``agenerate_batch`` for synchronous code, even while an event loop runs in this thread."""
        futures = self.submit(requests)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def probe(self, request: ModelRequest) -> dict[str, ModelResponse]:
        """Sample one request with the current weights. The key of the result is the engine's name in messages.

        The request is computed between two steps with a separate cache, so a paused engine can answer, too.
        """
        sequence = self._intake.sequence(request)
        size = len(sequence.tokens), sequence.length_limit
        with self._between_steps():
            known, self._prober = self._prober, None  # dropped if the step fails, which may leave its sequence behind
            if known is None or known[0] != size:
                known = size, Stepper(self._runner.with_cache_for(1, size[1]), 1, 0, size[0], 0)
            stepper = known[1]
            stepper.version, stepper.scheduler.newest = self._stepper.version, self._stepper.scheduler.newest
            ((_, response),) = answer(stepper, [sequence])
            assert isinstance(response, ModelResponse)
            self._prober = known
            return {"The built-in engine": response}

    # ------------------------------------------------------------------ the thread

    def _run(self, threads: int, is_set: threading.Event) -> None:
        torch.get_num_threads()  # a thread's first call sets its number to the process's number
        torch.set_num_threads(threads)
        is_set.set()
        while True:
            with self._state:
                if not self._state.wait_for(self._has_to_go_on, timeout=_IDLE_SECONDS):
                    release_workers()
                    self._state.wait_for(self._has_to_go_on)
                if self._is_closed:
                    return
                self._is_stepping = True
                self._take_inbox()
            finished: list[Finished] = []
            try:
                self._stepper.step(finished)
            except BaseException as error:  # any error ends the requests, and the thread continues
                logger.exception("A step of the engine failed; its requests fail with it.")
                failure = EngineStepError(f"The engine's step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                finished += [(sequence, failure) for sequence in self._stepper.scheduler.remove_all()]
            with self._state:
                self._is_stepping = False
                self._state.notify_all()
            resolve(finished)

    def _has_to_go_on(self) -> bool:
        """Return whether the thread has a step to run or has to end. The caller holds ``_state``."""
        can_step = not (self._is_paused or self._controllers)
        return self._is_closed or (can_step and bool(self._inbox or self._cancelled or self._stepper.has_work))

    def _take_inbox(self) -> None:
        """Pass new requests to the scheduler and remove cancelled ones from it. The caller holds ``_state``."""
        while self._inbox:
            self._stepper.scheduler.enqueue(self._inbox.popleft())
        while self._cancelled:
            self._stepper.scheduler.remove(self._cancelled.popleft())

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Wait until no step runs, and prevent steps inside the context."""
        if threading.current_thread() is self._thread:
            raise EngineError("The engine cannot be controlled from a callback of its own thread.")
        with self._control:
            with self._state:
                self._controllers += 1
                self._state.wait_for(lambda: not self._is_stepping)
                self._take_inbox()
            try:
                yield
            finally:
                with self._state:
                    self._controllers -= 1
                    self._state.notify_all()

    # ------------------------------------------------------------------ control

    def pause(self) -> None:
        """Stop sampling, and return when no step runs. With ``on_weight_update="wait"`` running requests end first."""
        if self.on_weight_update == "wait":
            self._drain()
        with self._state:
            self._is_paused = True
            self._state.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        """Continue after ``pause``."""
        with self._state:
            self._is_paused = False
            self._stepper.scheduler.holding = False
            self._state.notify_all()

    def _drain(self) -> None:
        """Hold new requests back and wait until the running ones have ended."""
        scheduler = self._stepper.scheduler
        with self._state:
            if self._is_paused:
                return
            scheduler.holding = True
            self._state.wait_for(lambda: self._is_closed or (not self._is_stepping and not scheduler.active()))

    def pause_run(self, run: str) -> None:
        """Compute nothing for the requests of one run until ``resume_run``; the others go on. Returns when no step runs."""
        with self._between_steps():
            self._stepper.scheduler.hold_run(run)

    def resume_run(self, run: str) -> None:
        """Continue after ``pause_run``."""
        with self._between_steps():
            self._stepper.scheduler.release_run(run)

    def paused_runs(self) -> set[str]:
        """Return the runs that are paused by ``pause_run``."""
        return set(self._stepper.scheduler.held_runs)

    def abort(self, rid: str | None = None, run: str | None = None) -> None:
        """End the requests of one conversation, or all requests. They return their output so far, with stop_reason "abort".

        Args:
            rid: the conversation. None means all.
            run: the run whose requests are meant. None means all.
        """
        with self._between_steps():
            finished = self._stepper.abort(rid, run)
        resolve(finished)

    def flush_cache(self) -> None:
        """Forget the keys and values of finished sequences."""
        with self._between_steps():
            self._stepper.scheduler.kept.clear()

    def release_memory(self) -> None:
        """Forget the keys and values of finished sequences, and free the memory of the cache until the next request.

        Raises:
            EngineError: requests are running, whose keys and values are needed.
        """
        with self._between_steps():
            self._stepper.release_memory()

    def destroy(self) -> None:
        """End the thread; running and waiting requests raise ``RequestAborted``."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
            self._state.notify_all()
        atexit.unregister(self.destroy)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._state:
            self._take_inbox()
        closed = RequestAborted("The engine was closed while the request ran.")
        resolve([(sequence, closed) for sequence in self._stepper.scheduler.remove_all()])

    def __enter__(self) -> BuiltinEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.destroy()

    # ------------------------------------------------------------------ weights

    def get_version(self) -> int:
        """Return the version of the weights that a new request is sampled with: of the newest adapter, if one was published."""
        newest = self._stepper.scheduler.newest
        return self._stepper.version if newest is None else newest.version

    def set_version(self, version: int) -> None:
        """Confirm that ``version`` is the current version; otherwise raise ``WeightUpdateError``."""
        if version != self.get_version():
            raise WeightUpdateError(
                f"The engine's weights are version {self.get_version()}, not {version}: publish weights with publish(version) "
                "or update_weights(version=version, weights=named)."
            )

    def publish(self, version: int, copies: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """See ``WeightReceiver.publish``. Afterwards, requests that name no adapter use these weights alone.

        Args:
            version: the new version of the weights.
            copies: pairs ``(destination, source)``; each source is copied to its destination, between two steps, before ``version``
                becomes current.

        Raises:
            WeightUpdateError: the version is lower than the current one.
        """
        if version < self.get_version():
            raise WeightUpdateError(f"Version {version} cannot follow {self.get_version()}: versions only grow.")
        was_paused = self._is_paused
        if self.on_weight_update == "wait":
            self._drain()
        try:
            with self._between_steps():
                with torch.no_grad():
                    for destination, source in copies:
                        destination.copy_(source)
                self._runner.forward.share_weights()
                self._stepper.scheduler.weights_changed(recompute=self.on_weight_update == "recompute")
                self._stepper.version, self._stepper.scheduler.newest = version, None
        finally:
            if not was_paused:
                with self._state:
                    self._stepper.scheduler.holding = False
                    self._state.notify_all()

    def receive_weights(self, weights: WeightStream, version: int, meta: WeightUpdateMeta | None, config: Any) -> None:
        """Copy weights into the model and publish them as ``version``.

        If the weights are an adapter, the model stays as it is. The adapter is held as ``version_name(version)``, and new requests that
        name none are computed with it. Running requests end with the adapter that they began with, whatever ``on_weight_update`` says:
        nothing is recomputed, and all tokens of a request carry one version. An adapter of the same version is replaced.

        Args:
            weights: tensors under their names in the model's ``state_dict`` or in its checkpoints; tied tensors may be omitted. Or an
                adapter's, under PEFT's names.
            version, meta, config: as for ``update_weights``; the weights are copied regardless of ``meta``.

        Raises:
            WeightUpdateError: a name or shape does not match the model, or the version is lower than the current one; nothing has
                changed.
        """
        if weights.adapter is None:
            self.publish(version, paired(self.model, weights))
            return
        if version < self.get_version():
            raise WeightUpdateError(f"Version {version} cannot follow {self.get_version()}: versions only grow.")
        adapter = Adapter.copied(version_name(version), weights, self.model, version)
        with self._between_steps():
            if carries_live_adapters(self.model):
                bypass_injected(self.model)
                self._stepper.scheduler.weights_changed(recompute=True)
            self.adapters.hold(adapter)
            self._stepper.scheduler.newest = adapter
            old = self.adapters.published()[: -self.adapters.most]
            self.adapters.drop([adapter.name for adapter in old if not self._users(adapter)])

    def load_adapter(self, adapter: Adapter) -> None:
        """Hold an adapter, so that requests can name it. One of the same name is replaced; its running requests keep what they have.

        Raises:
            WeightUpdateError: the engine holds as many adapters of this run as it may, or cannot compute this one.
        """
        with self._between_steps():
            self.adapters.check_room(adapter)
            self.adapters.hold(adapter)

    def unload_adapter(self, name: str) -> Adapter:
        """Drop an adapter, and return it. New requests cannot name it; running ones end with it, and the last one frees its memory.

        Raises:
            EngineError: no adapter has this name.
        """
        adapter, scheduler = self.adapters.named(name), self._stepper.scheduler
        with self._between_steps():
            self.adapters.drop([name])
            if scheduler.newest is adapter:
                scheduler.newest = None
        return adapter

    def requests_to_wait_for(self, adapter: Adapter) -> int:
        """Return how many requests use an adapter, or 0 if some of them are paused: waiting for these might never end."""
        with self._between_steps():
            scheduler = self._stepper.scheduler
            rests = (
                self._is_closed or self._is_paused or scheduler.holding or any(s.adapter is adapter for s in scheduler.parked)
            )
            return 0 if rests else self._users(adapter)

    def adapter_requests(self) -> dict[str, int]:
        """Return the number of unfinished requests of each held adapter."""
        with self._between_steps():
            return {adapter.name: self._users(adapter) for adapter in self.adapters}

    def _users(self, adapter: Adapter) -> int:
        """Return how many requests use an adapter. No step may run meanwhile."""
        return sum(s.adapter is adapter for s in (*self._inbox, *self._stepper.scheduler.sequences()))

    def _forget_adapters(self, keys: set[int]) -> None:
        self._stepper.scheduler.kept.discard_keys(keys)
        self._runner.forward.stacks.forget(keys)

    def go_back(self, version: int, *, finish: bool = False) -> None:
        """Set an earlier version, before its weights are loaded. Running requests end, because versions only grow within a request.

        Args:
            version: version of the weights that are loaded next.
            finish: let running requests finish first, and keep waiting requests in the queue. If False, all requests are aborted.
        """
        if finish:
            self._drain()
        with self._between_steps():
            finished = [] if finish else self._stepper.abort(None)
            self._stepper.version, self._stepper.scheduler.newest = version, None
            self.adapters.drop([adapter.name for adapter in self.adapters.published()])
        resolve(finished)

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the numbers of running and waiting requests."""
        return {**self._stepper.stats(), "version": self.get_version(), "queued": len(self._inbox)}


#: Results of ``fastest_threads`` by model.
_fastest_threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@torch.inference_mode()
def fastest_threads(runner: ModelRunner, rows: int) -> int:
    """Return the number of threads that decode fastest on CPU, measured once for each model.

    If the measurement fails (out of memory, a forward that raises), return torch's number; the first request then reports the error.

    Args:
        runner: the model.
        rows: maximum number of sequences at once.
    """
    most = torch.get_num_threads()
    if most == 1 or runner.device.type != "cpu":
        return most
    if (known := _fastest_threads.get(runner.model)) is not None and known <= most:
        return known
    rows = min(rows, _MEASURED_ROWS)
    runner, table = runner.with_cache_for(rows, _MEASURED_TOKENS), RowTable(rows)
    runner.cache.make_room(rows, _MEASURED_TOKENS, [])
    ids = [0] * (_MEASURED_TOKENS // 2)
    sequences = [Sequence(ModelRequest(ids), tokens=ids, prompt_length=len(ids), length_limit=len(ids)) for _ in range(rows)]
    for row, sequence in enumerate(sequences):
        table.enter(row, sequence, runner.vocabulary)
    batch = DecodeBatch(table, sequences, runner.cache, runner.device)
    batch.begin_step()
    try:
        number = fastest_number(lambda: runner.forward(batch, runner.cache))
    except Exception as error:  # of any kernel: requests will report it, if it is more than a matter of threads
        logger.warning("the fastest number of threads could not be measured (%s); %d compute", error, most)
        return most
    return _fastest_threads.setdefault(runner.model, number)
