"""Evaluation: run every task of a split and report mean rewards and pass@k. Evaluation does not count as sampling for training."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rollwright.config.experiment import EvalConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.secrets import hidden_texts
from rollwright.config.servers import is_endpoint
from rollwright.errors import ConfigError, RolloutError
from rollwright.experience.journal.records import Resumed
from rollwright.experience.journal.writing import Journal
from rollwright.experience.players import rows_by_role
from rollwright.experience.trajectory import Trajectory, sampled_tokens
from rollwright.inference.chat_endpoint import ChatEndpoint
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.intervals import interval_of_mean
from rollwright.tracking.logging import getLogger
from rollwright.tracking.progress import progress_bar
from rollwright.tracking.rollout_dumps import RolloutDumper
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.drawn_tasks import evaluating
from rollwright.trainers.loops.reporting import EvaluationResult, sample_means

logger = getLogger("eval")


def evaluate(
    rollout: RolloutEngine,
    tasks: Sequence[dict[str, Any]],
    workflow: Any,
    workflow_kwargs: dict[str, Any] | None,
    gconfig: GenerationHyperparameters,
) -> EvaluationResult:
    """Run ``gconfig.n_samples`` samples of every task and average their rewards.

    A :class:`TaskRunner` uses its own generation arguments, from its tasksets or its constructor.

    Raises:
        RolloutError: a task gave no sample, so the mean would not cover all tasks.
    """
    workflow, kwargs = evaluating(workflow, workflow_kwargs, gconfig)
    trajectory = rollout.rollout_batch(
        list(tasks), workflow=workflow, workflow_kwargs=kwargs, group_size=gconfig.n_samples, is_eval=True
    )
    groups = trajectory["group_ids"].unique()
    if len(groups) != len(tasks):
        raise RolloutError(
            f"evaluation: {len(tasks) - len(groups)} of {len(tasks)} tasks gave no sample, so a mean would mislead; "
            "see the log for the failures, and raise rollout.max_sample_retries if they are passing."
        )
    rewards = sample_means(trajectory, trajectory["rewards"])
    by_taskset: dict[str, list[float]] = {}
    for task, own in zip(tasks, rewards_by_task(trajectory), strict=True):
        by_taskset.setdefault(task.get("taskset", ""), []).extend(own)
    return EvaluationResult(
        reward=float(rewards.mean()),
        tasks=len(tasks),
        samples=len(rewards),
        truncated=float(sample_means(trajectory, trajectory["truncated"].float()).mean()),
        response_tokens=float(sampled_tokens(trajectory).sum()) / len(rewards),
        trajectory=trajectory,
        by_taskset={name: statistics.fmean(own) for name, own in by_taskset.items()} if len(by_taskset) > 1 else {},
    )


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of ``k`` samples passes (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= samples:
        raise ConfigError(f"pass@{k} cannot be told from {samples} samples: k is between 1 and the number of samples.")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def scores_by_task(
    name: str, rewards: Sequence[Sequence[float]], pass_at: Sequence[int], pass_reward: float
) -> dict[str, list[float]]:
    """Compute the mean reward and each ``pass@k`` of every task. Their means over tasks are the scores.

    Args:
        name: name of the mean reward.
        rewards: rewards of each task's samples; see ``rewards_by_task``.
        pass_at: values of k. Values above the number of samples are skipped.
        pass_reward: smallest reward of a sample that passes.
    """
    samples = min(map(len, rewards))
    passed = [sum(reward >= pass_reward for reward in task) for task in rewards]
    values = {name: [statistics.fmean(task) for task in rewards]}
    for k in sorted(k for k in set(pass_at) if k <= samples):
        values[f"pass@{k}"] = [pass_at_k(len(task), count, k) for task, count in zip(rewards, passed, strict=True)]
    return values


def rewards_by_role(trajectory: Trajectory) -> dict[str, list[list[float]]]:
    """Return ``rewards_by_task`` of each role that is trained. Tasks without a row of the role are left out. Empty without roles."""
    compared = ("group_ids", "sample_ids", "rewards")
    return {
        role: rewards_by_task({key: trajectory[key][rows] for key in compared})
        for role, rows in rows_by_role(trajectory).items()
    }


def rewards_by_task(trajectory: Trajectory) -> list[list[float]]:
    """Return the rewards of each task's samples, in the order of the tasks. The reward of a sample is the mean over its rows."""
    samples = torch.stack([trajectory["group_ids"], trajectory["sample_ids"]], dim=1).unique(dim=0)
    counts = samples[:, 0].unique(return_counts=True)[1].tolist()
    return [part.tolist() for part in sample_means(trajectory, trajectory["rewards"]).split(counts)]


def evaluate_model(config: EvalConfig, directory: RunDirectory | None = None) -> dict[str, Any]:
    """Evaluate a model on a split.

    Args:
        config: the model, the split and the workflow. The model is a directory, which the built-in engine samples from (a LoRA adapter
            over the base that it names, too), or the URL of an endpoint of the OpenAI chat protocol.
        directory: receives the journal and readable samples (``stats_logger.dump_rollouts`` for each score). If None, nothing
            is written.

    Returns:
        Mean rewards ``greedy`` and ``mean@<samples>`` as configured, with several players also ``greedy/<role>`` and
        ``mean@<samples>/<role>``, ``pass@<k>``, the 95 % ``intervals`` of these over tasks
        (``[low, high]`` by name; empty with one task), the number of ``tasks``, and a few ``completions`` (``prompt``, ``completion``,
        ``reward``, ``answer``).

    Raises:
        ConfigError: the model, the endpoint or the dataset cannot be used.
    """
    from rollwright.data.datasets import get_dataset
    from rollwright.trainers.drawn_tasks import refuse_missing_chat_template, refuse_unusable_reward, thinks, workflow_arguments

    tokenizer, rollout = _engine(config, directory)
    refuse_missing_chat_template(config, tokenizer)
    tasks = get_dataset(config.dataset, tokenizer, thinks(config.workflow_kwargs))
    refuse_unusable_reward(config, tasks)
    runs = {"greedy": config.gconfig.new(greedy=True, n_samples=1)} if config.greedy else {}
    if config.samples:
        runs[f"mean@{config.samples}"] = config.gconfig.new(n_samples=config.samples)
    dumper = None
    scores: dict[str, Any] = {"tasks": len(tasks), "intervals": {}}
    if directory is not None:
        rollout.journal = _journal_of(config, directory)
        dumper = RolloutDumper(
            directory.rollouts, tokenizer, config.stats_logger.dump_rollouts, for_programs=rollout.journal is None
        )
    rollout.initialize()
    try:
        for name, gconfig in runs.items():
            kwargs = workflow_arguments(config, config.workflow, config.workflow_kwargs, tokenizer, gconfig)
            # Each score has its own ordinals in the journal. The sampled one keeps 0, 1, …, from which its seeds derive.
            first = len(tasks) if name == "greedy" and len(runs) > 1 else 0
            rows = [{**task, "ordinal": ordinal} for ordinal, task in enumerate(tasks, first)]
            with _bar(rollout, len(tasks) * gconfig.n_samples, name):
                result = evaluate(rollout, rows, config.workflow, kwargs, gconfig)
            rewards = rewards_by_task(result.trajectory)
            pass_at = [] if name == "greedy" else config.pass_at
            if pass_at and len(set(map(len, rewards))) > 1:
                logger.warning("pass@k is left out, because tasks gave different numbers of samples: some were rejected")
                pass_at = []
            by_task = scores_by_task(name, rewards, pass_at, config.pass_reward)
            for role, values in rewards_by_role(result.trajectory).items():
                by_task |= scores_by_task(f"{name}/{role}", values, [], config.pass_reward)
            for score, values in by_task.items():
                scores[score] = statistics.fmean(values)
                if limits := interval_of_mean(values):
                    scores["intervals"][score] = list(limits)
            if dumper is not None:
                dumper.dump(0, result.trajectory, name=name)
            scores.setdefault("completions", _completions(result.trajectory, tasks, tokenizer))
    finally:
        rollout.destroy()
    return scores


def _engine(config: EvalConfig, directory: RunDirectory | None) -> tuple[Any, RolloutEngine]:
    """Return the model's tokenizer and an engine that samples from the model, or those of an endpoint."""
    from rollwright.data.tokenizer import build_byte_tokenizer, load_tokenizer
    from rollwright.placement.local_rollout import make_local_engine

    if not is_endpoint(config.path):
        tokenizer = load_tokenizer(config.tokenizer_path or config.path, config.trust_remote_code)
        return tokenizer, make_local_engine(config, config.path, tokenizer)
    tokenizer = build_byte_tokenizer(None if directory is None else directory.path / "tokenizer")  # where the viewer finds it
    client = ChatEndpoint(config.path, tokenizer, model=config.served_model, api_key=config.api_key)
    return tokenizer, RolloutEngine(config.rollout, client=client, seed=config.seed, deterministic=config.deterministic)


def _journal_of(config: EvalConfig, directory: RunDirectory) -> Journal | None:
    """Open the journal of an evaluation. The samples of an earlier attempt, which is not continued, are marked as undone."""
    if not config.journal.enabled:
        return None
    journal = Journal(directory.journal, config.journal, hidden_texts(config))
    if directory.has_journal:
        journal.write(Resumed(step=0, version=-1, frontier=0, episodes=0, tokens=0, time=time.time()))
    return journal


def _bar(rollout: RolloutEngine, samples: int, name: str) -> AbstractContextManager[Any]:
    """Return a progress bar that counts the samples that end from now on."""

    def ended() -> float:
        counters = rollout.counters()
        return sum(counters[f"samples/{how}"] for how in ("accepted", "rejected", "failed"))

    before = ended()
    return progress_bar(samples, f"evaluating, {name}", count=lambda: ended() - before)


def _completions(
    trajectory: Trajectory, tasks: Sequence[dict[str, Any]], tokenizer: Any, limit: int = 4
) -> list[dict[str, Any]]:
    shown = []
    for row in range(min(limit, len(trajectory["input_ids"]))):
        ids = trajectory["input_ids"][row][trajectory["attention_mask"][row].bool()]
        start = int(trajectory["loss_mask"][row].argmax())
        shown.append(
            {
                "prompt": tokenizer.decode(ids[:start], skip_special_tokens=True),
                "completion": tokenizer.decode(ids[start:], skip_special_tokens=True),
                "reward": float(trajectory["rewards"][row]),
                "answer": str(tasks[row].get("answer", "")) if len(tasks) > row else "",
            }
        )
    return shown
