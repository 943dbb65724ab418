"""Reinforcement learning with verifiable rewards: one prompt, one completion, one score."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.dumping import dump_sample, task_name
from rollwright.workflows.prompting import (
    InputIdsFunction,
    PromptFunction,
    as_gconfig,
    as_tokenizer,
    chat_input_ids,
    extract_messages,
)
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.side_by_side import one_group


@dataclass(frozen=True)
class Prompt:
    """What is asked, and what comes of it besides token ids where the prompt is more than text.

    Attributes:
        ids: token ids ``[P]``.
        inputs: further fields of each request.
        columns: further columns of each row, one element long.
        statistics, facts: further figures of the metrics, lines of the dumps.
    """

    ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@WORKFLOWS.register_module("rlvr")
class RLVRWorkflow(RolloutWorkflow):
    """Ask once, score the answer.

    The executor repeats a task for its group. Where ``gconfig.n_samples`` is above 1 and nobody repeats, the workflow makes
    the group itself, and returns one row for each sample.

    Args:
        reward_fn: function ``(prompt, completion, prompt_ids, completion_ids, **data) -> float``, plain or async, or its
            registered name or import path.
        gconfig: how completions are sampled.
        tokenizer: the policy's tokenizer, or its path or name.
        enable_thinking: given to chat templates that know it.
        rollout_stat_scope: scope that reward, lengths and share of truncated completions are reported under.
        dump_dir: where each sample is written to, readable; None: nowhere.
        get_input_ids_fn: ``(prompt, tokenizer, enable_thinking) -> token ids``, or its import path; None: the chat template.
        data_extract_prompt_fn: ``(task) -> prompt``, or its import path; None: the task's ``messages``.
        reward_timeout: seconds that the reward function may take.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        get_input_ids_fn: InputIdsFunction | str | None = None,
        data_extract_prompt_fn: PromptFunction | str | None = None,
        reward_timeout: float = 15.0,
    ) -> None:
        self.tokenizer = as_tokenizer(tokenizer)
        self.gconfig = as_gconfig(gconfig, self.tokenizer)
        self.async_reward_fn = AsyncRewardWrapper(reward_fn, timeout_seconds=reward_timeout)
        self.enable_thinking = enable_thinking
        self.rollout_stat_scope = rollout_stat_scope
        self.dump_dir = dump_dir
        self.get_input_ids_fn = resolve_function(get_input_ids_fn or chat_input_ids, "get_input_ids_fn")
        self.data_extract_prompt_fn = resolve_function(data_extract_prompt_fn or extract_messages, "data_extract_prompt_fn")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """Run one episode; see :class:`RolloutWorkflow`."""
        prompt = await self._prompt(data)
        return await one_group(self._sample(engine, data, prompt) for _ in range(self.gconfig.n_samples))

    async def _prompt(self, data: dict[str, Any]) -> Prompt:
        prompt = self.data_extract_prompt_fn(data)
        return Prompt(list(self.get_input_ids_fn(prompt, self.tokenizer, self.enable_thinking)))

    async def _sample(self, engine: InferenceEngine, data: dict[str, Any], prompt: Prompt) -> Trajectory | None:
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=prompt.ids,
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
            **prompt.inputs,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            return None
        prompt_text = self.tokenizer.decode(prompt.ids, skip_special_tokens=False)
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=self.gconfig.skip_special_tokens)
        reward = await self.async_reward_fn(prompt_text, completion, prompt.ids, response.output_tokens, **data)
        get_tracker(self.rollout_stat_scope).scalar(
            reward=reward,
            prompt_tokens=len(prompt.ids),
            response_tokens=response.output_len,
            truncated=response.truncated,
            **prompt.statistics,
        )
        if self.dump_dir is not None:
            await dump_sample(
                self.dump_dir,
                version=min(response.output_versions, default=0),
                task=task_name(data),
                sections={"prompt": prompt_text, "completion": completion},
                facts={
                    "reward": reward,
                    **prompt.facts,
                    "tokens": f"{len(prompt.ids)} + {response.output_len}",
                    "stopped by": response.stop_reason,
                },
            )
        return {**single_turn_row(response, reward, self.gconfig.effective_temperature), **prompt.columns}


def single_turn_row(response: ModelResponse, reward: float, temperature: float) -> Trajectory:
    """The trajectory ``[1, L]`` of one prompt and one completion, sampled at a temperature."""
    prompt, completion = response.input_len, response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "attention_mask": torch.ones(1, prompt + completion, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * prompt + [1] * completion]),
        "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs]),
        "versions": torch.tensor([[-1] * prompt + response.output_versions], dtype=torch.int32),
        "rewards": torch.tensor([float(reward)]),
        "temperature": torch.tensor([temperature]),
        "truncated": torch.tensor([response.truncated]),
    }
