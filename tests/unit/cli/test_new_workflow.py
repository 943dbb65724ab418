"""``rollwright new workflow``: what it writes runs, and it hides and overwrites nothing."""

import importlib.util
import subprocess
import sys

import pytest

from rollwright.cli.main import main


def test_names_that_cannot_be_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, reason in {
        "Two-Readers": "no name for a Python module",
        "class": "no name for a Python module",
        "rlvr": "is built in",
        "json": "is installed already",
        "sys": "is installed already",
        "zipimport": "is installed already",
    }.items():
        assert main(["new", "workflow", name]) == 1
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_directory_of_that_name_is_not_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "three_readers").mkdir()
    assert main(["new", "workflow", "three_readers", "--directory", "three_readers"]) == 0
    assert (tmp_path / "three_readers" / "three_readers.py").exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "two_readers.yaml").write_text("mine")
    assert main(["new", "workflow", "two_readers", "--directory", str(tmp_path)]) == 1
    assert "two_readers.yaml exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["two_readers.yaml"]


@pytest.mark.parametrize(
    ("has_pytest", "command"), [(True, ": cd x && python -m"), (False, ": cd x && pip install pytest && python -m")]
)
def test_the_command_of_the_test_works_as_it_is_printed(tmp_path, capsys, monkeypatch, has_pytest, command):
    """The quickstart's environment has no pytest."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found(name) if has_pytest or name != "pytest" else None)
    monkeypatch.chdir(tmp_path)
    assert main(["new", "workflow", "two_readers", "--directory", "x"]) == 0
    assert f"test_two_readers.py{command} pytest test_two_readers.py" in capsys.readouterr().out


@pytest.mark.slow
def test_the_test_that_is_written_passes(tmp_path, capsys, warm):
    assert main(["new", "workflow", "two_readers", "--directory", str(tmp_path / "mine")]) == 0
    printed = capsys.readouterr().out
    assert "TwoReadersWorkflow" in printed
    assert "rollwright run two_readers.yaml" in printed
    runner = tmp_path / "run_pytest.py"
    runner.write_text('import sys, pytest\nsys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "test_two_readers.py"]))\n')
    done = warm.run([runner], tmp_path / "mine", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    ruff = [sys.executable, "-m", "ruff", "check", "--line-length", "128", "."]
    if subprocess.run([*ruff[:3], "--version"], capture_output=True).returncode == 0:
        checked = subprocess.run([*ruff, "--select", "E,F,I,B"], cwd=tmp_path / "mine", capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
