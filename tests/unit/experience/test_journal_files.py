"""Journal files: whole after a kill, cut where they are torn, private, and without secrets."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import xxhash

from rollwright.config.sections import JournalConfig
from rollwright.errors import JournalError
from rollwright.experience.journal import writing
from rollwright.experience.journal.reading import journal_files, read_records
from rollwright.experience.journal.records import Begin, DurableResult, End, Phase, encode, pack_value
from rollwright.experience.journal.writing import Journal


def phases(directory) -> list[int]:
    return [record.step for _, record in read_records(directory) if isinstance(record, Phase)]


def begun(episode: int) -> Begin:
    return Begin(episode, episode, 0, 0, False, 0, "W", 1, None, "", 0.0)


def test_records_are_there_while_the_file_is_written_and_only_its_user_reads_them(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert not (tmp_path / "journal").exists()
    for step in range(3):
        journal.write(Phase(step, "train", 0.5))
        assert phases(tmp_path / "journal") == list(range(step + 1))
    (file,) = journal_files(tmp_path / "journal")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    journal.close()
    journal.write(Phase(9, "train", 0.5))
    assert phases(tmp_path / "journal") == [0, 1, 2]


def test_a_killed_process_loses_no_record(tmp_path):
    script = """
        import itertools, sys
        from rollwright.experience.journal.writing import Journal
        from rollwright.experience.journal.records import Phase
        journal = Journal(sys.argv[1])
        for step in itertools.count():
            journal.write(Phase(step, "train", 0.5))
            print(step, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 200:
            process.send_signal(signal.SIGKILL)
            break
    told = [200, *map(int, process.stdout.read().split())]
    process.wait()
    found = phases(tmp_path)
    assert found == list(range(len(found)))
    assert len(found) >= told[-1] + 1
    again = Journal(tmp_path)  # the next process has a file of its own
    again.write(Phase(-1, "train", 0.5))
    again.close()
    assert phases(tmp_path) == [*found, -1]
    assert [path.name for path in journal_files(tmp_path)] == ["000000-0000.journal", "000001-0000.journal"]


@pytest.mark.parametrize("left", [1, 11, 12, 15])
def test_a_torn_tail_is_cut_and_said(tmp_path, caplog, left):
    journal = Journal(tmp_path)
    journal.write(Phase(0, "train", 0.5))
    journal.write(Phase(1, "train", 0.5))
    whole = journal.size
    journal.write(Phase(2, "train", 0.5))
    journal.close()
    (file,) = journal_files(tmp_path)
    os.truncate(file, whole + left)
    with caplog.at_level("WARNING"):
        assert phases(tmp_path) == [0, 1]
    assert f"the last {left} bytes, from byte {whole} on" in caplog.text


def old_form(directory, records) -> Path:
    """A file as the version before wrote it: no marks, and no records of the files."""
    directory.mkdir(exist_ok=True)
    bodies = map(encode, records)
    framed = (struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body for body in bodies)
    path = directory / "000000-0000.journal"
    path.write_bytes(b"RWJRNL1\n" + b"".join(framed))
    return path


def written(directory, steps: int) -> Path:
    journal = Journal(directory)
    for step in range(steps):
        journal.write(Phase(step, "train", 0.5))
    journal.close()
    return journal_files(directory)[0]


@pytest.mark.parametrize("is_old", [False, True])
def test_each_byte_that_is_damaged_costs_one_record_which_is_named(tmp_path, caplog, is_old):
    """Also one of a length, of a mark and of the version: all other records are read."""
    file = old_form(tmp_path, [Phase(step, "train", 0.5) for step in range(6)]) if is_old else written(tmp_path, 6)
    assert phases(tmp_path) == list(range(6))
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        caplog.clear()
        with caplog.at_level("WARNING"):
            found = phases(tmp_path)
        lost = sorted({*range(6)} - {*found})
        assert found == sorted(found)
        assert len(lost) <= 1
        if lost:
            assert file.name in caplog.text
            assert "bytes" in caplog.text
        if lost and 0 < lost[0] < 5:
            assert f"between step {lost[0] - 1} and step {lost[0] + 1}: damaged" in caplog.text


@pytest.mark.parametrize("is_old", [False, True])
def test_reading_goes_on_behind_bytes_that_are_gone_or_too_many(tmp_path, is_old):
    file = old_form(tmp_path, [Phase(step, "train", 0.5) for step in range(6)]) if is_old else written(tmp_path, 6)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[: middle - 20] + content[middle + 20 :])
    found = phases(tmp_path)
    assert found[0] == 0
    assert found[-1] == 5
    assert len(found) >= 3
    file.write_bytes(content[:middle] + os.urandom(9_000_000) + content[middle:])  # more than is read at once
    assert len(phases(tmp_path)) >= 5
    file.write_bytes(content[:middle] + b"\x1eRW\xf7\xff\xff\x0f\x00" * 400_000 + content[middle:])  # looks like records
    found = phases(tmp_path)
    assert found[0] == 0
    assert len(found) >= 2


def test_what_is_no_journal_is_refused(tmp_path):
    file = written(tmp_path, 1)
    file.write_bytes(b"something else")
    with pytest.raises(JournalError, match="is not a journal of this version"):
        phases(tmp_path)


def test_a_full_disk_is_an_error_and_leaves_whole_records(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.write(Phase(0, "train", 0.5))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]) if len(data) > 7 else _full())
    with pytest.raises(JournalError, match="cannot be written"):
        journal.write(Phase(1, "train", 0.5))
    monkeypatch.undo()
    journal.write(Phase(2, "train", 0.5))
    journal.close()
    assert phases(tmp_path) == [0, 2]


def _full() -> int:
    raise OSError(28, "No space left on device")


def test_files_rotate_at_checkpoints_and_old_ones_go_only_where_that_is_asked_for(tmp_path):
    for keep, steps in ((None, [0, 1, 2, 3, 4]), (2, [2, 3, 4])):
        directory = tmp_path / str(keep)
        journal = Journal(directory, JournalConfig(rotate_mib=1e-6, keep=keep))
        for step in range(5):
            journal.write(Phase(step, "train", 0.5))
            journal.checkpoint(step, frontier=step)
        journal.close()
        assert phases(directory) == steps


def test_files_rotate_at_the_ends_of_episodes_where_no_checkpoint_is_written(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino) or fsync(file))
    journal = Journal(tmp_path, JournalConfig(rotate_mib=1e-6, fsync_seconds=60))
    for episode in range(3):
        journal.write(begun(episode))
        journal.write(Phase(episode, "train", 0.5))
        journal.write(End(episode, "accepted", "", [], 0.0))
    journal.flush()
    found = journal_files(tmp_path)
    assert [path.name for path in found] == [f"000000-000{number}.journal" for number in range(4)]
    assert {path.stat().st_ino for path in found} <= set(flushed)  # those that ended, too
    journal.close()
    assert phases(tmp_path) == [0, 1, 2]


def test_files_of_the_processes_before_go_too_where_old_ones_are_not_kept(tmp_path):
    for _ in range(2):
        journal = Journal(tmp_path, JournalConfig(keep=1))
        journal.write(Phase(0, "train", 0.5))
        journal.close()
    journal = Journal(tmp_path, JournalConfig(rotate_mib=1e-6, keep=1))
    for step in range(1, 4):
        journal.write(Phase(step, "train", 0.5))
        journal.checkpoint(step, frontier=step)
    journal.close()
    assert phases(tmp_path) == [2, 3]


def test_a_file_whose_mark_could_not_be_written_takes_no_records(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    monkeypatch.setattr(os, "write", lambda file, data: _full())
    with pytest.raises(JournalError, match="cannot be written"):
        journal.write(Phase(0, "train", 0.5))
    monkeypatch.undo()
    journal.write(Phase(1, "train", 0.5))
    journal.close()
    assert phases(tmp_path) == [1]


def test_arguments_are_written_once_and_those_in_memory_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_ARGUMENTS_KEPT", 3)
    journal = Journal(tmp_path)
    numbers = [journal.arguments({"seed": seed}) for seed in (0, 0, 1, 2, 3, 4, 0)]
    assert len(journal._arguments) <= 3
    journal.close()
    written = {record.number: record.gconfig["seed"] for _, record in read_records(tmp_path)}
    assert [written[number] for number in numbers] == [0, 0, 1, 2, 3, 4, 0]
    assert len(written) == 6


def test_a_checkpoint_is_not_made_where_the_journal_does_not_reach_the_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.write(Phase(0, "train", 0.5))
    monkeypatch.setattr(os, "fsync", lambda file: _full())
    with pytest.raises(JournalError, match="did not reach the disk"):
        journal.checkpoint(1, frontier=1)
    journal.close()


def test_messages_may_hold_any_text(tmp_path):
    journal = Journal(tmp_path)
    journal.write(End(0, "failed", "ValueError: \ud83d", [], 0.0))
    journal.write(DurableResult(0, "tool", 1, "recorded", None, ["builtins:ValueError", "\ud83d"], None, 0.0, 0.0))
    journal.close()
    end, result = (record for _, record in read_records(tmp_path))
    assert (end.reason, result.error[1]) == ("ValueError: ?", "?")
    with pytest.raises(TypeError, match="no Unicode"):
        pack_value({"text": "\ud83d"})


def test_a_file_stays_while_a_checkpoint_needs_it_to_go_on_from(tmp_path):
    journal = Journal(tmp_path, JournalConfig(rotate_mib=1e-6, keep=1))
    journal.write(begun(journal.next_episode()))
    journal.write(End(0, "accepted", "", [], 0.0))
    for step in range(4):  # finished, and not trained
        journal.write(Phase(step, "train", 0.5))
        journal.checkpoint(step, frontier=0)
    assert phases(tmp_path) == [0, 1, 2, 3]
    journal.write(Phase(4, "train", 0.5))
    journal.checkpoint(4, frontier=1)  # which is not seen yet: the one before needs the episode
    assert phases(tmp_path) == [0, 1, 2, 3, 4]
    journal.write(Phase(5, "train", 0.5))
    journal.checkpoint(5, frontier=1)
    assert phases(tmp_path) == [4, 5]
    journal.close()


def test_files_of_the_process_before_stay_until_its_episodes_are_done(tmp_path):
    before = Journal(tmp_path, JournalConfig(keep=1))
    before.write(Phase(0, "train", 0.5))
    before.close()
    journal = Journal(tmp_path, JournalConfig(rotate_mib=1e-6, keep=1))
    journal.goes_on_to = 7
    for step, left in ((1, [0, 1]), (2, [0, 1, 2]), (3, [0, 2, 3]), (4, [3, 4])):
        journal.write(Phase(step, "train", 0.5))
        journal.checkpoint(step, frontier=7 if step < 3 else 8)
        assert phases(tmp_path) == left
    journal.close()


def test_generation_arguments_may_hold_text_of_the_environment(tmp_path):
    from rollwright import GenerationHyperparameters
    from rollwright.config.secrets import Secret

    journal = Journal(tmp_path, secrets={"s3cr3t-key"})
    assert journal.arguments(GenerationHyperparameters(stop=[Secret("s3cr3t-key"), "end"])) == 0
    journal.close()
    (file,) = tmp_path.glob("*.journal")
    assert b"s3cr3t-key" not in file.read_bytes()
    assert b"end" in file.read_bytes()


def test_what_the_config_marks_secret_is_not_in_the_file(tmp_path):
    journal = Journal(tmp_path, secrets={"s3cr3t-key", "x"})
    value = pack_value({"said": ["the key is s3cr3t-key", 5]})
    journal.write(DurableResult(0, "tool ask s3cr3t-key", 1, "recorded", value, None, None, 0.0, 0.0))
    journal.close()
    (file,) = journal_files(tmp_path)
    assert b"s3cr3t" not in file.read_bytes()
    ((_, record),) = read_records(tmp_path)
    assert record.name == "tool ask ***"
