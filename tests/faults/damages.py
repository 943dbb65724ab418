"""Run directories that are damaged at random, and what readers may then say: what was there, or that it is missing."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from rollwright.cli.main import main
from rollwright.errors import RollwrightError
from rollwright.experience.journal.reading import read_records
from rollwright.rollout.resume import read_past
from rollwright.store import ExperienceStore
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.recovery_checkpoint import RecoverCheckpoints
from rollwright.viewer.frames import tokens_of
from rollwright.viewer.run import Run
from rollwright.viewer.server import make_app

#: Of the files that are damaged: what their names fit, and how often they are chosen.
FILES = {"journal/*.journal": 8, "metrics.jsonl": 4, "run.json": 2, "config.yaml": 2, "stages.json": 2}
FILES |= {"experiences.db": 3, "recover/*/*.json": 2, "recover/*/*.safetensors": 1, "recover/*/parts/*": 1}
#: Facts of a sample that are shown, and belong to it alone.
FACTS = ("status", "reason", "reward", "rewards", "ordinal", "index", "attempt", "version", "truncated", "workflow")
COUNTS = ("tokens", "length", "rows", "calls", "tools", "advantage", "step", "trained", "prompt_tokens", "tool_names")


def damage(directory: Path, draw: random.Random) -> list[str]:
    """Damage one to three files of a run; says which, and how."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        pattern = draw.choices([*FILES], [*FILES.values()])[0]
        files = sorted(path for path in directory.glob(pattern) if path.is_file())
        if not files:
            continue
        path, kind = draw.choice(files), draw.choice([*KINDS])
        before = path.read_bytes()
        after = KINDS[kind](before, draw)
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
        if after != before:
            done.append(f"{kind} {path.relative_to(directory)}")
    return done


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _slice(data: bytes, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(data) + 1)
    return begin, min(len(data), begin + draw.choice((1, 40, 700, 9_000)))


def _cut_out(data: bytes, draw: random.Random) -> bytes:
    begin, end = _slice(data, draw)
    return data[:begin] + data[end:]


def _zeros(data: bytes, draw: random.Random) -> bytes:
    begin, end = _slice(data, draw)
    return data[:begin] + bytes(end - begin) + data[end:]


KINDS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "bytes flipped in": _flip,
    "again bytes flipped in": _flip,
    "end cut off": lambda data, draw: data[: draw.randrange(len(data) + 1)],
    "part cut out of": _cut_out,
    "zeros written into": _zeros,
    "bytes put into": lambda data, draw: (at := draw.randrange(len(data) + 1), data[:at] + draw.randbytes(50) + data[at:])[1],
    "emptied": lambda data, draw: b"",
    "removed": lambda data, draw: None,
}


@dataclass
class Seen:
    """What a run's readers show."""

    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: dict[str, list[Any]] = field(default_factory=dict)  # of the rows of each sample
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    answers: dict[tuple[int, int, int, int], list[list[int]]] = field(default_factory=dict)  # of episodes: output of each call
    past: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    stored: list[Any] | None = None
    missing: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""


def look(directory: Path) -> Seen:
    """Read all of a run, as a person does with ``rollwright.Run``."""
    seen = Seen()
    try:
        run = Run(directory)
    except RollwrightError as error:
        seen.refused = str(error)
        return seen
    with run:
        for _ in range(3):
            run.refresh()
        seen.missing, seen.config = run.missing(), run.config
        seen.points = {name: run.curves.points(name) for name in run.curves.names()}
        seen.steps = {entry["step"]: entry for entry in run.steps()}
        if run.has_journal:
            seen.samples = {each["key"]: each for each in run.search(limit=-1, undone=True)["samples"]}
            for number, (key, sample) in enumerate(seen.samples.items()):
                try:
                    if number % 16 == 0:
                        run.sample(key)
                    lines = list(tokens_of(run, key))  # of frame("tokens"), which a damaged one of all samples would end
                    seen.tokens[key] = [(line["token"], line["logprob"], line["trained"]) for line in lines]
                except RollwrightError:
                    assert sample["is_damaged"] or seen.missing, key
            frame = run.frame("samples", undone=True)
            assert sorted(frame.key if len(frame) else []) == sorted(seen.samples)
            assert {each["key"] for each in run.search(limit=-1)["samples"]} <= set(seen.samples)
    seen.past = past_of(directory)
    store = directory / "experiences.db"
    if store.exists():
        try:
            with ExperienceStore(f"sqlite:///{store}", create=False) as opened:
                groups = list(opened.groups(partial=True))
                seen.stored = [
                    (group.name, each.tokens.tolist(), each.reward) for group in groups for each in group.experiences
                ]
        except RollwrightError as error:
            seen.missing.append({"file": store.name, "message": str(error)})
    return seen


def past_of(directory: Path) -> dict[tuple[int, int], list[list[int]]]:
    """What a run that goes on would take from the journal: the answers of the episodes of all tasks."""
    try:
        past = read_past([directory / "journal"], lambda ordinal: True)
    except RollwrightError:
        return {}
    return {
        (ordinal, index): [call.output.tolist() for call in episode.calls]
        for ordinal, samples in past.episodes.items()
        for index, episode in samples.items()
    }


def faults_of(truth: Seen, seen: Seen) -> list[str]:
    """Values that are wrong, and losses of which nothing is said."""
    wrong = []
    if seen.refused:
        return wrong
    said = bool(seen.missing)
    for key, sample in seen.samples.items():
        if (own := _named(truth, key)) is None:
            if not said:
                wrong.append(f"there was no sample {key}")
            continue
        # A process, or an attempt, may be lost: then others are the last ones. What is of the sample alone is not another for that.
        names = FACTS if sample["is_damaged"] else (*FACTS, *COUNTS)
        for name in names:
            is_lost = said and sample[name] in (None, [], 0, 0.0) and name in ("step", "advantage", "trained")
            if sample[name] != own[name] and not is_lost:
                wrong.append(f"{name} of {key} is {sample[name]}, not {own[name]}")
        rows = seen.tokens.get(key)
        if rows is not None and not sample["is_damaged"] and rows != truth.tokens[own["key"]]:
            wrong.append(f"the tokens of {key} are others")
        if sample["is_undone"] != own["is_undone"] and not said:
            wrong.append(f"{key} is undone: {sample['is_undone']}")
    for name, points in seen.points.items():
        for point in points:
            if point not in truth.points.get(name, []):
                wrong.append(f"{name} has the point {point}")
    if seen.config != truth.config and not said:
        wrong.append("config")
    for step, entry in seen.steps.items():
        for name, value in entry.items():
            if truth.steps.get(step, {}).get(name) != value and not said:
                wrong.append(f"{name} of step {step} is {value}")
    for name, outputs in seen.past.items():
        known = [truth.past.get(name, [])] + [value for key, value in truth.answers.items() if key[:2] == name]
        if not any(outputs == each[: len(outputs)] for each in known):
            wrong.append(f"the past of {name} is {outputs}")
    if seen.stored is not None and any(each not in (truth.stored or []) for each in seen.stored):
        wrong.append("experiences of the store")
    if not said:
        for name in ("samples", "tokens", "points", "steps", "stored", "past"):
            if len(getattr(seen, name) or ()) != len(getattr(truth, name) or ()):
                wrong.append(
                    f"{name}: {len(getattr(seen, name) or ())} of {len(getattr(truth, name) or ())}, and nothing is said"
                )
    return wrong


def _named(truth: Seen, key: str) -> dict[str, Any] | None:
    """A sample by its key; that names its process only where several are known."""
    if key in truth.samples:
        return truth.samples[key]
    plain = key.split("@")[0] if not key.startswith("eval:") else key
    return next((sample for name, sample in truth.samples.items() if name.partition("@")[0] == plain), None)


def visit(directory: Path, keys: list[str]) -> list[str]:
    """Ask the viewer for its pages; returns what is wrong with the answers."""
    app = make_app([directory])
    pages, wrong = app.state.pages, []
    try:
        with TestClient(app, base_url="http://127.0.0.1:7111") as client:
            for entry in pages.entries():
                run = pages.runs.get(entry["id"])
                for _ in range(3):
                    run.refresh()
                views = [
                    "",
                    "/config",
                    "/steps",
                    "/steps?undone=1",
                    "/step/2",
                    "/timeline",
                    "/weights",
                    "/search",
                    "/search?text=1",
                ]
                views += [f"/sample/{key}?view={view}" for key in keys for view in ("chat", "tokens", "table", "requests")]
                views += [f"/group/{key.partition('/')[0]}" for key in keys]
                for view in views:
                    answer = client.get(entry["url"] + view.replace("#", "%23"))
                    if answer.status_code not in (200, 404, 500):
                        wrong.append(f"{view}: {answer.status_code} {answer.text[:300]}")
                    elif answer.status_code == 200 and run.missing() and "✗ Missing" not in answer.text:
                        wrong.append(f"{view} does not say what is missing")
    finally:
        pages.runs.close()
    return wrong


def check(directory: Path) -> tuple[int, str]:
    """Exit status and output of ``rollwright check``."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(["check", str(directory)])
    return status, said.getvalue()


def resume(directory: Path, config: dict[str, Any]) -> str:
    """What a resume reads besides the journal; why it is refused, or nothing."""
    try:
        whole = RunDirectory(directory.parent.parent, directory.parent.name, directory.name)
        with whole.claim(config, "resume") as claimed:
            claimed.finished_stages()
            RecoverCheckpoints(directory / "recover").load()
            if claimed.metrics_file.exists():
                read_metrics(claimed.metrics_file)
    except RollwrightError as error:
        return str(error)
    return ""


def copy_of(directory: Path, place: Path) -> Path:
    """A copy of a run below another root, without its index."""
    target = place / directory.parent.name / directory.name
    return shutil.copytree(directory, target, ignore=shutil.ignore_patterns("index.sqlite*"))


def answers_of(directory: Path) -> dict[tuple[int, int, int, int], list[list[int]]]:
    """The answers of each episode of an undamaged journal, by ordinal, index, process and number."""
    from rollwright.experience.journal.records import Begin, ModelCall

    names: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    answers: dict[tuple[int, int, int, int], list[list[int]]] = {}
    for place, record in read_records(directory / "journal"):
        if isinstance(record, Begin) and not record.is_eval:
            name = names[place.writer, record.episode] = (record.ordinal, record.index, place.writer, record.episode)
            answers[name] = []
        elif isinstance(record, ModelCall) and (place.writer, record.episode) in names:
            answers[names[place.writer, record.episode]].append(np.frombuffer(record.output, "<i4").tolist())
    return answers


def marker_config(directory: Path) -> dict[str, Any]:
    """The config that the run's marker has."""
    return json.loads((directory / "run.json").read_text())["config"]
