"""What version 0.1.0 wrote is read: a run directory, its config, its recovery checkpoint, its stores.

``tests/fixtures/run-0.1.0.tar.xz`` was written by ``rollwright run config.yaml`` of that version: two steps of two groups of two samples, of a
model of one layer, and one group in each kind of store.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from rollwright import load_stages
from rollwright.cli.main import main
from rollwright.store import ExperienceStore, FileStore
from rollwright.viewer.run import Run

FIXTURE = Path(__file__).parents[2] / "fixtures" / "run-0.1.0.tar.xz"
RUN = Path("runs/old/run")


@pytest.fixture
def old(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tarfile.open(FIXTURE) as packed:
        packed.extractall(tmp_path, filter="data")
    return RUN


def test_its_run_is_shown_and_whole(old, capsys):
    with Run(old) as run:
        run.refresh()
        assert run.missing() == []
        assert [(step["step"], step["reward"], step["samples"]) for step in run.steps()] == [(1, 0.0, 4), (2, 0.0, 4)]
        assert run.search()["total"] == 10
        assert run.sample("0/0")["rows"][0]["ids"] == [4, 7, 16, 9, 19, 2, 5, 30, 22, 24]
        assert run.config["actor.optimizer.lr"] == 1e-3
        assert run.info()["state"] == "finished"
    assert main(["check", str(old)]) == 0


def test_a_byte_of_its_journal_that_is_damaged_is_named(old, capsys):
    (file,) = old.glob("journal/*.journal")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["check", str(old)]) == 1
    assert "journal/000000-0000.journal: bytes" in capsys.readouterr().out
    with Run(old) as run:
        run.refresh()
        assert run.search()["total"] >= 9


def test_its_stores_are_read(old):
    for store in (ExperienceStore(f"sqlite:///{old}/experiences.db", create=False), FileStore(old / "experiences.jsonl")):
        with store:
            (group,) = store.groups()
            assert (group.name, group.experiences[0].tokens.tolist(), group.experiences[0].reward) == (
                "task/4",
                [1, 2, 3, 11],
                0.75,
            )


def test_its_config_is_read_and_its_run_trained_on(old, capsys):
    """Two steps of then, two of now: the files go on in today's form."""
    assert [stage.kind for stage in load_stages("config.yaml")] == ["rl"]
    assert main(["run", "config.yaml", "recover.mode=resume", "total_train_steps=4"]) == 0
    with Run(old) as run:
        run.refresh()
        assert run.missing() == []
        assert [(step["step"], step["samples"]) for step in run.steps()] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert main(["check", str(old)]) == 0
