"""What the journal costs: memory over a million records, its share of a training step, and running recorded episodes again.

    python benchmarks/journal.py [--json FILE] [--records N] [--steps N] [--only WHAT]

``records`` writes that many calls of three-turn episodes and reads them again; its memory should not grow. ``step`` trains a model of the
quickstart's size on two-digit sums, 64 tasks x 8 samples a step, and adds up the time spent in the journal. ``replay`` runs the
command ``rollwright replay … all --reward_fn …`` on 1,024 recorded episodes. ``--only`` names one of the three. The cost of a sample beside
the executor's is in ``benchmarks/executor.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, TOOL, TURNS = 64, 32, 16, 3


def records(count: int) -> dict[str, Any]:
    """Write ``count`` calls, and read them."""
    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.experience.journal.episodes import read_episodes
    from rollwright.experience.journal.writing import EpisodeWriter, Journal
    from rollwright.experience.recorder import Recorder
    from rollwright.inference.request import ModelRequest, ModelResponse

    gconfig = GenerationHyperparameters(max_new_tokens=OUTPUT)

    def episode(number: int) -> None:
        writer, recorder = EpisodeWriter(journal), Recorder()
        facts: dict[str, Any] = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
        writer.begin(ordinal=number, index=0, task=b"\x80", task_error="", **facts)
        ids = list(range(PROMPT))
        for _ in range(TURNS):
            said = [(number + place) % 50_000 for place in range(OUTPUT)]
            response = ModelResponse(output_tokens=said, output_logprobs=[-0.5] * OUTPUT, output_versions=[0] * OUTPUT)
            writer.call(recorder.record(ModelRequest(input_ids=ids, gconfig=gconfig, rid=f"r{number}"), response))
            ids = [*ids, *said, *range(TOOL)]
        writer.end("accepted")

    with tempfile.TemporaryDirectory() as directory:
        journal = Journal(directory)
        for number in range(2_000):
            episode(number)
        before, processor = _memory(), time.process_time()
        for number in range(count // TURNS):
            episode(number)
        processor, grown = time.process_time() - processor, _memory() - before
        journal.close()
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
        started, before = time.perf_counter(), _memory()
        found = sum(len(each.calls) for each in read_episodes(directory))
        assert found >= count // TURNS * TURNS
        return {
            "what": f"{count:,} records",
            "grown MiB": round(grown, 1),
            "of reading MiB": round(_memory() - before, 1),
            "bytes/record": round(size / found),
            "cpu µs/record": round(processor / count * 1e6, 1),
            "read µs/record": round((time.perf_counter() - started) / found * 1e6, 1),
        }


def _memory() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def step(steps: int) -> dict[str, Any]:
    """Train, with a watch on everything that writes to the journal."""
    from quickstart_run import SAMPLES, quickstart_run

    from rollwright.experience.journal.writing import EpisodeWriter, Journal
    from rollwright.trainers.loops import reporting

    spent = 0.0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal spent
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                spent += time.perf_counter() - started

        return call

    for name in ("begin", "call", "result", "end"):
        setattr(EpisodeWriter, name, watched(getattr(EpisodeWriter, name)))
    reporting.journal_step = watched(reporting.journal_step)
    Journal.checkpoint = watched(Journal.checkpoint)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as root, quickstart_run(root, steps, deterministic=True) as trainer:
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    return {
        "what": f"step of {SAMPLES} samples",
        "seconds": round(seconds / steps, 3),
        "journal %": round(spent / seconds * 100, 2),
    }


def replay() -> dict[str, Any]:
    """Score the episodes of two steps with another reward function: the whole command, start of Python included."""
    from quickstart_run import quickstart_run

    with tempfile.TemporaryDirectory() as root:
        with quickstart_run(root, 2) as trainer:
            trainer.train()
        command = [sys.executable, "-m", "rollwright", "replay", f"{root}/quickstart/run", "all"]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [*command, "--reward_fn", "quickstart_run.share_of_digits", "--json", f"{root}/replay.json"],
            env=environment,
            check=True,
            stdout=sys.stderr,
        )
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        told = json.loads(Path(f"{root}/replay.json").read_text())
        assert told["equal"] == told["episodes"]
        assert told["mean_reward"]["now"] != told["mean_reward"]["recorded"]
    return {
        "what": f"replay of {told['episodes']:,} episodes, another reward",
        "seconds": round(seconds, 2),
        "cpu seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "without start": round(told["seconds"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write results to this file")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=["records", "step", "replay"], help="measure this alone")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from report import Report

    report = Report("journal")
    measured = {"records": lambda: records(arguments.records), "replay": replay, "step": lambda: step(arguments.steps)}
    for measure in [measured[arguments.only]] if arguments.only else measured.values():
        report.row(**measure())
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
