"""Sums, as a taskset of ``verifiers.v1`` whose reward can raise."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """One reply, which is right if it has the number."""

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if "stupid" in trace.last_reply:
            raise LookupError(f"no such word in the book of sum {self.data.answer}")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """What is summed."""

    tasks: int = 40


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """Sums with 25."""

    def load(self):
        for number in range(17, 17 + self.config.tasks):
            data = SumData(prompt=f"What is {number} + 25?", system_prompt="Answer with a number.", answer=str(number + 25))
            yield SumTask(data, self.config.task)
