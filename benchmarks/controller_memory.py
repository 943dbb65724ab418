"""Memory of a Ray controller that holds one batch: 512 rows, one or all of 100,000 tokens.

    python benchmarks/controller_memory.py [--rows 512] [--short 100] [--long 100000] [--padded] [--json FILE]

Two workers in processes of their own run the episodes with an engine that answers at once. Their rows come to this process packed, which
sends them to one rank. Shown is this process's anonymous memory (``RssAnon``) above that before the batch, read every two milliseconds:
while the batch comes, once it is there, while it is sent, and with ``--padded`` also while it is unpacked and padded here. Ray's object
store is shared memory and not counted.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from instant_engine import InstantEngine
from rank_memory import RETURNED_AT_ONCE, Peaks, anonymous
from report import Report

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import ClusterConfig, RolloutConfig
from rollwright.experience.journal.writing import Journal
from rollwright.experience.packed import parts_of, unpacked
from rollwright.experience.trajectory import row_lengths
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.workers.episode_leases import RolloutWorkers
from rollwright.rollout.workers.worker import RolloutWorker

GROUP = 4


class LongAnswers(InstantEngine):
    """Answers with as many tokens as are asked for."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        count = request.gconfig.max_new_tokens
        return ModelResponse(request.tokens, [7] * count, [-0.5] * count, [0] * count, rid=request.rid)  # type: ignore[arg-type]


class Answer:
    """One question, and as many tokens of an answer as the task says of the sample."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        count = data["tokens"][engine.name.index]  # type: ignore[attr-defined]
        request = ModelRequest(input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(max_new_tokens=count))
        response = await engine.agenerate(request)
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 1.0}


def open_worker(where: Any, directory: str) -> RolloutWorker:
    """In a placed process: a worker with an engine of its own."""
    return RolloutWorker(LongAnswers(), RolloutConfig(), Answer(), group_size=GROUP, journal=Journal(Path(directory)))


class Taker:
    """Stands for a rank in a placed process."""

    def __init__(self, where: Any) -> None:
        pass

    def take(self, parts: list[np.ndarray]) -> int:
        """Count the bytes that came."""
        return sum(map(len, parts))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--short", type=int, default=100, help="tokens of all answers but one")
    parser.add_argument("--long", type=int, default=100_000, help="tokens of that one")
    parser.add_argument("--padded", action="store_true", help="also unpack and pad the batch")
    parser.add_argument("--json", type=Path, help="also write results to this file")
    arguments = parser.parse_args()
    from rollwright.placement.ray_cluster import RayCluster

    report = Report("memory of a controller that holds one batch")
    with tempfile.TemporaryDirectory() as directory:
        cluster = RayCluster(ClusterConfig(kind="ray"), directory)
        try:
            path = "controller_memory:open_worker"
            workers = [
                cluster.process(f"worker {number}", path, lambda: (directory,), cpus=0.5, gpus=0, concurrency=600)
                for number in range(2)
            ]
            rank = cluster.process("rank", "controller_memory:Taker", lambda: (), cpus=0.5, gpus=0)
            rank.wait_started(120.0)
            pool = RolloutWorkers(workers, 120.0, journal=directory)
            pool.wait_started()
            executor = RolloutExecutor(LongAnswers(), RolloutConfig(), workers=pool)
            short = [arguments.short] * GROUP
            tasks = [{"ordinal": number, "tokens": short} for number in range(4 + arguments.rows // GROUP)]
            executor.rollout_batch(tasks[:4], Answer(), group_size=GROUP)  # imports and first uses
            tasks = tasks[4:]
            tasks[0]["tokens"] = [arguments.long, *short[1:]]
            peaks = Peaks()
            with peaks.phase("while the batch comes"):
                batch = executor.rollout_batch(tasks, Answer(), group_size=GROUP)
            peaks.found["once it is there"] = (anonymous() - peaks.base) / 2**20, 0.0
            parts, _ = parts_of(batch)
            with peaks.phase("while it is sent to a rank"):
                sent = rank.call("take", [np.frombuffer(part, np.uint8) for part in parts]).result(600)
            report.row(phase="packed rows", MiB=round(sent / 2**20, 1))
            report.row(phase="bytes per token", bytes=round(sent / int(row_lengths(batch).sum()), 1))
            if arguments.padded:
                with peaks.phase("while it is unpacked and padded"):
                    padded = unpacked(batch)
                report.row(phase="padded tensors", MiB=round(sum(value.nbytes for value in padded.values()) / 2**20, 1))
            for phase, (mebibytes, seconds) in peaks.found.items():
                report.row(phase=phase, MiB=round(mebibytes, 1), seconds=round(seconds, 2))
            executor.destroy()
        finally:
            cluster.close()
    report.finish(arguments.json)


if __name__ == "__main__":
    import os
    import sys

    if os.environ.get("MALLOC_ARENA_MAX") != RETURNED_AT_ONCE["MALLOC_ARENA_MAX"]:  # it is read when a process begins
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **RETURNED_AT_ONCE})
    main()
