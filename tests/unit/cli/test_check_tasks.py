"""``rollwright check-tasks``: its table and its exit code."""

import pytest

from rollwright.cli.main import main

TEST = '#!/bin/sh\nif [ "$(cat answer.txt)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
FILES = {
    "task.toml": "",
    "instruction.md": "Write done.",
    "tests/test.sh": TEST,
    "solution/solve.sh": "echo done > answer.txt\n",
}


def write(path, **changed):
    for name, text in {**FILES, **changed}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


@pytest.fixture
def table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rollwright.tracking.logging._console", None)

    def lines():
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return lines


def test_good_tasks_end_with_0(tmp_path, table):
    write(tmp_path / "a/one")
    write(tmp_path / "two")
    assert main(["check-tasks", str(tmp_path)]) == 0
    shown = table()
    assert [line.split()[0] for line in shown[-3:-1]] == ["a/one", "two"]
    assert all(line.split()[1:3] == ["1", "0"] and line.endswith("ok") for line in shown[-3:-1])
    assert shown[-1] == "2 tasks: 2 ok, 0 not."


def test_any_other_outcome_is_named_and_ends_with_1(tmp_path, table):
    write(tmp_path / "good")
    write(tmp_path / "wrong", **{"solution/solve.sh": "true\n"})
    write(tmp_path / "refused", **{"task.toml": "[environment]\ngpus = 1\n"})
    assert main(["check-tasks", str(tmp_path), "--at-once", "3"]) == 1
    shown = "\n".join(table())
    assert "the reference solution scores 0, not 1" in shown
    assert "task.toml:2: environment.gpus" in shown
    assert "3 tasks: 1 ok, 2 not." in shown


def test_a_wrong_path_is_told(tmp_path, capsys):
    assert main(["check-tasks", str(tmp_path / "nowhere")]) == 1
    assert "no such directory" in capsys.readouterr().err
