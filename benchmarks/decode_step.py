"""Where the time of a decode step goes: the model, the sampler, and the bookkeeping around them.

    python benchmarks/decode_step.py [--sizes 0.13M,1M] [--threads 1,2] [--json FILE]
    python benchmarks/decode_step.py --batch-invariant --rows 256 --sizes 5M

32 rows of 32 prompt tokens, sampled at temperature 1 and kept from their end token, as in benchmarks/grpo_step.py. ``step`` is a
whole step of the built-in engine, ``forward`` the model's part of it and ``sample`` that of drawing tokens, each alone; ``around``
is the rest. ``operators`` counts torch's operators in a step, those inside others too: with small models a step takes as long as
they are many. Microseconds, the median of steps in the calling thread; ``--clock processor`` counts processor time, of all threads
together, which a busy machine disturbs less.

``--batch-invariant`` compares whole steps with those of the engine of a deterministic run, in turns: the fastest of each counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generation import SIZES, qwen3
from report import Report

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.sampling import sample
from rollwright.inference.request import ModelRequest

ROWS, PROMPT_LENGTH, STEPS = 32, 32, 96
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
MODELS = {"0.13M": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 512}, **SIZES}


def decoding_engine(model: Any, rows: int = ROWS, **settings: Any) -> BuiltinEngine:
    """An engine whose steps this thread runs, with ``rows`` sequences that decode."""
    settings = {"threads": 1, "kv_cache_bytes": 1 << 26, **settings}
    engine = BuiltinEngine(model, max_running_requests=rows, context_length=512, **settings)
    engine.pause()
    new_tokens = 4 * STEPS
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, min_new_tokens=new_tokens, stop_token_ids=[0])
    prompts = torch.randint(10, model.config.vocab_size, (rows, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    engine.submit([ModelRequest(prompt.tolist(), gconfig, seed=index) for index, prompt in enumerate(prompts)])
    engine._take_inbox()
    return engine


def microseconds(work: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """The median of ``count`` calls."""
    taken = []
    for _ in range(count):
        start = clock()
        work()
        taken.append(clock() - start)
    return 1e6 * statistics.median(taken)


def measure(model: Any, clock: Callable[[], float]) -> dict[str, float]:
    """The parts of a step."""
    engine = decoding_engine(model)
    stepper, runner = engine._stepper, engine._runner
    for _ in range(8):
        stepper.step([])
    step = microseconds(lambda: stepper.step([]), STEPS, clock)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            stepper.step([])
    operators = sum(event.count for event in profile.key_averages() if event.key.startswith("aten::")) / STEPS
    assert stepper._decode is not None
    batch, plan = stepper._decode
    with torch.inference_mode():
        forward = microseconds(lambda: runner.forward(batch, runner.cache), STEPS, clock)
        logits = runner.forward(batch, runner.cache)
        draw = microseconds(lambda: sample(logits, plan), STEPS, clock)
    engine.destroy()
    return {"step": step, "forward": forward, "sample": draw, "around": step - forward - draw, "operators": operators}


def compare(model: Any, rows: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Tokens a second of the fastest decode step of the plain engine and of the batch-invariant one."""
    settings = {"kv_cache_bytes": 1 << 31, "prefix_cache": False, "threads": torch.get_num_threads()}
    engines = [decoding_engine(model, rows, batch_invariant=is_invariant, **settings) for is_invariant in (False, True)]
    best = [float("inf")] * 2
    for number in range(4 + STEPS // 4):
        for index, engine in enumerate(engines):
            start = clock()
            engine._stepper.step([])
            taken = clock() - start
            assert len(engine._stepper.scheduler.running) == rows or number < 4, "not all run at once"
            best[index] = min(best[index], taken) if number >= 4 else best[index]
    for engine in engines:
        engine.destroy()
    plain, invariant = (rows / seconds for seconds in best)
    return {"plain_tokens_per_second": plain, "batch_invariant": invariant, "kept": invariant / plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.13M,1M,5M,26M", help="comma-separated, of: " + ", ".join(MODELS))
    parser.add_argument("--threads", default="1,2", help="numbers of compute threads, comma-separated")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of all threads together, on a busy machine")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="compare whole steps with the engine of a deterministic run"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="with --batch-invariant: sequences that decode")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    arguments = parser.parse_args()
    unit = "tokens a second" if arguments.batch_invariant else "microseconds"
    report = Report(f"A decode step of {arguments.rows} rows, {unit}")
    for size in arguments.sizes.split(","):
        model = qwen3(**MODELS[size])
        for threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(threads)
            clock = CLOCKS[arguments.clock]
            parts = compare(model, arguments.rows, clock) if arguments.batch_invariant else measure(model, clock)
            report.row(model=size, threads=threads, **parts)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
