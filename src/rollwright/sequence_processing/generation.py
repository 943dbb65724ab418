"""Generates responses on the built-in engine: sampling settings, prompts, and the requests.

Each call creates an engine; if memory runs out, a new engine continues with half the batch size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import DatasetConfig
from rollwright.data.chat_template import prompt_ids
from rollwright.data.datasets import DATASET_REGISTRY, get_dataset
from rollwright.data.formats import Example
from rollwright.data.rows import ENDINGS
from rollwright.errors import ConfigError, DataError, PromptTooLongError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.sequence_processing.models import cache_bytes, generation_batch_size, halved_after

ANSWER_END = "</answer>"

BatchSize = int | Literal["auto"]
#: Text, token ids, or the messages of a conversation (which the tokenizer's chat template turns into text).
Prompt = str | list[int] | list[dict[str, Any]]


@dataclass
class GenerationConfig:
    """Sampling settings and batch sizes.

    Log-probabilities and entropies are those of the softmax of ``logits / temperature``, before ``top_p``. Greedy decoding counts as
    temperature 1.

    Attributes:
        temperature: softmax temperature; 0 means greedy.
        top_p: sample from the smallest set of tokens that has this total probability.
        max_new_tokens: maximum number of tokens of a response, including the end token.
        do_sample: if False, take the most likely token.
        gen_batch_size: number of sequences decoded at once; when one ends, the next one starts. ``"auto"`` chooses by free memory.
        tf_batch_size: number of sequences in one teacher-forced forward pass. ``"auto"`` chooses by free memory.
        stop_after_answer: end a response after ``</answer>``; the response includes this tag.
        stop: other strings that end a response; the response includes them.
        enable_thinking: passed to the chat template for prompts that are conversations.
        deterministic: return the same bits for the same seed on one machine. Batch sizes must then be numbers, and running out of memory
            is an error instead of halving the batch size.

    Raises:
        ConfigError: a value is out of its range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 200
    do_sample: bool = True

    gen_batch_size: BatchSize = 32
    tf_batch_size: BatchSize = 64

    stop_after_answer: bool = True
    stop: list[str] | None = None
    deterministic: bool = False
    enable_thinking: bool = False

    def __post_init__(self) -> None:
        rules = {
            f"temperature is {self.temperature}: give 0 (greedy) or more": self.temperature >= 0,
            f"top_p is {self.top_p}: give a probability above 0 and at most 1": 0 < self.top_p <= 1,
            f"max_new_tokens is {self.max_new_tokens}: give 0 or more": self.max_new_tokens >= 0,
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ConfigError(f"GenerationConfig.{broken[0]}.")
        for name in ("gen_batch_size", "tf_batch_size"):
            value = getattr(self, name)
            if value == "auto":
                if self.deterministic:
                    raise ConfigError(f"{name} is 'auto', which goes by free memory; a deterministic run needs a number.")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}: give a number from 1 on, or 'auto'.")

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the log-probabilities."""
        return self.temperature if self.do_sample and self.temperature > 0 else 1.0

    def hyperparameters(self) -> GenerationHyperparameters:
        """Return the settings as generation arguments of an engine."""
        stop = ([ANSWER_END] if self.stop_after_answer else []) + list(self.stop or [])
        return GenerationHyperparameters(
            max_new_tokens=self.max_new_tokens,
            greedy=not self.do_sample,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=stop or None,
        )


# ------------------------------------------------------------------ prompts


def dataset_prompts(name: str, split: str, count: int | None, seed: int | None, **kwargs: Any) -> list[str]:
    """Return prompts of a dataset; see ``SequenceProcessor.sample_prompts``."""
    if name in DATASET_REGISTRY:
        prompts = [example.prompt for example in DATASET_REGISTRY.examples(name, split, **kwargs)]
    elif Path(name).expanduser().exists() or Path(name).suffix in ENDINGS or any(mark in name for mark in "/:~"):
        rows = get_dataset(DatasetConfig(path=name, split=split, kwargs=kwargs))
        prompts = [Example.from_row(row).prompt for row in rows]
    else:
        raise DataError(
            f"no dataset is registered as {name!r}, and there is no file of that name; registered: "
            f"{', '.join(sorted(DATASET_REGISTRY))}. Add yours with DATASET_REGISTRY.register(name), or give a file's path."
        )
    if count is None:
        return prompts
    if not 1 <= count <= len(prompts):
        raise ConfigError(f"num_prompts is {count}, and {name} ({split}) has {len(prompts)} prompts: give 1 to {len(prompts)}.")
    return random.Random(seed).sample(prompts, count)


def encoded(prompts: Sequence[Prompt], tokenizer: Any, enable_thinking: bool = False) -> list[list[int]]:
    """Return the token ids of each prompt.

    Strings get the tokenizer's special tokens; conversations use the chat template, which gets ``enable_thinking``.

    Raises:
        ConfigError: ``prompts`` is a single prompt or empty, or a prompt has no tokens.
    """
    if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
        raise ConfigError(f"prompts is one {type(prompts).__name__}: give a list of prompts, [prompt] for a single one.")
    if not prompts:
        raise ConfigError("prompts is empty: give at least one prompt.")
    ids = [_ids_of(prompt, tokenizer, enable_thinking) for prompt in prompts]
    for index, tokens in enumerate(ids):
        if not tokens:
            raise ConfigError(f"Prompt {index} has no tokens ({prompts[index]!r}): give text, or the begin token.")
    return ids


def _ids_of(prompt: Prompt, tokenizer: Any, enable_thinking: bool) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if prompt and isinstance(prompt[0], dict):
        return prompt_ids(tokenizer, prompt, enable_thinking=enable_thinking)  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


# ------------------------------------------------------------------ sampling


def context_of(model: Any) -> int | None:
    """Return the context length of the model in tokens, or None if there is no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_lengths(prompts: list[list[int]], model: Any) -> None:
    """Raise ``PromptTooLongError`` if a prompt leaves no room for a new token; the message names it."""
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
    batch_size: BatchSize,
    *,
    deterministic: bool = False,
    advance: Callable[[int], None] = lambda steps: None,
) -> list[ModelResponse]:
    """Sample every request, ``batch_size`` at once, with the model's own weights.

    Args:
        model: the Hugging Face model, in evaluation mode.
        tokenizer: decodes for stop strings and defines the end token.
        requests: the requests to sample.
        batch_size: number of sequences decoded at once; ``"auto"`` chooses by free memory.
        deterministic: compute with torch's number of threads, and raise if memory runs out. Otherwise the engine uses the number of
            threads that it measures as fastest, and generation continues with half the batch size if memory runs out.
        advance: called with the number of newly finished responses.

    Returns:
        Responses in the order of the requests.
    """
    responses: list[ModelResponse | None] = [None] * len(requests)
    longest = max(len(r.input_ids) + r.gconfig.max_new_tokens for r in requests)
    length = min(longest, context_of(model) or longest)
    if batch_size == "auto":
        batch_size = generation_batch_size(model, len(requests), length)
    threads = torch.get_num_threads() if deterministic else None
    while missing := [index for index, response in enumerate(responses) if response is None]:
        rows = min(batch_size, len(missing))
        try:
            _attempt(model, tokenizer, requests, missing, responses, rows, length, threads, advance)
        except Exception as error:
            batch_size = halved_after(error, rows, "gen_batch_size", not deterministic)
    return [response for response in responses if response is not None]


def _attempt(
    model: Any,
    tokenizer: Any,
    requests: list[ModelRequest],
    missing: list[int],
    responses: list[ModelResponse | None],
    rows: int,
    length: int,
    threads: int | None,
    advance: Callable[[int], None],
) -> None:
    """Store the responses that succeed in ``responses``, then raise the first error, if any."""
    with BuiltinEngine(
        model,
        tokenizer,
        max_running_requests=rows,
        context_length=length,
        kv_cache_bytes=cache_bytes(model, rows, length),
        prefix_cache=False,
        threads=threads,
    ) as engine:
        futures = engine.submit([requests[index] for index in missing])
        for future in futures:
            future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else advance(1))
        failures = [future.exception() for future in futures]
        for index, future, failure in zip(missing, futures, failures, strict=True):
            if failure is None:
                responses[index] = future.result()
        if failure := next(filter(None, failures), None):
            raise failure


class StopAfterAnswer(LogitsProcessor):
    """A logits processor that forces the end token once a row's newest token has completed the closing answer tag.

    ``SequenceProcessor`` does not need it: its engine ends a response at the tag (``GenerationConfig.stop_after_answer``), so the response
    has only tokens that the policy sampled. This class applies the same rule in
    ``model.generate(logits_processor=[StopAfterAnswer(tokenizer)])``, where a row can end only with an end token, so one more token follows
    the tag.

    Args:
        tokenizer: decodes the newest tokens and defines the end token.
        tag: the string after which a row ends.

    Raises:
        ConfigError: the tokenizer has no end token.
    """

    def __init__(self, tokenizer: Any, tag: str = ANSWER_END) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("StopAfterAnswer forces the end token, and the tokenizer has none: set tokenizer.eos_token.")
        self.tag = tag
        self._tokenizer = tokenizer
        self._window = len(tag.encode()) + 1  # a tag of n bytes spans at most n tokens

    def _ends_with_tag(self, tokens: list[int]) -> bool:
        tail = tokens[-self._window :]
        return self._tokenizer.decode(tail).count(self.tag) > self._tokenizer.decode(tail[:-1]).count(self.tag)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask all tokens but the end token in ``scores`` ``[B, V]`` of the rows in ``input_ids`` ``[B, L]`` that end with the tag."""
        ended = [index for index, tokens in enumerate(input_ids.tolist()) if self._ends_with_tag(tokens)]
        if ended:
            scores = scores.clone()
            forced = torch.full_like(scores[0], float("-inf"))
            forced[self._tokenizer.eos_token_id] = 0.0
            scores[ended] = forced
        return scores
