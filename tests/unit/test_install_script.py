"""``scripts/install.py``: uv is handed pip's settings, and pip installs where uv cannot."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("install_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTING = r"""
:env:.find-links='/wheels'
:env:.disable-pip-version-check='1'
global.extra-index-url='\nhttps://one/simple\nhttps://two/simple'
global.find-links='/other'
global.index-url='https://main/simple'
install.trusted-host='main'
"""


def test_pips_settings_become_options_of_uv(script):
    options = script.uv_options(script.pip_settings(LISTING))
    pairs = list(zip(options[::2], options[1::2], strict=True))
    assert pairs == [
        ("--default-index", "https://main/simple"),
        ("--index", "https://one/simple"),
        ("--index", "https://two/simple"),
        ("--find-links", "/wheels"),  # the environment wins
        ("--allow-insecure-host", "main"),
        ("--index-strategy", "unsafe-best-match"),
    ]
    assert "--no-index" in script.uv_options({"no-index": ["true"]})


class Commands:
    """Stands for the programs that are called: notes them, and answers by what they contain."""

    def __init__(self, **answers):
        self.called, self.answers = [], answers

    def run(self, command, **options):
        self.called.append(command)
        status, text = next((answer for name, answer in self.answers.items() if name.replace("_", "-") in command), (0, ""))
        return SimpleNamespace(returncode=status, stdout=text, stderr=text)

    def names(self):
        return ["uv" if command[0] == "/bin/uv" else command[4] for command in self.called]


def patched(script, monkeypatch, commands, uv="/bin/uv", gpu=False):
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=commands.run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(script, "find_uv", lambda: uv)
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.delenv("ROLLWRIGHT_TORCH", raising=False)


def test_where_only_the_cuda_build_is_offered_the_cpu_build_is_asked_for(script, monkeypatch, capsys):
    for dry_run, gpu, has_backend in [("+ nvidia-cublas==1", False, True), ("+ torch==2+cpu", False, False), ("", True, False)]:
        commands = Commands(__dry_run=(0, dry_run))
        patched(script, monkeypatch, commands, gpu=gpu)
        assert script.install(["-e", "."]) == 0
        last = commands.called[-1]
        assert ("--torch-backend" in last) == has_backend
        assert last[-2:] == ["-e", "."]
        assert any("--dry-run" in command for command in commands.called) == (not gpu)
    assert "CPU build" in capsys.readouterr().err


def test_pip_installs_where_uv_is_not_or_fails(script, monkeypatch, capsys):
    commands = Commands()
    patched(script, monkeypatch, commands, uv=None)
    assert script.install(["x"]) == 0
    assert commands.names() == ["install"]
    commands = Commands(__python=(2, "no solution"))
    patched(script, monkeypatch, commands)
    assert script.install(["x"]) == 0
    assert commands.names()[-2:] == ["uv", "install"]
    assert "no solution" in capsys.readouterr().err


def test_uv_that_cannot_be_had_is_said(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=Commands(uv=(1, "no index has it")).run, PIPE=None))
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    monkeypatch.setattr(script.sys, "executable", str(tmp_path / "python"))
    assert script.find_uv() is None
    assert "pip installs, which takes minutes: no index has it" in capsys.readouterr().err
