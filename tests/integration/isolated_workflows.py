"""Workflows of tests that run in processes of their own."""

import os
import time

from rollwright import Workflow
from rollwright.processes.sandbox import sandbox_name
from rollwright.workflows.registry import WORKFLOWS


@WORKFLOWS.register_module("isolated_echo")
class Echo(Workflow):
    """Asks twice in one conversation; its reward says in which process it ran."""

    resettable = True

    def reset(self, task):
        self.resets = getattr(self, "resets", 0) + 1

    def run(self):
        messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        (first,) = self.model.chat(messages, temperature=0.5)
        messages += [{"role": "assistant", "content": first.response_text}, {"role": "user", "content": "again"}]
        self.model.chat(messages, temperature=0.5)
        (experience,) = self.model.extract_experience_from_history()
        experience.reward = float(os.getpid())
        experience.info = {"resets": getattr(self, "resets", 0), "text": first.response_text}
        return [experience]


class Hanging(Workflow):
    """Hangs in code that no exception can end, with a child of its own."""

    def run(self):
        with open(self.task.workflow_args["note"], "w") as file:
            file.write(str(os.getpid()))
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue


class Scripting(Workflow):
    """Says which sandbox its scripts would run in."""

    def run(self):
        (experience,) = self.model.chat([{"role": "user", "content": "1"}])
        experience.reward = 0.0
        experience.info = {"sandbox": sandbox_name()}
        return [experience]


class Failing(Workflow):
    async def run_async(self):
        await self.model.chat_async([{"role": "user", "content": "hi"}])
        raise ValueError("the price is wrong")


class Dying(Workflow):
    def run(self):
        os._exit(3)


class AgentInProcess(Workflow):
    """An unmodified agent of two turns, whose calls go to the front; it keeps its client, which must not outlive the run."""

    def run(self):
        before = getattr(type(self), "client", None)
        client = type(self).client = self.model.get_openai_client()
        messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        answer = client.chat.completions.create(model=client.model_path, messages=messages)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "more"}]
        client.chat.completions.create(model=client.model_path, messages=messages, max_tokens=2)
        self.model.set_reward(0.25)
        self.model.set_reward(0.5, call=answer.id)
        (experience,) = self.model.extract_experience_from_history()
        judge = self.auxiliary_models[0]
        experience.info = {
            "process": os.getpid(),
            "retries": client.max_retries,
            "judge": [judge.model_path, judge.max_retries],
            "earlier_client": None if before is None else refusal_of(before),
        }
        return [experience]


class AsyncAgentInProcess(Workflow):
    """The same agent on an event loop."""

    async def run_async(self):
        client = self.model.get_openai_async_client()
        messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        answer = await client.chat.completions.create(model=client.model_path, messages=messages)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model=client.model_path, messages=messages, max_tokens=2)
        self.model.set_reward(0.25)
        self.model.set_reward(0.5, call=answer.id)
        return self.model.extract_experience_from_history()


def refusal_of(client) -> str:
    """How a call of an earlier run's client ends."""
    try:
        client.chat.completions.create(model=client.model_path, messages=[{"role": "user", "content": "late"}])
    except Exception as error:
        return type(error).__name__
    return "answered"
