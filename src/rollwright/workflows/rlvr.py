"""Reinforcement learning with verifiable rewards: one prompt, one completion, one score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest
from rollwright.workflows.episode import EpisodeWorkflow, dump_sample, task_name
from rollwright.workflows.registry import WORKFLOWS


@dataclass(frozen=True)
class Prompt:
    """The prompt of an episode, with further inputs if it is more than text.

    Attributes:
        ids: token ids ``[P]``.
        inputs: further fields of each request.
        columns: further columns of each row, one element long.
        statistics: further metrics.
        facts: further lines of the dumps.
    """

    ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@WORKFLOWS.register_module("rlvr")
class RLVRWorkflow(EpisodeWorkflow):
    """Samples one answer and scores it. See :class:`EpisodeWorkflow` for the arguments.

    Reports the reward, the lengths and the share of truncated completions.
    """

    async def prompt(self, data: dict[str, Any]) -> Prompt:
        """Make the prompt of a task."""
        prompt = self.data_extract_prompt_fn(data)
        return Prompt(list(self.get_input_ids_fn(prompt, self.tokenizer, self.enable_thinking)))

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Sample an answer and score it."""
        prompt = await self.prompt(data)
        request = ModelRequest(
            input_ids=prompt.ids, gconfig=self.gconfig.new(n_samples=1), tokenizer=self.tokenizer, **prompt.inputs
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            return None
        asked = self.tokenizer.decode(prompt.ids, skip_special_tokens=False)
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=self.gconfig.skip_special_tokens)
        reward = await self.async_reward_fn(asked, completion, prompt.ids, response.output_tokens, **data)
        self.report(prompt_tokens=len(prompt.ids), **prompt.statistics)
        if self.dump_dir is not None:
            await dump_sample(
                self.dump_dir,
                version=min(response.output_versions, default=0),
                task=task_name(data),
                sections={"prompt": asked, "completion": completion},
                facts={
                    "reward": reward,
                    **prompt.facts,
                    "tokens": f"{len(prompt.ids)} + {response.output_len}",
                    "stopped by": response.stop_reason,
                },
            )
        return {
            "input_ids": prompt.ids + response.output_tokens,
            "loss_mask": [0] * len(prompt.ids) + [1] * response.output_len,
            "rewards": reward,
            **prompt.columns,
        }
