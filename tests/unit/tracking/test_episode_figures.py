"""What is reported while an episode runs is kept for its sample, reduced as in the run's metrics."""

from __future__ import annotations

import asyncio

from rollwright.tracking.metrics import FIGURES, LONGEST_NOTE, EpisodeFigures, MetricsTracker


def test_each_episode_keeps_what_its_tasks_and_threads_report():
    tracker = MetricsTracker()

    async def episode(number: int) -> EpisodeFigures:
        figures = EpisodeFigures()
        FIGURES.set(figures)
        with tracker.scope("eval"):
            tracker.get("rollout").scalar(turns=number)
            await asyncio.sleep(0)
            await asyncio.to_thread(tracker.get("rollout").scalar, turns=number + 2)
            tracker.get("judge").maximum(score=[1, 3])
            tracker.note(verdict="x" * (LONGEST_NOTE + 1))
        return figures

    async def both() -> list[EpisodeFigures]:
        return await asyncio.gather(*(asyncio.create_task(episode(number)) for number in (1, 10)))

    first, second = (each.export() for each in asyncio.run(both()))
    assert first == {"turns": 2.0, "judge/score": 3.0, "verdict": "x" * LONGEST_NOTE}
    assert second["turns"] == 11.0
    tracker.scalar(loss=1.0)  # not of an episode
    assert tracker.export() == {"eval/judge/score": 3.0, "eval/rollout/turns": 6.5, "loss": 1.0}
    assert "loss" not in first
