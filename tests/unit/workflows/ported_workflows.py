"""Task-style workflows of the shapes that Trinity-RFT's files have, with the names that they import."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from rollwright import (
    WORKFLOWS,
    Experience,
    MathBoxedRewardFn,
    ModelWrapper,
    MultiTurnWorkflow,
    SimpleWorkflow,
    Task,
    Workflow,
    get_logger,
)

logger = get_logger(__name__)

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


@WORKFLOWS.register_module("ported_frozen_lake")
class FrozenLakeWorkflow(MultiTurnWorkflow):
    """A conversation of several turns, whose generation arguments are a property; one run is one sample."""

    can_reset: bool = False
    is_async: bool = True
    can_repeat: bool = False

    def __init__(self, model: ModelWrapper, task: Task, auxiliary_models: list | None = None):
        super().__init__(model=model, task=task, auxiliary_models=auxiliary_models)
        arguments = task.workflow_args if hasattr(task, "workflow_args") else {}
        self.max_steps = arguments.get("max_steps", 4)
        self.grid = task.raw_task["map"]
        self.place = (0, 0)

    @property
    def rollout_args(self):
        return asdict(self.task.rollout_args)

    def tile(self) -> str:
        return self.grid[self.place[0]][self.place[1]]

    def draw(self) -> str:
        rows = [list(row) for row in self.grid]
        rows[self.place[0]][self.place[1]] = "P"
        return "\n".join("".join(row) for row in rows)

    def move(self, text: str) -> bool:
        found = re.findall(r"```(.*?)```", text, re.DOTALL)
        step = MOVES.get(found[-1].strip().lower()) if found else None
        if step is None:
            return False
        size = len(self.grid)
        self.place = tuple(min(max(at + by, 0), size - 1) for at, by in zip(self.place, step, strict=True))
        return True

    async def run_async(self) -> list[Experience]:
        self.place, reward, steps = (0, 0), 0.0, 0
        messages = [{"role": "system", "content": "Walk to G. Do not step on H."}]
        for steps in range(1, self.max_steps + 1):
            messages.append({"role": "user", "content": f"{self.draw()}\n{self.max_steps - steps} steps are left."})
            arguments = self.rollout_args.copy()
            arguments["n"] = 1
            responses = await self.model.chat_async(messages, **arguments)
            messages.append({"role": "assistant", "content": responses[0].response_text})
            self.move(responses[0].response_text)
            if self.tile() in "GH":
                reward = float(self.tile() == "G")
                break
        info = {"env_steps": steps, "success": int(reward), "map": "small"}
        return [self.process_messages_to_experience(messages=messages, reward=reward, info=info)]


class StepWiseRewardWorkflow(Workflow):
    """Every step is an experience with a reward of its own; declares nothing about who repeats."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        assert model.enable_history, "set enable_history"

    def run(self) -> list[Experience]:
        experiences = []
        for step in range(self.max_step_num):
            goes_on = self.step(step_num=step)
            new = self.model.extract_experience_from_history()
            reward = self.reward(new, step_num=step)
            for experience in new:
                experience.reward = reward
                experience.eid.step = step
            experiences.extend(new)
            if not goes_on:
                break
        return experiences


@WORKFLOWS.register_module("ported_counting")
class CountingWorkflow(StepWiseRewardWorkflow):
    def __init__(self, **given):
        super().__init__(**given)
        self.memory = [{"role": "user", "content": "Count."}]

    def step(self, step_num: int) -> bool:
        text = self.model.chat(self.memory)[0].response_text
        self.memory += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        return True

    def reward(self, exps: list[Experience], step_num: int) -> float:
        return float(step_num)

    @property
    def max_step_num(self) -> int:
        return self.task.workflow_args.get("steps", 3)


@WORKFLOWS.register_module("ported_propagation")
class PropagationWorkflow(Workflow):
    """Asynchronous steps that share the reward of the last one."""

    is_async: bool = True

    async def run_async(self) -> list[Experience]:
        experiences = []
        for step in range(2):
            await self.model.chat_async(
                [{"role": "user", "content": f"step {step}"}], **asdict(self.task.rollout_args) | {"n": 1}
            )
            new = self.model.extract_experience_from_history()
            for experience in new:
                experience.eid.step = step
            experiences.extend(new)
        for experience in experiences:
            experience.reward = 1.0
            if experience.metrics is None:
                experience.metrics = {}
            experience.metrics["actual_env_steps"] = step + 1
        return experiences


@WORKFLOWS.register_module("ported_boxed")
class BoxedWorkflow(SimpleWorkflow):
    """A customised workflow for mathematics: its own reset, prompts and rewards; asks with messages or with plain text."""

    def reset(self, task: Task):
        self.format_args = task.format_args
        self.system_prompt = task.format_args.system_prompt
        self.reply_prefix = task.format_args.reply_prefix
        self.task_desc = task.task_desc
        self.truth = task.truth
        self.rollout_args = asdict(task.rollout_args)
        self.is_eval = task.is_eval
        self.use_base = task.workflow_args.get("use_base", False)
        self.with_think = task.workflow_args.get("with_think", False)
        if self.system_prompt is None:
            self.system_prompt = "Put your result into \\boxed{}."
        self.reward_fn = MathBoxedRewardFn()

    def run(self) -> list[Experience]:
        if self.use_base:
            text = f"System:{self.system_prompt}\nUser:\n{self.task_desc}\nAssistant:\n"
            responses = self.model.generate([text], **self.rollout_args)
        else:
            responses = self.model.chat(self.format_messages(), **self.rollout_args)
        for response in responses:
            parts = self.reward_fn(response=response.response_text, truth=self.truth, with_think=self.with_think)
            if response.metrics is None:
                response.metrics = {}
            response.metrics.update(parts)
            response.reward = sum(parts.values())
            logger.debug("%s: %s", self.task_desc, response.reward)
        return responses


@WORKFLOWS.register_module("ported_tool_call")
class ToolCallWorkflow(SimpleWorkflow):
    """Prompts from columns of the row; compares the calls in the text with the reference; numbers its runs."""

    def reset(self, task: Task):
        self.raw_task = task.raw_task
        self.rollout_args = asdict(task.rollout_args)
        self.workflow_args = task.workflow_args

    def run(self) -> list[Experience]:
        tools = "\n".join(json.dumps({"type": "function", "function": tool}) for tool in json.loads(self.raw_task["tools"]))
        prompt = [{"role": "system", "content": f"<tools>\n{tools}\n</tools>"}]
        prompt += [{"role": "user", "content": turn["value"]} for turn in self.raw_task["conversations"]]
        responses = self.model.chat(prompt, **self.rollout_args)
        for number, response in enumerate(responses):
            found = re.findall(r"<tool_call>(.*?)</tool_call>", response.response_text, re.DOTALL)
            response.reward = float(bool(found) and json.loads(found[-1]) == json.loads(self.raw_task["answer"]))
            response.eid.run = number
        return responses


@WORKFLOWS.register_module("ported_household")
class HouseholdWorkflow(MultiTurnWorkflow):
    """Makes its whole group in one run, one conversation after the other, as often as the task says."""

    def __init__(self, model: ModelWrapper, task: Task, auxiliary_models: list | None = None):
        super().__init__(model=model, task=task)
        self.repeat_times = task.repeat_times

    def run(self) -> list[Experience]:
        experiences = []
        for episode in range(self.repeat_times):
            memory = [{"role": "system", "content": "Act."}]
            for turn in range(2):
                memory = [*memory, {"role": "user", "content": f"Observation: room {turn}"}]
                text = self.model.chat(memory, n=1)[0].response_text
                memory.append({"role": "assistant", "content": text})
            experiences.append(self.process_messages_to_experience(memory, float(episode), {"env_rounds": turn}))
        return experiences


@WORKFLOWS.register_module("ported_judged")
class JudgedWorkflow(SimpleWorkflow):
    """Answers of one group are compared by a judge, which is an auxiliary model."""

    can_repeat: bool = True

    def reset(self, task: Task):
        self.task_desc, self.truth = task.task_desc, task.truth
        self.system_prompt, self.reply_prefix = None, None

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times
        self.task.rollout_args.n = repeat_times
        self.run_id_base = run_id_base

    @property
    def rollout_args(self):
        return asdict(self.task.rollout_args)

    def run(self) -> list[Experience]:
        responses = self.model.chat(self.format_messages(), **self.rollout_args)
        judge = self.auxiliary_models[0]
        texts = [response.response_text for response in responses]
        answer = judge.chat.completions.create(
            model=judge.model_path, messages=[{"role": "user", "content": json.dumps(texts)}], stream=False
        )
        for place, (response, score) in enumerate(zip(responses, json.loads(answer.choices[0].message.content), strict=True)):
            response.metrics.update(MathBoxedRewardFn()(response=response.response_text, truth=self.truth))
            response.reward = score
            response.eid.run = place + self.run_id_base
        return responses
