"""The process inside a jail: a running Python that forks itself for each script. It uses only the standard library.

``jails`` sends this file and ``inside`` to the jail as text, because the jail contains nothing of this package. A request is a line of JSON on
standard input: ``source``, ``stdin``, the ``limits``, the ``roots`` that scripts may write to (the first is the working directory) and ``filters``,
the seccomp programs that apply to scripts, in base 16. The answer is a line on standard output. The jail ends when its standard input ends.

In a separate process namespace (``bubblewrap``, a container) this is process 1; see ``inside``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from typing import Any

from rollwright.processes.inside import (
    CHUNK,
    IS_ALONE,
    Outputs,
    empty,
    exit_code,
    files_in,
    finish,
    first_excess,
    other_processes,
    reaped,
    restrict,
    set_dumpable,
    wake_descriptor,
)

MOST_TASKS = 256  # threads and processes together
_MOST_FILES = 10_000
_LOOK_SECONDS = 0.05


def serve() -> dict[str, Any]:
    """Answer requests until standard input ends. **Returns only in a forked process**, which has to run the returned request."""
    if IS_ALONE:  # scripts, which run as the same user, can neither trace this process nor access its memory
        set_dumpable(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives only signals that it handles
    ends = wake_descriptor()
    gc.freeze()  # existing objects stay shared with all scripts as long as no collection touches them
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            reads, streams = _streams(request)
            process = os.fork()
            if process == 0:
                _become_script(request, streams)
                return request
            for stream in streams:
                os.close(stream)
            answer = _watch(process, request["limits"], request["roots"], ends, reads)
            for root in request["roots"]:
                empty(root)
        except (OSError, RecursionError) as error:
            answer["broken"] = str(error)  # the jail ends, because no other script may see this script's files
        print(json.dumps(answer), flush=True)
    sys.exit()


def _streams(request: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the read ends of standard output and error, and the script's standard input, output and error."""
    directory = request["roots"][0]
    for name, text in (("main.py", request["source"]), (".stdin", request["stdin"])):
        with open(os.path.join(directory, name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    streams = [os.open(file.name, os.O_RDONLY)]
    os.unlink(file.name)
    pipes = [os.pipe(), os.pipe()]
    return [reads for reads, _ in pipes], [*streams, *(writes for _, writes in pipes)]


def _watch(process: int, limits: dict[str, Any], roots: list[str], ends: int, reads: list[int]) -> dict[str, Any]:
    """Read a script's output until it ends or exceeds a limit; then kill all processes that it started."""
    started = looked = time.monotonic()
    outputs = Outputs(reads, limits["output_bytes"])
    answer: dict[str, Any] = {"excess": ""}
    poll = select.poll()
    for descriptor in (0, ends, *reads):
        poll.register(descriptor, select.POLLIN)
    while (status := reaped(os.WNOHANG).get(process)) is None and not answer["excess"]:
        left = started + limits["seconds"] - time.monotonic()
        for descriptor, _ in poll.poll(1000 * max(0.0, min(left, _LOOK_SECONDS))):
            if descriptor == 0:  # the process that sent the request is gone
                _end(process)
                sys.exit()
            if descriptor == ends:
                os.read(ends, CHUNK)
            elif not outputs.take(descriptor):
                poll.unregister(descriptor)
        if left <= 0:
            answer["excess"] = "time"
        elif IS_ALONE and time.monotonic() - looked > _LOOK_SECONDS:
            looked, answer["excess"] = time.monotonic(), _excess(limits, roots)
    answer["seconds"] = time.monotonic() - started
    _end(process)
    killed = reaped(0).get(process)
    answer["exit"] = os.waitstatus_to_exitcode(killed if status is None else status)  # type: ignore[arg-type]
    answer["out"], answer["err"] = outputs.finish()
    answer["cut"] = outputs.is_cut
    return answer


def _end(script: int) -> None:
    """Kill the remaining processes of a script. Process 1 kills all others in one step that no fork can escape."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL) if IS_ALONE else os.killpg(script, signal.SIGKILL)


def _excess(limits: dict[str, Any], roots: list[str]) -> str:
    """Describe a limit that the script and its descendants exceed together, if any; the kernel limits each process."""
    found = other_processes().values()
    return first_excess(
        (
            (sum(not process.is_zombie for process in found) - 1, limits["processes"], "processes"),
            (sum(process.tasks for process in found), MOST_TASKS, "threads and processes"),
            (sum(process.memory for process in found), limits["memory_bytes"], "bytes of memory"),
            (files_in(roots)[0], _MOST_FILES, "files"),
        )
    )


# ------------------------------------------------------------------ in the forked process


def _become_script(request: dict[str, Any], streams: list[int]) -> None:
    """Drop the server's state and restrict this process's rights."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
        os.closerange(3, 1024)
        directory = request["roots"][0]
        os.chdir(directory)
        os.environ.update(HOME=directory, TMPDIR=directory)
        _limit(request["limits"], [bytes.fromhex(program) for program in request["filters"]])
    except BaseException:  # a failed script process must not become a second server
        traceback.print_exc()
        os._exit(1)


def _limit(limits: dict[str, Any], programs: list[bytes]) -> None:
    wanted = {
        resource.RLIMIT_CPU: int(limits["seconds"]) + 2,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: limits["memory_bytes"],
    }
    if IS_ALONE:  # the kernel counts per user namespace; root is exempt
        wanted[resource.RLIMIT_NPROC] = MOST_TASKS
    restrict(wanted, programs)


def _main() -> None:
    source = serve()["source"]
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    code = exit_code(lambda: exec(compile(source, "main.py", "exec"), module.__dict__), "main.py")
    os._exit(exit_code(lambda: finish(module), "main.py") or code)


if __name__ == "__main__":
    _main()
