"""Two explorers and a trainer, each a process on one store, killed by SIGKILL at random: nothing lost, nothing repeated."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from store_databases import new_postgresql_database

pytest.importorskip("sqlalchemy")

from rollwright.experience.experience import Experience
from rollwright.store import ExperienceStore

TASKS = 160
SAMPLES = 3
LEASE = 0.5
LIMIT = 400.0
KILLS = 5  # at least; before them no more than half of the tasks are begun


def rejected(ordinal: int) -> bool:
    return ordinal % 7 == 3


def sample(ordinal: int, attempt: int, index: int) -> Experience:
    return Experience(tokens=[1, ordinal + 2, attempt, index], prompt_length=1, versions=[0, 0, 0], reward=float(index))


def explore(url: str, directory: str, owner: str, seed: int) -> None:
    """Claims tasks; stores some groups at once and some sample by sample."""
    generator = random.Random(seed)
    store = ExperienceStore(url, run="processes")
    while not store.status().production_ended:
        if store.status().finished_tasks >= TASKS / 2 and not (Path(directory) / "enough kills").exists():
            time.sleep(0.01)
            continue
        for claim in store.tasks.claim(owner, generator.randint(1, 4), lease_seconds=LEASE, max_outstanding=24):
            time.sleep(generator.uniform(0, 0.004))
            samples = [sample(claim.ordinal, claim.attempt, index) for index in range(SAMPLES)]
            if rejected(claim.ordinal):
                store.tasks.finish(claim, [])
            elif generator.random() < 0.5:
                store.tasks.finish(claim, samples)
            else:
                for index in range(SAMPLES):
                    store.append(
                        samples[index : index + 1],
                        ordinal=claim.ordinal,
                        index=index,
                        group_size=SAMPLES + 1,  # tasks.finish completes it
                        attempt=claim.attempt,
                    )
                    time.sleep(generator.uniform(0, 0.002))
                store.tasks.finish(claim, None)
        time.sleep(0.002)


def train(url: str, directory: str, seed: int) -> None:
    """Trains by writing down what it trained on; a checkpoint is that list, in a file that is renamed into place."""
    generator = random.Random(seed)
    path = Path(directory)
    saved = sorted(path.glob("step-*.json"))
    version, trained = json.loads(saved[-1].read_text()) if saved else (0, [])
    store = ExperienceStore(url, run="processes")
    store.recover(saved[-1].stem if saved else None)
    number = int(saved[-1].stem.removeprefix("step-")) if saved else 0
    while True:
        ended = store.status().production_ended
        batch = store.sample(groups=4, timeout=0.1, partial_batch=ended)
        if batch is not None:
            trained += [[each.ordinal, [row.tokens.tolist() for row in each.experiences]] for each in batch]
        if batch is None and not ended:
            continue
        if batch is None or generator.random() < 0.4:
            number += 1
            fresh = path / f".step-{number:05d}.json"
            fresh.write_text(json.dumps([version, trained]))
            store.commit(f"step-{number:05d}", version=version)
            time.sleep(generator.uniform(0, 0.004))
            os.rename(fresh, path / f"step-{number:05d}.json")
        version += 1
        store.announcements.publish(f"weights/{version}", version)
        if batch is None:
            return


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_lose_and_repeat_nothing(tmp_path, seed):
    kill_at_random(f"sqlite:///{tmp_path}/store.db", tmp_path, seed)


@pytest.mark.slow
def test_random_kills_over_postgresql(tmp_path, postgresql):
    kill_at_random(new_postgresql_database(postgresql), tmp_path, seed=3)


def kill_at_random(url: str, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollwright.store"])
    with ExperienceStore(url, run="processes") as store:
        store.tasks.declare(TASKS)

    def start(role: str) -> multiprocessing.Process:
        arguments = (url, str(tmp_path), *([] if role == "trainer" else [role]), generator.randrange(2**30))
        process = context.Process(target=train if role == "trainer" else explore, args=arguments, name=role)
        process.start()
        return process

    running = {role: start(role) for role in ("explorer-1", "explorer-2", "trainer")}
    started, kills = time.monotonic(), Counter()
    try:
        while running:
            assert time.monotonic() - started < LIMIT, f"not done after {LIMIT} s: {ExperienceStore(url).status()}"
            time.sleep(generator.uniform(0.01, 0.15))
            for role, process in list(running.items()):
                if process.exitcode is not None:
                    assert process.exitcode == 0, f"{role} failed"
                    del running[role]
            if running and kills.total() < 24:
                role = generator.choice(sorted(running))
                os.kill(running[role].pid, signal.SIGKILL)
                running[role].join()
                kills[role] += 1
                if kills.total() >= KILLS:
                    (tmp_path / "enough kills").touch()
                running[role] = start(role)
    finally:
        for process in running.values():
            process.kill()
            process.join()

    assert kills.total() >= KILLS
    _, trained = json.loads(sorted(tmp_path.glob("step-*.json"))[-1].read_text())
    assert Counter(ordinal for ordinal, _ in trained) == Counter(each for each in range(TASKS) if not rejected(each))
    for ordinal, rows in trained:
        attempt = rows[0][2]
        assert rows == [[1, ordinal + 2, attempt, index] for index in range(SAMPLES)]
    with ExperienceStore(url, run="processes") as store:
        status = store.status()
        assert (status.finished_tasks, status.claimed_tasks, status.open_groups, status.unused_groups) == (TASKS, 0, 0, 0)
        assert status.uncommitted_uses == 0
