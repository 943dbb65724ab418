"""What looking at a large run costs, and what its records cost the training.

    python benchmarks/viewer.py [--json FILE] [--samples N] [--steps N] [--pages]

A run of 100,000 samples of two calls and 200 tokens over 1,000 steps is written by the journal's own writer, with its metrics. Then, each in
a process of its own: the first page of what it shows before there is an index; the index, records and texts; any sample, steps, groups and
searches once it is there; the memory of the process that did all that. ``pages`` times the evaluations page of 256 tasks at 60 versions and a
list of 1,000 runs. ``overhead`` compares the CPU seconds of training steps of the
quickstart's size with and without what the viewer's records add (log-probabilities and entropies of each token, publications, phases).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, OUTPUT, TOOL, GROUP = 40, 64, 32, 10  # two calls: 40 + 64 + 32 + 64 = 200 tokens
WORDS = 2_000


# -- a large run -------------------------------------------------------------------------------------------------------------


def write_run(directory: Path, samples: int, steps: int) -> None:
    """A finished run, in the form and by the writers of a real one; its tokenizer is one of words."""
    from rollwright.config.sections import JournalConfig
    from rollwright.data.tokenizer import build_word_tokenizer
    from rollwright.experience.journal.records import Checkpoint, GroupEnd, Phase, Published, Trained
    from rollwright.experience.journal.writing import Journal
    from rollwright.tracking.run_directory import RunDirectory
    from rollwright.tracking.sinks import JSONLSink

    random.seed(1)
    letters = "bcdfghklmnprst"
    words = {
        f" {random.choice(letters)}{random.choice('aeiou')}{random.choice(letters)}{random.choice('aeiou')}"
        for _ in range(WORDS)
    }
    run = RunDirectory(directory, "large", "run").claim({"stages": []}, "off")
    size = len(build_word_tokenizer(sorted(words), run.path / "model"))
    (run.path / "config.yaml").write_text(f"actor:\n  path: {run.path / 'model'}\ntotal_train_steps: {steps}\n")
    journal, sink, generator = (
        Journal(run.journal, JournalConfig(fsync_seconds=60.0)),
        JSONLSink(run.metrics_file),
        np.random.default_rng(1),
    )
    groups, ordinal, now = samples // GROUP // steps, 0, 1.7e9
    names = [f"actor/metric_{number}" for number in range(40)] + ["seconds/generate", "seconds/train", "actor/entropy"]
    for step in range(1, steps + 1):
        first, rewards = ordinal, []
        for ordinal in range(first, first + groups):
            prompt = generator.integers(100, size, PROMPT).tolist()
            rewards.append(write_group(journal, generator, size, ordinal, prompt, step, now))
            journal.write(GroupEnd(ordinal, ordinal, False, "delivered", "", GROUP, now))
        for number, own in enumerate(rewards, first):
            mean = sum(own) / len(own)
            for index, reward in enumerate(own):
                logprobs, entropies = generator.random(2 * OUTPUT, np.float32), generator.random(2 * OUTPUT).astype("<f2")
                sample = (number << 20) + index
                journal.write(
                    Trained(
                        step, number, sample, reward, reward - mean, 2 * OUTPUT, (-logprobs).tobytes(), entropies.tobytes()
                    ),
                    may_hold_secrets=False,
                )
        ordinal, now = first + groups, now + 10.0
        for name in ("generate", "train", "publish"):
            journal.write(Phase(step, name, 3.0, now - 10.0), may_hold_secrets=False)
        audit = {"logprob_difference/mean": 1e-6}
        journal.write(Published(step, step, audit, now, "shared", 0.1, 10**9, ["127.0.0.1:30000"]), may_hold_secrets=False)
        if step % 100 == 0:
            journal.write(Checkpoint(step, ordinal, now))
        flat = [reward for own in rewards for reward in own]
        sink.write(
            step, {"reward": statistics.fmean(flat), "samples": len(flat), **{name: math.sin(step / 50) for name in names}}
        )
    journal.close()
    sink.close()
    run.finish()
    run.release()


def write_group(journal: Any, generator: Any, size: int, ordinal: int, prompt: list[int], step: int, now: float) -> list[float]:
    """The episodes of a group; returns their rewards."""
    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.experience.journal.records import pack_value
    from rollwright.experience.journal.writing import EpisodeWriter
    from rollwright.experience.recorder import Recorder
    from rollwright.inference.request import ModelRequest, ModelResponse

    gconfig, task = GenerationHyperparameters(max_new_tokens=OUTPUT), pack_value({"question": f"task {ordinal}", "answer": "7"})
    rewards = []
    for index in range(GROUP):
        writer, recorder = EpisodeWriter(journal), Recorder()
        facts = {"attempt": 0, "is_eval": False, "version": step - 1, "workflow": "Large", "samples_asked": 1}
        writer.begin(ordinal=ordinal, index=index, task=task, task_error="", **facts)
        ids, mask = list(prompt), [False] * PROMPT
        for turn in range(2):
            said = generator.integers(100, size, OUTPUT).tolist()
            logprobs = (-generator.random(OUTPUT, np.float32)).tolist()
            response = ModelResponse(
                output_tokens=said, output_logprobs=logprobs, output_versions=[step - 1] * OUTPUT, latency=0.5
            )
            writer.call(
                recorder.record(ModelRequest(input_ids=list(ids), gconfig=gconfig, rid=f"r{ordinal}-{index}"), response)
            )
            ids, mask = ids + said, mask + [True] * OUTPUT
            if turn == 0:
                ids, mask = ids + generator.integers(100, size, TOOL).tolist(), mask + [False] * TOOL
        reward = float(generator.random() < 0.5)
        writer.end("accepted", rows=_trajectory(ids, mask, recorder, reward))
        rewards.append(reward)
    return rewards


def _trajectory(ids: list[int], mask: list[bool], recorder: Any, reward: float) -> dict[str, Any]:
    import torch

    said = [value for record in recorder.records for value in record.logprobs]
    logprobs, versions = torch.zeros(1, len(ids)), torch.full((1, len(ids)), -1, dtype=torch.int32)
    trained = torch.tensor([mask])
    logprobs[trained], versions[trained] = torch.tensor(said), 0
    return {
        "input_ids": torch.tensor([ids]),
        "loss_mask": trained,
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "logprobs": logprobs,
        "versions": versions,
        "rewards": torch.tensor([reward]),
        "truncated": torch.tensor([False]),
    }


# -- looking at it -----------------------------------------------------------------------------------------------------------


def look(path: Path) -> dict[str, Any]:
    """What each question costs; run in a process that did nothing else."""
    started, processor = time.perf_counter(), time.process_time()
    from rollwright.viewer.run import Run

    run = Run(path)
    run.info(), run.metrics(), run.steps(), run.diagnosis()
    result: dict[str, Any] = {
        "first_page_s": time.perf_counter() - started,
        "first_page_cpu_s": time.process_time() - processor,
    }
    index = run.index
    started, processor = time.perf_counter(), time.process_time()
    with index._writing:
        index._open()
        assert index._writer is not None
        index._advance_records(index._writer, None)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    samples = index.progress()["samples"]
    result |= {"samples": samples, "index_per_s": samples / seconds, "index_per_cpu_s": samples / processor}
    started, processor = time.perf_counter(), time.process_time()
    run.refresh()
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    result |= {"text_per_s": samples / seconds, "text_per_cpu_s": samples / processor}
    random.seed(2)
    keys = [f"{random.randrange(samples // GROUP)}/{random.randrange(GROUP)}" for _ in range(200)]
    taken = [_both(lambda key=key: run.sample(key)) for key in keys]
    result |= {"sample_s": max(each[0] for each in taken), "sample_cpu_s": max(each[1] for each in taken)}
    result["group_s"] = max(_seconds(lambda key=key: run.group(key.partition("/")[0])) for key in keys[:50])
    steps = len(run.steps())
    result["step_s"] = max(_seconds(lambda step=step: run.step(step)) for step in random.sample(range(1, steps + 1), 20))
    words = run.text(run.sample("0/0")["rows"][0]["ids"][:40]).split()
    asked: list[dict[str, Any]] = [{"text": words[0]}, {"text": " ".join(words[:2])}, {"text": f'"{words[0]} {words[1]}"'}]
    asked += [
        {"text": words[3], "order": "-reward", "step": (10, 900)},
        {"reward": (1, 1), "order": "-step"},
        {"version": (5, 50)},
    ]
    taken = [_both(lambda query=query: run.search(**query)) for query in asked]
    result |= {"search_s": max(each[0] for each in taken), "search_cpu_s": max(each[1] for each in taken)}
    result["pattern_s"] = _seconds(lambda: run.search(regex=rf"{words[0]}\s+{words[1]}\s+{words[2]}"))
    result["timeline_s"] = _seconds(run.timeline)
    status = Path("/proc/self/status").read_text()
    result["memory_mb"] = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    files = [file for file in (path / "journal").iterdir() if file.suffix != ".journal"]
    result["index_mb"] = sum(file.stat().st_size for file in files) / 2**20
    run.close()
    return result


def _seconds(action: Any) -> float:
    return _both(action)[0]


def _both(action: Any) -> tuple[float, float]:
    """Seconds, and those of the processor: on a busy machine the second says more."""
    started, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - started, time.process_time() - processor


# -- pages over many evaluations and many runs --------------------------------------------------------------------------------


def write_evaluations(path: Path, tasks: int, versions: int) -> None:
    """A run that evaluated ``tasks`` tasks at ``versions`` versions of the weights."""
    from rollwright.experience.journal.records import Begin, End, ModelCall, Row, pack_value
    from rollwright.experience.journal.writing import Journal

    journal, generator = Journal(path / "journal"), random.Random(1)
    ids = np.arange(5, 25, dtype="<i4").tobytes()
    packed = [pack_value({"query_id": f"{number}+1", "answer": str(number + 1)}) for number in range(tasks)]
    for version in range(versions):
        for ordinal in range(tasks):
            number, now = journal.next_episode(), 1.7e9 + version
            journal.write(Begin(number, ordinal, 0, 0, True, version, "W", 1, packed[ordinal], "", now))
            call = (number, 0, 0, 0, -1, 0, ids, ids, bytes(80), version, 1.0, "stop", None, 1, 0, now, now + 1, 1.0, 0.1)
            journal.write(ModelCall(*call))
            reward = float(generator.random() < (version + ordinal) / (versions + tasks))
            journal.write(End(number, "accepted", "", [Row(0, 40, b"", [20, 40], reward, False, b"")], now + 1))
    journal.close()


def write_runs(root: Path, count: int) -> None:
    """Finished runs of two stages with 50 steps each, half of them seeds of one config."""
    from rollwright.tracking.run_directory import RunDirectory
    from rollwright.tracking.sinks import JSONLSink

    for number in range(count // 2):
        stages = [{"kind": "sft", "name": "warmup", "seed": number}, {"kind": "rl", "name": "grpo", "seed": number}]
        run = RunDirectory(root, f"experiment{number % 20}", f"trial{number}").claim({"stages": stages}, "off")
        for name, curve in (("warmup", "loss"), ("grpo", "reward")):
            part = run.stage(name)
            (part.path / "config.yaml").write_text(
                f"seed: {number}\ntotal_train_steps: 50\nactor:\n  optimizer: {{lr: 1.0e-4}}\n"
            )
            sink = JSONLSink(part.metrics_file)
            for step in range(1, 51):
                sink.write(step, {curve: math.sin(step / 20 + number), "eval/reward": 0.5, "seconds/train": 1.0})
            sink.close()
        run.finish()
        run.release()


def pages(directory: Path) -> dict[str, float]:
    """Seconds for the evaluations page of 256 tasks at 60 versions, and for a list of 1,000 runs: at first, and once they were read."""
    from starlette.testclient import TestClient

    from rollwright.viewer.server import make_app

    result = {}
    write_evaluations(directory / "evaluated" / "run", 256, 60)
    write_runs(directory / "many", 1_000)
    for name, place, address in (("evaluations", "evaluated", "/run/run/evaluations"), ("list_of_1000", "many", "/")):
        app = make_app([directory / place])
        if name == "evaluations":
            app.state.pages.runs.get("run").refresh()
        client = TestClient(app, base_url="http://localhost")
        for time_of in ("first", "again"):
            wall, processor = _both(lambda client=client, address=address: client.get(address).raise_for_status())
            result |= {f"{name}_{time_of}_s": wall, f"{name}_{time_of}_cpu_s": processor}
            app.state.pages.runs.list()  # what the first request left to a thread
        app.state.pages.runs.close()
    return result


# -- what it costs a step ----------------------------------------------------------------------------------------------------


def overhead(steps: int) -> dict[str, float]:
    """CPU seconds of training steps, and those of the calls that the viewer's records added to them.

    The added calls are timed inside the steps, as two runs of a training differ by more than what is looked for.
    """
    from quickstart_run import quickstart_run

    from rollwright.trainers.loops import reporting
    from rollwright.training import actor

    added = 0.0

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal added
            started = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                added += time.thread_time() - started

        return call

    # The whole of what a step writes counts, with what was written of it before.
    actor.PolicyUpdate._keep_scores = timed(actor.PolicyUpdate._keep_scores)  # type: ignore[method-assign]
    reporting.journal_step = timed(reporting.journal_step)
    with tempfile.TemporaryDirectory() as root, quickstart_run(root, steps) as trainer:
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
    return {"step_cpu_s": seconds / steps, "added_cpu_s": added / steps, "overhead": seconds / (seconds - added)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write results to this file")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--training-steps", type=int, default=4)
    parser.add_argument("--pages", action="store_true", help="only the evaluations page and the list of 1,000 runs")
    parser.add_argument("--keep", type=Path, help="write the run here, or look at the one that is there")
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look:
        print(json.dumps(look(arguments.look)))
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from report import Report

    report = Report("viewer")
    with tempfile.TemporaryDirectory() as scratch:
        of_pages = pages(Path(scratch))
    if arguments.pages:
        for name, value in of_pages.items():
            report.row(figure=name, value=value)
        report.finish(arguments.json)
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        path = root / "large" / "run"
        if not path.exists():
            write_run(root, arguments.samples, arguments.steps)
        for file in (path / "journal").glob("index.sqlite*"):
            file.unlink()
        size = sum(file.stat().st_size for file in (path / "journal").iterdir())
        told = subprocess.run(
            [sys.executable, __file__, "--look", str(path)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    figures = {
        **json.loads(told.splitlines()[-1]),
        **of_pages,
        "journal_mb": size / 2**20,
        **overhead(arguments.training_steps),
    }
    for name, value in figures.items():
        report.row(figure=name, value=value)
    report.finish(arguments.json)
    if arguments.json:
        content = json.loads(arguments.json.read_text())
        arguments.json.write_text(json.dumps({**figures, **content}, indent=2) + "\n")


if __name__ == "__main__":
    main()
