"""The program that ``warm.Warm`` runs: it imports what commands of ``rollwright`` need, and starts them as forks of itself.

It reads one request a line and answers with one: ``["start", argv, directory, out, err, environment]`` gives a
process id, ``["poll", pid]`` the exit status or null. When its input ends, it kills what it started and ends. ``argv[0]`` is
the command ``rollwright`` or the path of a script.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import types

MODULES = (
    "rollwright.cli.run",
    "rollwright.trainers.stages",
    "rollwright.trainers.loops.rl",
    "rollwright.trainers.modes.explore",
    "rollwright.trainers.modes.train_from_store",
    "rollwright.trainers.modes.serve",
    "rollwright.data.arithmetic",
    "transformers.models.qwen3.modeling_qwen3",
    "openai",
)
WHERE_INSTALLED = ("peft", "matplotlib.figure", "matplotlib.backends.backend_agg")


def serve() -> list[str]:
    """Answer requests; returns only in the processes that it starts, with the arguments of theirs."""
    for name in MODULES:
        importlib.import_module(name)
    for name in WHERE_INSTALLED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    validation, experiment = (importlib.import_module(f"rollwright.config.{name}") for name in ("validation", "experiment"))
    validation.adapter_of(experiment.PPOConfig)  # kept by it
    gc.collect()
    gc.freeze()  # collections of the forks would copy all of it
    _answer("ready")
    started: set[int] = set()
    for line in sys.stdin:
        what, *given = json.loads(line)
        if what == "poll":
            (pid,) = given
            found, status = os.waitpid(pid, os.WNOHANG)
            started -= {found}
            _answer(os.waitstatus_to_exitcode(status) if found else None)
            continue
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            return _become(*given)
        started.add(pid)
        _answer(pid)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def _become(arguments: list[str], directory: str, out: str, err: str, environment: dict[str, str]) -> list[str]:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, log in ((1, out), (2, err)):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(directory)
    os.environ.update(environment)
    sys.path.insert(0, directory)
    sys.argv[:] = arguments
    return arguments


def _run_script(path: str) -> None:
    """Run a script as the main module, which stays until the process ends."""
    sys.path[0] = os.path.dirname(path)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    program, *rest = serve()
    if program == "rollwright":
        from rollwright.cli.main import main

        sys.exit(main(rest))
    _run_script(program)
