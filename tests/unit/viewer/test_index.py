"""The index of a journal: the same however it was built, also while the journal grows, after a crash, and by several processes."""

from __future__ import annotations

import os
import sqlite3
import threading

import pytest

from rollwright.errors import JournalError
from rollwright.experience.journal.reading import journal_files, read_records
from rollwright.experience.journal.records import (
    Begin,
    Checkpoint,
    End,
    GroupEnd,
    ModelCall,
    Phase,
    Published,
    Resumed,
    Row,
    Trained,
    pack_value,
)
from rollwright.experience.journal.writing import Journal
from rollwright.viewer import index as module
from rollwright.viewer.index import Index
from rollwright.viewer.run import Run
from rollwright.viewer.samples import reward_bins


def contents(index: Index) -> dict[str, list]:
    """What an index says, without the numbers of its rows."""
    kept = {
        "samples": "writer, ordinal, idx, attempt, is_eval, status, reward, tokens, calls, tools, step, trained, advantage, places",
        "groups": "writer, ordinal, is_eval, version, state, policy, step, has_variance",
        "steps": "*",
        "phases": "*",
        "checkpoints": "step, frontier",
        "texts": "given, said",
    }
    return {table: sorted(map(tuple, index.rows(f"SELECT {columns} FROM {table}"))) for table, columns in kept.items()}


def write_sample(
    journal: Journal,
    ordinal: int,
    index: int = 0,
    *,
    reward: float = 0.0,
    outcome: str = "accepted",
    began: float = 0.0,
    is_eval: bool = False,
    version: int = 0,
    task: dict[str, str] | None = None,
):
    """An episode of one call of three tokens."""
    number = journal.next_episode()
    packed = pack_value(task or {"question": "?"})
    journal.write(Begin(number, ordinal, index, 0, is_eval, version, "W", 1, packed, "", began))
    ids = b"".join(token.to_bytes(4, "little") for token in (5, 6, 7))
    journal.write(
        ModelCall(number, 0, 0, 0, -1, 0, ids, ids, bytes(12), 0, 1.0, "stop", None, 1, 0, began, began + 1, 1.0, 0.1)
    )
    rows = [Row(0, 6, b"", [3, 6], reward, False, b"")] if outcome == "accepted" else []
    journal.write(End(number, outcome, "", rows, began + 1))
    return number


def write_step(
    journal: Journal, step: int, ordinal: int, group: int, rewards: tuple[float, ...] = (0.0, 1.0), with_samples: bool = True
):
    """A step that trained one group."""
    for index, reward in enumerate(rewards):
        if with_samples:
            write_sample(journal, ordinal, index, reward=reward)
    journal.write(GroupEnd(ordinal, group, False, "delivered", "", len(rewards), 0.0))
    for index, reward in enumerate(rewards):
        journal.write(Trained(step, group, (group << 20) + index, reward, reward - 0.5, 3))
    journal.write(Phase(step, "train", 0.5))
    journal.write(Published(step, step, {}, float(step)))


@pytest.fixture
def whole(copied_run):
    """The index of a whole run, built at once."""
    with Run(copied_run) as run:
        run.refresh()
        yield contents(run.index)


def test_it_is_the_same_when_it_is_built_byte_by_byte(copied_run, whole, tmp_path):
    (file,) = journal_files(copied_run / "journal")
    data = file.read_bytes()
    grown = tmp_path / "grown" / "journal"
    grown.mkdir(parents=True)
    with Run(copied_run) as vocabulary:
        index = Index(grown, vocabulary.vocabulary)
        for size in [0, 5, 8, 60, *range(500, len(data), 3_777), len(data) - 1, len(data)]:
            (grown / file.name).write_bytes(data[:size]) if size < 9 else os.truncate(_append(grown / file.name, data), size)
            index.advance()
            if size % 2:  # another process goes on
                index.close()
                index = Index(grown, vocabulary.vocabulary)
        assert contents(index) == whole
        index.close()


def _append(path, data: bytes):
    """Write data that the file does not have yet, without changing what is there."""
    with path.open("ab") as file:
        file.write(data[path.stat().st_size :])
    return path


def test_several_processes_build_one_index(copied_run, whole):
    (copied_run / "journal" / "index.sqlite").unlink()
    runs = [Run(copied_run) for _ in range(3)]
    threads = [threading.Thread(target=lambda run=run: [run.refresh(0.01) for _ in range(30)]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(runs[0].index) == contents(runs[2].index) == whole
    for run in runs:
        run.close()


def test_one_that_is_damaged_or_of_another_version_is_built_anew(copied_run, whole, monkeypatch):
    path = copied_run / "journal" / "index.sqlite"
    path.write_bytes(b"no database " * 1000)
    with Run(copied_run) as run:
        run.refresh()
        run.refresh()
        assert contents(run.index) == whole
    monkeypatch.setattr(module, "VERSION", 99)
    with Run(copied_run) as run:
        run.refresh()
        assert contents(run.index) == whole
        path.unlink()  # while it is open
        run.refresh()
        assert contents(run.index) == whole


def test_one_with_tables_of_before_is_built_anew_by_who_reads(copied_run, whole):
    path = copied_run / "journal" / "index.sqlite"
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        connection.executescript("CREATE TABLE samples (id INTEGER PRIMARY KEY, writer INT); PRAGMA user_version = 1;")
    with Run(copied_run) as run:
        assert run.search()["samples"] == []  # nothing is indexed yet; no error
        assert run.steps()
        run.refresh()
        assert contents(run.index) == whole
        assert path.stat().st_mode & 0o077 == 0


def test_a_page_that_is_damaged_ends_the_index_and_not_who_follows(copied_run, whole):
    with Run(copied_run) as run:
        run.refresh()
        index = run.index
        with pytest.raises(sqlite3.DatabaseError, match="malformed"), index.reading():
            raise sqlite3.DatabaseError("database disk image is malformed")
        run.refresh()
        run.refresh()
        assert contents(run.index) == whole


def test_a_journal_that_cannot_be_written_has_its_index_elsewhere(copied_run, whole, monkeypatch, tmp_path):
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (copied_run / "journal" / "index.sqlite").unlink()
    with Run(copied_run) as run:
        run.refresh()
        assert contents(run.index) == whole
    assert not (copied_run / "journal" / "index.sqlite").exists()
    (made,) = (tmp_path / "cache").rglob("*.sqlite")
    assert made.stat().st_mode & 0o077 == 0


def test_a_torn_tail_is_left_out_and_read_when_it_is_whole(tmp_path):
    journal = Journal(tmp_path / "journal")
    write_sample(journal, 0)
    write_sample(journal, 1)
    (file,) = journal_files(tmp_path / "journal")
    data = file.read_bytes()
    journal.close()
    file.write_bytes(data[:-3])
    with Run(tmp_path) as run:
        assert run.refresh()["samples"] == 1
        assert run.sample("1/0")["status"] == "interrupted"
        assert [sample["key"] for sample in run.last_samples()] == ["1/0", "0/0"]
        file.write_bytes(data)
        assert run.refresh()["samples"] == 2
        assert run.sample("1/0")["status"] == "accepted"
        file.write_bytes(data[:100] + b"\xff" * 40 + data[140:])  # not the file that it was
        run.refresh()
        assert run.progress()["samples"] == 0


def test_a_journal_that_is_still_being_read_lacks_nothing(copied_run):
    with Run(copied_run) as run:
        read = run.refresh(0.0)
        assert (read["bytes"] < read["of_bytes"], read["is_complete"]) == (True, False)
        assert run.missing() == []
        assert run.refresh()["is_complete"]
        assert run.missing() == []


def test_dropped_groups_stand_with_the_step_in_which_they_were_sampled(tmp_path):
    journal = Journal(tmp_path / "journal")
    write_step(journal, 1, 0, 0)
    for ordinal, state in enumerate(("dropped/no_variance", "dropped/stale", "dropped/stale", "rejected", "failed"), 1):
        write_sample(journal, ordinal)
        journal.write(GroupEnd(ordinal, ordinal, False, state, f"because of {state}", 1, 0.0))
    write_step(journal, 2, 9, 9, (1.0, 1.0))
    journal.close()
    with Run(tmp_path) as run:
        run.refresh()
        step = run.step(2)
        assert step["counts"] == {
            "drawn": 6,
            "trained": 1,
            "dropped": {"stale": 2, "no_variance": 1, "rejected": 1, "failed": 1},
            "without_variance": 1,
        }
        assert [entry["dropped"] for entry in run.steps()] == [0, 5]
        by_key = {group["key"]: group for group in step["groups"]}
        assert (by_key["2"]["state"], by_key["2"]["policy"], by_key["2"]["reason"]) == (
            "dropped",
            "stale",
            "because of dropped/stale",
        )


def test_steps_that_a_resume_undid_are_told_apart(tmp_path):
    first = Journal(tmp_path / "journal")
    for step in (1, 2, 3):
        write_step(first, step, step, step)
        if step == 1:
            first.write(Checkpoint(1, 2, 0.0))
    write_sample(first, 4)
    first.close()
    second = Journal(tmp_path / "journal")
    second.write(Resumed(1, 1, 2, 1, 3, 5.0))
    with Run(tmp_path) as run:
        run.refresh()
        assert [run.sample(key)["is_undone"] for key in ("1/0@0", "2/0@0", "3/1@0")] == [False, True, True]
        assert [entry["step"] for entry in run.steps()] == [1]
        assert [entry["is_undone"] for entry in run.steps(undone=True)] == [False, True, True]
        assert [len(group["samples"]) for group in run.step(3)["groups"]] == [2]  # who asks for a step that was undone gets it
    write_step(second, 2, 2, 7, (0.25, 0.75))
    second.close()
    with Run(tmp_path) as run:
        run.refresh()
        assert [(each["step"], each["episodes"]) for each in run.resumes()] == [(1, 1)]
        assert [(entry["step"], entry["reward"]) for entry in run.steps()] == [(1, 0.5), (2, 0.5)]
        assert [entry["is_undone"] for entry in run.steps(undone=True)] == [False, False, True]
        assert [entry["step"] for entry in run.publications()] == [1, 2]
        assert [group["is_undone"] for step in (1, 2, 3) for group in run.step(step)["groups"]] == [False, False, True]
        assert run.sample("2/1")["reward"] == 0.75
        assert run.sample("2/1@0")["is_undone"]
        assert (run.sample("2/1")["trained"], run.sample("3/0")["is_undone"]) == (1, True)


def test_a_sample_that_ran_again_after_resumes_counts_once(tmp_path):
    """Groups of four, recorded by three processes: what was under way or lost is written again by each."""
    first = Journal(tmp_path / "journal")
    write_step(first, 1, 0, 0, (0.0, 0.25, 0.5, 0.75))
    first.write(Checkpoint(1, 1, 0.0))
    write_step(first, 2, 1, 1, (0.0, 0.25, 0.5, 0.75))
    write_sample(first, 5, version=2, is_eval=True)  # of weights that are lost with step 2
    write_sample(first, 2, 0)  # finished, and not trained
    first.write(Begin(first.next_episode(), 2, 1, 0, False, 1, "W", 1, None, "", 9.0))  # under way
    first.close()
    middle = Journal(tmp_path / "journal")
    middle.write(Resumed(1, 1, 1, 6, 9, 9.0))
    worker = Journal(tmp_path / "journal")  # of that process
    write_sample(worker, 1, 0)
    middle.close()
    worker.close()
    last = Journal(tmp_path / "journal")
    last.write(Resumed(1, 1, 1, 6, 9, 19.0))
    with Run(tmp_path) as run:
        run.refresh()
        assert run.search(step=2)["total"] == 0
        trained = [f"0/{index}@0" for index in (3, 2, 1, 0)]
        assert [each["key"] for each in run.last_samples()] == ["2/1@0", "1/0@2", "2/0@0", *trained]
    write_step(last, 2, 1, 1, (0.0, 0.25, 0.5, 0.75))
    for index in range(2):
        write_sample(last, 2, index)
    write_sample(last, 5, version=2, is_eval=True)
    last.close()
    with Run(tmp_path) as run:
        assert run.refresh()["samples"] == run.info()["samples"] == 11
        assert run.search()["total"] == 11
        assert run.search(undone=True)["total"] == 18
        assert {len(run.group(ordinal)["samples"]) for ordinal in (0, 1)} == {4}
        assert len(run.group(1, undone=True)["samples"]) == 9
        assert len(run.group(2)["samples"]) == 2
        assert [len(group["samples"]) for group in run.step(2)["groups"]] == [4]
        assert [entry["samples"] for entry in run.steps()] == [4, 4]
        assert len(run.frame("samples")) == 11
        assert len(run.frame("samples", undone=True)) == 18
        assert set(run.frame("tokens").key) == {each["key"] for each in run.search()["samples"]}
        assert sorted(each["key"] for each in run.last_samples()) == sorted(each["key"] for each in run.search()["samples"])
        assert len(run.last_samples(undone=True)) == 19
        assert run.search(is_eval=True)["total"] == 1
        assert len(run.sample("1/0@0")["attempts"]) == 3  # one that was undone is shown among the others
        assert run.sample("1/0")["process"] == 3
        assert {sample["trained"] for sample in run.group(1)["samples"]} == {1}


def test_samples_that_other_processes_wrote_are_found_for_what_was_trained(tmp_path):
    controller, worker = Journal(tmp_path / "journal"), Journal(tmp_path / "journal")
    write_step(controller, 1, 0, 0, with_samples=False)
    for index, reward in enumerate((0.0, 1.0)):
        write_sample(worker, 0, index, reward=reward)
    with Run(tmp_path) as run:
        run.refresh()
        assert [(sample["trained"], sample["advantage"]) for sample in run.step(1)["groups"][0]["samples"]] == [
            (1, -0.5),
            (1, 0.5),
        ]
        assert run.steps()[0]["samples"] == 2
        write_step(controller, 2, 1, 1, with_samples=False)
        run.refresh()
        assert run.steps()[1]["samples"] == 0
        for index, reward in enumerate((0.0, 1.0)):
            write_sample(worker, 1, index, reward=reward)
        run.refresh()
        assert (run.steps()[1]["samples"], run.steps()[1]["reward"]) == (2, 0.5)
        assert {sample["trained"] for sample in run.group(1)["samples"]} == {1}
        write_sample(controller, 2, began=0.5)
        run.refresh()
        names = {lane["name"] for lane in run.timeline(lanes=4)["lanes"] if lane["kind"] == "sampling"}
        assert names == {"process 0, sampling 1", "process 1, sampling 1", "process 1, sampling 2"}
    controller.close()
    worker.close()


def test_a_sample_whose_file_was_removed_is_told(copied_run, whole):
    with Run(copied_run) as run:
        key = run.step(1)["groups"][0]["samples"][0]["key"]
        for file in journal_files(copied_run / "journal"):
            file.unlink()
        with pytest.raises(JournalError, match=r"journal\.keep"):
            run.sample(key)


def test_what_is_shown_is_what_the_journal_has(copied_run, whole):
    ends = [record for _, record in read_records(copied_run / "journal") if isinstance(record, End)]
    assert len(whole["samples"]) == len(ends)
    connection = sqlite3.connect(copied_run / "journal" / "index.sqlite")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_rewards_that_are_no_numbers_are_in_no_bin():
    rewards = [float("inf"), float("nan"), float("-inf"), *map(float, range(30))]
    bins = reward_bins([{"rewards": rewards, "trained": 1}], 20)
    assert sum(each["count"] for each in bins) == 30
    assert bins[-1]["high"] == 29


def test_an_evaluation_that_workers_ran_belongs_to_its_version_whoever_is_read_first(tmp_path):
    controller, worker = Journal(tmp_path / "journal"), Journal(tmp_path / "journal")  # the first has what became of groups
    for version in (1, 2):
        controller.write(GroupEnd(0, version, True, "delivered", "", 1, 0.0, version))
        controller.write(Published(version, version, {}, float(version)))
        number = worker.next_episode()
        worker.write(Begin(number, 0, 0, 0, True, version, "W", 1, pack_value({"question": "?"}), "", 0.0))
        worker.write(End(number, "accepted", "", [Row(-1, 0, b"", [], 0.5, False, b"")], 1.0))
    for journal in (controller, worker):
        journal.close()
    with Run(tmp_path) as run:
        run.refresh()
        for version in (1, 2):
            (group,) = run.step(version)["evaluations"]
            assert (group["version"], [sample["reward"] for sample in group["samples"]]) == (version, [0.5])


def test_samples_that_workers_run_again_after_a_resume_are_those_that_were_trained(tmp_path):
    """The journal of a resumed controller is read before those of its workers, which record finished episodes again."""
    for begins in (Checkpoint(0, 0, 0.0), Resumed(0, 0, 0, 2, 6, 9.0)):
        controller, worker = Journal(tmp_path / "journal"), Journal(tmp_path / "journal")
        controller.write(begins)
        write_step(controller, 1, 0, 0, with_samples=False)
        for index, reward in enumerate((0.0, 1.0)):
            write_sample(worker, 0, index, reward=reward)
        controller.close()
        worker.close()
    with Run(tmp_path) as run:
        run.refresh()
        assert {(each["key"], each["process"]) for each in run.search(step=1)["samples"]} == {("0/0@3", 3), ("0/1@3", 3)}
        assert [(sample["trained"], sample["advantage"]) for sample in run.step(1)["groups"][0]["samples"]] == [
            (1, -0.5),
            (1, 0.5),
        ]
        assert run.steps()[0]["samples"] == 2
