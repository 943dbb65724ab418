"""Requests in and responses out: checks requests, and passes requests and responses between event loops and the engine's thread.

Each crossing between threads wakes a thread that then competes for the interpreter. Samples of one batch often send their requests in the
same iteration of the event loop, and one step answers many of them, so requests cross together, and so do responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import marshal
import math
import random
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, InvalidStateError
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError, PromptTooLongError
from rollwright.inference.attention_masks import sees
from rollwright.inference.backends.builtin.adapters import AdapterTable
from rollwright.inference.backends.builtin.adjustments import Adjustment, grammar_of
from rollwright.inference.backends.builtin.batch import Sequence
from rollwright.inference.backends.builtin.general_model import GeneralModel
from rollwright.inference.backends.builtin.model import ModelRunner
from rollwright.inference.backends.builtin.scheduler import Finished
from rollwright.inference.backends.builtin.stop_strings import StopStrings
from rollwright.inference.request import ModelRequest, ModelResponse

Batches = SequenceOf[list[Sequence]]

_KNOWN_ARGUMENTS = 64

#: Numeric generation arguments: whether they must be whole, and the limits of their config.
_NUMBERS: dict[str, tuple[bool, Any]] = {
    field.name: (str(field.type).startswith("int"), field.metadata)
    for field in fields(GenerationHyperparameters)
    if field.type in ("int", "float", "int | None")
}


class RequestIntake:
    """Turns requests into sequences, and rejects requests that the engine cannot serve as specified.

    A step computes many requests together, so a request that breaks the step would end all of them.

    Args:
        runner: the model.
        tokenizer: decodes for stop strings and defines the end token; may be None.
        seed: seed from which requests without their own seed get theirs, in order of submission.
        adapters: the adapters that requests can name.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Any, seed: int, adapters: AdapterTable) -> None:
        self._runner = runner
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        model = runner.model
        configs = getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer
        ends = [getattr(config, "eos_token_id", None) for config in configs]
        self._known_stop_ids: dict[bytes, tuple[int, ...]] = {}  # by generation arguments
        self._end_ids = {i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None}

    def sequence(self, request: ModelRequest) -> Sequence:
        """Check a request and convert it to a sequence.

        Raises:
            PromptTooLongError: there is no room for a new token.
            EngineError: the request cannot be served as specified.
        """
        gconfig, runner, length = request.gconfig, self._runner, len(request.input_ids)
        room = runner.context_length - length
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {length} tokens and the engine's context is {runner.context_length} (rid {request.rid}): shorten "
                "the prompt or start the engine with a larger context_length."
            )
        stop_ids = self._stop_ids(gconfig)
        self._check_inputs(request)
        tokenizer = request.tokenizer or self._tokenizer
        if gconfig.stop and tokenizer is None:
            raise EngineError("Stop strings need a tokenizer: give one to the engine or set request.tokenizer.")
        seed = gconfig.seed if gconfig.seed is not None else request.seed
        multi_modal = runner.forward if request.multi_modal and isinstance(runner.forward, GeneralModel) else None
        delta = 0 if multi_modal is None else multi_modal.multi_modal_position_delta(request)
        sequence = Sequence(
            request=request,
            tokens=list(request.input_ids),
            prompt_length=length,
            length_limit=length + min(gconfig.max_new_tokens, room),
            stop_ids=stop_ids,
            seed=self._random.getrandbits(63) if seed is None else seed,
            has_own_layout=request.branch_ids is not None or request.position_ids is not None or delta != 0,
            position_delta=delta,
            stop_strings=StopStrings(tokenizer, gconfig.stop) if gconfig.stop else None,
            run=str(request.metadata.get("run", "")),
        )
        if request.lora_name is not None:
            sequence.bind(self._adapters.named(request.lora_name) if request.lora_name else None)
        if gconfig.adjusts_scores:
            grammar = grammar_of(gconfig, tokenizer, runner.vocabulary, self._end_ids)
            sequence.adjustment = Adjustment(gconfig, request.input_ids, grammar)
        if request.branch_ids is not None:
            branches = torch.from_numpy(sequence.branch_ids())
            hidden = ~sees(branches[-1:], branches)[0]
            sequence.hidden = hidden.to(runner.device) if bool(hidden.any()) else None
        return sequence

    def _stop_ids(self, gconfig: GenerationHyperparameters) -> tuple[int, ...]:
        """Check generation arguments and return the tokens that end the request; equal arguments are checked once."""
        try:
            content = marshal.dumps(vars(gconfig), 2)
        except ValueError:  # not a builtin type, such as a numpy number
            content = b""
        if (known := self._known_stop_ids.get(content)) is not None:
            return known
        check_sampling(gconfig, self._runner.vocabulary)
        possible = {i for i in gconfig.stop_token_ids if 0 <= i < self._runner.vocabulary}
        stop_ids = tuple(sorted(possible - self._end_ids if gconfig.ignore_eos else possible | self._end_ids))
        if content:
            if len(self._known_stop_ids) >= _KNOWN_ARGUMENTS:
                self._known_stop_ids.clear()
            self._known_stop_ids[content] = stop_ids
        return stop_ids

    def _check_inputs(self, request: ModelRequest) -> None:
        """Reject tokens, positions, branches and images that the model or the engine does not support."""
        runner, length = self._runner, len(request.input_ids)
        if (largest := max(request.input_ids)) >= runner.vocabulary:
            raise EngineError(
                f"input_ids hold {largest}, and the model's vocabulary ends at {runner.vocabulary - 1} (rid {request.rid}): "
                "the prompt was encoded by another model's tokenizer."
            )
        for name, ids in (("position_ids", request.position_ids), ("branch_ids", request.branch_ids)):
            if ids is not None and len(ids) != length:
                raise EngineError(f"{name} has {len(ids)} entries for {length} tokens (rid {request.rid}); give one for each.")
        if request.position_ids is not None and (furthest := max(request.position_ids)) >= runner.context_length:
            raise EngineError(
                f"position_ids hold {furthest}, and the engine's context ends at {runner.context_length - 1} (rid {request.rid}): "
                "count positions from 0, or start the engine with a larger context_length."
            )
        if request.image_data and not request.multi_modal:
            raise EngineError("The built-in engine takes images as processor outputs in multi_modal, not as image_data.")
        if request.multi_modal and not runner.takes_multi_modal:
            raise EngineError(
                f"{type(runner.model).__name__} takes text only, and the request carries {sorted(request.multi_modal)}."
            )
        if request.multi_modal and not runner.sees_pictures_causally:
            raise EngineError(
                f"{type(runner.model).__name__} attends in both directions within an image, which the built-in engine does not "
                "support: use an SGLang or vLLM server for requests with images."
            )
        if (start := request.prompt_logprobs_from) is not None and (request.multi_modal or start > length):
            said = "scores the prompts of text only" if request.multi_modal else f"was asked for index {start} of {length}"
            raise EngineError(f"prompt_logprobs_from cannot be honoured: the built-in engine {said} (rid {request.rid}).")
        if request.multi_modal and request.branch_ids is not None:
            raise EngineError("A multi-modal request cannot have branches in the built-in engine.")


def check_sampling(gconfig: GenerationHyperparameters, vocabulary: int) -> None:
    """Check the types and limits of the generation arguments.

    Raises:
        EngineError: an argument has a wrong type or is outside its limits; the message names it.
    """
    for name, (is_whole, limits) in _NUMBERS.items():
        value = getattr(gconfig, name)
        if value is None and name == "seed":
            continue
        kind = Integral if is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind) or not -math.inf < value < math.inf:  # type: ignore[operator]
            raise EngineError(f"{name} is {value!r}; it has to be {'a whole' if is_whole else 'a finite'} number.")
        if value < limits.get("ge", value) or value <= limits.get("gt", -math.inf) or value > limits.get("le", value):
            bounds = {"ge": "at least", "gt": "more than", "le": "at most"}
            said = " and ".join(f"{words} {limits[key]}" for key, words in bounds.items() if key in limits)
            raise EngineError(f"{name} is {value!r}; it has to be {said}.")
    if gconfig.n_samples != 1:
        raise EngineError(
            f"n_samples is {gconfig.n_samples}, and one request is one completion: send n_samples requests, each with "
            "gconfig.new(n_samples=1)."
        )
    if any(not isinstance(text, str) for text in gconfig.stop or ()):
        raise EngineError(f"stop is {gconfig.stop!r}; it has to be a list of texts.")
    if any(isinstance(token, bool) or not isinstance(token, Integral) for token in gconfig.stop_token_ids):
        raise EngineError(f"stop_token_ids is {gconfig.stop_token_ids!r}; it has to be a list of token ids.")
    for token, bias in gconfig.logit_bias.items():
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocabulary:
            raise EngineError(f"logit_bias names {token!r}, which is no token id: they are 0 to {vocabulary - 1}.")
        if isinstance(bias, bool) or not isinstance(bias, Real) or not math.isfinite(bias):
            raise EngineError(f"logit_bias of token {token} is {bias!r}; it has to be a finite number.")


class Outbox:
    """Collects the requests of one event loop until the end of the loop's current iteration.

    Args:
        queue: queues batches of requests in the engine; returns for each batch the error that rejects it, or None.
        most: number of requests that are sent without waiting for the end of the iteration, because the engine can run them at once.
    """

    def __init__(self, queue: Callable[[Batches], list[EngineError | None]], most: int) -> None:
        self._queue = queue
        self._most = most
        self._batches: list[list[Sequence]] = []
        self._count = 0

    def send(self, sequences: list[Sequence]) -> list[asyncio.Future[ModelResponse]]:
        """Queue requests together and return futures of the running loop."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in sequences]
        for sequence, future in zip(sequences, futures, strict=True):
            sequence.future = future
        if not self._batches:
            loop.call_soon(self._flush, context=contextvars.Context())
        self._batches.append(sequences)
        self._count += len(sequences)
        if self._count >= self._most:
            self._flush()
        return futures

    def _flush(self) -> None:
        if not self._batches:
            return
        batches = [[s for s in sequences if not s.future.done()] for sequences in self._batches]
        self._batches, self._count = [], 0
        for sequences, error in zip(batches, self._queue(batches), strict=True):
            if error is not None and sequences:
                sequences[0].future.set_exception(error)  # the task that awaits this future cancels the others


def resolve(finished: list[Finished]) -> None:
    """Pass responses and errors to the futures of their sequences; each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[ModelResponse], ModelResponse | BaseException]]] = {}
    for sequence, outcome in finished:
        future = sequence.future
        if isinstance(future, asyncio.Future):
            by_loop.setdefault(future.get_loop(), []).append((future, outcome))
        else:
            _settle([(future, outcome)])
    for loop, outcomes in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_settle, outcomes, context=contextvars.Context())


def _settle(
    outcomes: SequenceOf[tuple[Future[ModelResponse] | asyncio.Future[ModelResponse], ModelResponse | BaseException]],
) -> None:
    for future, outcome in outcomes:
        # A future may be cancelled at any moment by whoever waits for it.
        with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


async def stream(
    submit: Callable[..., list[Future[ModelResponse]]], request: ModelRequest
) -> AsyncGenerator[ModelResponse, None]:
    """Yield the response to ``request`` as it grows; see ``BuiltinEngine.astream``.

    Args:
        submit: ``BuiltinEngine.submit``.
        request: the request.
    """
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    sampled: list[tuple[Sequence, int, float, int]] = []

    def note(*token: Any) -> None:
        sampled.append(token)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(news.set)

    future = asyncio.wrap_future(submit([request], note)[0])
    future.add_done_callback(lambda _: news.set())
    given = 0
    try:
        while not future.done():
            await news.wait()
            news.clear()
            if len(sampled) > given and not future.done():
                given = len(sampled)
                _, tokens, logprobs, versions = zip(*sampled[:given], strict=True)
                yield sampled[0][0].response(sampled=(list(tokens), list(logprobs), list(versions)))
        yield future.result()
    finally:
        future.cancel()
