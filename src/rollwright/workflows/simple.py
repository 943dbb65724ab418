"""Single-turn task-style workflows: sample an answer and score it; with variants for mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.data.formats import with_system
from rollwright.experience.experience import Experience
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import ResettableWorkflow, Task, TaskReward

#: Default system prompts of the mathematical workflows.
THINK_ANSWER_PROMPT = (
    "Solve the user's problem. First reason step by step between <think> and </think>, then give nothing but the final result "
    "between <answer> and </answer>."
)
BOXED_PROMPT = "Solve the user's problem step by step, and put nothing but the final result into \\boxed{}."


@WORKFLOWS.register_module("simple_workflow")
class SimpleWorkflow(ResettableWorkflow):
    """Samples one answer and scores it with the task's reward function.

    The conversation comes from the task's format (system prompt, prompt or messages). ``reply_prefix`` is the start of the
    assistant's reply. The reward function gets the reference answer as ``answer``, the row's columns and
    ``reward_fn_args``. The class takes no ``workflow_args``; a subclass may.

    A subclass may override ``run``, using ``format_messages()``, ``task_desc``, ``truth``, ``system_prompt``, ``reply_prefix`` and
    ``reward_fn(response=…, truth=…)``, which returns the parts of the reward by name.
    """

    default_system_prompt: str | None = None
    default_reward_fn: str | None = None

    @staticmethod
    def uses_chat_template(arguments: Mapping[str, Any]) -> bool:
        """Return whether prompts are rendered by the tokenizer's chat template."""
        return True

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        self.raw_task, self.task_desc, self.truth = task.raw_task, task.task_desc, task.truth
        self.format_args, self.reply_prefix = task.format_args, task.format_args.reply_prefix
        self.system_prompt = task.format_args.system_prompt or self.default_system_prompt
        if type(self).__module__ == __name__:  # a subclass may take arguments
            task.arguments()
        self.reward = TaskReward(task, type(self).__name__, self.default_reward_fn)
        if not hasattr(type(self), "reward_fn"):
            self.reward_fn = self.reward.in_parts

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the conversation to answer. It ends with an assistant message if there is a reply prefix."""
        messages = with_system(self.task.messages(), self.system_prompt)
        return [*messages, {"role": "assistant", "content": self.reply_prefix}] if self.reply_prefix else messages

    async def run_async(self) -> list[Experience]:
        """Sample ``rollout_args.n`` answers and score each."""
        layout = self.task.format_args
        tools = self.task.raw_task.get(layout.tools_key) if layout.tools_key else None
        experiences = await self.model.chat_async(self.format_messages(), tools=tools, n=self.task.rollout_args.n)
        for experience in experiences:
            experience.reward = await self.score(experience)
        return experiences

    async def score(self, experience: Experience) -> float:
        """Return the reward of one answer."""
        return await self.reward(experience)


@WORKFLOWS.register_module("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """Mathematics with think and answer tags: 1 for a correct answer, plus or minus 0.1 for the format."""

    default_system_prompt = THINK_ANSWER_PROMPT
    default_reward_fn = "math_reward"


@WORKFLOWS.register_module("math_boxed_workflow")
class MathBoxedWorkflow(SimpleWorkflow):
    r"""Mathematics with the result in ``\boxed{}``."""

    default_system_prompt = BOXED_PROMPT
    default_reward_fn = "math_boxed_reward"
