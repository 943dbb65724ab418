"""Workflows of tests that run in processes of their own."""

import os
import time

from rollwright import Workflow
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


class Failing(Workflow):
    async def run_async(self):
        await self.model.chat_async([{"role": "user", "content": "hi"}])
        raise ValueError("the price is wrong")


class Dying(Workflow):
    def run(self):
        os._exit(3)
