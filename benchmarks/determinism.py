"""Whether a deterministic run gives one curve, however many requests are computed at once.

    python benchmarks/determinism.py [CONFIG] [--at-once 16,64,256] [--ahead 0,1] [--together 1] [--directory runs/determinism]

``rollwright run`` carries out a config (examples/quickstart.yaml) once for each number of ``rollout.max_running_requests`` and of
``rollout.max_head_offpolicyness`` (0: synchronous; 1: one step ahead, with the fixed schedule). Runs of one ``ahead`` have to agree bit
for bit: every figure of every step and evaluation that is no time, and every token, log-probability, version and reward of every
episode, read from the journal. The command ends with 1 where they do not.

``--model`` starts each run at the stages that train with rewards, from a model that is warmed up already. What finished is not
repeated: the same command goes on after an interruption, and ``--compare`` runs nothing and compares the steps that are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from report import Report

from rollwright.experience.journal.episodes import read_episodes

CLOCK = ("time", "unix_time", "seconds/", "tokens_per_second/", "memory/")  # what the names of figures of the clock begin with

Curve = dict[tuple[str, int, bool], dict[str, Any]]  # by stage, step, and whether it is an evaluation
Episodes = dict[
    tuple[str, str], tuple[Any, ...]
]  # by stage and name: tokens, log-probabilities and versions of its calls, and rewards


def config_from(config: Path, model: str | None, directory: Path) -> Path:
    """The config, without the stages before the first that trains with rewards where a model is given."""
    if model is None:
        return config
    content = yaml.safe_load(config.read_text())
    first = next(index for index, stage in enumerate(content["stages"]) if stage["kind"] == "rl")
    content["stages"] = content["stages"][first:]
    content["stages"][0]["actor"]["path"] = model
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def carry_out(config: Path, directory: Path, trial: str, settings: list[str]) -> None:
    """A run of its own process, with its output beside it."""
    names = [f"cluster.fileroot={directory}", "experiment_name=curve", f"trial_name={trial}"]
    with (directory / f"{trial}.log").open("w") as log:
        command = [sys.executable, "-m", "rollwright", "run", str(config), *settings, *names]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{trial} ended with {done.returncode}: see {directory / trial}.log")


def curve_of(run: Path) -> Curve:
    """All figures of all stages that are not of the clock; an evaluation's with completions that it shows."""
    curve: Curve = {}
    for file in sorted(run.glob("*/metrics.jsonl")):
        for figures in map(json.loads, file.read_text().splitlines()):
            is_evaluation = any(name.startswith("eval/") for name in figures)
            kept = {name: value for name, value in figures.items() if not name.startswith(CLOCK)}
            curve[file.parent.name, figures["step"], is_evaluation] = kept
    stages = run / "stages.json"
    for name, results in json.loads(stages.read_text()).items() if stages.exists() else ():
        if results["kind"] == "eval":
            curve[name, 0, True] = {key: value for key, value in results.items() if key != "total_seconds"}
    return curve


def episodes_of(run: Path) -> Episodes:
    """What every finished episode sampled, and its rewards."""
    found: Episodes = {}
    for journal in sorted(run.glob("*/journal")):
        for episode in read_episodes(journal):
            if episode.end is not None:
                calls = tuple((each.call.output, each.call.logprobs, each.call.versions) for each in episode.calls)
                found[journal.parent.name, episode.name] = calls, tuple(row.reward for row in episode.end.rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=Path(__file__).parents[1] / "examples" / "quickstart.yaml")
    parser.add_argument("--at-once", default="16,64,256", help="numbers of max_running_requests")
    parser.add_argument("--ahead", default="0,1", help="numbers of max_head_offpolicyness")
    parser.add_argument("--model", help="directory of a warmed-up model; without it every stage is carried out")
    parser.add_argument("--together", type=int, default=1, help="runs at once")
    parser.add_argument("--directory", type=Path, default=Path("runs/determinism"), help="where the runs are written")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of every run")
    parser.add_argument("--compare", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="write machine and results to this file")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    report = Report("Curves of a deterministic run")
    runs = {
        (ahead, rows): f"at-{rows}-ahead-{ahead}"
        for ahead, rows in itertools.product(arguments.ahead.split(","), arguments.at_once.split(","))
    }
    if not arguments.compare:
        config = config_from(arguments.config, arguments.model, directory)
        with ThreadPoolExecutor(arguments.together) as pool:
            for done in [
                pool.submit(
                    carry_out,
                    config,
                    directory,
                    trial,
                    [f"rollout.max_running_requests={rows}", f"rollout.max_head_offpolicyness={ahead}", *arguments.set],
                )
                for (ahead, rows), trial in runs.items()
            ]:
                done.result()
    are_equal = True
    for ahead in arguments.ahead.split(","):
        first: tuple[Curve, Episodes] | None = None
        for rows in arguments.at_once.split(","):
            run = directory / "curve" / runs[ahead, rows]
            curve, sampled = curve_of(run), episodes_of(run)
            first = first or (curve, sampled)
            steps, episodes = first[0].keys() & curve.keys(), first[1].keys() & sampled.keys()
            if not arguments.compare:
                are_equal &= first[0].keys() == curve.keys() and first[1].keys() == sampled.keys()
            same_steps = sum(first[0][step] == curve[step] for step in steps)
            same_episodes = sum(first[1][episode] == sampled[episode] for episode in episodes)
            are_equal &= same_steps == len(steps) and same_episodes == len(episodes)
            report.row(
                ahead=int(ahead),
                at_once=int(rows),
                figures=sum(len(curve[step]) for step in steps),
                steps_and_evaluations=len(steps),
                of_them_equal=same_steps,
                episodes=len(episodes),
                of_them_the_same=same_episodes,
            )
    report.finish(arguments.json)
    if not are_equal:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    main()
