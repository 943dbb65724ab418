"""The process inside a jail: a running Python that forks itself for each script. It uses only the standard library.

``jails`` sends this file to the jail as text, because the jail contains nothing of this package. A request is a line of JSON on standard
input: ``source``, ``stdin``, the ``limits``, the ``roots`` that scripts may write to (the first is the working directory) and ``filters``,
the seccomp programs that apply to scripts, in base 16. The answer is a line on standard output. The jail ends when its standard input ends.

In a separate process namespace (``bubblewrap``, a container) this is process 1: no script can kill, stop or trace it, and one call kills
all processes that a script left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

_IS_ALONE = os.getpid() == 1
_MOST_TASKS = 256  # threads and processes together
_MOST_FILES = 10_000
_LOOK_SECONDS = 0.05
_CHUNK = 65536
_READS_AT_THE_END = 64  # far more than a pipe holds
_PR_SET_DUMPABLE, _PR_SET_SECCOMP = 4, 22


def serve() -> dict[str, Any]:
    """Answer requests until standard input ends. **Returns only in a forked process**, which has to run the returned request."""
    if _IS_ALONE:  # not dumpable: scripts, which run as the same user, can neither trace this process nor access its memory
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives only signals that it handles
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ends, wake = os.pipe()
    os.set_blocking(ends, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
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
                _empty(root)
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
    for reads, _ in pipes:
        os.set_blocking(reads, False)
    return [reads for reads, _ in pipes], [*streams, *(writes for _, writes in pipes)]


def _watch(process: int, limits: dict[str, Any], roots: list[str], ends: int, reads: list[int]) -> dict[str, Any]:
    """Read a script's output until it ends or exceeds a limit; then kill all processes that it started."""
    started = looked = time.monotonic()
    kept = {descriptor: bytearray() for descriptor in reads}
    answer: dict[str, Any] = {"excess": "", "cut": False}

    def take(descriptor: int) -> bool:
        """Read at most a chunk of what is available. Returns False if nothing is available or the stream has ended."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        room = limits["output_bytes"] - len(kept[descriptor])
        kept[descriptor] += chunk[:room]
        answer["cut"] = answer["cut"] or len(chunk) > room
        return bool(chunk)

    poll = select.poll()
    for descriptor in (0, ends, *reads):
        poll.register(descriptor, select.POLLIN)
    while (status := _reaped(process, os.WNOHANG)) is None and not answer["excess"]:
        left = started + limits["seconds"] - time.monotonic()
        for descriptor, _ in poll.poll(1000 * max(0.0, min(left, _LOOK_SECONDS))):
            if descriptor == 0:  # the process that sent the request is gone
                _end(process)
                sys.exit()
            if descriptor == ends:
                os.read(ends, _CHUNK)
            elif not take(descriptor):
                poll.unregister(descriptor)
        if left <= 0:
            answer["excess"] = "time"
        elif _IS_ALONE and time.monotonic() - looked > _LOOK_SECONDS:
            looked, answer["excess"] = time.monotonic(), _excess(limits, roots)
    answer["seconds"] = time.monotonic() - started
    _end(process)
    killed = _reaped(process, 0)
    for descriptor in reads:  # everything that the ended script wrote is already in the pipes
        for _ in range(_READS_AT_THE_END):
            if not take(descriptor):
                break
        os.close(descriptor)
    answer["exit"] = os.waitstatus_to_exitcode(killed if status is None else status)  # type: ignore[arg-type]
    answer["out"], answer["err"] = (kept[descriptor].decode("utf-8", "replace") for descriptor in reads)
    return answer


def _reaped(script: int, options: int) -> int | None:
    """Reap ended children (without WNOHANG: wait for all children), and return the script's status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, options))[0]:
            status = ended[1] if ended[0] == script else status
    return status


def _end(script: int) -> None:
    """Kill the remaining processes of a script. Process 1 kills all others in one step that no fork can escape."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL) if _IS_ALONE else os.killpg(script, signal.SIGKILL)


def _excess(limits: dict[str, Any], roots: list[str]) -> str:
    """Describe a limit that the script and its descendants exceed together, if any; the kernel limits each process."""
    processes = tasks = pages = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError):
            if name.isdigit() and name != "1":
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                processes += fields[0] != "Z"
                tasks += int(fields[17])
                pages += int(fields[21])
    places = [os.statvfs(root) for root in roots]
    for count, most, what in (
        (processes - 1, limits["processes"], "processes"),
        (tasks, _MOST_TASKS, "threads and processes"),
        (pages * resource.getpagesize(), limits["memory_bytes"], "bytes of memory"),
        (sum(place.f_files - place.f_ffree for place in places), _MOST_FILES, "files"),
    ):
        if count > most:
            return f"more than {most} {what}"
    return ""


def _empty(directory: str) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _empty(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


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
    if _IS_ALONE:  # the kernel counts per user namespace; root is exempt
        wanted[resource.RLIMIT_NPROC] = _MOST_TASKS
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if _IS_ALONE:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
    for program in programs:
        kept = ctypes.create_string_buffer(program, len(program))
        pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
        if ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, 2, pointer):
            raise OSError("the filter of system calls was refused")


def _main() -> None:
    source = serve()["source"]
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    code = _exit_code(lambda: exec(compile(source, "main.py", "exec"), module.__dict__))
    os._exit(_exit_code(lambda: _finish(module)) or code)


def _exit_code(body: Callable[[], None]) -> int:
    """Run ``body`` and return the exit code that Python would give the script; printed tracebacks begin in the script."""
    try:
        body()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # raised by the script; SystemExit is handled above
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "main.py":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _finish(module: types.ModuleType) -> None:
    """Do the parts of an interpreter's shutdown that a script can observe. The other parts would take 6 ms of processor time."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name in reversed(list(module.__dict__)):
        module.__dict__.pop(name)  # runs destructors and writes files
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


if __name__ == "__main__":
    _main()
