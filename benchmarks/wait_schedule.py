"""What the admission rule alone allows: the schedule of a run whose samples wait and cost no computation.

    python benchmarks/wait_schedule.py [--staleness 0,1,2,4,8] [--steps 56] [--seeds 1,2,3] [--json FILE]

A discrete-event replay with the executor's own :class:`Staleness`, the waits of ``async_rollouts.py`` and a fixed time for
training. It takes a second where the run takes half an hour, and says what a measured ratio can be compared with.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections import deque
from pathlib import Path

from async_training import tool_wait
from report import Report

from rollwright.rollout.scheduler import Staleness
from rollwright.rollout.task_group import GroupState


def seconds_a_step(
    *, steps: int, prompts: int, group: int, concurrency: int, staleness: int, seed: int, train: float, skip: int
) -> float:
    """Seconds between two publications, the first ``skip`` left out.

    Args:
        steps: publications.
        prompts: groups in a batch.
        group: samples in a group.
        concurrency: samples at once.
        staleness: ``max_head_offpolicyness``, under ``on_stale: wait``.
        seed: of the waits.
        train: seconds from a batch's leaving to its publication.
        skip: publications that are not timed.
    """
    rule = Staleness(staleness, batch=prompts)
    events: list[tuple[float, int, int]] = []  # (time, ordinal of the group or -1 for a publication, sample)
    waiting: deque[tuple[int, int]] = deque()
    missing: dict[int, int] = {}  # group -> samples that have not ended
    admitted: list[int] = []
    ready: list[int] = []  # in order of completion
    now, active, published = 0.0, 0, [0.0]
    while len(published) <= steps:
        while active < concurrency:
            if waiting:
                ordinal, index = waiting.popleft()
                heapq.heappush(events, (now + tool_wait(seed, ordinal, index), ordinal, index))
                active += 1
            elif rule.capacity >= 1:
                missing[len(admitted)] = group
                waiting.extend((len(admitted), index) for index in range(group))
                admitted.append(rule.version)
                rule.move(rule.version, GroupState.QUEUED, GroupState.RUNNING)
            else:
                break
        if not rule.groups[GroupState.DELIVERED] and len(ready) >= prompts:
            picked = sorted(ready, key=admitted.__getitem__)[:prompts]
            ages = [admitted[ordinal] for ordinal in picked]
            older_runs = any(admitted[ordinal] < max(ages) for ordinal in missing)
            if not (older_runs and rule.must_wait(ages, prompts)):
                ready = [ordinal for ordinal in ready if ordinal not in set(picked)]
                for age in ages:
                    rule.move(age, GroupState.READY, GroupState.DELIVERED)
                heapq.heappush(events, (now + train, -1, 0))
        now, ordinal, _ = heapq.heappop(events)
        if ordinal < 0:
            rule.publish(rule.version + 1)
            published.append(now)
            continue
        active -= 1
        missing[ordinal] -= 1
        if not missing[ordinal]:
            del missing[ordinal]
            rule.move(admitted[ordinal], GroupState.RUNNING, GroupState.READY)
            ready.append(ordinal)
    return (published[-1] - published[skip]) / (steps - skip)


def main() -> None:
    """Replay every staleness and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="0,1,2,4,8", help="separated by commas; begins with 0")
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--train", type=float, default=1.0, help="seconds from a batch's leaving to its publication")
    parser.add_argument("--seeds", default="1,2,3", help="separated by commas")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("steps", "prompts", "group", "concurrency", "train")}
    report = Report(
        f"Waits alone: {sizes['steps']} steps × {sizes['prompts']} × {sizes['group']}, {sizes['concurrency']} at once"
    )
    limits = [int(limit) for limit in arguments.staleness.split(",")]
    synchronous = None
    for limit in limits:
        seconds = statistics.fmean(
            seconds_a_step(**sizes, staleness=limit, seed=int(seed), skip=min(max(limits), arguments.steps // 2) + 1)
            for seed in arguments.seeds.split(",")
        )
        synchronous = seconds if synchronous is None else synchronous
        report.row(limit=limit, seconds_per_step=seconds, faster=synchronous / seconds)
        if limit:
            report.ratio(f"waits alone, staleness {limit}/sync", synchronous / seconds)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
