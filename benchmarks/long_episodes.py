"""What recorder, request and normaliser cost in one long episode: a conversation of many turns, each of a thousand tokens.

    python benchmarks/long_episodes.py [--json FILE]

Each turn's prompt is all that came before it, so whatever looks at whole prompts costs the square of the turns. An episode is run
twice: through the engine that is bound to its sample and the normaliser, and alone, with the same lists and an engine that answers at
once. The table shows the difference: processor time, and the peak of traced memory. Each line is a process of its own. The ratio
``cpu/100k:50k`` would be 2 where the cost is linear, and 4 where it is quadratic.

``workflow`` is a plain list that grows, as users write it; ``turns`` is ``Turns``, of which the built-in workflows are made.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

TOKENS_A_TURN, TOOL = 1_000, 200  # so many of a turn's tokens are a tool's


def run(turns: int, kind: str) -> dict[str, Any]:
    """One line of the table."""
    import torch
    from instant_engine import InstantEngine

    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.experience.normaliser import normalise
    from rollwright.inference.request import ModelRequest, ModelResponse
    from rollwright.rollout.sample_engine import SampleEngine
    from rollwright.rollout.seeds import SampleName
    from rollwright.workflows.turns import Turns

    torch.set_num_threads(1)
    count = TOKENS_A_TURN - TOOL
    gconfig = GenerationHyperparameters(max_new_tokens=count)

    answers = [[1_000 + (turn * 31 + place * 7919) % 150_000 for place in range(count)] for turn in range(turns)]
    logprobs, versions = [-0.5 - place / 1024 for place in range(count)], [0] * count

    class ScriptedEngine(InstantEngine):
        """Answers without waiting."""

        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            answer = answers[len(request.tokens) // TOKENS_A_TURN]
            return ModelResponse(request.tokens, answer, logprobs, versions, rid=request.rid)  # type: ignore[arg-type]

    tool = list(range(TOOL))

    def row_of(ids: list[int], mask: list[int]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([ids]), "loss_mask": torch.tensor([mask]), "rewards": torch.tensor([1.0])}

    async def alone() -> Any:
        ids, mask = list(tool), [0] * TOOL
        for turn in range(turns):
            ids += answers[turn]
            mask += [1] * count
            if turn < turns - 1:
                ids += tool
                mask += [0] * TOOL
        return row_of(ids, mask)

    async def recorded() -> Any:
        engine = SampleEngine(ScriptedEngine(), SampleName(0, 0), run_seed=1, loop=asyncio.get_running_loop())
        if kind == "turns":
            sequence = Turns(engine, tool, gconfig, None, max_turns=turns)
            async for _ in sequence:
                if not sequence.is_last:
                    sequence.append_context(tool)
            return normalise(sequence.row(1.0), engine.recorder)
        ids, mask = list(tool), [0] * TOOL
        for turn in range(turns):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig, rid="conversation"))
            ids += response.output_tokens
            mask += [1] * response.output_len
            if turn < turns - 1:
                ids += tool
                mask += [0] * TOOL
        return normalise(row_of(ids, mask), engine.recorder)

    def cost(episode: Any) -> float:
        gc.collect()
        started = time.process_time()
        asyncio.run(episode())
        return time.process_time() - started

    def peak(episode: Any) -> float:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        asyncio.run(episode())
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return (highest - before) / 2**20

    for episode in (alone, recorded):  # imports and first uses
        cost(episode)
    spent = min(cost(recorded) for _ in range(9)) - min(cost(alone) for _ in range(9))
    return {
        "episode": kind,
        "turns": turns,
        "tokens": turns * TOKENS_A_TURN,
        "cpu ms": round(spent * 1e3, 1),
        "peak MiB": round(peak(recorded) - peak(alone), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write results and ratios to this file")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each line; the least processor time is shown")
    parser.add_argument("--one", nargs=2, metavar=("TURNS", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(int(arguments.one[0]), arguments.one[1])))
        return

    from report import Report

    report = Report(f"long episodes: turns of {TOKENS_A_TURN - TOOL} sampled and {TOOL} other tokens")
    for kind in ("workflow", "turns"):
        spent: dict[int, float] = {}
        for turns in (50, 100):
            command = [sys.executable, __file__, "--one", str(turns), kind]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            outputs = [
                subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                for _ in range(arguments.repeats)
            ]
            best = min((json.loads(output.splitlines()[-1]) for output in outputs), key=lambda found: found["cpu ms"])
            spent[turns] = best["cpu ms"]
            report.row(**best)
        report.ratio(f"{kind}/cpu/100k:50k", spent[100] / spent[50])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
