"""What a call of a Python tool costs: in the sandbox, in a plain process of our own, and as a new Python.

    python benchmarks/sandbox.py [--calls 200] [--at-once 4] [--json FILE]

The script prints a sum, so nearly all time is overhead. ``one_after_another`` is one episode that makes many calls;
``episodes`` are as many episodes of one call each, each with a jail of its own; ``at_once`` are several episodes side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from report import Report

from rollwright.processes.sandbox import check_sandbox, run_python, sandboxed

SCRIPT = "print(6 * 7)"


async def plain_python() -> None:
    """A new interpreter for the call, without any limit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", SCRIPT, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert (await process.communicate())[0] == b"42\n"


async def sandboxed_call() -> None:
    """A call in the jail of the episode around it."""
    result = await run_python(SCRIPT)
    assert result.stdout == "42\n", result


async def seconds(call: Callable[[], Awaitable[None]], calls: int) -> list[float]:
    """How long each of ``calls`` took, one after another."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return taken


async def measure(report: Report, name: str, calls: int, at_once: int) -> float:
    """The rows of a sandbox; ``python`` is a new interpreter for each call. Returns the median of one call, in seconds."""
    call = plain_python if name == "python" else sandboxed_call

    async def episode(count: int) -> list[float]:
        with sandboxed(None if name == "python" else name):
            return await seconds(call, count)

    if name != "python":
        check_sandbox(name)
    await episode(10)
    alone = await episode(calls)
    started = time.perf_counter()
    await asyncio.gather(*(episode(calls // at_once) for _ in range(at_once)))
    together = calls / (time.perf_counter() - started)
    episodes = await seconds(lambda: episode(1), max(10, calls // 5))  # type: ignore[arg-type, return-value]
    report.row(
        calls=name,
        one_ms=round(median(alone) * 1e3, 2),
        one_ms_p95=round(sorted(alone)[int(0.95 * len(alone))] * 1e3, 2),
        **{f"per_second_{at_once}_at_once": round(together, 1)},
        episode_of_one_call_ms=round(median(episodes) * 1e3, 2),
    )
    return median(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--sandboxes", nargs="+", default=["bubblewrap", "unsafe"], help="such as docker")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    report = Report("sandbox")

    async def all_of_them() -> dict[str, float]:
        names = ["python", *arguments.sandboxes]
        return {name: await measure(report, name, arguments.calls, arguments.at_once) for name in names}

    taken = asyncio.run(all_of_them())
    for name in arguments.sandboxes:
        report.ratio(f"python/{name}", taken["python"] / taken[name])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
