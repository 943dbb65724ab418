"""Episodes that run in other processes: leased, leased again where a process is lost, and one run all the same."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from echo import EchoEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, JournalError, LostProcessError, RolloutError
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import GroupEnd
from rollwright.experience.journal.writing import Journal
from rollwright.experience.packed import unpacked
from rollwright.inference.request import ModelRequest
from rollwright.inference.server_watch import ServerWatch
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.resume import read_past
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.workers.episode_leases import RolloutWorkers
from rollwright.rollout.workers.worker import RolloutWorker
from rollwright.tracking.metrics import get_tracker


class OneTurn:
    async def arun_episode(self, engine, data):
        if data.get("does") == "raise":
            raise ValueError("a bug in the workflow")
        if data.get("does") == "reject":
            return None
        if data.get("does") == "hang":
            await asyncio.sleep(3600)
        request = ModelRequest(input_ids=[1, 2, data["id"] + 1], gconfig=GenerationHyperparameters(max_new_tokens=3))
        response = await engine.agenerate(request)
        get_tracker("rollout").scalar(length=len(response.output_tokens))
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": float(data["id"])}


class Process:
    """A worker in a thread of its own, which can be lost as a process can."""

    def __init__(self, number, **config):
        self.name = f"worker {number}"
        self._config = config
        self.made = []
        self.asked = []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.restart()

    def restart(self):
        self.is_lost = False
        self.waiting = []
        self.started = Future()
        self.worker = RolloutWorker(EchoEngine(), RolloutConfig(**self._config), OneTurn())
        self.made.append(self.worker)
        self.started.set_result(None)

    def lose(self):
        self.is_lost = True
        for answer in self.waiting:
            if not answer.done():
                answer.set_exception(LostProcessError(f"{self.name} was lost"))

    def call(self, method, *arguments):
        answer = Future()
        self.asked.append((method, *arguments))
        if self.is_lost:
            answer.set_exception(LostProcessError(f"{self.name} was lost"))
            return answer
        self.waiting.append(answer)

        async def work():
            function = getattr(self.worker, method)
            try:
                result = await function(*arguments) if asyncio.iscoroutinefunction(function) else function(*arguments)
                if not answer.done():
                    answer.set_result(result)
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)

        asyncio.run_coroutine_threadsafe(work(), self.loop)
        return answer

    def close(self):
        for worker in self.made:
            worker.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def make():
    opened = []

    def build(count=2, **config):
        processes = [Process(number, **config) for number in range(count)]
        executor = RolloutExecutor(EchoEngine(), RolloutConfig(**config), workers=RolloutWorkers(processes, 10.0))
        opened.extend([executor.destroy, *(process.close for process in processes)])
        return executor, processes

    yield build
    for close in opened:
        close()


def rows(count, **more):
    return [{"id": number, "ordinal": number, **more} for number in range(count)]


def runs(process):
    return [tuple(words[1])[:2] for words in process.asked if words[0] == "run"]


def test_rows_of_workers_are_those_of_one_process(make):
    executor, processes = make()
    here = RolloutExecutor(EchoEngine(), RolloutConfig())
    try:
        ours = here.rollout_batch(rows(4), OneTurn(), group_size=2)
    finally:
        here.destroy()
    get_tracker().export(reset=True)
    outline = executor.rollout_batch(rows(4), OneTurn(), group_size=2)
    assert not any(isinstance(value, torch.Tensor) and value.dim() > 1 and value.numel() for value in outline.values())
    theirs = unpacked(outline)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key], key
    assert get_tracker().export()["rollout/length"] == 3.0  # reported there, told here
    assert sorted(runs(processes[0])) == [(0, 0), (0, 1), (2, 0), (2, 1)]  # a task's samples are with one worker
    assert sorted(runs(processes[1])) == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_a_worker_that_joins_runs_episodes_when_it_has_started(make):
    executor, processes = make(1)
    late = Process(7)
    late.started = Future()
    pool = executor._episodes.workers
    pool.use_servers(["10.0.0.1:3000"], 0)
    pool.add(late)
    executor.rollout_batch(rows(4), OneTurn())
    assert len(runs(processes[0])) == 4  # it waits for room
    late.started.set_result(None)
    deadline = time.monotonic() + 60
    while len(pool.supervisor.running) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert late.asked[0] == ("release", ["10.0.0.1:3000"], 0)
    executor.rollout_batch(rows(4), OneTurn())
    assert len(runs(late)) == 2
    late.close()


def test_episodes_of_a_lost_worker_are_leased_again_as_the_same_attempt(make):
    executor, processes = make()
    ids = [executor.submit(row, OneTurn(), group_size=2) for row in rows(2, does="hang")]
    deadline = time.monotonic() + 60
    while len(runs(processes[0])) + len(runs(processes[1])) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    leased = runs(processes[0])
    processes[0].lose()
    while len(runs(processes[0])) + len(runs(processes[1])) < 6 or len(processes[0].made) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = runs(processes[0])[2:] + runs(processes[1])[2:]  # worker 0 may be back before the second one is leased
    assert sorted(again) == sorted(leased)
    assert all(words[1][2] == 0 for each in processes for words in each.asked if words[0] == "run")  # attempt
    assert executor.counters()["samples/retried"] == 0
    assert ids == [0, 1]
    while len(executor._episodes.workers.supervisor.running) < 2:  # it came back
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TwoTurns:
    """Waits before its second question until somebody opens the gate."""

    gate = threading.Event()

    async def arun_episode(self, engine, data):
        prompt, outputs = [1, 2, data["id"] + 1], []
        for turn in range(2):
            if turn:
                await asyncio.to_thread(self.gate.wait)
            request = ModelRequest(input_ids=prompt, gconfig=GenerationHyperparameters(max_new_tokens=3), rid=f"{data['id']}")
            outputs = (await engine.agenerate(request)).output_tokens
            prompt = prompt if turn else [*prompt, *outputs, 9]
        return {"input_ids": prompt, "output_ids": outputs, "reward": 1.0}


def test_episodes_of_a_lost_worker_go_on_from_what_it_wrote(make, tmp_path, monkeypatch):
    executor, processes = make()
    executor._episodes.workers._journal = tmp_path
    asked = []
    for process in processes:
        process.worker._workflow = TwoTurns(), None
        process.worker._episodes.journal = Journal(tmp_path)
        answer = process.worker.engine.agenerate

        async def agenerate(request, answer=answer):
            asked.append(list(request.input_ids))
            return await answer(request)

        monkeypatch.setattr(process.worker.engine, "agenerate", agenerate)
    tasks = [executor.submit(row, TwoTurns(), group_size=2) for row in rows(2)]
    deadline = time.monotonic() + 60
    while len(asked) < 4 or sum(len(episode.calls) for episode in read_episodes(tmp_path)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[0].restart = lambda: setattr(processes[0], "started", Future())  # nothing has room for it
    processes[0].lose()
    while len(runs(processes[1])) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [words[4] and words[4].tokens for words in processes[1].asked if words[0] == "run"] == [None, None, 3, 3]
    TwoTurns.gate.set()
    assert all(executor.wait_for_task(task, timeout=60)["rewards"].tolist() == [1.0, 1.0] for task in tasks)
    firsts = [prompt for prompt in asked if len(prompt) == 3]
    assert sorted(firsts) == [[1, 2, 1]] * 2 + [[1, 2, 2]] * 2  # nothing was asked twice
    executor._episodes.workers.close()


def test_an_episode_of_a_lost_worker_that_asks_something_else_now_begins_anew(make, tmp_path, monkeypatch):
    executor, (process,) = make(1)
    executor._episodes.workers._journal = tmp_path
    process.worker._workflow, journal = (Asks(), None), Journal(tmp_path)
    process.worker._episodes.journal = journal
    asked = []

    async def never(request):
        asked.append(request)
        await asyncio.sleep(3600)

    task, begin = executor.submit(rows(1)[0], Asks()), process.restart
    executor.wait_for_task(task, timeout=20)  # what it was asked and answered is in the journal
    monkeypatch.setattr(Asks, "first", 2)
    monkeypatch.setattr(process.worker.engine, "agenerate", never)

    def restart():
        begin()
        process.worker._workflow = Asks(), None

    process.restart = restart
    task = executor.submit(rows(1)[0], Asks())
    wait_until(lambda: asked)
    process.lose()
    batch = unpacked(executor.wait_for_task(task, timeout=20))
    assert batch["input_ids"][0, 0] == 2
    assert [words[4] is None for words in process.asked if words[0] == "run"] == [True, True, False, True]
    assert executor.counters()["samples/retried"] == 0


def test_who_is_not_wanted_any_more_takes_no_past_from_others(make, tmp_path, monkeypatch):
    reads, goes_on = [], [threading.Event(), threading.Event(), threading.Event()]

    def slow(directories, is_open, *more):
        reads.append([ordinal for ordinal in range(3) if is_open(ordinal)])
        goes_on[len(reads) - 1].wait(20.0)
        return read_past(directories, is_open, *more)

    monkeypatch.setattr("rollwright.rollout.workers.episode_leases.read_past", slow)
    journal = Journal(tmp_path)
    before = RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal)
    before.rollout_batch(rows(3), Asks())
    before.destroy()
    journal.close()
    pool = RolloutWorkers([], 10.0, journal=tmp_path)

    async def read(count):
        await asyncio.to_thread(wait_until, lambda: len(reads) >= count)

    async def lost_together():
        first = asyncio.ensure_future(pool._recorded(SampleName(0, 0, 0, False)))
        await read(1)
        second, third = (asyncio.ensure_future(pool._recorded(SampleName(ordinal, 0, 0, False))) for ordinal in (1, 2))
        await asyncio.sleep(0)
        goes_on[0].set()
        await read(2)
        second.cancel()
        await asyncio.sleep(0)
        goes_on[1].set()
        goes_on[2].set()
        return [episode and episode.begin.ordinal for episode in await asyncio.gather(first, third)]

    assert asyncio.run(lost_together()) == [0, 2]
    assert reads == [[0], [1, 2], [1, 2]]


def test_all_workers_lost_are_waited_for(make):
    executor, processes = make(count=1)
    processes[0].lose()
    batch = executor.rollout_batch(rows(3), OneTurn())
    assert batch["rewards"].tolist() == [0.0, 1.0, 2.0]
    assert len(processes[0].made) == 2


def test_what_is_heard_late_of_a_lost_worker_does_not_end_the_one_that_took_its_place(make):
    executor, (process,) = make(count=1)
    pool, start = executor._episodes.workers, process.started
    process.lose()
    pool._lose(process, start)
    deadline = time.monotonic() + 60
    while not pool.supervisor.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool._lose(process, start)  # of another sample that was with it
    assert pool.supervisor.running == [process]
    assert len(process.made) == 2


def test_what_fails_or_is_rejected_there_is_counted_here(make):
    executor, processes = make(max_sample_retries=1, max_failed_share=1.0)
    with pytest.raises(RolloutError, match=r"a bug in the workflow.*test_workers\.py"):
        executor.rollout_batch(rows(1, does="raise"), OneTurn())
    assert executor.counters()["samples/retried"] == 1
    attempts = [words[1][2] for words in processes[0].asked if words[0] == "run"]
    assert attempts == [0, 1]
    with pytest.raises(RolloutError, match="rejected by its workflow"):
        executor.rollout_batch(rows(1, does="reject"), OneTurn())


def test_an_episode_that_is_not_wanted_any_more_is_ended_there(make):
    executor, processes = make(count=1, sample_timeout=60.0)
    task = executor.submit(rows(1, does="hang")[0], OneTurn())
    deadline = time.monotonic() + 60
    while not processes[0].worker._callers:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    group = executor._scheduler.tasks[task]
    executor._change(executor._scheduler.drop, group, "test", "not wanted")
    while processes[0].worker._callers:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_row_that_cannot_travel_is_named(make):
    executor, _ = make(max_failed_share=1.0)
    with pytest.raises(RolloutError, match="cannot travel to a worker"):
        executor.rollout_batch([{"id": 0, "image": object()}], OneTurn())


class Asks(OneTurn):
    """Asks for what its class says."""

    first = 1

    async def arun_episode(self, engine, data):
        request = ModelRequest(input_ids=[self.first, data["id"]], gconfig=GenerationHyperparameters(max_new_tokens=3))
        response = await engine.agenerate(request)
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 1.0}


def test_an_episode_goes_on_there_from_its_past_and_begins_anew_where_it_diverges(make, tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    before = RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal)
    before.wait_for_task(before.submit(rows(1)[0], Asks()))
    before.destroy()
    journal.close()
    past = read_past([tmp_path], lambda ordinal: True).episodes[0]
    executor, (process,) = make(count=1)
    process.worker._workflow = Asks(), None
    asked = []
    answer = process.worker.engine.agenerate

    async def agenerate(request):
        asked.append(request)
        return await answer(request)

    monkeypatch.setattr(process.worker.engine, "agenerate", agenerate)
    batch = executor.wait_for_task(executor.submit(rows(1)[0], Asks(), past=past))
    assert batch["rewards"].tolist() == [1.0]
    assert not asked  # it was answered by the past
    monkeypatch.setattr(Asks, "first", 2)
    batch = unpacked(executor.wait_for_task(executor.submit({"id": 0, "ordinal": 1}, Asks(), past=past)))
    assert [request.input_ids[0] for request in asked] == [2]
    assert batch["input_ids"][0, 0] == 2
    assert executor.counters()["samples/retried"] == 0


def test_a_resumed_run_goes_on_in_its_workers(make, tmp_path):
    journal = Journal(tmp_path)
    before = RolloutExecutor(EchoEngine(), RolloutConfig(), journal=journal)
    then = before.prepare_batch(iter(rows(4)), OneTurn(), group_size=2, batch_size=4)
    before.destroy()
    journal.close()
    executor, processes = make()
    assert executor.recall([tmp_path]).count == 8
    now = unpacked(executor.prepare_batch(iter(rows(4)), OneTurn(), group_size=2, batch_size=4))
    leases = [words for process in processes for words in process.asked if words[0] == "run"]
    assert sorted((*words[1][:2], words[4].tokens) for words in leases) == [(task, i, 3) for task in range(4) for i in range(2)]
    assert torch.equal(then["input_ids"], now["input_ids"])


def test_rows_outlive_the_worker_that_made_them(make):
    executor, (process,) = make(count=1)
    batch = executor.rollout_batch(rows(2), OneTurn(), group_size=2)
    process.lose()
    now = unpacked(batch)
    assert (now["group_ids"].tolist(), now["sample_ids"].unique().numel()) == ([0, 0, 1, 1], 4)
    assert now["loss_mask"].sum(1).tolist() == [3] * 4


def test_what_is_complete_is_no_part_of_a_checkpoint_and_is_drawn_again(make):
    executor, _ = make(count=1)
    executor.wait_for_task(executor.submit(rows(1)[0], OneTurn()))
    executor.submit(rows(2)[1], OneTurn())
    wait_until(lambda: executor.counters()["ready"])
    state = executor.state_dict()
    assert (state["pending"], state["finished"]) == ([*rows(1), rows(2)[1]], [])


def test_what_one_process_had_complete_runs_again_where_workers_go_on(make, tmp_path):
    config, journal = {"max_head_offpolicyness": 2}, Journal(tmp_path)
    here = RolloutExecutor(EchoEngine(), RolloutConfig(**config), journal=journal)
    for row in rows(3):
        here.submit(row, OneTurn())
    wait_until(lambda: here.counters()["ready"] == 3)
    state = here.state_dict()
    here.destroy()
    journal.close()
    assert len(state["finished"]) == 3
    executor, processes = make(**config)
    executor.load_state_dict(state)
    executor.recall([tmp_path])
    batch = executor.prepare_batch(iter(rows(5)[3:]), OneTurn(), batch_size=5)
    assert sorted(unpacked(batch)["rewards"].tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    leases = [words for process in processes for words in process.asked if words[0] == "run"]
    assert sorted(words[1][0] for words in leases if words[4] is not None) == [0, 1, 2]  # these ask nothing


def test_a_function_that_accepts_groups_is_given_their_tokens_and_may_change_them(make):
    def accept(group):
        group["rewards"] = group["rewards"] + group["input_ids"][:, 2]
        return int(group["rewards"][0]) != 3

    executor, _ = make()
    batch = executor.rollout_batch(rows(3), OneTurn(), should_accept_fn=accept)
    assert batch["rewards"].tolist() == unpacked(batch)["rewards"].tolist() == [1.0, 5.0]


class Columns(OneTurn):
    """Gives a further column in every second sample."""

    async def arun_episode(self, engine, data):
        row = await super().arun_episode(engine, data)
        return row if engine.name.index else {**row, "score": 1.0}


def test_samples_whose_columns_differ_fail_their_group(make):
    executor, processes = make(max_failed_share=1.0)
    for process in processes:
        process.worker._workflow = Columns(), None
    with pytest.raises(RolloutError, match="some have the columns score and others none besides"):
        executor.rollout_batch(rows(1), Columns(), group_size=2)


class Hears:
    """A worker that hears words, one of which it may be slow to take or to answer."""

    def __init__(self, number, takes=None, answers=0.0):
        self.name, self.started = f"worker {number}", Future()
        self.heard, self.is_taking = [], threading.Event()
        self._takes, self._answers = takes, answers

    def call(self, word, *arguments):
        if self._takes is not None:
            self.is_taking.set()
            self._takes.wait(10.0)
        self.heard.append(word)
        answer = Future()
        threading.Timer(self._answers, answer.set_result, [None]).start()
        return answer


def test_the_last_word_that_workers_hear_is_the_last_that_was_said():
    goes_on = threading.Event()
    workers = [Hears(0, takes=goes_on), Hears(1)]
    pool = RolloutWorkers(workers, 10.0)
    watch = threading.Thread(target=pool.use_servers, args=(["10.0.0.1:1"], 0))
    watch.start()
    assert workers[0].is_taking.wait(10.0)
    trainer = threading.Thread(target=pool.hold)  # weights are about to change while servers are told
    trainer.start()
    time.sleep(0.1)
    goes_on.set()
    watch.join(10.0)
    trainer.join(10.0)
    assert [worker.heard for worker in workers] == [["release", "hold"]] * 2


def test_what_was_asked_may_take_longer_to_be_answered_than_a_worker_to_start():
    RolloutWorkers([Hears(0, answers=0.3)], 0.1, 10.0).hold()
    with pytest.raises(RolloutError, match=r"worker 0 did not hold within 0\.2 s"):
        RolloutWorkers([Hears(0, answers=1.0)], 0.1, 0.1).hold()


def test_the_journal_of_a_worker_says_where_an_episode_failed(make, tmp_path):
    executor, (process,) = make(count=1, max_sample_retries=0)
    process.worker._episodes.journal = Journal(tmp_path)
    with pytest.raises(RolloutError, match="a bug in the workflow"):
        executor.rollout_batch([{"id": 0, "does": "raise"}], OneTurn())
    (episode,) = read_episodes(tmp_path)
    assert episode.end.traceback.rstrip().endswith("ValueError: a bug in the workflow")


def test_a_worker_that_cannot_write_its_journal_says_so_and_nobody_waits(make, tmp_path, monkeypatch):
    def is_full(*_):
        raise JournalError("the disk is full")

    executor, (process,) = make(count=1, max_sample_retries=0)
    process.worker._episodes.journal = journal = Journal(tmp_path)
    monkeypatch.setattr(journal, "_append", is_full)
    for _ in range(2):  # of an episode that was under way, and of one that comes later
        with pytest.raises(JournalError, match="the disk is full"):  # which ends the run, wherever it was raised
            executor.wait_for_task(executor.submit({"id": 0}, OneTurn()), timeout=20)


class HeldOut(OneTurn):
    async def arun_episode(self, engine, data):
        get_tracker("rollout").scalar(held_out=1.0)
        return {**await super().arun_episode(engine, data), "reward": 7.0}


def test_evaluation_runs_there_with_a_workflow_of_its_own(make, tmp_path):
    executor, processes = make()
    for process in processes:
        process.worker._evaluation, process.worker._episodes.journal = (HeldOut(), None), Journal(tmp_path)
    executor._episodes.workers._journal, executor._episodes.journal = tmp_path, Journal(tmp_path)
    assert executor.rollout_batch(rows(2), OneTurn())["rewards"].tolist() == [0.0, 1.0]
    get_tracker().export(reset=True)
    assert executor.rollout_batch(rows(2), HeldOut(), is_eval=True)["rewards"].tolist() == [7.0, 7.0]
    assert [runs(process) for process in processes] == [[(0, 0)] * 2, [(1, 0)] * 2]
    assert get_tracker().export()["eval/rollout/held_out"] == 1.0
    assert sorted(episode.begin.is_eval for episode in read_episodes(tmp_path)) == [False, False, True, True]
    ends = [record for _, record in read_records(tmp_path) if isinstance(record, GroupEnd)]
    assert [(end.is_eval, end.version) for end in ends] == [(False, 0)] * 2 + [
        (True, 0)
    ] * 2  # whose samples are in other files


def test_an_evaluation_of_a_lost_worker_takes_no_past_from_the_training_task_of_its_ordinal(make, tmp_path):
    executor, (process,) = make(count=1)
    process.worker._episodes.journal = Journal(tmp_path)
    executor._episodes.workers._journal = tmp_path
    executor.rollout_batch(rows(1), OneTurn())
    process.lose()
    assert executor.rollout_batch(rows(1), OneTurn(), is_eval=True)["rewards"].tolist() == [0.0]
    assert [words[4] for words in process.asked if words[0] == "run"] == [None, None, None]


def test_a_worker_that_is_lost_while_it_starts_again_is_started_once_more(make):
    executor, (process,) = make(count=1)
    begin, failures = process.restart, [LostProcessError("lost while it started"), RolloutError("no tokenizer there")]

    def restart():
        begin()
        if failures:
            process.started = Future()
            process.started.set_exception(failures.pop())

    process.restart = restart
    process.lose()
    batch = executor.rollout_batch(rows(2), OneTurn())
    assert batch["rewards"].tolist() == [0.0, 1.0]
    assert not failures


def test_workers_that_can_never_start_again_end_the_run_with_the_cause(make):
    executor, (process,) = make(count=1, max_sample_retries=0)
    begin = process.restart

    def restart():
        begin()
        process.started = Future()
        process.started.set_exception(RolloutError("no tokenizer there"))

    process.restart = restart
    process.lose()
    with pytest.raises(RolloutError, match=r"worker 0 was started 4 times without running an episode.*no tokenizer there"):
        executor.rollout_batch(rows(1), OneTurn())


def test_servers_that_were_seen_before_a_publication_are_not_told_after_it():
    pool = RolloutWorkers([], 10.0)
    pool.release(["10.0.0.1:1", "10.0.0.2:1"], 4)
    pool.use_servers(["10.0.0.1:1"], 3)
    assert pool._serving == (["10.0.0.1:1", "10.0.0.2:1"], 4)
    pool.use_servers(["10.0.0.1:1"], 4)
    assert pool._serving == (["10.0.0.1:1"], 4)


def test_a_worker_that_comes_back_while_weights_change_runs_nothing_before_it_holds():
    pool, worker = RolloutWorkers([], 10.0), Hears(0)
    ran = []
    worker.started.set_result(None)
    call = worker.call

    def slow(word, *arguments):
        if word == "release":
            pool.hold()  # weights are about to change
        ran.append((word, worker in pool.supervisor.running))
        return call(word, *arguments)

    worker.call = slow
    pool.add(worker)
    wait_until(lambda: pool.supervisor.running)
    wait_until(lambda: len(ran) == 2)
    assert ran == [("release", False), ("hold", False)]


def ended_for_good():
    raise LostProcessError("its place was needed: it has been ended")


def test_a_worker_that_was_ended_for_good_is_not_said_to_be_started_again(make, caplog):
    executor, processes = make()
    pool = executor._episodes.workers
    processes[1].restart = ended_for_good
    processes[1].lose()
    assert executor.rollout_batch(rows(2), OneTurn())["rewards"].tolist() == [0.0, 1.0]
    wait_until(lambda: pool.supervisor.running == processes[:1])
    wait_until(lambda: "it has been ended" in caplog.text)
    assert "its place was needed: it has been ended" in caplog.text
    assert "was started" not in caplog.text
    assert "could not be started again" not in caplog.text


class ServerProcess:
    """A server that can be lost, as ``ServerWatch`` sees it."""

    def __init__(self, number):
        self.name = f"server {number}"
        self.number, self.starts = number, 0
        self.is_lost = False
        self.cannot_start = None
        self.started = Future()
        self.started.set_result(None)

    def restart(self):
        self.starts += 1
        self.is_lost = False
        self.started = Future()
        if self.cannot_start is not None:
            self.started.set_exception(self.cannot_start)

    def call(self, method):
        answer = Future()
        if self.is_lost:
            answer.set_exception(
                self.is_lost if isinstance(self.is_lost, Exception) else LostProcessError(f"{self.name} was lost")
            )
        else:
            answer.set_result(f"10.0.0.{self.number}:{self.starts}" if method == "address" else None)
        return answer


@contextlib.contextmanager
def watched(processes, changed=None, failed=None, timeout=5.0):
    """A watch of servers, and what it tells of them; a server is in service where clients were told of it."""
    addresses, told, present = [f"10.0.0.{process.number}:0" for process in processes], [], []
    present[:] = addresses

    def change(running):
        if changed is not None:
            changed()
        present[:] = running

    watch = ServerWatch(
        processes,
        addresses,
        changed=change,
        in_service=lambda: (list(present), 3),
        serve=lambda *words: told.append(words),
        failed=failed or pytest.fail,
        timeout=timeout,
    )
    watch.start()
    try:
        yield watch, told
    finally:
        watch.close()


def wait_until(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lost_server_is_left_out_at_once_and_told_when_it_is_back(caplog):
    processes, failing = [ServerProcess(number) for number in range(2)], [1]

    def changed():
        if failing:
            failing.pop()
            raise LostProcessError("the first rank was not there to be told")

    with watched(processes, changed) as (watch, told):
        processes[1].is_lost = EngineError(
            "The server at 10.0.0.1:0 ended with status -9. The end of /run/server.log:\n42 requests"
        )
        wait_until(lambda: told)
        said = [record.getMessage() for record in caplog.records if "server 1" in record.getMessage()]
        assert said == [
            "server 1 was lost and is started again: The server at 10.0.0.1:0 ended with status -9; its log is /run/server.log"
        ]
        assert told == [(["10.0.0.0:0"], 3)]
        assert watch.addresses == ["10.0.0.0:0"]
        processes[1].started.set_result(None)
        wait_until(lambda: len(told) == 2)
        assert told[1] == (["10.0.0.0:0", "10.0.0.1:1"], 3)
        assert processes[1].starts == 1


def test_a_server_that_can_never_start_again_is_given_up_and_the_last_one_ends_the_run():
    processes, failures = [ServerProcess(number) for number in range(2)], []
    with watched(processes, failed=failures.append) as (watch, _):
        for process in (processes[1], processes[0]):
            process.cannot_start = EngineError("out of memory on GPU 3")
        processes[1].is_lost = True
        wait_until(lambda: processes[1].starts == 3)
        time.sleep(1.2)
        assert processes[1].starts == 3  # it is not tried for ever
        assert watch.addresses == ["10.0.0.0:0"]
        assert not failures  # the other one serves
        processes[0].is_lost = True
        wait_until(lambda: failures)
        assert "No inference server is left: server 0 was started 4 times" in str(failures[0])
        assert "out of memory on GPU 3" in str(failures[0])


def test_where_one_server_was_given_up_and_nothing_has_room_for_the_other_the_run_ends(monkeypatch):
    monkeypatch.setattr("rollwright.inference.server_watch.LOOK_SECONDS", 0.01)
    processes, failures = [ServerProcess(number) for number in range(2)], []
    with watched(processes, failed=failures.append, timeout=0.3):
        processes[1].cannot_start = EngineError("out of memory on GPU 3")
        processes[1].is_lost = True
        wait_until(lambda: processes[1].starts == 3)
        time.sleep(0.1)
        processes[0].is_lost = True  # it waits for room from now on
        wait_until(lambda: failures)
        assert "server 0 could not be started again within 0.3 s" in str(failures[0])


def test_a_server_that_was_ended_for_good_is_given_up_at_once(monkeypatch, caplog):
    monkeypatch.setattr("rollwright.inference.server_watch.LOOK_SECONDS", 0.01)
    processes = [ServerProcess(number) for number in range(2)]
    with watched(processes) as (watch, told):
        processes[1].restart = ended_for_good
        processes[1].is_lost = True
        wait_until(lambda: told)
        assert watch.addresses == ["10.0.0.0:0"]
    assert "its place was needed" in caplog.text
    assert "Could not send the list of servers" not in caplog.text


def test_the_pool_tells_the_cause_to_episodes_that_nobody_can_run(make):
    executor, (process,) = make(count=1, max_sample_retries=0)
    task = executor.submit(rows(1, does="hang")[0], OneTurn())
    wait_until(lambda: runs(process))
    executor._episodes.workers.fail(RolloutError("No inference server is left: it is out of memory"))
    with pytest.raises(RolloutError, match="it is out of memory"):
        executor.wait_for_task(task, timeout=20)
