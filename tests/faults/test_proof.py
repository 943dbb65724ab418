"""The proof finds what is lost, repeated, sampled again and left behind."""

from __future__ import annotations

import fcntl
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import (
    Begin,
    Checkpoint,
    DurableResult,
    End,
    GroupEnd,
    ModelCall,
    Trained,
    pack_value,
)
from rollwright.experience.journal.writing import Journal
from rollwright.rollout.task_group import SAMPLE_BITS

from . import left, parts
from .long_episodes import compare_lengths
from .proof import HOW_LONG, History, Proof, compare, damage_tail
from .search_agent import compare_with_undisturbed


class Process:
    """Writes what a process of a run with one group of two samples a step would."""

    def __init__(self, directory: Path, started: float) -> None:
        self.journal = Journal(directory)
        self.now = started
        self.episodes: dict[tuple[int, int], int] = {}

    def begins(self, ordinal: int, index: int) -> None:
        self.episodes[ordinal, index] = number = self.journal.next_episode()
        self.journal.write(Begin(number, ordinal, index, 0, False, 0, "w", 1, b"", "", self.tick()))

    def calls(self, ordinal: int, index: int, turn: int, tokens: int, at: float | None = None) -> None:
        output, started = np.zeros(tokens, dtype="<i4").tobytes(), at or self.tick()
        about: tuple[Any, ...] = (1.0, "stop", None, None, 0, started, started, 0.0, 0.0)
        self.journal.write(ModelCall(self.episodes[ordinal, index], turn, 0, turn, -1, 0, b"", output, b"", 0, *about))

    def draws(self, ordinal: int, index: int, turns: int) -> None:
        self.journal.write(
            DurableResult(
                self.episodes[ordinal, index], HOW_LONG, 0, "recorded", pack_value(turns), None, None, self.tick(), 0.0
            )
        )

    def ends(self, ordinal: int, index: int) -> None:
        self.journal.write(End(self.episodes[ordinal, index], "accepted", "", [], self.tick()))

    def trains(self, step: int, ordinal: int, samples: tuple[int, ...] = (0, 1)) -> None:
        group = ordinal + 7  # its number in this process
        self.journal.write(GroupEnd(ordinal, group, False, "delivered", "", 2, self.tick()))
        for index in samples:
            self.journal.write(Trained(step, group, (group << SAMPLE_BITS) + index, 0.0, 0.0, 1))

    def tick(self) -> float:
        self.now += 1.0
        return self.now


def judged(directory: Path, steps: int = 2):
    return compare(History([directory]), steps=steps, batch=1, samples=2, slack=0)


def test_steps_that_are_made_again_count_once(tmp_path):
    first = Process(tmp_path, 0.0)
    first.trains(1, 0)
    first.trains(2, 5)  # of the history that was lost
    second = Process(tmp_path, 100.0)
    second.trains(2, 1)
    assert judged(tmp_path).holds


def test_what_is_lost_or_repeated_is_counted(tmp_path):
    process = Process(tmp_path, 0.0)
    process.trains(1, 0)
    process.trains(2, 0, (0,))
    proof = judged(tmp_path)
    assert (proof.lost, proof.duplicated, len(proof.wrong)) == (2, 1, 1)  # 3 rows of 4
    assert judged(tmp_path, steps=3).wrong[0] == "steps [1, 2] were trained, not 1 to 3"


def test_calls_that_are_made_again_are_lost_and_those_in_flight_are_not(tmp_path):
    first = Process(tmp_path, 0.0)
    for index in (0, 1):
        first.begins(0, index)
        first.calls(0, index, turn=0, tokens=5)
    second = Process(tmp_path, 100.0)
    for index in (0, 1):
        second.begins(0, index)
    second.calls(0, 0, turn=0, tokens=5, at=2.0)  # a copy of what was answered
    second.calls(0, 0, turn=1, tokens=3)  # in flight when the first was killed
    second.calls(0, 1, turn=0, tokens=5)  # sampled again
    history = History([tmp_path])
    assert (history.sampled_again(), history.in_flight()) == (5, 3)


def test_episodes_that_became_shorter_are_found(tmp_path):
    first, second = Process(tmp_path, 0.0), Process(tmp_path, 100.0)
    for process, lengths in ((first, (2, 3)), (second, (2, 1))):
        for index, turns in enumerate(lengths):
            process.begins(0, index)
            process.draws(0, index, turns)
    for index, turns in enumerate((2, 1)):  # the second was drawn again
        for turn in range(turns):
            second.calls(0, index, turn, tokens=4)
        second.ends(0, index)
    second.trains(1, 0)
    proof = Proof()
    compare_lengths(History([tmp_path]), 1, proof)
    assert proof.wrong == ["1 of 2 episodes are not as long as they were when they first began: 1 are shorter"]
    assert proof.report()["episodes"] == {"trained": 2, "calls": 1.5, "tokens": 6, "first_drawn": 2.5}


def test_lengths_and_scores_beyond_the_spread_of_seeds_are_found():
    draw = random.Random(1)

    def lengths(calls: int) -> list[tuple[int, int]]:
        return [(turns, 7 * turns) for turns in (draw.randint(1, calls) for _ in range(400))]

    def judged(calls: int, reward: float) -> Proof:
        proof = Proof(lengths=lengths(calls), measured=[{"reward": reward, "eval/reward": 0.5}])
        compare_with_undisturbed(proof, others)
        return proof

    others = [{"reward": 0.5 + 0.01 * seed, "eval/reward": 0.5, "lengths": lengths(12)} for seed in range(3)]
    assert judged(12, 0.52).wrong == []
    assert [words.split()[0] for words in judged(9, 0.4).wrong] == ["reward", "calls", "tokens"]


def test_a_torn_tail_takes_nothing_from_before_a_checkpoint(tmp_path):
    for seed in range(20):
        directory = tmp_path / str(seed)
        process = Process(directory, 0.0)
        process.begins(0, 0)
        process.calls(0, 0, turn=0, tokens=5)
        process.journal.write(Checkpoint(1, 0, 1.0))
        process.calls(0, 0, turn=1, tokens=3)
        before = len(list(read_records(directory)))
        torn = damage_tail(directory, random.Random(seed))
        after = list(read_records(directory))
        assert before - 1 <= len(after) < before + 1
        assert any(isinstance(record, Checkpoint) for _, record in after)
        assert torn == 3 * (before - len(after))


def test_what_is_left_behind_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(left, "SECONDS", 0.1)
    part: Any = parts.Part(None, "trainer", [], tmp_path)  # type: ignore[arg-type]
    assert left.left_behind([part], tmp_path) == []
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
    try:
        part.family.add(psutil.Process(child.pid))
        with socket.create_server(("127.0.0.1", 0)) as listener, (tmp_path / "run.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            part.ports.add(listener.getsockname()[1])
            said = left.left_behind([part], tmp_path, ["/dev/shm", "/dev/shm/rollwright-none"])
    finally:
        child.kill()
        child.wait()
    assert [line.split()[0] for line in said] == ["process", "port", "lock", "shared"]
