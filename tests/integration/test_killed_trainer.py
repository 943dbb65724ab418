"""A trainer that is stopped or killed in the middle of a step leaves no process and no shared memory behind, and goes on where it was."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from real_servers import write_model

from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import GroupEnd, ModelCall, Resumed, Trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TRAINER = """
import sys
from rollwright import PPOTrainer
from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import DatasetConfig
from rollwright.config.sections import ClusterConfig, OptimizerConfig, PPOActorConfig, RecoverConfig, RolloutConfig


def reward(prompt, completion, prompt_ids, completion_ids, **data):
    return float(len(set(completion_ids)))


if __name__ == "__main__":
    model, runs = sys.argv[1:3]
    config = PPOConfig(
        experiment_name="killed",
        actor=PPOActorConfig(path=model, optimizer=OptimizerConfig(lr=1e-4)),
        rollout=RolloutConfig(backend="builtin_process", max_head_offpolicyness=1, setup_timeout=300),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=60, temperature=0.7, ignore_eos=True),
        total_train_steps=100_000,
        total_train_epochs=100_000,
        recover=RecoverConfig(every_steps=1),
        cluster=ClusterConfig(fileroot=runs, threads=1),
    )
    rows = [{"messages": [{"role": "user", "content": f"task {index}"}], "answer": "x"} for index in range(16)]
    with PPOTrainer(config, rows) as trainer:
        trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
"""


def steps(runs: Path) -> int:
    files = list(runs.glob("**/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def wait_for(what, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_trainer(tmp_path, warm, number):
    model, runs, script, log = (tmp_path / name for name in ("model", "runs", "trainer.py", "trainer.log"))
    write_model(model)
    script.write_text(TRAINER)
    trainer = warm.start_script(script, [str(model), str(runs)], tmp_path, log, {})
    try:
        wait_for(lambda: steps(runs) >= 2 or trainer.poll() is not None, 240)
        assert trainer.poll() is None, log.read_text()[-3000:]
        family = psutil.Process(trainer.pid).children(recursive=True)
        words = next(words for words in map(command_of, family) if "serve-model" in words)
        roots = [Path(words[index + 1]) for index, word in enumerate(words) if word == "--weights-root"]
        assert roots
        assert all(list(root.iterdir()) for root in roots)  # what weights travel through
        trainer.send_signal(number)
        status = trainer.wait(240)
    finally:
        trainer.kill()
        trainer.wait()
    assert status == (128 + number if number == signal.SIGTERM else -number)
    wait_for(lambda: not any(map(command_of, family)), 120)
    wait_for(lambda: not any(root.exists() for root in roots), 120)
    if number == signal.SIGTERM:  # asked to stop, it has finished its step and saved it
        recorded = [json.loads(line)["step"] for line in next(runs.glob("**/metrics.jsonl")).read_text().splitlines()]
        saved = sorted(path.name for path in next(runs.glob("**/recover")).iterdir())
        assert f"{max(recorded)}" in saved[-1]


TURNS = """
import random
import sys
import uuid
from rollwright import ModelRequest, PPOTrainer, durable
from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import DatasetConfig
from rollwright.config.sections import ClusterConfig, OptimizerConfig, PPOActorConfig, RecoverConfig, RolloutConfig


class Turns:
    gconfig = GenerationHyperparameters(max_new_tokens=8, temperature=1.0, ignore_eos=True)

    async def arun_episode(self, engine, data):
        ids, mask, rid = [5, 6, 7 + data["number"]], [0, 0, 0], uuid.uuid4().hex
        for turn in range(1 + data["number"] % 4):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig, rid=rid))
            ids = [*ids, *response.output_tokens, durable(random.randrange)(5, 20)]
            mask = [*mask, *[1] * response.output_len, 0]
        return {"input_ids": ids, "loss_mask": mask, "reward": float(len(set(ids)))}


if __name__ == "__main__":
    model, runs, staleness = sys.argv[1:4]
    config = PPOConfig(
        experiment_name="killed",
        actor=PPOActorConfig(path=model, optimizer=OptimizerConfig(lr=1e-3)),
        rollout=RolloutConfig(backend="builtin", max_head_offpolicyness=int(staleness), sandbox="none", dtype="float32"),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2),
        total_train_steps=8,
        total_train_epochs=2,
        recover=RecoverConfig(every_steps=3),
        cluster=ClusterConfig(fileroot=runs, threads=1),
    )
    with PPOTrainer(config, [{"number": number} for number in range(16)]) as trainer:
        trainer.train(Turns)
"""


@pytest.mark.parametrize(("staleness", "kills"), [(0, 1), (1, 3)])
def test_a_trainer_killed_several_times_trains_each_sample_once_and_samples_nothing_twice(tmp_path, warm, staleness, kills):
    model, runs, script, log = (tmp_path / name for name in ("model", "runs", "trainer.py", "trainer.log"))
    write_model(model)
    script.write_text(TURNS)
    journal = runs / "killed" / "trial" / "journal"

    def calls():
        return sum(isinstance(record, ModelCall) for _, record in read_records(journal)) if journal.is_dir() else 0

    draw = random.Random(staleness)
    for number in range(kills + 1):
        before = calls()
        after = before + draw.randint(10, 60)
        trainer = warm.start_script(script, [str(model), str(runs), str(staleness)], tmp_path, log, {})
        try:
            if number < kills:
                wait_for(lambda: calls() >= after or trainer.poll() is not None, 240)  # noqa: B023
                trainer.kill()
            status = trainer.wait(240)
        finally:
            trainer.kill()
            trainer.wait()
    assert status == 0, log.read_text()[-3000:]

    answers, steps_of, ordinals, resumed = defaultdict(set), defaultdict(dict), {}, {}
    for episode in read_episodes(journal):
        for each in episode.calls:
            place = (episode.begin.ordinal, episode.begin.index, each.call.conversation, each.call.turn)
            answers[place].add((each.call.output, each.call.logprobs, each.versions.tobytes(), each.call.started))
    for place, record in read_records(journal):
        if isinstance(record, GroupEnd) and record.state == "delivered":
            ordinals[place.writer, record.group] = record.ordinal
        elif isinstance(record, Resumed):
            resumed[place.writer] = record.step
        elif isinstance(record, Trained):
            steps_of[place.writer].setdefault(record.step, []).append((ordinals[place.writer, record.group], record.sample % 2))
    assert {place: len(found) for place, found in answers.items() if len(found) > 1} == {}
    trained = {}
    for writer, made in sorted(steps_of.items()):
        trained = {step: rows for step, rows in trained.items() if step <= resumed.get(writer, 0)} | made
        for step, rows in made.items():
            lost = [sorted(other[step]) for earlier, other in steps_of.items() if earlier < writer and step in other]
            assert all(rows_before == sorted(rows) for rows_before in lost)  # made again of the same samples
    assert sorted(trained) == list(range(1, 9))
    assert sorted(row for rows in trained.values() for row in rows) == [
        (ordinal, index) for ordinal in range(32) for index in (0, 1)
    ]
    metrics = next(runs.glob("**/metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, 9))
