"""The tokens of an episode that goes on: what was sampled and what was put between, side by side with their masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollwright.experience.trajectory import Trajectory
from rollwright.inference.request import ModelResponse


class TokenSequence:
    """One row in the making; ``input_ids``, ``logprobs``, ``loss_mask`` and ``versions`` always have the same length."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.input_ids: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[int] = []
        self.versions: list[int] = []
        self.append_context(prompt_ids)
        self.prompt_length = len(self.input_ids)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.input_ids[self.prompt_length :]

    def append_context(self, ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample: the prompt, what tools returned."""
        self.input_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [0] * len(ids)
        self.versions += [-1] * len(ids)

    def append_response(self, response: ModelResponse) -> None:
        """Tokens as they were sampled. Versions that the engine did not give are left to the record."""
        self.input_ids += response.output_tokens
        self.logprobs += response.output_logprobs
        self.loss_mask += [1] * response.output_len
        self.versions += response.output_versions or [-1] * response.output_len

    def trajectory(self, reward: float, *, truncated: bool, temperature: float) -> Trajectory:
        """One row ``[1, L]``."""
        return {
            "input_ids": torch.tensor([self.input_ids], dtype=torch.int64),
            "logprobs": torch.tensor([self.logprobs], dtype=torch.float32),
            "loss_mask": torch.tensor([self.loss_mask], dtype=torch.int64),
            "versions": torch.tensor([self.versions], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(self), dtype=torch.bool),
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "temperature": torch.tensor([temperature], dtype=torch.float32),
            "truncated": torch.tensor([truncated]),
        }
