"""What the executor itself costs: samples of three turns against an engine that answers at once.

    python benchmarks/executor.py [--json FILE]

Every sample makes three model calls with a tool's text between them and returns one row; each of its tokens goes through the
recorder, the normaliser, the checker and the batch. All samples of a run are in flight at once. Each run is a process of its
own, so that its peak memory is its own. The ratio ``per_sample/10000`` is the cost of a sample among 10,000 divided by the
cost among 1,000: it should not be above 1 by more than the machine's noise.

The lines with a journal write every call to a file, as a run does; ``µs/journal`` is the processor time that this adds to a sample.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, TOOL, TURNS = 64, 32, 16, 3


def run(samples: int, group_size: int, journaled: bool) -> dict[str, Any]:
    """One run; its figures."""
    import torch
    from instant_engine import InstantEngine

    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.config.sections import RolloutConfig
    from rollwright.experience.journal.writing import Journal
    from rollwright.inference.engine import InferenceEngine
    from rollwright.inference.request import ModelRequest, ModelResponse
    from rollwright.rollout.executor import RolloutExecutor

    gconfig = GenerationHyperparameters(max_new_tokens=OUTPUT)

    class SeededEngine(InstantEngine):
        """Answers without waiting; tokens depend on the seed, so that no two samples are alike."""

        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            seed = request.seed or 0
            await asyncio.sleep(0)  # as any real engine, it gives way to others once
            return ModelResponse(
                input_tokens=request.input_ids,
                output_tokens=[(seed >> place) % 50_000 for place in range(OUTPUT)],
                output_logprobs=[-0.5] * OUTPUT,
                output_versions=[0] * OUTPUT,
                rid=request.rid,
                seed=request.seed,
            )

    class ThreeTurns:
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
            ids, mask, rid = list(range(PROMPT)), [0] * PROMPT, uuid.uuid4().hex
            for turn in range(TURNS):
                response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig, rid=rid))
                ids += response.output_tokens
                mask += [1] * response.output_len
                if turn < TURNS - 1:
                    ids += range(TOOL)
                    mask += [0] * TOOL
            return {
                "input_ids": torch.tensor([ids]),
                "loss_mask": torch.tensor([mask]),
                "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
                "rewards": torch.tensor([1.0]),
            }

    config = RolloutConfig(max_concurrent_samples=samples)
    directory = tempfile.TemporaryDirectory()
    journal = Journal(directory.name) if journaled else None
    executor = RolloutExecutor(SeededEngine(), config, journal=journal)
    tasks = [{"question": f"question {number}", "answer": str(number)} for number in range(samples // group_size)]
    executor.rollout_batch(tasks[:8], ThreeTurns(), group_size=group_size)  # imports and first uses
    before = _peak_mib()
    processor, wall = time.process_time(), time.perf_counter()
    batch = executor.rollout_batch(tasks, ThreeTurns(), group_size=group_size)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert batch["input_ids"].shape[0] == samples
    executor.destroy()
    if journal is not None:
        journal.close()
    written = sum(path.stat().st_size for path in Path(directory.name).iterdir())
    directory.cleanup()
    tensors = sum(value.numel() * value.element_size() for value in batch.values()) / 2**20
    return {
        "samples": samples,
        "mode": "journal" if journaled else "free",
        "group": group_size,
        "seconds": round(wall, 2),
        "samples/s": round(samples / wall),
        "µs/sample": round(wall / samples * 1e6),
        "cpu µs/sample": round(processor / samples * 1e6),
        "memory MiB": round(_peak_mib() - before, 1),
        "of it batch MiB": round(tensors, 1),
        "journal bytes/sample": round(written / samples) or None,
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write results and ratios to this file")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each line; the one that took least processor time is shown"
    )
    parser.add_argument("--one", nargs=3, metavar=("SAMPLES", "GROUP", "JOURNAL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        samples, group, journaled = (int(value) for value in arguments.one)
        print(json.dumps(run(samples, group, bool(journaled))))
        return

    from report import Report

    report = Report(f"executor: {TURNS} turns a sample, {PROMPT} + {TURNS}×{OUTPUT} + {TURNS - 1}×{TOOL} tokens")
    cost: dict[tuple[str, int], float] = {}
    for journaled in (0, 1):
        for samples in (1_000, 10_000):
            command = [sys.executable, __file__, "--one", str(samples), "8", str(journaled)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            outputs = [
                subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                for _ in range(arguments.repeats)
            ]
            best = min((json.loads(output.splitlines()[-1]) for output in outputs), key=lambda found: found["cpu µs/sample"])
            cost[best["mode"], samples] = best["cpu µs/sample"]
            report.row(**best)
    report.ratio("per_sample/10000", cost["free", 10_000] / cost["free", 1_000])
    report.ratio("µs/journal", cost["journal", 10_000] - cost["free", 10_000])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
