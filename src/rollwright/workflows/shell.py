"""An agent that works in a task's box by shell commands: it writes one, reads the output, and goes on until it is done."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from rollwright.data.formats import with_system
from rollwright.environments.harbor.task_box import Attempt, TaskBox
from rollwright.environments.harbor.tasks import folder_of
from rollwright.errors import PromptTooLongError, WorkflowError
from rollwright.experience.durable import durable
from rollwright.experience.experience import Experience
from rollwright.processes.box import ExecResult
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import ResettableWorkflow, Task, with_reward
from rollwright.workflows.tools import shortened

SYSTEM_PROMPT = (
    "You work in a Linux shell. Write one command, or a short script, in a code block:\n```sh\nls\n```\nIts output is shown to you. "
    "Each command starts in the working directory. When the task is done, answer without a code block."
)
_BLOCK = re.compile(r"```(?:sh|bash|shell)?[ \t]*\n(.*?)```", re.DOTALL)


@WORKFLOWS.register_module("shell_workflow")
class ShellWorkflow(ResettableWorkflow):
    """Lets the model work in the box of a task folder (``kind: harbor``); an episode is one experience, scored by the task's tests.

    A step ends with a reply without a command, after ``max_turns`` replies, or when the agent's time is used up; then it is graded.
    The tests' further rewards are metrics. ``workflow_args`` may hold:

    * ``max_turns`` (30): replies for each step;
    * ``command_timeout`` (60): seconds of a command;
    * ``max_output_characters`` (4000): of a command's output that are shown; the middle of longer output is left out;
    * ``fenced`` (true): commands are in code blocks; false for a model whose whole reply is the command;
    * ``system_prompt``: replaces the module's; an empty string omits it.
    """

    @staticmethod
    def uses_chat_template(arguments: Mapping[str, Any]) -> bool:
        """Return whether prompts are rendered by the tokenizer's chat template."""
        return True

    @staticmethod
    def box_image(arguments: Mapping[str, Any]) -> None:
        """Return the image of the boxes: that of each task folder."""

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        self.arguments = task.arguments(
            max_turns=30, command_timeout=60.0, max_output_characters=4000, fenced=True, system_prompt=SYSTEM_PROMPT
        )
        if self.arguments["max_turns"] < 1 or self.arguments["command_timeout"] <= 0:
            raise WorkflowError("shell_workflow: max_turns and command_timeout are above 0.")
        self.folder = folder_of(task.raw_task)

    async def run_async(self) -> list[Experience]:
        """Work on each step of the task."""
        messages: list[dict[str, Any]] = []
        self.turns = self.failed_commands = timeouts = 0
        async with TaskBox(self.folder) as box:
            async for attempt in box.steps():
                messages.append({"role": "user", "content": attempt.instruction})
                if len(messages) == 1:
                    messages = with_system(messages, self.arguments["system_prompt"])
                await self._work(box, attempt, messages)
                timeouts += attempt.timed_out
            reward = box.reward
        others = {f"verifier_{name}": value for name, value in box.all_rewards.items()}
        metrics = {"shell_turns": self.turns, "failed_commands": self.failed_commands, "agent_timeouts": timeouts, **others}
        get_tracker("rollout").scalar(**metrics)
        return with_reward(self.model.extract_experience_from_history(), reward, **metrics)

    async def _work(self, box: TaskBox, attempt: Attempt, messages: list[dict[str, Any]]) -> None:
        """Converse until the step is done or its turns, its time or the context are used up."""
        now = durable("agent clock")(time.monotonic)
        ends = now() + attempt.seconds
        for turn in range(self.arguments["max_turns"]):
            try:
                [reply] = await self.model.chat_async(messages, n=1)
            except PromptTooLongError:
                if self.turns == 0:
                    raise
                return
            self.turns += 1
            messages.append({"role": "assistant", "content": reply.response_text})
            command = self._command(reply.response_text or "")
            left = ends - now()
            attempt.timed_out = left <= 0
            if command is None or attempt.timed_out or (reply.truncated and self.arguments["fenced"]):
                return
            result = await box.run(["sh", "-c", command], timeout=min(left, self.arguments["command_timeout"]))
            self.failed_commands += not result.ok
            if turn + 1 < self.arguments["max_turns"]:
                messages.append({"role": "user", "content": self._shown(result)})

    def _command(self, reply: str) -> str | None:
        """Return the command of a reply, or None if it has none."""
        if not self.arguments["fenced"]:
            return reply.strip() or None
        found = _BLOCK.findall(reply)
        return found[-1].strip() or None if found else None

    def _shown(self, result: ExecResult) -> str:
        text = "\n".join(filter(None, [result.stdout.strip(), result.stderr.strip()]))
        if result.excess:
            text = f"{text}\nThe command was ended by a limit: {result.excess}.".strip()
        elif result.exit_code:
            text = f"{text}\nexit code {result.exit_code}".strip()
        return shortened(text or "(no output)", self.arguments["max_output_characters"])
