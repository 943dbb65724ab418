"""Task-style workflows of one turn: ask, score, return; and their forms for mathematics."""

from __future__ import annotations

from typing import Any

from rollwright.data.formats import with_system
from rollwright.experience.experience import Experience
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import ResettableWorkflow, Task, TaskReward

#: What the mathematical workflows tell the model where the task's format has no system prompt.
THINK_ANSWER_PROMPT = (
    "Solve the user's problem. First reason step by step between <think> and </think>, then give nothing but the final result "
    "between <answer> and </answer>."
)
BOXED_PROMPT = "Solve the user's problem step by step, and put nothing but the final result into \\boxed{}."


@WORKFLOWS.register_module("simple_workflow")
class SimpleWorkflow(ResettableWorkflow):
    """Asks once and scores the answer with the task's reward function.

    The conversation comes from the task's format (system prompt, prompt or messages). ``reply_prefix`` is where the
    assistant's reply begins. The reward function gets the reference answer as ``answer``, the row's columns and
    ``reward_fn_args``. There are no ``workflow_args``; a subclass may have some.
    """

    default_system_prompt: str | None = None
    default_reward_fn: str | None = None

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        if type(self).__module__ == __name__:  # a subclass may read some
            task.arguments()
        self.reward = TaskReward(task, type(self).__name__, self.default_reward_fn)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation to be answered."""
        return with_system(self.task.messages(), self.default_system_prompt)

    async def run_async(self) -> list[Experience]:
        """Ask ``rollout_args.n`` times and score each answer."""
        layout = self.task.format_args
        tools = self.task.raw_task.get(layout.tools_key) if layout.tools_key else None
        experiences = await self.model.chat_async(
            self.messages(), tools=tools, reply_prefix=layout.reply_prefix, n=self.task.rollout_args.n
        )
        for experience in experiences:
            experience.reward = await self.score(experience)
            experience.metrics = {"reward": experience.reward}
        return experiences

    async def score(self, experience: Experience) -> float:
        """The reward of one answer."""
        return await self.reward(experience)


@WORKFLOWS.register_module("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """Mathematics with think and answer tags: 1 for a right answer, ±0.1 for keeping to the format or not."""

    default_system_prompt = THINK_ANSWER_PROMPT
    default_reward_fn = "math_reward"


@WORKFLOWS.register_module("math_boxed_workflow")
class MathBoxedWorkflow(SimpleWorkflow):
    r"""Mathematics whose result stands in ``\boxed{}``."""

    default_system_prompt = BOXED_PROMPT
    default_reward_fn = "math_boxed_reward"
