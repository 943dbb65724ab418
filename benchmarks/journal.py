"""What the journal costs: memory over a million records, and its share of a training step of the quickstart's size.

    python benchmarks/journal.py [--json FILE] [--records N]

``records`` writes that many calls of three-turn episodes and reads them again; its memory should not grow. ``step`` trains a model of the
quickstart's size on two-digit sums, 64 tasks x 8 samples a step, and adds up the time spent in the journal. The cost of a sample beside
the executor's is in ``benchmarks/executor.py``.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, TOOL, TURNS = 64, 32, 16, 3


def records(count: int) -> dict[str, Any]:
    """Write ``count`` calls, and read them."""
    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.experience.journal.episodes import EpisodeWriter, read_episodes
    from rollwright.experience.journal.files import Journal
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
    from rollwright.config.experiment import GRPOConfig, NewModelConfig
    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.config.sections import ClusterConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig, StatsLoggerConfig
    from rollwright.config.tasksets import DatasetConfig
    from rollwright.data.datasets import get_dataset
    from rollwright.experience.journal.episodes import EpisodeWriter
    from rollwright.experience.journal.files import Journal
    from rollwright.trainers import reporting
    from rollwright.trainers.rl import PPOTrainer
    from rollwright.trainers.stages import make_model

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
    with tempfile.TemporaryDirectory() as root:
        model = NewModelConfig(
            path=f"{root}/model",
            hidden_size=128,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=32,
            intermediate_size=384,
            max_position_embeddings=128,
            characters="0123456789+-*= ",
            pieces=["<answer>", "</answer>"],
        )
        make_model(model)
        config = GRPOConfig(
            experiment_name="journal",
            deterministic=True,
            cluster=ClusterConfig(fileroot=root),
            stats_logger=StatsLoggerConfig(display="none"),
            workflow="rollwright.workflows.rlvr.RLVRWorkflow",
            reward_fn="numeric_reward",
            gconfig=GenerationHyperparameters(n_samples=8, max_new_tokens=32, temperature=0.7),
            actor=PPOActorConfig(path=model.path, optimizer=OptimizerConfig(), mb_spec=MicroBatchSpec(), ppo_n_minibatches=4),
            train_dataset=DatasetConfig(path="arithmetic", split="train", batch_size=64, kwargs={"digits": 2}),
            total_train_steps=steps,
        )
        with PPOTrainer(config, get_dataset(config.train_dataset, model.path)) as trainer:
            started = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - started
    return {"what": "step of 512 samples", "seconds": round(seconds / steps, 3), "journal %": round(spent / seconds * 100, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write results to this file")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from report import Report

    report = Report("journal")
    report.row(**records(arguments.records))
    report.row(**step(arguments.steps))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
