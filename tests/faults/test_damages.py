"""Damaged run directories: every reader is right, or says what is missing. ``pytest tests/faults/test_damages.py --damages 300`` is the long form."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("textual")

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "viewer"))

import torch
from recorded import TASKS, Adds, record_run, run_config

from rollwright import Experience
from rollwright.data.tokenizer import load_tokenizer
from rollwright.store import ExperienceStore
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.loops.rl import PPOTrainer

from . import damages

pytestmark = pytest.mark.timeout(3600)


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


class KilledTrainer(PPOTrainer):
    """Is killed in its fourth step."""

    def make_step(self, *arguments):
        if self.step == 3:
            raise Killed
        return super().make_step(*arguments)


def resumed_run(root: Path, model: Path) -> Path:
    """A run that was stopped behind its checkpoint of step 2, in step 4, and went on."""
    tokenizer = load_tokenizer(model)
    config = run_config(root, model)
    config.trial_name, config.total_train_steps, config.recover.every_steps = "resumed", 4, 2
    with pytest.raises(Killed), KilledTrainer(config, TASKS, TASKS[:2]) as trainer:
        trainer.train(workflow=Adds(tokenizer))
    with PPOTrainer(config, TASKS, TASKS[:2]) as trainer:
        trainer.train(workflow=Adds(tokenizer))
    return root / "runs" / "viewed" / "resumed"


def with_store(directory: Path) -> Path:
    """Groups in a store beside a run's files, and the results of its only stage."""
    with ExperienceStore(f"sqlite:///{directory / 'experiences.db'}", run="viewed") as store:
        for number in range(12):
            tokens = torch.arange(number, number + 9)
            logprobs = torch.full((6,), -0.5 - number)
            each = [
                Experience(tokens=tokens + index, prompt_length=3, logprobs=logprobs, reward=index / 3) for index in range(3)
            ]
            store.append(each, ordinal=number)
    run = RunDirectory(directory.parent.parent, directory.parent.name, directory.name)
    run.write_stages({"grpo": {"kind": "rl", "steps": 3, "reward": 0.5}})
    return directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_model):
    """A run as it ended, with a store, and one that was resumed; each with what its readers show while nothing is damaged."""
    whole = with_store(record_run(tmp_path_factory.mktemp("whole"), tiny_model))
    resumed = resumed_run(tmp_path_factory.mktemp("resumed"), tiny_model)
    found = []
    for directory in (whole, resumed):
        truth = damages.look(directory)
        truth.answers = damages.answers_of(directory)
        assert truth.missing == []
        assert not truth.refused
        assert damages.check(directory)[0] == 0
        found.append((directory, truth, damages.marker_config(directory)))
    return found


def test_readers_of_a_resumed_run_count_each_sample_once(recorded):
    """Of a real resume: four groups of four samples in each of four steps, and two held-out tasks after each."""
    _, truth, _ = recorded[1]
    shown = [each for each in truth.samples.values() if not each["is_undone"]]
    trained = [each for each in shown if not each["is_eval"] and each["status"] == "accepted"]
    assert len(trained) == 4 * 16
    assert len({(each["ordinal"], each["index"]) for each in trained}) == 4 * 16
    assert len({(each["ordinal"], each["index"], each["group"]) for each in shown if each["is_eval"]}) == 4 * 2
    assert any(each["is_undone"] for each in truth.samples.values())


def test_every_reader_of_a_damaged_run_is_right_or_says_what_is_missing(recorded, tmp_path, request, capsys):
    count, wrong = request.config.getoption("--damages"), []
    for case in range(count):
        draw = random.Random(f"damages/{case}")
        origin, truth, config = recorded[case % len(recorded)]
        directory = damages.copy_of(origin, tmp_path / str(case))
        done = damages.damage(directory, draw)
        try:
            wrong += [
                f"case {case} ({', '.join(done)}): {each}" for each in _faults(directory, truth, config, draw, done, case)
            ]
        except Exception as error:  # a raw error of any reader is what this looks for
            wrong.append(f"case {case} ({', '.join(done)}): {type(error).__name__}: {error}")
            if request.config.getoption("--maxfail") == 1:
                raise
        shutil.rmtree(tmp_path / str(case))
    assert wrong == []


def _faults(directory, truth, config, draw, done, case) -> list[str]:
    seen = damages.look(directory)
    faults = damages.faults_of(truth, seen)
    keys = draw.sample(sorted(truth.samples), 2)
    if not seen.refused:
        faults += damages.visit(directory, keys)
    if case % 12 == 0 and not seen.refused:
        asyncio.run(_look_on_a_terminal(directory))
    status, said = damages.check(directory)
    if "Traceback" in said:
        faults.append(f"check: {said}")
    if status == 0 and seen.missing:
        faults.append(f"check finds nothing, and this is missing: {seen.missing}")
    refusal = damages.resume(directory, config)
    if status == 0 and refusal:
        faults.append(f"check finds nothing, and a resume is refused: {refusal}")
    return faults


async def _look_on_a_terminal(directory: Path) -> None:
    from rollwright.viewer.terminal import Viewer

    app = Viewer([directory])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.3)
        await pilot.press("s")
        await pilot.pause(0.2)
        await pilot.press("enter")
        await pilot.pause(0.2)
