"""Boxes that stay, with the imports of a Python program done: each episode gets a reset box in which the program starts at once.

``warm_python`` is the process inside. It is out of the reach of an episode's programs, and its memory holds nothing of any episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

from rollwright.errors import SandboxError, WorkflowError
from rollwright.processes.box import Box, BoxProcess, ExecResult
from rollwright.processes.jails import bundle
from rollwright.processes.warm_python import RUN, STOP
from rollwright.tracking.logging import getLogger

logger = getLogger("boxes")

_IMPORT_SECONDS = 300.0
_GRACE_SECONDS = 15.0  # wait for an answer after a program's time limit, which the process inside enforces
_STOP_SECONDS = 10.0  # for a program that was told to stop


class WarmBox:
    """A box, and a process in it that runs a Python program without its imports."""

    def __init__(self, box: Box, process: BoxProcess) -> None:
        self.box = box
        self._process = process
        self._received = bytearray()
        self._is_spent = False

    async def exec(
        self, arguments: Sequence[str], *, timeout: float, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run the program in the working directory; see :meth:`Box.exec`.

        Args:
            arguments: the command line without the program.
            timeout: seconds of wall-clock time.
            stdin: standard input.
            env: environment variables in addition to those that the modules were imported with.

        A program that ends the process that started it is reported like one that a limit ended.

        Raises:
            SandboxError: the process was gone before.
        """
        request = {
            "arguments": list(arguments),
            "cwd": self.box.workdir,
            "env": dict(env or {}),
            "stdin": stdin,
            "seconds": timeout,
            "output_bytes": self.box.spec.limits.output_bytes,
        }
        body = json.dumps(request).encode()
        started = asyncio.get_running_loop().time()
        await self._process.write(RUN + len(body).to_bytes(4, "big") + body)
        self._is_spent = True
        try:
            answer = await asyncio.wait_for(self.answer(), timeout + _GRACE_SECONDS)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._process.write(STOP)
                await asyncio.wait_for(self.answer(), _STOP_SECONDS)
                self._is_spent = False
            raise
        except (SandboxError, TimeoutError):
            seconds = asyncio.get_running_loop().time() - started
            return ExecResult("", "", None, seconds, "the end of the process that started the program")
        self._is_spent = False
        return ExecResult(answer["out"], answer["err"], answer["exit"], answer["seconds"], answer["excess"], answer["cut"])

    async def answer(self) -> dict[str, Any]:
        """Read the next line of the process.

        Raises:
            SandboxError: it was ended, by a limit of the box or by a program.
        """
        while b"\n" not in self._received:
            if not (part := await self._process.read()):
                raise SandboxError("the process that starts the program has ended.")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError as error:
            raise SandboxError("the process that watched the program has ended.") from error

    async def reset(self) -> None:
        """Make the box ready for the next episode.

        Raises:
            SandboxError: the box cannot be used again.
        """
        if self._is_spent:
            raise SandboxError("a program has ended or stopped the process that starts it.")
        await self.box.reset(keep=self._process)


class WarmBoxes:
    """Lends boxes, and keeps them for the next episodes until the event loop ends.

    Args:
        make: makes a box that has not been started.
        command: returns the command line that runs a command with the program in its ``PATH``.
        program: name of the program, a Python script.
        modules: what is imported once.
        env: environment variables of the imports.
        most: number of boxes. Further episodes wait for one.
    """

    def __init__(
        self,
        make: Callable[[], Box],
        command: Callable[[Sequence[str]], list[str]],
        program: str,
        modules: Sequence[str],
        env: Mapping[str, str],
        most: int,
    ) -> None:
        self._make, self._command, self._program, self._modules, self._env, self._most = (
            make,
            command,
            program,
            modules,
            env,
            most,
        )
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Kept] = WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[WarmBox]:
        """Lend a box that nobody else uses, as if it were new.

        Raises:
            WorkflowError: the program is no Python script, or a module cannot be imported.
            SandboxError: no box can be started.
        """
        loop = asyncio.get_running_loop()
        if (kept := self._loops.get(loop)) is None:
            kept = self._loops[loop] = _Kept(self._most)
        async with kept.places:
            warm = kept.idle.pop() if kept.idle else await self._started()
            is_clean = False
            try:
                yield warm
                try:
                    await warm.reset()
                    is_clean = True
                except SandboxError as error:
                    logger.info("a box is not used again: %s", error)
            finally:
                if is_clean and not kept.is_over:
                    kept.idle.append(warm)
                else:
                    await warm.box.stop()

    async def _started(self) -> WarmBox:
        box = self._make()
        await box.start()
        try:
            command = [
                "python3",
                "-I",
                "-c",
                bundle("tree", "inside", "warm_python"),
                self._program,
                json.dumps(list(self._modules)),
            ]
            warm = WarmBox(box, await box.open(self._command(command), cwd="/", env=self._env))
            said = await asyncio.wait_for(warm.answer(), _IMPORT_SECONDS)
            if "error" in said:
                raise WorkflowError(
                    f"{self._program}: {said['error']}, so it cannot be started from a process that has imported "
                    f"{', '.join(self._modules)}: change the modules of the agent's `imports`, or leave them out (imports: [])."
                )
            await warm.reset()  # removes what the imports have written
            return warm
        except TimeoutError as error:
            await box.stop()
            raise SandboxError(f"{self._program}: its imports took more than {_IMPORT_SECONDS:g} s.") from error
        except BaseException:
            await box.stop()
            raise


class _Kept:
    """The boxes of one event loop. A task of the loop stops them when the loop's owner cancels its tasks."""

    def __init__(self, most: int) -> None:
        self.places = asyncio.Semaphore(most)
        self.idle: list[WarmBox] = []
        self.is_over = False
        self._end = asyncio.get_running_loop().create_task(self._stop_at_the_end(), context=Context())

    async def _stop_at_the_end(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_over = True
            await asyncio.gather(*(warm.box.stop() for warm in self.idle), return_exceptions=True)
