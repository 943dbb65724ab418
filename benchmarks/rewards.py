"""What a reward call costs beside the function itself: one after another, and 2,000 at once.

    python benchmarks/rewards.py [--json FILE]

The function adds two numbers, so all time is overhead. The peer is the standard library's ``ProcessPoolExecutor`` with the
same number of workers, which has no limit that it can enforce.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from report import Report

from rollwright import AsyncRewardWrapper

IDS = list(range(500))
ROW = {"answer": "42", "question": "What is six times seven?"}
CALLS = 2000


def reward(prompt, completion, prompt_ids, completion_ids, answer=None, **columns):
    return float(completion == answer)


async def seconds_per_call(call, at_once: bool) -> float:
    await asyncio.gather(*(call() for _ in range(50)))
    started = time.perf_counter()
    if at_once:
        await asyncio.gather(*(call() for _ in range(CALLS)))
    else:
        for _ in range(CALLS):
            await call()
    return (time.perf_counter() - started) / CALLS


async def measure(report: Report) -> None:
    wrapper = AsyncRewardWrapper(reward, max_workers=2)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()

        async def ours() -> float:
            return await wrapper("a prompt", "42", IDS, IDS, **ROW)

        async def peer() -> float:
            return await loop.run_in_executor(pool, reward, "a prompt", "42", IDS, IDS, "42")

        for size, at_once in (("one_after_another", False), ("at_once", True)):
            own, other = await seconds_per_call(ours, at_once), await seconds_per_call(peer, at_once)
            report.row(calls=size, ours_ms=round(own * 1e3, 3), process_pool_executor_ms=round(other * 1e3, 3))
            report.ratio(f"process_pool_executor/{size}", other / own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    report = Report("rewards")
    asyncio.run(measure(report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
