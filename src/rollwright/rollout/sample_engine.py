"""The engine bound to a sample: a workflow gets it instead of the run's engine.

Invariants:

* every request that the engine serves is in the sample's record, once, and in the journal before its answer is returned;
* a request that the episode's past contains is answered from there, and only if its prompt is equal, token for token;
* a request's seed depends only on the run's seed, the task, the sample and the request's position in the sample, not on the attempt,
  other samples or the clock;
* after ``close`` no model call of the sample succeeds, from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np

from rollwright.errors import EngineError, PromptTooLongError, ReplayError, RequestAborted
from rollwright.experience.journal.episodes import RecordedCall
from rollwright.experience.journal.writing import EpisodeWriter
from rollwright.experience.recorder import Recorder, common_length
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.processes.child import UncountedTime
from rollwright.rollout.seeds import SampleName, request_seed
from rollwright.workflows.base import SampleBoundEngine

#: The sample that the running asyncio task belongs to; inherited by the tasks that it starts.
CURRENT_SAMPLE: contextvars.ContextVar[SampleEngine | None] = contextvars.ContextVar("current_sample", default=None)


class SampleEngine(SampleBoundEngine):
    """Forwards requests to the run's engine, each with its own seed, and records the responses.

    Args:
        engine: the engine of the run.
        name: identifies the sample.
        run_seed: the run's seed.
        loop: the executor's event loop; calls from other loops are forwarded to it.
        workflow: name of the workflow, for messages.
        episode: writes the sample's journal. None disables it.

    Attributes:
        uncounted: time that does not count against the sample's time limit.
    """

    recorder: Recorder
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        engine: InferenceEngine,
        name: SampleName,
        *,
        run_seed: int,
        loop: asyncio.AbstractEventLoop,
        workflow: str = "",
        episode: EpisodeWriter | None = None,
    ) -> None:
        self.engine = engine
        self.episode = episode or EpisodeWriter(None)
        self.context_length = engine.context_length
        self.name = name
        self.workflow = workflow
        self.loop = loop
        self.recorder = Recorder()
        self.uncounted = UncountedTime()
        self.closed_because: str | None = None
        self._run_seed = run_seed
        self._conversations: set[str] = set()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion; see :meth:`InferenceEngine.agenerate`. May be awaited on any event loop."""
        return await self.answer(request, self.engine)

    async def answer(self, request: ModelRequest, model: InferenceEngine) -> ModelResponse:
        """Sample one completion with a model, the policy or another; otherwise as ``agenerate``."""
        if asyncio.get_running_loop() is not self.loop:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.answer(request, model), self.loop))
        sent, place = self._taken(request)
        started = time.time()
        with self._noting_overflow(sent, place):
            if (kept := self._from_past(sent, place)) is not None:
                return kept
            response = _with_seed(await model.agenerate(sent), sent)
        self._refuse_if_closed()
        self.episode.call(self.recorder.record(sent, response, place=place, started=started))
        return response

    async def astream(self, request: ModelRequest) -> AsyncGenerator[ModelResponse, None]:
        """Yield the growing response, if the engine can stream; it is recorded when complete. May be used on any event loop.

        If the reader stops early, the response is cancelled and not recorded.
        """
        sent, place = self._taken(request)
        started, response = time.time(), None
        with self._noting_overflow(sent, place):
            kept = self._from_past(sent, place)
        if kept is not None:
            yield kept
            return
        async with contextlib.aclosing(self.engine.astream(sent)) as parts:
            with self._noting_overflow(sent, place):
                async for response in parts:
                    self._refuse_if_closed()
                    yield _with_seed(response, sent)
        if response is not None:
            self.episode.call(self.recorder.record(sent, response, place=place, started=started))

    def asking(self, model: InferenceEngine) -> InferenceEngine:
        """See :meth:`SampleBoundEngine.asking`."""
        return OtherModel(self, model)

    def close(self, because: str) -> None:
        """Reject every further model call of this sample."""
        self.closed_because = self.closed_because or because
        self.episode.close()

    def _taken(self, request: ModelRequest) -> tuple[ModelRequest, tuple[int, int]]:
        """Return the request with its seed, and its conversation and turn in the record."""
        self._refuse_if_closed()
        if request.gconfig.n_samples != 1:
            raise EngineError(
                f"a request asks for n_samples={request.gconfig.n_samples}: one request is one completion. "
                "Pass gconfig.new(n_samples=1) and ask several times."
            )
        self._conversations.add(request.rid)
        past = self.episode.past
        numbering = {} if past is None else {"number_of": functools.partial(past.conversation_of, request.tokens.array)}
        place = self.recorder.open_turn(request.rid, **numbering)
        seed = request.seed if request.seed is not None else request.gconfig.seed
        if seed is None:
            seed = request_seed(self._run_seed, self.name, *place, request.metadata.get("index", 0))
        return request.seeded(seed), place

    def _from_past(self, sent: ModelRequest, place: tuple[int, int]) -> ModelResponse | None:
        """Answer a request from the journal and record it like an answer of the engine; return None if the engine must answer.

        Raises:
            ReplayError: the request differs from the recorded one or, in a replay, none is recorded.
            PromptTooLongError: the recorded request was rejected.
        """
        episode = self.episode
        if episode.past is None:
            return None
        kept = episode.past.call_at(place)
        if kept is None:
            if not episode.is_replay:
                episode.restore()
                return None
            raise self._diverged(
                f"it asks for turn {place[1]} of conversation {place[0]}, and the journal has {len(episode.past.calls)} calls, none at "
                "that place"
            )
        prompt = sent.tokens.array
        if not np.array_equal(prompt, kept.prompt):
            raise self._diverged(_first_difference(prompt, kept, sent.tokenizer))
        if kept.call.refused is not None:
            raise PromptTooLongError(kept.call.refused)
        response = ModelResponse.recorded(sent, kept)
        times = {"started": kept.call.started, "finished": kept.call.finished}
        episode.call(self.recorder.record(sent, response, place=place, **times))
        return response

    def _diverged(self, what: str) -> ReplayError:
        error = ReplayError(
            f"{self.name} ({self.workflow}) does not run as it was recorded: {what}. Something that it depends on has changed, or is "
            "neither seeded nor durable."
        )
        self.episode.diverged = self.episode.diverged or error
        return error

    @contextlib.contextmanager
    def _noting_overflow(self, sent: ModelRequest, place: tuple[int, int]) -> Iterator[None]:
        try:
            yield
        except PromptTooLongError as error:
            self.recorder.outgrew_context = True
            self.episode.refused(sent, place, error)
            raise

    def _refuse_if_closed(self) -> None:
        if self.closed_because is not None:
            raise RequestAborted(
                f"model call of {self.name} refused: the sample {self.closed_because}. What it returns is not used; let it end."
            )

    # -- the rest of the protocol: read-only, because the engine belongs to the run ------------------------------------

    def get_version(self) -> int:
        """Return the version of the weights that the next token is sampled with."""
        return self.engine.get_version()

    def abort(self, rid: str | None = None) -> None:
        """Abort this sample's conversation ``rid``, or all of its conversations."""
        for own in list(self._conversations) if rid is None else self._conversations & {rid}:
            self.engine.abort(own)


class OtherModel(SampleBoundEngine):
    """Another model than the policy, bound to a sample: what it answers is in the sample's record.

    Args:
        sample: the engine of the sample.
        model: the model's engine.
    """

    def __init__(self, sample: SampleEngine, model: InferenceEngine) -> None:
        self._sample = sample
        self._model = model
        self.recorder = sample.recorder
        self.loop = sample.loop
        self.context_length = model.context_length

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See :meth:`SampleEngine.agenerate`."""
        return await self._sample.answer(request, self._model)

    @property
    def closed_because(self) -> str | None:  # type: ignore[override]
        """Why the sample makes no more calls, or None while it may."""
        return self._sample.closed_because

    def get_version(self) -> int:
        """Return the version of the other model."""
        return self._model.get_version()

    def abort(self, rid: str | None = None) -> None:
        """Abort the sample's conversation ``rid`` with the other model; None aborts nothing, because other samples use it, too."""
        if rid is not None:
            self._model.abort(rid)


def _with_seed(response: ModelResponse, request: ModelRequest) -> ModelResponse:
    """Return a response with the seed of its request, as the journal returns it in a replay."""
    if response.seed is None:
        response.seed = request.seed
    return response


def _first_difference(prompt: np.ndarray, kept: RecordedCall, tokenizer: Any) -> str:
    """Describe the first token at which a prompt differs from the recorded one."""
    at = common_length(prompt, kept.prompt)

    def shown(ids: np.ndarray) -> str:
        if at >= len(ids):
            return f"ends there ({len(ids)} tokens)"
        text = "" if tokenizer is None else f" ({tokenizer.decode(ids[at : at + 8].tolist(), skip_special_tokens=False)!r}…)"
        return f"has {ids[at]}{text}"

    return (
        f"call {kept.call.index} (conversation {kept.call.conversation}, turn {kept.call.turn}) differs from token {at} on: the prompt "
        f"{shown(prompt)}, the recorded one {shown(kept.prompt)}"
    )
