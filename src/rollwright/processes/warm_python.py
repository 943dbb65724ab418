"""Runs a Python program many times without its imports: one process imports its modules, and forks for each run.

It runs inside a box and uses only the standard library; ``warm_boxes`` sends it there as text. Its arguments are the program's name and a
JSON list of modules; it starts itself again with the Python that the program's first line names. Its first line of output is ``{}``, or says
in ``error`` why it ends. Then a byte ``r`` on standard input has it fork a keeper, which reads the request (4 bytes of length, JSON), starts
the program in another fork, and answers with a line of JSON when the program has ended with everything that it started. A byte ``s`` ends
the program. Only the keeper reads requests and output, so the memory of the process that goes on holds nothing of any run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from typing import Any

from rollwright.processes.inside import (
    CHUNK,
    Outputs,
    below,
    exit_code,
    finish,
    other_processes,
    reaped,
    set_dumpable,
    wake_descriptor,
)
from rollwright.processes.tree import adopt_orphans, die_with_parent

RUN, STOP = b"r", b"s"
_SWEEP_SECONDS = 2.0


def python_of(script: str) -> str:
    """Return the Python that a script's first lines name (pip writes two if the path is long), or an empty string."""
    with open(script, "rb") as file:
        head = file.read(1024)
    lines = head.split(b"\n")[:2] if head.startswith(b"#!/bin/sh\n") else head.split(b"\n")[:1]
    found = re.search(rb"(/[^\s'\"]*python[\d.]*)(?:[\s'\"]|$)", b"\n".join(lines)) if head.startswith(b"#!") else None
    name = re.fullmatch(rb"#!\s*/usr/bin/env\s+(python[\d.]*)\s*", lines[0])
    if name:
        return shutil.which(os.fsdecode(name[1])) or ""
    return os.fsdecode(found[1]) if found else ""


def serve(modules: list[str]) -> dict[str, Any]:
    """Import the modules, and answer requests until standard input ends. **Returns only in a forked process**, with its request."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a module may also end the process
            _tell(answers, error=f"{name} cannot be imported: {type(error).__name__}: {error}")
            os._exit(1)
        if len(os.listdir("/proc/self/task")) > 1:
            _tell(answers, error=f"the import of {name} starts a thread, which forks would lack")
            os._exit(1)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    set_dumpable(False)  # programs, which run as the same user, cannot change this process
    gc.collect()
    gc.freeze()  # existing objects stay shared with all forks as long as no collection touches them
    _tell(answers)
    while byte := os.read(requests, 1):
        if byte != RUN:
            continue  # a request to stop that came after the program's end
        keeper = os.fork()
        if keeper == 0:
            return _keep(requests, answers, null)
        os.waitpid(keeper, 0)
        os.write(answers, b"\n")
    os._exit(0)


def _tell(descriptor: int, **answer: Any) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(json.dumps(answer).encode() + b"\n")


def _keep(requests: int, answers: int, null: int) -> dict[str, Any]:
    """Read a request, run the program, and answer. **Returns in the program's process only.**"""
    try:
        die_with_parent()
        adopt_orphans()
        ends = wake_descriptor()
        with os.fdopen(os.dup(requests), "rb", 0) as file:
            body, size = bytearray(), int.from_bytes(file.read(4), "big")
            while len(body) < size:
                body += file.read(size - len(body)) or os._exit(1)
        request = json.loads(body)
        with tempfile.TemporaryFile() as stdin:
            stdin.write(request["stdin"].encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            pipes = [os.pipe(), os.pipe()]
            process = os.fork()
            if process == 0:
                _become(request, [stdin.fileno(), pipes[0][1], pipes[1][1]])
                for descriptor in (requests, answers, null, ends, *pipes[0], *pipes[1]):
                    os.close(descriptor)
                return request
        for _, writes in pipes:
            os.close(writes)
        answer = _watch(process, request, requests, ends, [reads for reads, _ in pipes])
        with os.fdopen(os.dup(answers), "wb") as file:
            file.write(json.dumps(answer).encode())
    except BaseException:  # a keeper must not become a second server
        os._exit(1)
    os._exit(0)


def _watch(process: int, request: dict[str, Any], requests: int, ends: int, reads: list[int]) -> dict[str, Any]:
    """Read a program's output until it ends, takes too long or is to stop; then kill all processes that it started."""
    started = time.monotonic()
    outputs = Outputs(reads, request["output_bytes"])
    answer: dict[str, Any] = {"excess": ""}
    poll = select.poll()
    for descriptor in (requests, ends, *reads):
        poll.register(descriptor, select.POLLIN)
    while (status := reaped(os.WNOHANG).get(process)) is None and not answer["excess"]:
        left = started + request["seconds"] - time.monotonic()
        if left <= 0:
            answer["excess"] = "time"
        for descriptor, _ in poll.poll(1000 * max(0.0, left)):
            if descriptor == requests:  # a stop, or the end of the process that sent the request
                os.read(requests, 1)
                answer["excess"] = "stopped"
            elif descriptor == ends:
                os.read(ends, CHUNK)
            elif not outputs.take(descriptor):
                poll.unregister(descriptor)
    answer["seconds"] = time.monotonic() - started
    killed = _end_all().get(process, 0)
    answer["exit"] = None if answer["excess"] else os.waitstatus_to_exitcode(killed if status is None else status)
    answer["out"], answer["err"] = outputs.finish()
    answer["cut"] = outputs.is_cut
    return answer


def _end_all() -> dict[int, int]:
    """Kill and reap all descendants, and return their statuses. The reset of the box gets those that are quicker."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + _SWEEP_SECONDS
    while (left := below(other_processes(), [os.getpid()])) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        statuses |= reaped(os.WNOHANG)
        time.sleep(0.001)
    return statuses


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Drop the keeper's state."""
    os.close(signal.set_wakeup_fd(-1))
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python sets it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    set_dumpable(True)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def _run(request: dict[str, Any], script: str) -> None:
    """Run a script as Python would, and end this process."""
    sys.argv = [script, *request["arguments"]]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)

    def body() -> None:
        with open(script, "rb") as file:
            text = file.read()
        exec(compile(text, script, "exec"), module.__dict__)

    code = exit_code(body, script)
    os._exit(exit_code(lambda: finish(module), script) or code)


def main() -> None:
    """See the module."""
    program, modules, *found = sys.argv[1:]
    if found:
        sys.path[0] = os.path.dirname(found[0])
        request = serve(json.loads(modules))
        try:
            _run(request, found[0])
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    script = shutil.which(program)
    python = python_of(script) if script else ""
    if not script or not python:
        _tell(1, error=f"{script} is no Python script" if script else f"{program} is not there")
        os._exit(1)
    text = sys.orig_argv[sys.orig_argv.index("-c") + 1]
    os.execv(python, [python, "-c", text, program, modules, script])


if __name__ == "__main__":
    main()
