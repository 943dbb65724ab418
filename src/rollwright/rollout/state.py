"""What a checkpoint keeps of rollout, so that every task drawn is trained once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollwright.rollout.runner import Runner


def read_state(runner: Runner, next_ordinal: int, drawn: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A consistent cut; see :meth:`RolloutExecutor.state_dict`. Called on the loop.

    Args:
        runner: its groups.
        next_ordinal: the next task without an ordinal gets it.
        drawn: tasks that were drawn from a dataloader and not given to the runner.
    """
    unfinished = [{**group.data, "ordinal": group.ordinal} for group in runner.unfinished_groups()]
    delivery = runner.delivery
    return {
        "version": delivery.staleness.version,
        "next_ordinal": next_ordinal,
        "frontier": delivery.frontier.frontier,
        "beyond": delivery.frontier.beyond,
        "pending": [*unfinished, *(dict(row) for row in drawn)],
        "finished": [
            {
                "task": {**group.data, "ordinal": group.ordinal},
                "trajectory": group.trajectory,
                "admitted": group.admitted,
                "size": group.size,
            }
            for group in delivery.ready
            if not group.is_eval
        ],
    }
