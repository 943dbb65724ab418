"""Generation: requests through an engine that lives for the call, going on with half the batch when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import PromptTooLongError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rollout.sample import SampleName, request_seed
from rollwright.sequence_processing.memory import cache_bytes, halved, is_out_of_memory, release


def make_requests(
    prompts: list[list[int]], group: int, gconfig: GenerationHyperparameters, seed: int, first_prompt: int = 0
) -> list[ModelRequest]:
    """``group`` requests for each prompt, prompt by prompt.

    A request's seed is a function of (``seed``, the prompt's number, its number in the group): what it draws does not depend
    on what else is generated, in how many batches or on how many processes.

    Args:
        prompts: ids of each prompt.
        group: responses to each.
        gconfig: how they are sampled.
        seed: of the whole experiment.
        first_prompt: number of the first prompt in the experiment.
    """
    return [
        ModelRequest(ids, gconfig, seed=request_seed(seed, SampleName(first_prompt + b, g), 0, 0))
        for b, ids in enumerate(prompts)
        for g in range(group)
    ]


def context_of(model: Any) -> int | None:
    """Most tokens of the model's context; None where it names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_lengths(prompts: list[list[int]], model: Any) -> None:
    """See that every prompt leaves room for a new token.

    Raises:
        PromptTooLongError: one does not; the message names it.
    """
    limit = context_of(model)
    for index, ids in enumerate(prompts):
        if limit is not None and len(ids) >= limit:
            raise PromptTooLongError(
                f"Prompt {index} has {len(ids)} tokens and the model's context is {limit}, which leaves no room for a response: "
                "shorten or leave out that prompt."
            )


def generate(
    model: Any,
    tokenizer: Any,
    requests: list[ModelRequest],
    batch_size: int,
    *,
    may_halve: bool = True,
    advance: Callable[[int], None] = lambda steps: None,
) -> list[ModelResponse]:
    """Sample every request, ``batch_size`` at once, on the model's own weights.

    Args:
        model: the Hugging Face model, in evaluation mode.
        tokenizer: decodes for stop strings and names the end token.
        requests: what to sample.
        batch_size: sequences decoded at once.
        may_halve: out of memory, go on with half the batch size where it stopped; False: raise.
        advance: told how many more responses are there.

    Returns:
        Responses in the order of the requests.
    """
    responses: list[ModelResponse | None] = [None] * len(requests)
    longest = max(len(r.input_ids) + r.gconfig.max_new_tokens for r in requests)
    length = min(longest, context_of(model) or longest)
    while missing := [index for index, response in enumerate(responses) if response is None]:
        failure = _attempt(model, tokenizer, requests, missing, responses, min(batch_size, len(missing)), length, advance)
        if failure is None:
            continue
        if not (may_halve and batch_size > 1 and is_out_of_memory(failure)):
            raise failure
        batch_size = halved(min(batch_size, len(missing)), "gen_batch_size", failure)
        failure = None  # its traceback holds the failed step's tensors
        release()
    return [response for response in responses if response is not None]


def _attempt(
    model: Any,
    tokenizer: Any,
    requests: list[ModelRequest],
    missing: list[int],
    responses: list[ModelResponse | None],
    rows: int,
    length: int,
    advance: Callable[[int], None],
) -> Exception | None:
    """Fill in ``responses`` as far as it goes; return what stopped it."""
    try:
        engine = BuiltinEngine(
            model,
            tokenizer,
            max_running_requests=rows,
            context_length=length,
            kv_cache_bytes=cache_bytes(model, rows, length),
            prefix_cache=False,
        )
    except Exception as error:
        return error
    failure: Exception | None = None
    with engine:
        futures = engine.submit([requests[index] for index in missing])
        for future in futures:
            future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else advance(1))
        for index, future in zip(missing, futures, strict=True):
            try:
                responses[index] = future.result()
            except Exception as error:
                failure = failure or error
    return failure
