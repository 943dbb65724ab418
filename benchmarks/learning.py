"""Whether the algorithms learn what the docs claim: each claim with three seeds, which were fixed before the first run, all of them shown.

    python benchmarks/learning.py [CLAIM ...] [--seeds 1,2,3] [--jobs 2] [--directory runs/learning] [--json FILE]

A run is one ``rollwright run`` of a file of ``examples/`` below ``--directory``. A run that has finished there is not repeated, and one that
was interrupted goes on, so that the same command continues after a break and adds seeds or claims later. ``--jobs`` runs go side by side
and share the cores.

``lora``: ``examples/lora.yaml`` trains an adapter, ``examples/quickstart.yaml`` all weights, at the learning rate of each. Held-out greedy
accuracy after training; the adapter's mean may be 0.02 lower.

``ppo``: ``examples/ppo_multi_turn.yaml`` has a critic, ``examples/multi_turn.yaml`` the mean of a group; the samples are as many. Held-out greedy
reward after training; the mean with a critic may be 0.02 lower. And how far from the reward the critic's value before each turn was, in steps whose
games it had not seen, against the mean reward of the task's other samples.

``distillation``: ``examples/distillation.yaml``, and GRPO of the same student with the settings of the quickstart for 200 steps, at 64 × 8 and at
32 × 4 samples a step. Sampled tokens until an evaluation has 0.95 of the teacher's accuracy, or those of all steps if GRPO does not get there;
a fifth of the least of GRPO is the limit, for every seed.

``shared_server``: two runs train adapters over one base, one on sums and one on differences: alone beside a ``rollwright serve-model``, and both
beside one. Held-out greedy accuracy, whose mean may be 0.02 lower together; and the time of both together against one after the other, from
the start of the commands to their ends, where 0.75 is the limit. Times need a machine that does nothing else. The runs alone are repeated, which
shows how far two such runs differ: requests meet in other batches each time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas
import yaml
from report import Report

import rollwright

REPOSITORY = Path(__file__).resolve().parents[1]
LESS = 0.02  # by which a mean may be below the other


@dataclass(frozen=True)
class Finished:
    """A run that has ended well."""

    directory: Path

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Scores of the eval stages, by the stage's name."""
        return json.loads((self.directory / "summary.json").read_text())["eval"]

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(json.loads((self.directory / "summary.json").read_text())["seconds"].values())

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """The metrics of a stage, one record per step."""
        records: dict[int, dict[str, Any]] = {}
        for line in (self.directory / stage / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            records.setdefault(record["step"], {}).update(record)
        return [records[step] for step in sorted(records)]


class Runs:
    """Carries out runs, or finds them finished.

    Args:
        directory: what runs write is below it.
        seeds: seeds of each claim.
        jobs: runs side by side.
    """

    def __init__(self, directory: Path, seeds: Sequence[int], jobs: int) -> None:
        self.directory, self.seeds, self.jobs = directory.absolute(), seeds, jobs

    def each(self, claim: str, sides: dict[str, Sequence[str]]) -> dict[tuple[str, int], Finished]:
        """Carry out every side of a claim with every seed.

        Args:
            claim: name of the claim.
            sides: by the name of a side, the example and what is overridden.

        Returns:
            The runs, by side and seed.
        """
        wanted = [(side, seed) for seed in self.seeds for side in sides]
        with ThreadPoolExecutor(self.jobs) as pool:
            done = [pool.submit(self.run, claim, f"{side}-{seed}", *sides[side], f"seed={seed}") for side, seed in wanted]
            return {key: each.result() for key, each in zip(wanted, done, strict=True)}

    def run(self, claim: str, trial: str, example: str, *overrides: str) -> Finished:
        """Carry out one run.

        Args:
            claim: name of the claim.
            trial: name of the run.
            example: name of a file in ``examples/``, or the path of another.
            overrides: ``key=value``.

        Raises:
            SystemExit: the run failed; the message has the end of what it said.
        """
        file = example if example.endswith(".yaml") else f"examples/{example}.yaml"
        place = [f"cluster.fileroot={self.directory}", f"experiment_name={claim}", f"trial_name={trial}"]
        command = [sys.executable, "-m", "rollwright", "run", file, *place, *overrides]
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        log = self.directory / f"{claim}-{trial}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as said:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=said,
                stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"{claim}/{trial} failed; the whole of it is in {log}:\n{log.read_text()[-3000:]}")
        print(f"{claim}/{trial}: finished", flush=True)
        return Finished(self.directory / claim / trial)


def show_scores(claim: str, runs: dict[tuple[str, int], Finished], report: Report) -> None:
    """Add a row for each run: the scores of its stages ``before`` and ``after``, and its time."""
    for (side, seed), run in runs.items():
        scores = {f"{stage}_{name}": value for stage in ("before", "after") for name, value in _scores(run, stage).items()}
        report.row(claim=claim, side=side, seed=seed, **scores, seconds=round(run.seconds, 1))


def _scores(run: Finished, stage: str) -> dict[str, float]:
    return {name: value for name, value in run.scores[stage].items() if name == "greedy" or name.startswith("mean@")}


def compare_means(claim: str, ours: str, theirs: str, runs: dict[tuple[str, int], Finished], report: Report) -> None:
    """Add the difference of the mean greedy scores after training, and whether it is at least ``-LESS``."""
    means = {
        each: fmean(run.scores["after"]["greedy"] for (side, _), run in runs.items() if side == each) for each in (ours, theirs)
    }
    difference = means[ours] - means[theirs]
    report.row(claim=claim, side=f"mean of {ours} − mean of {theirs}", after_greedy=difference, holds=difference >= -LESS)
    report.ratio(f"{claim}/difference", difference)


def lora(runs: Runs, report: Report) -> None:
    """An adapter of the quickstart's model against all of its weights."""
    done = runs.each("lora", {"adapter": ["lora"], "all-weights": ["quickstart"]})
    show_scores("lora", done, report)
    compare_means("lora", "adapter", "all-weights", done, report)


#: Steps of ``ppo_multi_turn`` whose games neither the policy nor the critic has been trained on: the last of the first epoch.
UNSEEN = range(19, 29)


def ppo(runs: Runs, report: Report) -> None:
    """PPO with a critic against GRPO on the game of several turns, at equal samples; and what the critic's values are worth."""
    stages = {"ppo": "ppo", "grpo": "grpo"}
    done = runs.each("ppo", {"ppo": ["ppo_multi_turn"], "grpo": ["multi_turn"]})
    sampled = {key: sum(record.get("samples", 0.0) for record in run.steps(stages[key[0]])) for key, run in done.items()}
    if len(set(sampled.values())) != 1:
        raise SystemExit(f"the sides have other numbers of samples: {sampled}")
    show_scores("ppo", done, report)
    compare_means("ppo", "ppo", "grpo", done, report)
    errors = pandas.concat(
        [squared_errors(run.directory / "ppo", UNSEEN).assign(seed=seed) for (side, seed), run in done.items() if side == "ppo"]
    )
    by_turn = (
        errors.groupby(["seed", "turn"])[["critic", "group_mean"]]
        .agg("mean")
        .assign(guesses=errors.groupby(["seed", "turn"]).size())
    )
    for (seed, turn), row in by_turn.iterrows():
        report.row(claim="ppo", side="squared error", seed=seed, turn=turn, **row.to_dict())
    means = errors[["critic", "group_mean"]].mean()
    turns = errors.groupby("turn").critic.mean()
    falls = bool((turns.diff().dropna() < 0).all())
    report.row(
        claim="ppo",
        side="squared error of all",
        **means.to_dict(),
        falls=falls,
        holds=bool(means.critic < means.group_mean) and falls,
    )
    report.ratio("ppo/squared_error", means.critic / means.group_mean)


def squared_errors(stage: Path, steps: Sequence[int]) -> pandas.DataFrame:
    """Compute how far from a conversation's reward the value before each of its turns was, and the mean reward of its task's other samples.

    Args:
        stage: directory of a run with a critic and groups of several samples.
        steps: whose samples count. The critic gave its values before it was trained on them.

    Returns:
        A row for each turn: ``turn`` from 1, ``critic`` and ``group_mean``, squared errors.
    """
    run = rollwright.Run(stage)
    run.refresh()
    parts = []
    for step in steps:
        samples = run.frame("samples", step=step).set_index("key")
        group = samples.groupby("group").reward
        samples["others"] = (group.transform("sum") - samples.reward) / (group.transform("size") - 1)
        tokens = run.frame("tokens", step=step)
        begins = tokens.trained.astype(bool) & ~tokens.groupby("key").trained.shift(fill_value=False).astype(bool)
        turns = tokens[begins].join(samples[["reward", "others"]], on="key")
        parts.append(
            pandas.DataFrame(
                {
                    "turn": turns.groupby("key").cumcount() + 1,
                    "critic": (turns.value - turns.reward) ** 2,
                    "group_mean": (turns.others - turns.reward) ** 2,
                }
            )
        )
    return pandas.concat(parts)


#: Tasks and samples of a step of GRPO; the one that needs fewer tokens counts.
GRPO_BATCHES = {"64x8": (64, 8), "32x4": (32, 4)}
OF_TEACHER, OF_TOKENS = 0.95, 0.2  # of its accuracy, and of the tokens of GRPO
GRPO_STEPS = 200


def distillation(runs: Runs, report: Report) -> None:
    """A student that learns from a teacher against the same student under GRPO: sampled tokens until it is nearly as good as the teacher."""
    shares = []
    distilled = runs.each("distillation", {"distilled": ["distillation", "stages.distill.evaluator.every_steps=2"]})
    trials = [(name, seed) for seed in runs.seeds for name in GRPO_BATCHES]
    with ThreadPoolExecutor(runs.jobs) as pool:
        made = pool.map(lambda trial: grpo_of_student(runs, distilled["distilled", trial[1]], *trial), trials)
        grpo = dict(zip(trials, made, strict=True))
    for (_, seed), run in distilled.items():
        target = OF_TEACHER * run.scores["teacher_after"]["greedy"]
        ours = show_tokens(run, "distill", "distilled", seed, target, report)
        theirs = [show_tokens(grpo[name, seed], "grpo", f"grpo {name}", seed, target, report) for name in GRPO_BATCHES]
        shares.append(ours / min(theirs))
    report.row(claim="distillation", side="tokens / least tokens of GRPO", tokens=max(shares), holds=max(shares) <= OF_TOKENS)
    report.ratio("distillation/tokens", max(shares))


def grpo_of_student(runs: Runs, distilled: Finished, name: str, seed: int) -> Finished:
    """Train the student of a distillation with GRPO, in batches of a name of ``GRPO_BATCHES``."""
    tasks, samples = GRPO_BATCHES[name]
    part = write_part(runs.directory / "distillation", f"grpo-{name}-{seed}", ["grpo", "after"], example="quickstart")
    batch = [f"stages.grpo.train_dataset.batch_size={tasks}", f"gconfig.n_samples={samples}"]
    length = [f"stages.grpo.total_train_steps={GRPO_STEPS}", "stages.grpo.evaluator.every_steps=5"]
    student = f"stages.grpo.actor.path={distilled.directory / 'warmup' / 'checkpoints' / 'final'}"
    return runs.run("distillation", f"grpo-{name}-{seed}", part, student, *batch, *length, f"seed={seed}")


def show_tokens(run: Finished, stage: str, side: str, seed: int, target: float, report: Report) -> float:
    """Add a row with the sampled tokens until an evaluation reaches the target, or of all steps; returns them. A student that does not reach
    it by distillation has failed, so that its tokens are infinite."""
    tokens, best, reached = 0.0, 0.0, None
    for record in run.steps(stage):
        tokens += record.get("response_tokens", 0.0) * record.get("samples", 0.0)
        best = max(best, record.get("eval/reward", 0.0))
        if best >= target:
            reached = record["step"]
            break
    report.row(claim="distillation", side=side, seed=seed, target=target, best=best, reached_at_step=reached, tokens=tokens)
    return float("inf") if reached is None and stage == "distill" else tokens


TASKS = {"sums": "+", "differences": "-"}
MOST_TIME = 0.75  # of both together, relative to one after the other


def shared_server(runs: Runs, report: Report) -> None:
    """Two runs beside one server against each of them alone."""
    place = runs.directory / "shared_server"
    place.mkdir(parents=True, exist_ok=True)
    base = runs.run("shared_server", "base", write_part(place, "base", ["model", "warmup"], "".join(TASKS.values())))
    model = base.directory / "warmup" / "checkpoints" / "final"
    differences, repeated, shares = [], [], []
    for seed in runs.seeds:
        accuracies, seconds = {}, {}
        for how in ("alone", "again"):
            alone = [beside_server(runs, model, seed, how, [task]) for task in TASKS]
            accuracies[how] = {name: value for each in alone for name, value in each["accuracy"].items()}
            seconds[how] = sum(each["seconds"] for each in alone)
        together = beside_server(runs, model, seed, "together", list(TASKS))
        accuracies["together"], seconds["together"] = together["accuracy"], together["seconds"]
        for how, each in accuracies.items():
            report.row(claim="shared_server", side=how, seed=seed, **each, seconds=round(seconds[how], 1))
        differences += [accuracies["together"][task] - accuracies["alone"][task] for task in TASKS]
        repeated += [accuracies["again"][task] - accuracies["alone"][task] for task in TASKS]
        shares.append(seconds["together"] / seconds["alone"])
    report.row(claim="shared_server", side="again − alone", after_greedy=fmean(repeated))
    report.row(
        claim="shared_server",
        side="together − alone",
        after_greedy=fmean(differences),
        time=fmean(shares),
        holds=fmean(differences) >= -LESS and fmean(shares) <= MOST_TIME,
    )
    report.ratio("shared_server/difference", fmean(differences))
    report.ratio("shared_server/time", fmean(shares))


def write_part(place: Path, name: str, stages: Sequence[str], operation: str = "+", example: str = "lora") -> str:
    """Write some stages of an example with these operations; returns the path of the file."""
    place.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_load((REPOSITORY / "examples" / f"{example}.yaml").read_text())
    if "grpo" not in stages:
        del content["gconfig"]  # which only RL reads
    content["stages"] = [stage for stage in content["stages"] if stage["name"] in stages]
    for stage in content["stages"]:
        for key in ("train_dataset", "valid_dataset", "dataset"):
            if key in stage:
                stage[key]["kwargs"]["operation"] = operation
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(file)


def beside_server(runs: Runs, model: Path, seed: int, how: str, tasks: Sequence[str]) -> dict[str, Any]:
    """Train on tasks, all at once, beside a server of their own.

    Args:
        runs: carries them out.
        model: the base.
        seed: of the runs.
        how: part of the names of the runs.
        tasks: names of ``TASKS``.

    Returns:
        ``accuracy`` by task and ``seconds``, which are kept in a file. If that is missing, everything begins anew, because a run that goes on
        takes less time.
    """
    place = runs.directory / "shared_server"
    outcome = place / f"{how}-{'-'.join(tasks)}-{seed}.json"
    if outcome.exists():
        return json.loads(outcome.read_text())
    keys = {task: secrets.token_hex(16) for task in tasks}
    with served(model, place, keys) as address, ThreadPoolExecutor(len(tasks)) as pool:

        def train(task: str) -> float:
            trial = f"{how}-{task}-{seed}"
            shutil.rmtree(place / trial, ignore_errors=True)
            beside = [
                f"stages.grpo.actor.path={model}",
                *("deterministic=false", f"seed={seed}", "rollout.backend=sglang"),
                *(f"rollout.addresses=[{address}]", f"rollout.api_key={keys[task]}"),
            ]
            file = write_part(place, f"{trial}", ["grpo", "after"], TASKS[task])
            return runs.run("shared_server", trial, file, *beside).scores["after"]["greedy"]

        started = time.perf_counter()
        accuracy = dict(zip(tasks, pool.map(train, tasks), strict=True))
        found = {"accuracy": accuracy, "seconds": time.perf_counter() - started}
    outcome.write_text(json.dumps(found))
    return found


@contextlib.contextmanager
def served(model: Path, place: Path, keys: dict[str, str]) -> Iterator[str]:
    """Serve a model to runs with these keys while the block runs; yields the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (place / "weights").mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "rollwright",
        "serve-model",
        str(model),
        "--port",
        str(port),
        "--weights-root",
        str(place / "weights"),
    ]
    named = " ".join(f"{name}={key}" for name, key in keys.items())
    environment = {**os.environ, "ROLLWRIGHT_API_KEY": secrets.token_hex(16), "ROLLWRIGHT_RUN_KEYS": named}
    with (place / "server.log").open("a") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + 300
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {(place / 'server.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def is_healthy(port: int) -> bool:
    """Whether the server at a port of this machine answers."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return answer.status == 200
    return False


CLAIMS: dict[str, Callable[[Runs, Report], None]] = {
    "lora": lora,
    "ppo": ppo,
    "distillation": distillation,
    "shared_server": shared_server,
}


def main() -> None:
    """Carry out what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"of: {', '.join(CLAIMS)}; all without one")
    parser.add_argument("--seeds", default="1,2,3", help="separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--directory", type=Path, default=Path("runs/learning"), help="where runs are written, and found again")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file, after each claim")
    arguments = parser.parse_args()
    if unknown := [claim for claim in arguments.claims if claim not in CLAIMS]:
        parser.error(f"there is no claim {unknown[0]!r}; there are {', '.join(CLAIMS)}")
    runs = Runs(arguments.directory, [int(seed) for seed in arguments.seeds.split(",")], arguments.jobs)
    report = Report("What is learned")
    for claim in arguments.claims or CLAIMS:
        CLAIMS[claim](runs, report)
        report.finish(arguments.json)


if __name__ == "__main__":
    main()
