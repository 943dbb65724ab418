"""One training run on the arithmetic task whose samples wait for a slow tool: what the asynchronous benchmarks share.

The model is the warmed-up one of ``examples/quickstart.yaml``, made once under ``--directory``. A sample is one completion,
then a tool call that takes a log-normal time drawn from (seed, task, sample): the same waits whatever the schedule.

The engine is the built-in one in the trainer's process. While samples wait for their tool the event loop is idle and the
trainer has the cores, so that what is overlapped is the wait, which is nearly all of a sample's life; an engine in a process
of its own would also overlap sampling with training, and on two cores take from the one what it gives to the other.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rollwright import RLVRWorkflow
from rollwright.config.loading import load_stages
from rollwright.data.datasets import get_dataset
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.loops.rl import PPOTrainer
from rollwright.trainers.stages import run_config

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "quickstart.yaml"
WAIT_MEDIAN, WAIT_P99 = 0.3, 6.0
MINIBATCH_SAMPLES = 128  # of an optimizer step, as in the quickstart


def tool_wait(seed: int, ordinal: int, index: int) -> float:
    """Seconds that the tool of one sample takes: log-normal with the median and the 99th percentile above.

    Args:
        seed: of the run.
        ordinal: which draw of a task.
        index: which sample of its group.
    """
    digest = hashlib.blake2b(f"{seed}/{ordinal}/{index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    deviation = math.log(WAIT_P99 / WAIT_MEDIAN) / NormalDist().inv_cdf(0.99)
    return WAIT_MEDIAN * math.exp(deviation * NormalDist().inv_cdf(uniform))


class SlowToolWorkflow(RLVRWorkflow):
    """One completion, scored after a tool call that takes its time.

    Args:
        reward_fn, gconfig, tokenizer: as for :class:`RLVRWorkflow`.
        seed: of the waits.
    """

    def __init__(self, reward_fn: Any, gconfig: Any, tokenizer: Any, seed: int) -> None:
        super().__init__(reward_fn, gconfig, tokenizer)
        self.seed = seed

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Sample, wait for the tool, score."""
        rows = await super().arun_episode(engine, data)
        await asyncio.sleep(tool_wait(self.seed, engine.name.ordinal, engine.name.index))
        return rows


@dataclass(frozen=True)
class Size:
    """How much is trained, the same for every run that is compared."""

    steps: int
    prompts: int
    group: int
    concurrency: int
    evaluation_tasks: int

    def __str__(self) -> str:
        return f"{self.steps} steps × {self.prompts} prompts × {self.group} samples, {self.concurrency} at once"


@dataclass(frozen=True)
class Outcome:
    """What a run gave. Times leave the first steps out, in which an asynchronous run fills its places."""

    tokens: float
    seconds: float
    seconds_a_step: float
    accuracy: float
    staleness_mean: float
    staleness_max: int
    clipped: float
    behaviour_capped: float
    dropped: int

    @property
    def tokens_an_hour(self) -> float:
        """Trained tokens an hour."""
        return 3600 * self.tokens / self.seconds


def arguments_of(description: str | None, full: Size, quick: Size) -> tuple[argparse.ArgumentParser, dict[str, Size]]:
    """The options that both benchmarks take, and the two sizes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; without it: {full}")
    for field in ("steps", "prompts", "group", "concurrency", "evaluation-tasks"):
        parser.add_argument(f"--{field}", type=int, help="in place of the size's")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs side by side, one compute thread each: quicker where accuracies are wanted; speeds need 1, since runs share cores",
    )
    parser.add_argument("--directory", type=Path, default=Path("runs/async-benchmark"), help="the warmed-up model is kept here")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    return parser, {"quick": quick, "full": full}


def size_of(arguments: argparse.Namespace, sizes: dict[str, Size]) -> Size:
    """The size that was asked for."""
    chosen = sizes["quick" if arguments.quick else "full"]
    given = {name: getattr(arguments, name) for name in vars(chosen) if getattr(arguments, name) is not None}
    return Size(**{**vars(chosen), **given})


def warmed_up_model(directory: Path) -> Path:
    """The checkpoint of the quickstart's first two stages, made where it is missing."""
    place = [f"cluster.fileroot={directory}", "experiment_name=base", "trial_name=warmup"]
    checkpoint = directory / "base" / "warmup" / "warmup" / "checkpoints" / "final"
    if not (directory / "base" / "warmup" / "summary.json").exists():
        run_config([stage for stage in load_stages(RECIPE, place) if stage.kind in ("model", "sft")])
    return checkpoint


@dataclass(frozen=True)
class Setting:
    """What tells one run from the others."""

    seed: int
    staleness: int
    is_decoupled: bool


def train_all(model: Path, size: Size, settings: Sequence[Setting], *, skip: int, jobs: int) -> Iterator[Outcome]:
    """The outcome of every setting, in order: each in a process of its own, ``jobs`` of them at a time.

    Args:
        model: checkpoint to begin with.
        size: how much.
        settings: the runs.
        skip: steps at the beginning that are trained and not timed.
        jobs: runs at a time; with more than one, each has one compute thread.
    """
    threads = 1 if jobs > 1 else os.cpu_count() or 1
    os.environ.update(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        runs = [pool.submit(train, model, size, setting, skip=skip) for setting in settings]
        for run in runs:
            yield run.result()


def train(model: Path, size: Size, setting: Setting, *, skip: int) -> Outcome:
    """Train from ``model`` and evaluate at the end.

    Args:
        model: checkpoint to begin with.
        size: how much.
        setting: seed of tasks, samples and waits; ``rollout.max_head_offpolicyness``, where 0 is synchronous; and the loss:
            decoupled, or with its ratio against the sampling policy.
        skip: steps at the beginning that are trained and not timed.
    """
    seed = setting.seed
    with tempfile.TemporaryDirectory() as root:
        settings = {
            "cluster.fileroot": root,
            "seed": seed,
            "deterministic": False,
            "stages.grpo.recover.every_steps": "null",
            "stages.grpo.stats_logger.display": "none",
            "stages.grpo.stats_logger.dump_rollouts": 0,
            "stages.grpo.actor.path": model,
            "stages.grpo.actor.use_decoupled_loss": setting.is_decoupled,
            "stages.grpo.actor.ppo_n_minibatches": max(1, size.prompts * size.group // MINIBATCH_SAMPLES),
            "stages.grpo.gconfig.n_samples": size.group,
            "stages.grpo.train_dataset.batch_size": size.prompts,
            "stages.grpo.total_train_steps": size.steps,
            "stages.grpo.evaluator.every_steps": size.steps,
            "stages.grpo.evaluator.limit": size.evaluation_tasks,
            "stages.grpo.rollout.max_head_offpolicyness": setting.staleness,
            "stages.grpo.rollout.max_concurrent_samples": size.concurrency,
        }
        overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
        config = next(stage.config for stage in load_stages(RECIPE, overrides) if stage.name == "grpo")
        tasks, held_out = (get_dataset(rows, str(model)) for rows in (config.train_dataset, config.valid_dataset))
        directory = RunDirectory(root, "run", f"seed-{seed}").claim({}, "off")
        with directory, PPOTrainer(config, tasks, held_out, directory=directory) as trainer:
            result = trainer.train(SlowToolWorkflow, {"seed": seed}, eval_workflow=RLVRWorkflow, eval_workflow_kwargs={})
            counters = trainer.rollout.counters()
        steps = [record for record in read_metrics(directory.metrics_file) if "seconds/generate" in record]
    return _outcome(steps, skip, result["eval"][size.steps], counters)


def _outcome(steps: Sequence[dict[str, Any]], skip: int, accuracy: float, counters: dict[str, float]) -> Outcome:
    timed = steps[skip:]
    seconds = sum(step[f"seconds/{phase}"] for step in timed for phase in ("generate", "train", "publish"))

    def mean(name: str) -> float:
        return statistics.fmean(step.get(name, 0.0) for step in steps)

    return Outcome(
        tokens=sum(step["response_tokens"] * step["samples"] for step in timed),
        seconds=seconds,
        seconds_a_step=seconds / len(timed),
        accuracy=accuracy,
        staleness_mean=mean("actor/staleness/mean"),
        staleness_max=int(max(step["actor/staleness/max"] for step in steps)),
        clipped=mean("actor/clip_share"),
        behaviour_capped=mean("actor/behaviour_weight/capped_share"),
        dropped=int(sum(counters[f"groups/{end}"] for end in ("rejected", "failed")))
        + int(sum(count for name, count in counters.items() if name.startswith("groups/dropped/"))),
    )
