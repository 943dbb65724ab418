"""What one process can roll out, and what a second one adds: episodes against an engine that answers at once.

    python benchmarks/workers.py [--repeats 3] [--json FILE]

Each process has an executor of its own with an instant engine inside, runs its share of the episodes, all in flight at once, and packs
the rows of each group as they travel to a trainer. Processes begin together. *short* episodes have 3 turns of 32 sampled tokens;
*32k* episodes have 32 turns of 1,000 tokens, 200 of each a tool's. A row of the table is the run with the least processor time.

``cpu/2`` is the processor time of an episode with two processes divided by that with one: nothing is shared, so it should be near 1.
``wall/2`` is the same of the elapsed time: 0.5 on two cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from instant_engine import InstantEngine
from report import Report

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.experience.packed import pack_rows
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.turns import Turns

#: Turns, sampled tokens and a tool's tokens of each turn, episodes of all processes together.
EPISODES = {"short": (3, 32, 16, 2_000), "32k": (32, 800, 200, 64)}
GROUP = 4


def work(kind: str, share: int, start: Any, figures: Any) -> None:
    """One process: wait for the others, run its episodes, and tell its figures."""
    torch.set_num_threads(1)
    turns, sampled, tool_tokens, _ = EPISODES[kind]
    gconfig = GenerationHyperparameters(max_new_tokens=sampled)
    tool = list(range(tool_tokens))
    logprobs, versions = [-0.5 - place / 1024 for place in range(sampled)], [0] * sampled

    class SeededEngine(InstantEngine):
        """Answers without waiting; tokens depend on the seed, so that no two samples are alike."""

        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            first = (request.seed or 0) % 40_000
            answer = list(range(first, first + sampled))
            return ModelResponse(request.tokens, answer, logprobs, versions, rid=request.rid)  # type: ignore[arg-type]

    class Conversation:
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
            sequence = Turns(engine, tool, gconfig, None, max_turns=turns)
            async for _ in sequence:
                if not sequence.is_last:
                    sequence.append_context(tool)
            return sequence.row(1.0)

    executor = RolloutExecutor(SeededEngine(), RolloutConfig(max_concurrent_samples=share))

    def episodes(first: int, count: int) -> int:
        """Run and pack episodes; returns bytes."""
        tasks = [{"question": f"{first + number}", "ordinal": first + number} for number in range(count // GROUP)]
        for task in tasks:
            executor.submit(task, Conversation(), group_size=GROUP)
        return sum(len(pack_rows(executor.wait(1))) for _ in tasks)

    episodes(10**6, 4 * GROUP)  # imports and first uses
    start.wait()
    processor, wall = time.process_time(), time.perf_counter()
    size = episodes(0, share)
    figures.put({"cpu": time.process_time() - processor, "wall": time.perf_counter() - wall, "bytes": size})
    executor.destroy()


def run(kind: str, processes: int) -> dict[str, float]:
    """Start processes, have them begin together, and add up what they say."""
    total, forking = EPISODES[kind][-1], multiprocessing.get_context("fork")  # what was imported is there already
    start, figures = forking.Barrier(processes), forking.SimpleQueue()
    started = [forking.Process(target=work, args=(kind, total // processes, start, figures)) for _ in range(processes)]
    for each in started:
        each.start()
    said = [figures.get() for _ in started]
    for each in started:
        each.join()
    return {
        "cpu": sum(each["cpu"] for each in said) / total,
        "wall": max(each["wall"] for each in said) / total,
        "bytes": sum(each["bytes"] for each in said) / total,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write results and ratios to this file")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each line; the one with the least processor time is shown"
    )
    arguments = parser.parse_args()
    report = Report("rollout processes with an engine that answers at once")
    for kind, (turns, sampled, tool, _) in EPISODES.items():
        found: dict[int, dict[str, float]] = {}
        for processes in (1, 2):
            runs = [run(kind, processes) for _ in range(arguments.repeats)]
            found[processes] = best = min(runs, key=lambda each: each["cpu"])
            report.row(
                **{
                    "episodes": kind,
                    "tokens": turns * (sampled + tool),
                    "processes": processes,
                    "cpu ms/episode": round(best["cpu"] * 1e3, 2),
                    "episodes/s": round(1 / best["wall"], 1),
                    "episodes/s of cpu": round(1 / best["cpu"], 1),
                    "packed KiB": round(best["bytes"] / 1024, 1),
                }
            )
        report.ratio(f"{kind}/cpu/2", found[2]["cpu"] / found[1]["cpu"])
        report.ratio(f"{kind}/wall/2", found[2]["wall"] / found[1]["wall"])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
