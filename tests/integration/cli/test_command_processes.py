"""The command as a process of its own."""

import os
import subprocess
import sys

COMMAND = [sys.executable, "-m", "rollwright"]


def run(*arguments, **environment):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=200, env={**os.environ, **environment}
    )


#: Whatever takes a while to import and says nothing about commands.
HEAVY = ("torch", "transformers", "datasets", "numpy", "yaml", "pydantic", "matplotlib", "fastapi", "httpx2", "sqlalchemy")


def test_help_lists_every_command_and_is_quick_for_it_imports_nothing_heavy():
    from rollwright.cli.main import COMMANDS

    done = run("--help", COLUMNS="120")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    probe = (
        f"import sys; from rollwright.cli.main import main; main(['--help']); print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.endswith("[]\n")


def test_failures_exit_with_one(tmp_path):
    done = run("run", str(tmp_path / "none.yaml"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no config file")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_failure_to_talk_about():
    done = subprocess.run(f"{sys.executable} -m rollwright config schema | head -1", shell=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "{\n"
