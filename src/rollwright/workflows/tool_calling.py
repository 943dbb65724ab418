"""Task-style tool calling: the model calls Python functions by its chat template's own convention until it answers."""

from __future__ import annotations

from typing import Any

from rollwright.errors import PromptTooLongError
from rollwright.experience.experience import Experience
from rollwright.inference.server.tool_calls import ToolCall, tool_convention
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import Task
from rollwright.workflows.task_reward import TaskReward
from rollwright.workflows.task_workflow import Workflow
from rollwright.workflows.tool_functions import ToolFunctions

MAX_TURNS = 8


@WORKFLOWS.register_module("tool_calling_workflow")
class ToolCallingWorkflow(Workflow):
    """Ask, run the tools that the reply calls, show what they gave, ask again; one experience for one conversation.

    The conversation comes from the task's format. The last reply is scored by the task's reward function, which also gets
    ``tool_calls``, a list of ``{"name", "arguments", "ok"}`` in the order of the calls. What tools said is not trained on.
    ``workflow_args`` may hold:

    * ``tools``: functions, their import paths, or ``execute_python``; default: that one;
    * ``max_turns`` (8): replies at most;
    * ``tool_timeout`` (30): seconds that one call may take.
    """

    resettable = True
    repeatable = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        arguments = task.arguments(tools=["execute_python"], tool_timeout=30.0, max_turns=MAX_TURNS)
        self.tools = ToolFunctions(arguments["tools"], arguments["tool_timeout"])
        self.max_turns = arguments["max_turns"]
        self.reward = TaskReward(task, "ToolCallingWorkflow")

    async def run_async(self) -> list[Experience]:
        """Converse until a reply calls no tool, is cut, or the turns are used up."""
        messages = self.task.messages()
        calls: list[dict[str, Any]] = []
        turns, reply = 0, None
        while turns < self.max_turns:
            try:
                [reply] = await self.model.chat_async(messages, tools=self.tools.schemas, n=1)
            except PromptTooLongError:
                if turns == 0:
                    raise
                break  # the tools' answers filled the context: what was said so far is scored
            turns += 1
            messages.append({"role": "assistant", "content": reply.response_text})
            asked = [] if reply.truncated else self._tool_calls(reply)
            if not asked or turns == self.max_turns:
                break
            for call in asked:
                result = await self.tools.call(call.name, call.arguments)
                calls.append({"name": call.name, "arguments": call.arguments, "ok": result.ok})
                messages.append({"role": "tool", "name": call.name, "content": result.text})
        assert reply is not None
        reward = await self.reward(reply, columns={"tool_calls": calls})
        failed = sum(not call["ok"] for call in calls)
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics = {"reward": reward, "turns": turns, "tool_calls": len(calls), "failed_tool_calls": failed}
        get_tracker("rollout").scalar(turns=turns, tool_calls=len(calls), failed_tool_calls=failed)
        return experiences

    def _tool_calls(self, reply: Experience) -> list[ToolCall]:
        tokenizer = self.model.tokenizer
        convention = tool_convention(tokenizer.chat_template or "")
        text = tokenizer.decode(reply.response_tokens, skip_special_tokens=False)
        _, calls = convention.parse(text.removesuffix(tokenizer.eos_token or ""))
        return calls
