"""Several attempts at one task: the answer is scored, feedback is given, and the model tries again.

The whole conversation is one sequence. Sampled tokens stay unchanged; between two turns, only the tokens that the chat template adds are
appended.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.conversation import ConversationTokens
from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.durable import kept_calls
from rollwright.experience.experience import Experience
from rollwright.inference.engine import InferenceEngine
from rollwright.workflows.episode import EpisodeWorkflow, PromptFunction, task_name
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.task import Task, Workflow
from rollwright.workflows.turns import Turns

FEEDBACK = "That answer was not accepted. Read the question once more, look for the mistake, and answer again."

#: ``(completion, reward, task) -> feedback``, plain or async.
FeedbackFunction = Callable[[str, float, dict[str, Any]], str | Awaitable[str]]


class ConversationWorkflow(Workflow):
    """Base of task-style workflows of several turns.

    A subclass defines ``run`` or ``run_async``, samples from ``self.model``, and returns its conversations, each converted by
    ``process_messages_to_experience``.
    """

    can_repeat = True  # one run should return the whole group

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Convert a conversation to one experience.

        Args:
            messages: the requests to ``self.model`` and its replies.
            reward: reward of the conversation.
            info: stored with the experience; its numbers are also metrics.
            truncate_status: any value but None marks the conversation as truncated.
        """
        experience = self.model.convert_messages_to_experience(messages)
        experience.reward, experience.info = reward, dict(info or {})
        experience.metrics = {key: float(value) for key, value in experience.info.items() if isinstance(value, int | float)}
        experience.truncated = bool(experience.truncated or truncate_status)
        return experience


@WORKFLOWS.register_module("multi_turn")
class MultiTurnWorkflow(EpisodeWorkflow, ConversationWorkflow):
    """Lets the model try again, with feedback, until an answer reaches ``target_reward`` or ``max_turns`` are used up.

    The sample's reward is that of its last answer times ``turn_discount ** (turns - 1)``. A conversation that fills the
    engine's context ends there and counts as truncated. If ``gconfig.n_samples`` is above 1 and the caller does not repeat the
    task, the workflow runs the group itself.

    Args:
        reward_fn: scores one answer, with the conversation so far as the prompt; a function, its name or import path.
        gconfig: how each turn is sampled.
        max_turns: maximum number of answers.
        turn_discount: factor on the reward for each further turn.
        target_reward: minimum reward of an answer that ends the conversation.
        feedback_message: the user's message between two turns.
        feedback_fn: ``(completion, reward, task) -> feedback``, or its import path; replaces ``feedback_message``. It runs on the
            event loop, so a slow one should be async.

    The other arguments are those of :class:`EpisodeWorkflow`.

    A subclass that defines ``run`` or ``run_async``, built with ``task`` and ``model``, behaves as a :class:`ConversationWorkflow`.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | None = None,
        gconfig: GenerationHyperparameters | None = None,
        tokenizer: Any = None,
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
        *,
        task: Task | None = None,
        model: ModelWrapper | None = None,
        auxiliary_models: list[Any] | None = None,
    ) -> None:
        if task is not None and model is not None:
            Workflow.__init__(self, task=task, model=model, auxiliary_models=auxiliary_models)
            return
        if reward_fn is None or tokenizer is None:
            raise WorkflowError(
                f"{type(self).__name__} needs reward_fn and tokenizer; or task and model, as a task-style workflow."
            )
        if max_turns < 1 or not 0.0 <= turn_discount <= 1.0:
            raise ConfigError(
                f"MultiTurnWorkflow(max_turns={max_turns}, turn_discount={turn_discount}): max_turns is at least 1 and "
                "turn_discount between 0 and 1."
            )
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking,
            rollout_stat_scope,
            dump_dir,
            data_extract_prompt_fn=data_extract_prompt_fn,
            reward_timeout=reward_timeout,
        )
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.target_reward = target_reward
        self.feedback_message = feedback_message
        self.feedback_fn = resolve_function(feedback_fn, "feedback_fn") if feedback_fn is not None else None

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Alternate answers and feedback until the conversation ends; return one row."""
        messages = [dict(message) for message in self.data_extract_prompt_fn(data)]
        conversation = ConversationTokens(self.tokenizer, enable_thinking=self.enable_thinking)
        turns = Turns(engine, conversation.encode(messages), self.gconfig, self.tokenizer, max_turns=self.max_turns)
        reward = 0.0
        async for response in turns:
            reward = await self.score(response.input_tokens, response.output_tokens, data)
            if reward >= self.target_reward or turns.is_last:
                break
            completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            reply = {"role": "assistant", "content": completion}
            conversation.remember(messages, reply, response.input_tokens, response.output_tokens)
            messages += [reply, {"role": "user", "content": await self._feedback(completion, reward, data)}]
            ids = conversation.encode(messages)
            if ids[: len(turns)] != turns.input_ids:  # tokens that were sampled must stay
                raise WorkflowError(
                    f"turn {turns.count + 1}: the chat template of {type(self.tokenizer).__name__} changes earlier turns, so "
                    "the conversation is not one sequence of the tokens that were sampled. Use a template that only appends."
                )
            turns.append_context(ids[len(turns) :])
        if turns.is_aborted:
            return None
        discounted = reward * self.turn_discount ** (turns.count - 1)
        self.report(last_reward=reward, solved=reward >= self.target_reward)
        return await self.end(turns, data, discounted, turns=turns.count)

    async def _feedback(self, completion: str, reward: float, data: dict[str, Any]) -> str:
        if self.feedback_fn is None:
            return self.feedback_message
        feedback_fn, journal = kept_calls(self.feedback_fn, "feedback")

        async def ask(
            completion: str,
        ) -> Any:  # recorded by the completion alone: a replay may score it with another reward function
            feedback = feedback_fn(completion, reward, data)
            return await feedback if inspect.isawaitable(feedback) else feedback

        feedback = await journal.awaited(ask, completion)
        if not isinstance(feedback, str):
            raise WorkflowError(
                f"MultiTurnWorkflow: feedback_fn gave a {type(feedback).__name__} for task {task_name(data)}; it has to return "
                "the text that the user says next."
            )
        return feedback
