"""Run Python source in a process of its own under limits on time, memory, files, processes and network.

**This is no security boundary.** It stops accidents (endless loops, huge allocations, stray files, forgotten servers) and
keeps the environment's secrets out of reach, but code that sets out to escape, with ``ctypes`` for instance, can. Run
hostile code in a container or a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollwright.errors import RewardError

_BOOTSTRAP = Path(__file__).with_name("sandbox_child.py")
_CHUNK = 65536


@dataclass(frozen=True)
class SandboxLimits:
    """What the code may use. The defaults suit tool calls and unit tests of small functions."""

    memory_bytes: int = 512 * 2**20  # address space
    file_bytes: int = 16 * 2**20  # each file that it writes
    open_files: int = 64
    processes: int = 0  # that it may start; threads are free
    network: bool = False
    output_bytes: int = 2**20  # kept of standard output and of standard error; the rest is thrown away


@dataclass(frozen=True)
class SandboxResult:
    """What came of a run."""

    stdout: str
    stderr: str
    exit_code: int | None  # None where it was killed for time
    timed_out: bool
    seconds: float
    output_truncated: bool = False

    @property
    def ok(self) -> bool:
        """True where the code ran to its end without an error."""
        return self.exit_code == 0 and not self.timed_out


async def run_python(
    source: str,
    stdin: str = "",
    timeout: float = 10.0,
    memory_bytes: int | None = None,
    *,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run ``source`` as a script in an empty temporary directory, which is removed afterwards.

    Args:
        source: Python source.
        stdin: what it reads from standard input.
        timeout: seconds of wall-clock time; the process and all that it started are then killed.
        memory_bytes: address space; None: that of ``limits``.
        limits: the other limits.

    Returns:
        Output, exit code and whether time ran out. Code that fails is no error here: its traceback is in ``stderr``.

    Raises:
        RewardError: a limit is out of range, or no process can be started.
    """
    limits = limits or SandboxLimits()
    memory_bytes = limits.memory_bytes if memory_bytes is None else memory_bytes
    if timeout <= 0 or memory_bytes < 2**26:
        raise RewardError(
            f"run_python: timeout is {timeout} s and memory {memory_bytes} bytes; allow more than 0 s and 64 MiB."
        )
    directory = tempfile.mkdtemp(prefix="sandbox-")
    settings = json.dumps({**asdict(limits), "memory_bytes": memory_bytes, "cpu_seconds": int(timeout) + 2})
    started = time.monotonic()
    try:
        await asyncio.to_thread(Path(directory, "main.py").write_text, source, "utf-8", "surrogatepass")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(_BOOTSTRAP),
            settings,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=directory,
            env=_environment(directory),
            start_new_session=True,
        )
        out, err = _Output(limits.output_bytes), _Output(limits.output_bytes)
        reading = asyncio.gather(out.read(process.stdout), err.read(process.stderr), _feed(process.stdin, stdin))
        try:
            await asyncio.wait_for(asyncio.gather(asyncio.shield(reading), process.wait()), timeout)
            timed_out = False
        except TimeoutError:
            timed_out = True
        finally:
            await _kill(process)
            await reading  # ends at once: nobody holds the other ends any more
    except OSError as error:
        raise RewardError(f"run_python cannot start a process: {error}; is the machine out of processes or memory?") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return SandboxResult(
        stdout=out.text,
        stderr=err.text,
        exit_code=None if timed_out else process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - started,
        output_truncated=out.truncated or err.truncated,
    )


def _environment(directory: str) -> dict[str, str]:
    """Nothing of ours but what Python and numerical libraries need: no keys, no proxies."""
    return {
        "PATH": os.defpath,
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


class _Output:
    """What a stream held, up to a limit; the rest is read and thrown away, so that the writer is not blocked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.truncated = False

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while chunk := await stream.read(_CHUNK):
            room = self._limit - len(self._kept)
            self._kept += chunk[:room]
            self.truncated = self.truncated or len(chunk) > room

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


async def _feed(stream: asyncio.StreamWriter | None, text: str) -> None:
    assert stream is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(text.encode("utf-8", "surrogatepass"))
        await stream.drain()
    stream.close()


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process and what is left of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
