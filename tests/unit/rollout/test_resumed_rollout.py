"""A run that was killed goes on from its journal: nothing that was sampled is sampled again, and each task is trained once."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
import uuid
from collections import defaultdict

import pytest
import torch
from echo import EchoEngine
from PIL import Image

from rollwright import GenerationHyperparameters, ModelRequest, RolloutConfig, durable
from rollwright.config.sections import JournalConfig
from rollwright.errors import DatasetEnded, ReplayError, RolloutError
from rollwright.experience.journal import reading
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.reading import TaskFiles, frames, read_file, read_records
from rollwright.experience.journal.records import GroupEnd
from rollwright.experience.journal.writing import Journal
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.resume import read_past

GCONFIG = GenerationHyperparameters(max_new_tokens=4, temperature=0.7)


class NeverTheSame(EchoEngine):
    """No two answers are equal, so that what was sampled again can be told; it knows what it answered."""

    numbers = itertools.count(100)

    def __init__(self, latency=0.0) -> None:
        super().__init__(latency)
        self.answers: list[list[int]] = []
        self.journal = None

    async def agenerate(self, request):
        response = await super().agenerate(request)
        response.output_tokens = [next(self.numbers) for _ in response.output_tokens]
        if not self.journal._is_closed:
            self.answers.append(list(response.output_tokens))
        return response


class Turns:
    """As many turns as the task says, with dice between them."""

    dice = staticmethod(durable("dice")(lambda turn: random.randrange(10_000, 20_000)))

    async def arun_episode(self, engine, data):
        ids, mask, rid, tool = [1, 2, data["ordinal"]], [0, 0, 0], uuid.uuid4().hex, self.tool_of(data)
        for turn in range(data["turns"]):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG, rid=rid))
            ids = [*ids, *response.output_tokens, tool(turn)]
            mask = [*mask, *[1] * response.output_len, 0]
        return self.scored(ids, mask, data)

    def tool_of(self, data):
        return self.dice

    def scored(self, ids, mask, data):
        if data.get("fails"):
            raise ValueError("the tool is broken")
        return None if data.get("rejects") else {"input_ids": ids, "loss_mask": mask, "reward": sum(ids) / 1000}


class Run:
    """A trainer's loop without training: batches, versions, checkpoints, and kills that leave the journal as it is."""

    def __init__(self, directory, tasks, *, batch=2, every=2, latency=0.0, workflow=None, journal=None, **settings) -> None:
        self.directory, self.tasks, self.batch, self.every = directory, tasks, batch, every
        self.latency, self.workflow, self.journal_config = latency, workflow or Turns(), journal or JournalConfig()
        self.config = RolloutConfig(sandbox="none", **settings)
        self.checkpoint = (0, None)
        self.trained: dict[int, dict] = {}  # step -> batch, of the surviving history
        self.engines: list[NeverTheSame] = []
        self.histories: list[dict[int, dict]] = []
        self.published_after = 0.0  # seconds from taking a batch

    def live(self, *, steps=10**6, killed_after=None):
        """Go on from the newest checkpoint to the end of the tasks, or until killed: after some steps, or some seconds."""
        version, state = self.checkpoint
        engine = NeverTheSame(self.latency)
        engine.set_version(version)
        self.engines.append(engine)
        journal = Journal(self.directory, self.journal_config)
        engine.journal = journal
        executor = RolloutExecutor(engine, self.config, journal=journal, batch_size=self.batch)

        def kill():
            journal._is_closed = True  # what is answered from now on is not written
            executor.destroy()
            journal.close()

        self.kill, drawn = kill, 0
        if state is not None:
            executor.load_state_dict(state)
            drawn = state["next_ordinal"]
        self.past = executor.recall([self.directory])
        self.trained = {step: batch for step, batch in self.trained.items() if step <= version}
        self.histories.append({})
        source = iter(self.tasks[drawn:])
        timer = threading.Timer(killed_after or 10**6, kill)
        timer.start()
        try:
            for _ in range(steps):
                batch = executor.prepare_batch(source, self.workflow, group_size=2, batch_size=self.batch)
                if journal._is_closed:
                    break  # a killed process does nothing more
                assert (
                    not batch
                    or int((version - batch["versions"][batch["loss_mask"].bool()]).max()) <= self.config.max_head_offpolicyness
                )
                assert int(batch["versions"].max()) <= version  # nothing is of weights that are still to come
                version += 1
                self.trained[version] = self.histories[-1][version] = batch
                time.sleep(self.published_after)
                engine.set_version(version)
                executor.set_version(version)
                if version % self.every == 0:
                    journal.checkpoint(version, executor.frontier)
                    state = executor.state_dict()
                    self.checkpoint = self.checkpoint if journal._is_closed else (version, state)
        except DatasetEnded:
            self.state = executor.state_dict()
        except RolloutError:
            if not journal._is_closed:
                raise
        finally:
            timer.cancel()
            kill()
        return self

    def ordinals(self):
        """Of the groups that were trained, in order."""
        return [int(ids[2]) for _, batch in sorted(self.trained.items()) for ids in batch["input_ids"][::2]]


def outputs(directory):
    """Every answer in the journal by its place; more than one where it was sampled again."""
    found = defaultdict(set)
    for episode in read_episodes(directory):
        for each in episode.calls:
            place = (episode.begin.ordinal, episode.begin.index, each.call.conversation, each.call.turn)
            found[place].add(
                (tuple(each.output.tolist()), tuple(each.logprobs.tolist()), tuple(each.versions.tolist()), each.call.started)
            )
    return found


def tasks_of(count, seed=0, **what):
    draw = random.Random(seed)
    return [
        {"ordinal": number, "turns": draw.randint(1, 5)} | {key: number in numbers for key, numbers in what.items()}
        for number in range(count)
    ]


def equal(one, other):
    """The same rows; numbers of groups are those of a process."""
    return all(torch.equal(one[key], other[key]) for key in ("input_ids", "loss_mask", "logprobs", "versions", "rewards"))


def test_steps_after_the_checkpoint_are_made_again_of_the_same_rows(tmp_path):
    run = Run(tmp_path, tasks_of(16), every=2, max_head_offpolicyness=1).live(steps=5)
    lost = run.histories[0][5]
    assert run.checkpoint[0] == 4
    run.live()
    assert equal(run.trained[5], lost)
    assert sorted(run.ordinals()) == list(range(16))
    assert all(len(answers) == 1 for answers in outputs(tmp_path).values())


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_from_its_journal(tmp_path):
    run = Run(tmp_path, tasks_of(8), every=100).live(steps=3)
    run.live()
    assert sorted(run.ordinals()) == list(range(8))
    for step, batch in run.histories[0].items():
        assert equal(run.trained[step], batch)
    assert all(len(answers) == 1 for answers in outputs(tmp_path).values())


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_point_each_task_is_trained_once_and_no_answer_is_lost(tmp_path, seed):
    draw = random.Random(seed)
    run = Run(
        tmp_path,
        tasks_of(30, seed),
        batch=3,
        every=draw.choice([1, 3, 100]),
        latency=lambda request: draw.random() * 0.01,
        max_head_offpolicyness=seed % 3,
        max_concurrent_samples=draw.choice([4, 64]),
    )
    for _ in range(5):
        run.live(killed_after=0.02 + draw.random() * 0.15)
    run.live()
    assert sorted(run.ordinals()) == list(range(30))
    assert run.state["frontier"] == 30
    kept = outputs(tmp_path)
    assert [place for place, answers in kept.items() if len(answers) != 1] == []
    # What an engine had answered is what was trained: an answer counts as lost only where its process was killed before it was written.
    written = {answer[0] for answers in kept.values() for answer in answers}
    trained = {int(token) for batch in run.trained.values() for token in batch["input_ids"][batch["loss_mask"].bool()]}
    assert {token for answer in written for token in answer} == trained
    for engine in run.engines[:-1]:
        assert sum(tuple(answer) not in written for answer in engine.answers) <= 1
    for history in run.histories:  # a step that was lost is made again as it was
        for step, batch in history.items():
            assert equal(run.trained[step], batch)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_point_each_task_has_one_end_whatever_is_dropped(tmp_path, seed):
    draw = random.Random(seed)
    rejected, failed = set(draw.sample(range(30), 3)), set(draw.sample(range(30), 2))
    run = Run(
        tmp_path,
        tasks_of(30, seed, rejects=rejected, fails=failed),
        batch=3,
        every=draw.choice([1, 3, 100]),
        latency=lambda request: draw.random() * 0.01,
        max_head_offpolicyness=draw.choice([0, 1, 2]),
        max_concurrent_samples=draw.choice([4, 64]),
        on_stale=draw.choice(["wait", "drop"]),
        over_sampling=draw.choice([0.0, 0.5]),
        max_failed_share=1.0,
        max_sample_retries=draw.choice([0, 1]),
    )
    for _ in range(4):
        run.live(killed_after=0.02 + draw.random() * 0.2)
    run.live()
    assert run.state["frontier"] == 30
    assert len(set(run.ordinals())) == len(run.ordinals())
    assert not set(run.ordinals()) & (rejected | failed)
    if run.config.on_stale == "wait" and not run.config.over_sampling:
        assert set(run.ordinals()) == set(range(30)) - rejected - failed
    again = {place[0] for place, answers in outputs(tmp_path).items() if len(answers) != 1}
    assert again <= failed  # another attempt of a sample asks anew


def test_an_unfinished_episode_goes_on_as_the_same_attempt_and_its_tool_is_not_called_again(tmp_path):
    gate = threading.Event()

    class Waits(Turns):
        def tool_of(self, data):
            def tool(turn):
                value = self.dice(turn)
                if turn == 2 and not gate.is_set():
                    time.sleep(0.3)
                return value

            return tool

    run = Run(tmp_path, [{"ordinal": 0, "turns": 6}, {"ordinal": 1, "turns": 1}], batch=1, workflow=Waits())
    run.live(killed_after=0.1)
    (before,) = [each for each in read_episodes(tmp_path) if each.name == "0/0"]
    assert before.end is None
    assert len(before.calls) == 3
    gate.set()
    run.live()
    after = next(each for each in read_episodes(tmp_path) if (each.writer, each.name) == (1, "0/0"))
    assert (after.begin.attempt, after.end.outcome) == (0, "accepted")
    for old, new in zip(before.calls, after.calls, strict=False):
        assert (old.call.output, old.call.logprobs, old.call.started) == (new.call.output, new.call.logprobs, new.call.started)
    assert [each.value for each in before.results] == [each.value for each in after.results][: len(before.results)]
    assert sorted(run.ordinals()) == [0, 1]


def test_tasks_that_were_rejected_stay_so_and_one_that_failed_begins_anew(tmp_path):
    run = Run(tmp_path, tasks_of(8, rejects={1, 3}, fails={2}), every=100, max_sample_retries=1).live(steps=2)
    assert run.engines[0].answers
    run.live()
    assert sorted(run.ordinals()) == [0, 4, 5, 6, 7]
    ends = [
        (record.ordinal, record.state)
        for place, record in read_records(tmp_path)
        if isinstance(record, GroupEnd) and place.writer == 1
    ]
    assert {(1, "rejected"), (2, "failed"), (3, "rejected")} <= set(ends)
    begun = [each.begin for each in read_episodes(tmp_path) if each.writer == 1]
    assert not any(begin.ordinal == 1 for begin in begun)
    assert {begin.attempt for begin in begun if begin.ordinal == 2} == {0, 1}


def test_what_failed_after_the_checkpoint_is_decided_anew_and_what_failed_before_is_not(tmp_path):
    """The tool is back: a task that was given up since is trained, after the batches that were taken without it."""
    run = Run(tmp_path, tasks_of(8, fails={0, 5}), every=2, batch=1, max_sample_retries=1, max_failed_share=1.0)
    run.live(steps=5)
    assert run.ordinals() == [1, 2, 3, 4, 6]
    assert run.checkpoint[0] == 4

    class Repaired(Turns):
        def scored(self, ids, mask, data):
            return super().scored(ids, mask, {**data, "fails": False})

    run.workflow = Repaired()
    run.live(steps=1).live()
    assert run.ordinals() == [1, 2, 3, 4, 6, 5, 7]
    assert run.state["frontier"] == 8


def test_an_episode_waits_until_the_version_that_it_had_come_to_is_published_again(tmp_path):
    """However late that is: no token of an older version comes behind one of a newer."""

    class OneTurnAVersion:
        async def arun_episode(self, engine, data):
            ids, mask, rid, lives = [1, 2, data["ordinal"]], [0, 0, 0], uuid.uuid4().hex, len(run.engines)
            for turn in range(4 if data["ordinal"] == 1 else 1):
                while lives == 1 and engine.get_version() < (turn or data["from"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG, rid=rid))
                ids, mask = [*ids, *response.output_tokens], [*mask, *[1] * response.output_len]
                if lives == 1 and turn == 2:
                    threading.Thread(target=run.kill).start()
                    await asyncio.sleep(3600)
            return {"input_ids": ids, "loss_mask": mask, "reward": 1.0}

    tasks = [{"ordinal": number, "from": 3 if number > 2 else 0} for number in range(5)]
    run = Run(tmp_path, tasks, batch=1, every=100, workflow=OneTurnAVersion(), max_head_offpolicyness=4)
    run.live()  # 0 and 2 are trained; 1 comes to version 2
    assert run.ordinals() == [0, 2]
    run.published_after = 0.2
    run.live()
    assert sorted(run.ordinals()) == list(range(5))
    (batch,) = [batch for batch in run.trained.values() if batch["input_ids"][0, 2] == 1]
    for versions, mask in zip(batch["versions"], batch["loss_mask"].bool(), strict=True):
        assert versions[mask].tolist() == sorted(versions[mask].tolist())


def test_a_retried_sample_goes_on_with_the_attempt_that_was_under_way(tmp_path):
    class FailsOnce(Turns):
        async def arun_episode(self, engine, data):
            result = await super().arun_episode(engine, data)
            if engine.name.attempt == 0:
                raise ValueError("the first time")
            await asyncio.sleep(0.5 if len(run.engines) == 1 else 0)
            return result

    run = Run(tmp_path, tasks_of(2), batch=1, workflow=FailsOnce(), max_failed_share=1.0)
    run.live(killed_after=0.2).live()
    attempts = [each.begin.attempt for each in read_episodes(tmp_path) if each.writer == 1 and each.begin.ordinal == 0]
    assert attempts == [1, 1]
    assert sorted(run.ordinals()) == [0, 1]


class Changed(Turns):
    """Its dice fall otherwise when it is run a second time."""

    def tool_of(self, data):
        return lambda turn: 7 if turn == 0 else self.dice(turn)


def test_an_episode_that_diverges_begins_anew_as_the_same_attempt(tmp_path, caplog):
    run = Run(tmp_path, tasks_of(6), every=100).live(steps=1)
    run.workflow = Changed()
    run.live()
    assert sorted(run.ordinals()) == list(range(6))
    ends = defaultdict(list)
    for each in read_episodes(tmp_path):
        if each.writer == 1:
            ends[each.begin.ordinal, each.begin.index].append((each.begin.attempt, each.end.outcome))
    longer = {number for number, task in enumerate(run.tasks) if task["turns"] > 1}
    again = {ordinal for (ordinal, _), found in ends.items() if found == [(0, "diverged"), (0, "accepted")]}
    assert again
    assert again <= longer
    assert "differs from token" in caplog.text
    past = read_past([tmp_path], lambda ordinal: True)
    assert all(
        episode.writer == 1 for ordinal in again for episode in past.episodes[ordinal].values()
    )  # not what diverged from


def test_a_divergence_may_stop_the_run(tmp_path):
    run = Run(tmp_path, tasks_of(6), every=100, journal=JournalConfig(on_divergence="fail")).live(steps=1)
    run.workflow = Changed()
    with pytest.raises(ReplayError, match="does not run as it was recorded"):
        run.live()
    run.workflow = Turns()  # the code is as it was: nothing is lost
    run.live()
    assert sorted(run.ordinals()) == list(range(6))
    assert all(len(answers) == 1 for answers in outputs(tmp_path).values())


def test_an_episode_with_an_environment_that_cannot_be_restored_begins_anew(tmp_path):
    class Environment(Turns):
        dice = staticmethod(durable("step", kind="restart")(lambda turn: random.randrange(10_000, 20_000)))

    run = Run(tmp_path, tasks_of(6), every=100, latency=0.02, workflow=Environment()).live(killed_after=0.07)
    before = {(each.begin.ordinal, each.begin.index): each for each in read_episodes(tmp_path)}
    begins_anew = {place for place, each in before.items() if each.results and each.end is None}
    assert begins_anew
    run.live()
    assert sorted(run.ordinals()) == list(range(6))
    again = {place[:2] for place, answers in outputs(tmp_path).items() if len(answers) > 1}
    assert again == begins_anew


def test_an_environment_is_restored_in_the_state_of_its_last_recorded_call(tmp_path):
    class Environment(Turns):
        def tool_of(self, data):
            place = [0]
            move = durable(
                "move", kind="restorable", export=lambda: place[0], restore=lambda state: place.__setitem__(0, state)
            )

            def step(turn):
                place[0] += 1
                return place[0]

            return lambda turn: 10_000 + move(step)(turn)

    run = Run(tmp_path, [{"ordinal": 0, "turns": 12}], batch=1, latency=0.02, workflow=Environment())
    run.live(killed_after=0.15).live()
    (batch,) = run.trained.values()
    ids = batch["input_ids"][0].tolist()
    assert [token for token in ids if token >= 10_000] == [10_001 + turn for turn in range(12)]
    assert all(len(answers) == 1 for answers in outputs(tmp_path).values())


def test_the_task_of_an_ordinal_is_the_one_that_it_was(tmp_path, caplog):
    """A selector that learns from rewards may draw another task after a resume."""
    run = Run(tmp_path, tasks_of(4), every=100).live(steps=1)
    turns = [task["turns"] for task in run.tasks]
    run.tasks = [{"ordinal": number, "turns": 1 + task["turns"]} for number, task in enumerate(run.tasks)]
    run.live()
    assert "task 0 is the one that it was before the stop" in caplog.text
    sampled = run.trained[1]["loss_mask"].sum(1).tolist()
    assert sampled == [3 * turns[number] for number in (0, 0, 1, 1)]


def test_a_task_with_a_secret_is_the_one_that_it_was(tmp_path):
    task = {"ordinal": 0, "turns": 2, "key": "a-secret-key"}
    run = Run(tmp_path, [task], batch=1)
    journal = Journal(tmp_path, secrets=[task["key"]])
    with RolloutExecutor(EchoEngine(), run.config, journal=journal) as executor:
        executor.wait_for_task(executor.submit(task, Turns()))
    past = read_past([tmp_path], lambda ordinal: True, journal)
    assert past.row(task) == task
    assert 0 in past.episodes  # and it goes on


def test_files_stay_as_long_as_they_say_which_tasks_were_given_up(tmp_path):
    before, journal = Journal(tmp_path), Journal(tmp_path)
    before.write(GroupEnd(7, 0, False, "rejected", "", 0, time.time()))
    before.close()
    with RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal) as executor:
        assert executor.recall([tmp_path]).rejected.keys() == {7}
        assert journal.goes_on_to == 7


def test_who_asks_often_reads_only_the_files_of_the_tasks(tmp_path, monkeypatch):
    """Explorers do, each time that tasks come again: of two processes' journals that of the task's, found without reading all again."""
    for number in range(2):
        journal = Journal(tmp_path, JournalConfig(rotate_mib=1))
        with RolloutExecutor(EchoEngine(), RolloutConfig(sandbox="none"), journal=journal) as executor:
            for ordinal in range(3 * number, 3 * number + 3):
                executor.wait_for_task(executor.submit({"ordinal": ordinal, "turns": 2}, Turns()))
        journal.close()
    read, looked_through = [], []

    def read_whole(path):
        read.append(path.name)
        with monkeypatch.context() as as_before:
            as_before.setattr(reading, "frames", frames)
            yield from read_file(path)

    monkeypatch.setattr(reading, "read_file", read_whole)
    monkeypatch.setattr(reading, "frames", lambda path, begin: looked_through.append((path.name, begin)) or frames(path, begin))
    known = TaskFiles()
    for ordinal in (1, 4):
        with_index = read_past([tmp_path], {ordinal}.__contains__, None, known)
        assert read == [f"{ordinal // 3:06d}-0000.journal"]
        read.clear()
        assert with_index.tokens == read_past([tmp_path], {ordinal}.__contains__).tokens > 0
        assert len(read) == 2
        read.clear()
    sizes = {path.name: path.stat().st_size for path in reading.journal_files(tmp_path)}
    assert looked_through == [(name, 0) for name in sizes] + list(sizes.items())


def test_a_conversation_that_was_in_flight_keeps_its_number(tmp_path):
    """Its seed comes of it. Three begin with one prompt, or come in another order: only the first was not answered."""

    class Three:
        async def arun_episode(self, engine, data):
            async def ask(number):
                if number == 0:
                    await asyncio.sleep(data["late"])
                request = ModelRequest(input_ids=data["prompts"][number], gconfig=GCONFIG)
                return await engine.agenerate(request)

            answers = await asyncio.gather(*map(ask, range(3)))
            return {"input_ids": answers[0].input_tokens, "output_ids": answers[0].output_tokens, "reward": 1.0}

    def seeds(past, task):
        engine = NeverTheSame()
        engine.journal = journal = Journal(tmp_path / str(next(numbers)))
        with RolloutExecutor(engine, RolloutConfig(sandbox="none"), journal=journal) as executor:
            executor.wait_for_task(executor.submit(task, Three(), past=past))
        (episode,) = read_past([journal.directory], lambda ordinal: True).episodes[0].values()
        return {each.call.conversation: each.call.seed for each in episode.calls}, episode

    numbers = itertools.count()
    for prompts in ([[1, 2]] * 3, [[1, 2], [3, 4], [5, 6]]):
        task = {"ordinal": 0, "prompts": prompts, "late": 0.0}
        whole, episode = seeds({}, task)
        assert len(whole) == 3
        episode.calls = [each for each in episode.calls if each.call.conversation]  # the answer to the first was on its way
        episode.end = None
        task["late"] = 0.2
        assert seeds({0: episode.rewind()}, task)[0] == whole


def test_what_a_journal_cannot_hold_begins_anew(tmp_path):
    tasks = [{"ordinal": number, "turns": 2, "image": object()} for number in range(4)]
    run = Run(tmp_path, tasks, every=100).live(steps=1)
    run.live()
    assert sorted(run.ordinals()) == list(range(4))
    assert all(len(answers) == 2 for (ordinal, *_), answers in outputs(tmp_path).items() if ordinal < 2)


def test_a_task_with_images_goes_on_as_any_other(tmp_path):
    """The journal has their digests, which say that the task is the same."""
    tasks = [{"ordinal": number, "turns": 2, "images": [Image.new("RGB", (4, 4), (number, 0, 0))]} for number in range(4)]
    run = Run(tmp_path, tasks, every=100).live(steps=1)
    run.live()
    assert sorted(run.ordinals()) == list(range(4))
    assert all(len(answers) == 1 for answers in outputs(tmp_path).values())
    other = {**tasks[0], "images": [Image.new("RGB", (4, 4), (9, 9, 9))]}
    past = read_past([tmp_path / "journal"], lambda ordinal: True)
    assert past.row(other) is other  # and another image is another task, which the journal has no copy of
    assert 0 not in past.episodes
