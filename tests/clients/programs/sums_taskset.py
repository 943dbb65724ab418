"""Sums, as a taskset of verifiers."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Right where the last reply has the number."""

    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """One sum."""

    def load(self):
        yield SumTask(SumData(prompt="What is 17 + 25?", answer="42"), self.config.task)
