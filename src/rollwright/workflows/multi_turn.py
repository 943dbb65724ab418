"""Several attempts at one task: the answer is scored, feedback is given, and the model tries again.

The whole conversation is one sequence. What was sampled stays as it was sampled; between two turns only the tokens that the
chat template puts there are appended.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.conversation import ConversationTokens
from rollwright.errors import ConfigError, PromptTooLongError, WorkflowError
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.dumping import dump_sample, task_name
from rollwright.workflows.prompting import PromptFunction, as_gconfig, as_tokenizer, extract_messages
from rollwright.workflows.registry import WORKFLOWS, resolve_function

FEEDBACK = "That answer was not accepted. Read the question once more, look for the mistake, and answer again."

#: ``(completion, reward, task) -> feedback``
FeedbackFunction = Callable[[str, float, dict[str, Any]], str]


@WORKFLOWS.register_module("multi_turn")
class MultiTurnWorkflow(RolloutWorkflow):
    """Turns until the reward is reached, or ``max_turns``.

    The sample's reward is that of its last answer times ``turn_discount ** (turns - 1)``. A conversation that fills the
    engine's context ends there, and counts as truncated.

    Args:
        reward_fn: scores one answer, called with the conversation so far as the prompt; function, name or import path.
        gconfig: how each turn is sampled.
        tokenizer: the policy's tokenizer, or its path or name.
        max_turns: answers at most.
        turn_discount: what a further turn leaves of the reward.
        rollout_stat_scope: scope that reward, turns and lengths are reported under.
        dump_dir: where each sample is written to, readable; None: nowhere.
        target_reward: an answer with at least this reward ends the conversation.
        feedback_message: what the user says between two turns.
        feedback_fn: ``(completion, reward, task) -> feedback`` instead, or its import path.
        enable_thinking: given to chat templates that know it.
        data_extract_prompt_fn: ``(task) -> messages``, or its import path; None: the task's ``messages``.
        reward_timeout: seconds that the reward function may take.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 4,
        turn_discount: float = 0.9,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        target_reward: float = 1.0,
        feedback_message: str = FEEDBACK,
        feedback_fn: FeedbackFunction | str | None = None,
        enable_thinking: bool = False,
        data_extract_prompt_fn: PromptFunction | str | None = None,
        reward_timeout: float = 15.0,
    ) -> None:
        if max_turns < 1 or not 0.0 <= turn_discount <= 1.0:
            raise ConfigError(
                f"MultiTurnWorkflow(max_turns={max_turns}, turn_discount={turn_discount}): max_turns is at least 1 and "
                "turn_discount between 0 and 1."
            )
        self.tokenizer = as_tokenizer(tokenizer)
        self.gconfig = as_gconfig(gconfig, self.tokenizer)
        self.async_reward_fn = AsyncRewardWrapper(reward_fn, timeout_seconds=reward_timeout)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.rollout_stat_scope = rollout_stat_scope
        self.dump_dir = dump_dir
        self.target_reward = target_reward
        self.feedback_message = feedback_message
        self.feedback_fn = resolve_function(feedback_fn, "feedback_fn") if feedback_fn is not None else None
        self.enable_thinking = enable_thinking
        self.data_extract_prompt_fn = resolve_function(data_extract_prompt_fn or extract_messages, "data_extract_prompt_fn")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """Run one episode; see :class:`RolloutWorkflow`."""
        messages = [dict(message) for message in self.data_extract_prompt_fn(data)]
        conversation = ConversationTokens(self.tokenizer, enable_thinking=self.enable_thinking)
        rid = uuid.uuid4().hex
        gconfig = self.gconfig.new(n_samples=1)
        ids: list[int] = []
        loss_mask: list[int] = []
        reward, turns, truncated = 0.0, 0, False
        while True:
            prompt_ids = conversation.encode(messages)
            self._check_continues(prompt_ids, ids, turns)
            request = ModelRequest(rid=rid, input_ids=prompt_ids, gconfig=gconfig, tokenizer=self.tokenizer)
            try:
                response = await engine.agenerate(request)
            except PromptTooLongError:
                if turns == 0:
                    raise
                truncated = True
                break
            if response.stop_reason == "abort":
                return None
            turns += 1
            loss_mask += [0] * (len(prompt_ids) - len(ids)) + [1] * response.output_len
            ids = prompt_ids + response.output_tokens
            truncated = response.truncated
            completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
            reward = await self.async_reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)
            if reward >= self.target_reward or turns == self.max_turns:
                break
            reply = {"role": "assistant", "content": completion}
            conversation.remember(messages, reply, prompt_ids, response.output_tokens)
            feedback = self.feedback_message if self.feedback_fn is None else self.feedback_fn(completion, reward, data)
            messages += [reply, {"role": "user", "content": feedback}]
        discounted = reward * self.turn_discount ** (turns - 1)
        get_tracker(self.rollout_stat_scope).scalar(
            reward=discounted,
            last_reward=reward,
            turns=turns,
            solved=reward >= self.target_reward,
            response_tokens=sum(loss_mask),
            truncated=truncated,
        )
        if self.dump_dir is not None:
            await dump_sample(
                self.dump_dir,
                version=engine.get_version(),
                task=task_name(data),
                sections={"conversation": self.tokenizer.decode(ids, skip_special_tokens=False)},
                facts={"reward": discounted, "turns": turns, "tokens": f"{len(ids)}, {sum(loss_mask)} sampled"},
            )
        return {  # log-probabilities and versions are filled from the record
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([loss_mask]),
            "rewards": torch.tensor([float(discounted)]),
            "truncated": torch.tensor([truncated]),
        }

    def _check_continues(self, prompt_ids: list[int], ids: list[int], turns: int) -> None:
        """Refuse to train on a conversation whose earlier tokens would change from one turn to the next."""
        if prompt_ids[: len(ids)] != ids:
            raise WorkflowError(
                f"turn {turns + 1}: the chat template of {type(self.tokenizer).__name__} writes earlier turns anew, so the "
                "conversation is not one sequence of the tokens that were sampled. Use a template that only appends."
            )
