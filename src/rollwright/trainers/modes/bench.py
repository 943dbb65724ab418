"""Benchmark of all checkpoints of a run on the evaluation tasks, with several samples per task: mean@k and pass@k."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwright.atomic import write_json
from rollwright.config.experiment import PPOConfig
from rollwright.config.loading import save_config
from rollwright.config.rules import validate
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.network import find_server_addresses
from rollwright.inference.weights.adapter import CONFIG_FILE
from rollwright.inference.weights.files import base_and_adapter
from rollwright.placement.local_rollout import make_rollout_engine
from rollwright.placement.task_services import TaskServices
from rollwright.tracking import logging
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.plots import plot_curves
from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.summary import checkpoint_table
from rollwright.trainers.drawn_tasks import held_out_tasks, refuse_missing_chat_template
from rollwright.trainers.loops.evaluation import evaluate, rewards_by_task, scores_by_task
from rollwright.trainers.modes.shared_run import trial_path

logger = getLogger("bench")


@dataclass
class Benchmark:
    """Scores of one checkpoint.

    Attributes:
        step: step at which the checkpoint was saved. None if unknown.
        scores: mean@n, pass@k and others, by taskset.
    """

    label: str
    path: str
    step: int | None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


def bench(config: PPOConfig, directory: RunDirectory) -> dict[str, Any]:
    """Evaluate checkpoints. Prints a table and writes ``bench.json`` and ``bench.png``.

    Returns:
        ``{"benchmarks": [...], "table": path, "plot": path}``; the plot is None without matplotlib.

    Raises:
        ConfigError: there are no checkpoints or no evaluation tasks, or servers are running already.
    """
    validate(config)
    benchmarks = find_checkpoints(config)
    backend = servers_of(config.rollout.backend)
    if backend is not None and backend.finds_servers and (addresses := find_server_addresses(config.rollout.addresses)):
        raise ConfigError(
            f"mode bench starts a server for each checkpoint, but there are servers that run already ({', '.join(addresses)}), and what "
            "they hold is one model: take rollout.addresses out of the config, and the addresses out of the environment."
        )
    logger.info("evaluating %d checkpoints: %s", len(benchmarks), ", ".join(each.label for each in benchmarks))
    for each in benchmarks:
        with logging.console().status(f"evaluating {each.label}"):
            each.scores = _scores(config, each.path, directory.stage(part_name(each.label)))
        for taskset, scores in each.scores.items():
            logger.info("%s on %s: %s", each.label, taskset, ", ".join(f"{k} {v:.3f}" for k, v in scores.items()))
    results = [dataclasses.asdict(each) for each in benchmarks]
    file = directory.path / "bench.json"
    write_json(file, {"samples": config.bench.samples, "benchmarks": results})
    logging.console().print(checkpoint_table([(each.label, each.scores) for each in benchmarks]))
    picture = plot_scores(directory.path / "bench.png", benchmarks, config)
    return {"benchmarks": results, "table": str(file), "plot": None if picture is None else str(picture)}


# -- which checkpoints -------------------------------------------------------------------------------------------------


def find_checkpoints(config: PPOConfig) -> list[Benchmark]:
    """Return the checkpoints listed in the config. Without a list, return the model at ``actor.path`` and all checkpoints of the run.

    Raises:
        ConfigError: no checkpoints are listed, and the run has written none.
    """
    if config.bench.checkpoints:
        return [Benchmark(path, path, step_of(Path(path).name)) for path in config.bench.checkpoints]
    trial = trial_path(config)
    places = [f"{above}checkpoints/*/{name}" for above in ("", "*/") for name in ("config.json", CONFIG_FILE)]
    written = [file.parent for place in places for file in trial.glob(place)]
    if not written:
        raise ConfigError(
            f"{trial} has no checkpoints: name the experiment and trial of a run that has saved some, or list bench.checkpoints."
        )
    found: dict[tuple[Path, int | str], Benchmark] = {}
    for path in sorted(written, key=lambda path: step_of(path.name) is None):
        step = last_step(path) if path.name == "final" else step_of(path.name)
        benchmark = Benchmark(str(path.relative_to(trial)), str(path), step)
        found.setdefault(
            (path.parent, path.name if step is None else step), benchmark
        )  # "final" may be the checkpoint of the last step
    ordered = sorted(
        found.values(), key=lambda each: (str(Path(each.path).parent), math.inf if each.step is None else each.step)
    )
    start = [] if config.actor.init_from_scratch or not config.actor.path else [Benchmark("start", config.actor.path, 0)]
    return [*start, *ordered]


def step_of(name: str) -> int | None:
    """Return the number in a name like ``step-000010``, or None if the name has another form."""
    match = re.fullmatch(r"(?:global_)?step[-_]?(\d+)", name)
    return int(match[1]) if match else None


def last_step(final: Path) -> int | None:
    """Return the step of ``checkpoints/final``: the last step in the run's metrics, or None if they are missing."""
    try:
        return max(record["step"] for record in read_metrics(final.parents[1] / "metrics.jsonl"))
    except (OSError, ValueError):
        return None


def part_name(label: str) -> str:
    """Return the directory of a checkpoint's journal, inside that of the benchmark: ``grpo-step-000010``."""
    return re.sub(r"[^\w.+@=-]+", "-", label.replace("checkpoints/", "")).strip("-.") or "checkpoint"


# -- scores ------------------------------------------------------------------------------------------------------------


def _scores(config: PPOConfig, path: str, directory: RunDirectory) -> dict[str, dict[str, float]]:
    base, adapter = base_and_adapter(path)
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, path=base, init_from_scratch=False))
    tokenizer = load_tokenizer(config.tokenizer_path or path, config.actor.trust_remote_code)
    refuse_missing_chat_template(config, tokenizer)
    gconfig = config.evaluator.gconfig.new(n_samples=config.bench.samples)
    save_config(config, directory.path / "config.yaml")
    scores, by_name = {}, defaultdict(list)
    with (
        # Services of this checkpoint, because agents and judges request it by name.
        TaskServices(config, tokenizer, directory.logs) as services,
        make_rollout_engine(config, None, tokenizer, directory) as rollout,
    ):
        if adapter is not None:
            rollout.update_weights(version=1, weights=adapter)
        rows, workflow, kwargs = held_out_tasks(config, tokenizer, services, group_size=config.bench.samples)
        for row in rows:
            by_name[row["taskset"] if config.eval_tasksets else "valid"].append(row)
        first = 0  # each taskset has its own ordinals in the journal
        for name, tasks in by_name.items():
            tasks = [{**task, "ordinal": ordinal} for ordinal, task in enumerate(tasks[: config.evaluator.limit], first)]
            first += len(tasks)
            result = evaluate(rollout, tasks, workflow, kwargs, gconfig)
            rewards = rewards_by_task(result.trajectory)
            if len(set(map(len, rewards))) > 1:
                raise ConfigError(
                    "tasks gave different numbers of samples, so mean@k and pass@k are not of one k: look at the workflow."
                )
            mean = f"mean@{len(rewards[0])}"
            by_task = scores_by_task(mean, rewards, config.bench.pass_at, config.bench.pass_reward)
            scores[name] = {
                **{score: statistics.fmean(values) for score, values in by_task.items()},
                "tasks": float(result.tasks),
                "truncated": result.truncated,
                "response_tokens": result.response_tokens,
            }
    return scores


def plot_scores(path: Path, benchmarks: Sequence[Benchmark], config: PPOConfig) -> Path | None:
    """Plot the scores over steps, one curve for each score and taskset. Checkpoints without a step are plotted after the last step."""
    last = max((each.step for each in benchmarks if each.step is not None), default=0)
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in benchmarks:
        step = last + 1 if each.step is None else each.step
        for taskset, scores in each.scores.items():
            for name, value in scores.items():
                if "@" in name:
                    curves[f"{taskset}: {name}"].append((step, value))
    return plot_curves(path, curves, title=f"{config.experiment_name}: checkpoints", y_label="reward, share that passes")
