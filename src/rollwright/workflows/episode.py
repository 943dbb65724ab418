"""Base of the built-in workflows: prompts, scoring, metrics, dumps and groups.

An ``EpisodeWorkflow`` returns the token ids, the mask and the reward of an episode. Log-probabilities, versions, temperature and truncation
are filled in from the record of its requests. The executor's engine keeps this record; with a plain engine, the workflow does.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.chat_template import prompt_ids, stopping_at_turn_end
from rollwright.errors import WorkflowError
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine, run_concurrently
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.tracking.rollout_dumps import marked_text
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.registry import resolve_function
from rollwright.workflows.turns import TokenSequence

logger = getLogger("workflows")

#: ``(prompt, tokenizer, enable_thinking) -> [P] token ids``; the prompt comes from a ``PromptFunction``.
InputIdsFunction = Callable[[Any, Any, bool], Sequence[int]]
#: ``(task) -> prompt``: by default a list of messages.
PromptFunction = Callable[[dict[str, Any]], Any]


def extract_messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the task's ``messages``.

    Raises:
        WorkflowError: the task has no messages, or the last one is the assistant's.
    """
    messages = data.get("messages")
    if not messages:
        raise WorkflowError(
            f"the task has no column 'messages' (it has {', '.join(sorted(data)) or 'none'}): prepare it with messages, or give "
            "data_extract_prompt_fn, a function from the task to its prompt."
        )
    if isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
        raise WorkflowError(
            f"the messages of task {task_name(data)!r} end with the assistant's reply, so there is nothing to ask: let them end with the user's, "
            "or give data_extract_prompt_fn, a function from the task to its prompt."
        )
    return list(messages)


def chat_input_ids(prompt: Any, tokenizer: Any, enable_thinking: bool = False) -> list[int]:
    """Return the token ids ``[P]`` of messages with the generation prompt; plain text is encoded unchanged.

    Args:
        prompt: messages, or text.
        tokenizer: a Hugging Face tokenizer.
        enable_thinking: passed to the chat template, which may ignore it.
    """
    if not isinstance(prompt, str):
        return prompt_ids(tokenizer, prompt, enable_thinking=enable_thinking)
    return list(tokenizer.encode(prompt, add_special_tokens=False))


class EpisodeWorkflow(RolloutWorkflow):
    """Base of the built-in workflows; a subclass defines ``episode``.

    The executor repeats a task for its group. If ``gconfig.n_samples`` is above 1 and the caller does not repeat the task, the
    workflow runs the group itself and returns one row for each episode.

    Args:
        reward_fn: function ``(prompt, completion, prompt_ids, completion_ids, **data) -> float``, plain or async, or its
            registered name or import path. If None, the subclass computes the reward.
        gconfig: how completions are sampled; may be a mapping (from YAML). The tokenizer's end and pad tokens, and the
            end-of-turn token of its chat template, are added to its stop tokens.
        tokenizer: the policy's tokenizer, or its path or name.
        enable_thinking: passed to the chat template; templates without this variable ignore it.
        rollout_stat_scope: scope of the reported metrics.
        dump_dir: directory for a readable dump of each sample. If None, samples are not dumped.
        get_input_ids_fn: ``(prompt, tokenizer, enable_thinking) -> token ids``, or its import path. Default: the chat template.
        data_extract_prompt_fn: ``(task) -> prompt``, or its import path. Default: the task's ``messages``.
        reward_timeout: time limit of the reward function in seconds.

    Attributes:
        group_size: episodes to run for one task. If None, ``gconfig.n_samples``.
    """

    group_size: int | None = None

    @staticmethod
    def uses_chat_template(arguments: Mapping[str, Any]) -> bool:
        """Return whether a workflow with these constructor arguments renders prompts with the tokenizer's chat template."""
        return not (arguments.get("get_input_ids_fn") or arguments.get("data_extract_prompt_fn"))

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | None,
        gconfig: GenerationHyperparameters | Mapping[str, Any] | None,
        tokenizer: Any,
        enable_thinking: bool = False,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        get_input_ids_fn: InputIdsFunction | str | None = None,
        data_extract_prompt_fn: PromptFunction | str | None = None,
        reward_timeout: float = 15.0,
    ) -> None:
        if isinstance(tokenizer, str | Path):
            from rollwright.data.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(str(tokenizer))
        if gconfig is None or isinstance(gconfig, Mapping):
            gconfig = GenerationHyperparameters.from_names(**(gconfig or {}))
        self.tokenizer = tokenizer
        self.gconfig = stopping_at_turn_end(gconfig.new_with_stop_and_pad_token_ids(tokenizer), tokenizer)
        self.async_reward_fn: Any = None if reward_fn is None else AsyncRewardWrapper(reward_fn, reward_timeout)
        if self.async_reward_fn is not None:
            _ = self.async_reward_fn.columns  # raises now, before the run, if the function cannot score a task
        self.enable_thinking = enable_thinking
        self.rollout_stat_scope = rollout_stat_scope
        self.dump_dir = dump_dir
        self.get_input_ids_fn = resolve_function(get_input_ids_fn or chat_input_ids, "get_input_ids_fn")
        self.data_extract_prompt_fn = resolve_function(data_extract_prompt_fn or extract_messages, "data_extract_prompt_fn")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Run the episodes of a task concurrently; see :class:`RolloutWorkflow`.

        Returns:
            The row of the episode, or a list of rows; if the engine keeps no record, a complete trajectory. Rows of one episode are
            one sample. None if any episode was rejected, because a group must be complete.
        """
        keeps_record = isinstance(engine, InferenceEngine) and engine.recorder is not None
        asked: Any = engine if keeps_record else _RecordingEngine(engine)
        count = self.group_size or self.gconfig.n_samples
        if count == 1:
            rows = [await self.episode(asked, data)]
        else:
            rows = await run_concurrently(self.episode(asked, data) for _ in range(count))
        if any(row is None for row in rows):
            return None
        result = rows[0] if len(rows) == 1 else _samples(rows)
        if keeps_record:
            return result
        return normalise(result, asked.recorder, workflow=type(self).__name__, task=str(task_name(data)))

    @abstractmethod
    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]] | None:
        """Run one episode.

        Returns:
            A row with one-dimensional ``input_ids`` and ``loss_mask``, and ``rewards``, or a list of such rows; None if the request was
            aborted.
        """

    def stop_at(self, *stops: str) -> None:
        """Add strings at which completions end."""
        self.gconfig = self.gconfig.new(stop=list(dict.fromkeys([*(self.gconfig.stop or []), *stops])))

    def encode(self, text: str) -> list[int]:
        """Encode a string without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def score(
        self, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any], skip_special_tokens: bool = True
    ) -> float:
        """Score a completion with the reward function; ``skip_special_tokens`` applies to the completion's text."""
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        completion = self.tokenizer.decode(completion_ids, skip_special_tokens=skip_special_tokens)
        return await self.async_reward_fn(prompt, completion, prompt_ids, completion_ids, **data)

    def report(self, **figures: float | str) -> None:
        """Report figures of an episode: its numbers are averaged into the run's metrics; numbers and texts are kept with its sample."""
        tracker = get_tracker(self.rollout_stat_scope)
        tracker.note(**{name: text for name, text in figures.items() if isinstance(text, str)})
        tracker.scalar(**{name: number for name, number in figures.items() if not isinstance(number, str)})

    async def end(self, sequence: TokenSequence, data: dict[str, Any], reward: float, **figures: float | str) -> dict[str, Any]:
        """Report the figures of a single-sequence episode, dump the episode if ``dump_dir`` is set, and return its row.

        In the dump, tokens that the policy did not sample are between ``⟦`` and ``⟧``, as in the rollouts of the run directory.
        """
        self.report(**figures)
        if self.dump_dir is not None:
            sampled = sequence.loss_mask[sequence.prompt_length :]
            await dump_sample(
                self.dump_dir,
                version=sequence.version,
                task=task_name(data),
                sections={
                    "prompt": self.tokenizer.decode(sequence.input_ids[: sequence.prompt_length]),
                    "episode": marked_text(sequence.completion_ids, sampled, self.tokenizer),
                },
                facts={"reward": reward, **figures, "tokens": f"{len(sequence)}, {sum(sampled)} of them sampled"},
            )
        return sequence.row(reward)


def _samples(episodes: Sequence[Any]) -> list[dict[str, Any]]:
    """Join the rows of a group's episodes; those of an episode with several share a sample."""
    if not any(isinstance(rows, list) for rows in episodes):
        return list(episodes)
    listed = [rows if isinstance(rows, list) else [rows] for rows in episodes]
    return [{**row, "sample_ids": number} for number, rows in enumerate(listed) for row in rows]


class _RecordingEngine:
    """Wraps an engine that keeps no record, and records the requests of an episode."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.recorder = Recorder()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await self.engine.agenerate(request)
        self.recorder.record(request, response)
        return response


def task_name(data: Mapping[str, Any]) -> Any:
    """Return the name of a task: its ``query_id``, its ``id``, or the ordinal of its draw."""
    return next((data[key] for key in ("query_id", "id", "ordinal") if data.get(key) is not None), "task")


_RULE = "-" * 100


async def dump_sample(
    dump_dir: str | Path, *, version: int, task: Any, sections: dict[str, str], facts: dict[str, Any] | None = None
) -> Path | None:
    """Write one sample to ``dump_dir/<version>/<task>-<unique>.txt`` without blocking the event loop.

    A disk error is logged, and does not fail the sample.

    Args:
        dump_dir: directory of the dumps; created if it does not exist.
        version: version of the weights that sampled the first token.
        task: name of the task.
        sections: heading -> text, in order.
        facts: values for the first lines, such as the reward.

    Returns:
        Path of the file; None if it could not be written.
    """
    name = "".join(character if character.isalnum() or character in "-_" else "_" for character in str(task))[:80]
    path = Path(dump_dir) / str(version) / f"{name}-{uuid.uuid4().hex[:8]}.txt"
    lines = [f"{key}: {value}" for key, value in (facts or {}).items()]
    for heading, text in sections.items():
        lines += [_RULE, heading, _RULE, text]

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        logger.warning("the sample of task %s was not dumped to %s: %s", task, path, error)
        return None
    return path
