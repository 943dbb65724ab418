"""Examples are run by their names, from a checkout and from a wheel."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import rollwright
from rollwright.cli import examples
from rollwright.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_example_is_listed_with_what_it_does(capsys):
    assert main(["examples"]) == 0
    listed = capsys.readouterr().out.splitlines()
    files = {
        str(path.relative_to(REPOSITORY / "examples")).removesuffix(".yaml") for path in REPOSITORY.glob("examples/**/*.yaml")
    }
    assert {line.split()[0] for line in listed} == files
    assert all(len(line.split()) > 4 for line in listed)


def test_it_is_found_by_name_in_an_empty_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "multi_turn", "modes/arithmetic", "quickstart.yaml"):
        assert main(["config", "check", name]) == 0, name
    assert "nothing is wrong" in capsys.readouterr().out


def test_a_file_of_that_name_wins_and_the_message_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("seed: x\n")
    with caplog.at_level("INFO", logger="rollwright"):
        monkeypatch.setattr(examples.logger, "propagate", True)
        import logging

        logging.getLogger("rollwright").propagate = True
        assert examples.find_config("quickstart") == "quickstart"
    assert "quickstart is the file in" in caplog.text


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quickstrat", "did you mean 'quickstart'?"),
        ("mine.yaml", "there is no config file mine.yaml in"),
        ("zzz", "`rollwright examples` lists them"),
    ],
)
def test_what_is_neither_is_refused(tmp_path, monkeypatch, capsys, name, told):
    monkeypatch.chdir(tmp_path)
    assert main(["run", name]) == 1
    assert told in capsys.readouterr().err


def test_the_wheel_holds_every_file_that_an_example_needs(tmp_path, monkeypatch):
    entries = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    held = {(place, path) for place, patterns in entries.items() for pattern in patterns for path in REPOSITORY.glob(pattern)}
    needed = {path for ending in ("yaml", "py") for path in REPOSITORY.glob(f"examples/**/*.{ending}")}
    assert {path for _, path in held} == needed
    for place, path in held:
        assert place == str(Path("share/rollwright") / path.parent.relative_to(REPOSITORY))

    class Installed(str):
        def locate(self) -> Path:
            return tmp_path / self.partition("../")[2]

    files = [Installed(f"../../../{place}/{path.name}") for place, path in held]
    monkeypatch.setattr(rollwright, "__file__", str(tmp_path / "lib/python/site-packages/rollwright/__init__.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: files)
    assert {"quickstart", "modes/arithmetic"} <= examples.shipped_examples().keys()
    assert not any("worlds" in name for name in examples.shipped_examples())
