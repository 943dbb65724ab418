"""Which player made a row: its agent, role and environment, whether it is trained, and which rows it is compared with.

A workflow with several players returns one row or more for each, and names them::

    {"input_ids": …, "loss_mask": …, "rewards": 1.0, "agent": "policy", "role": "first", "environment": "nim"}
    {"input_ids": …, "loss_mask": …, "rewards": -1.0, "agent": "version 0", "role": "second", "environment": "nim", "trainable": False}

Invariants:

* a row with ``trainable`` False has an empty ``loss_mask``: its tokens are context, and never trained, audited or counted as stale;
* rows of different roles or environments are never compared: not by a group's baseline, not by the batch's, not by a running average;
* rows that have ``turn_ids`` are compared within their turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollwright.experience.contract import PLAYER_NAMES, Origin, Trajectory

#: Columns that ``has_no_variance`` reads; those of the players are optional.
COMPARED = ("rewards", "sample_ids", "trainable", "group_ids", "role_ids", "turn_ids")


def role_id(environment: str, role: str) -> int:
    """Return the number of a role in an environment: the same in every process; 0 if both are empty."""
    if not environment and not role:
        return 0
    digest = hashlib.blake2b(f"{environment}\0{role}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: an int64


def fill_players(trajectory: Trajectory, place: Origin) -> None:
    """Complete the columns about the players of a workflow's rows; modifies ``trajectory``.

    ``role_ids`` are computed from ``environment`` and ``role``, and the ``loss_mask`` of rows that are not trainable is cleared.

    Raises:
        TrajectoryError: a name is not text.
    """
    rows = len(trajectory["input_ids"])
    for key in PLAYER_NAMES:
        values = trajectory.get(key)
        if values is not None and (
            not isinstance(values, list) or len(values) != rows or not all(isinstance(value, str) for value in values)
        ):
            raise place.error(key, f"it is {values!r:.80}", "give the name of each row's player as text, or one for all rows")
    if any(key in trajectory for key in ("role", "environment")):
        names = (trajectory.get(key, [""] * rows) for key in ("environment", "role"))
        ids = [role_id(environment, role) for environment, role in zip(*names, strict=True)]
        trajectory["role_ids"] = torch.tensor(ids, dtype=torch.int64)
    if "trainable" in trajectory:
        mask_BL = trajectory["loss_mask"]
        trajectory["loss_mask"] = mask_BL * trajectory["trainable"][:, None].to(mask_BL.dtype)


def trainable_rows(batch: Mapping[str, Any]) -> Tensor:
    """Return which rows belong to players that are trained, ``[B]`` bool; all of them without the column ``trainable``."""
    given = batch.get("trainable")
    if given is not None:
        return given.bool()
    return torch.ones_like(batch["rewards"], dtype=torch.bool)


def comparison_groups(group_ids_B: Tensor, role_ids_B: Tensor | None, turn_ids_B: Tensor | None = None) -> Tensor:
    """Number the rows that may be compared: those of one group, one role and one turn. Returns ``[B]`` int64.

    The key (task, role) is what a group is in a game of several players; (task, role, turn) is AT-GRPO's (arXiv 2510.11062).

    Args:
        group_ids_B: the group of each row.
        role_ids_B: the role of each row; if it is None, roles are not told apart.
        turn_ids_B: the turn of each row; if it is None, turns are not told apart.
    """
    keys = [group_ids_B, *(each.to(group_ids_B.device) for each in (role_ids_B, turn_ids_B) if each is not None)]
    return torch.unique(torch.stack(keys), dim=1, return_inverse=True)[1]


def compared_rows(batch: Mapping[str, Any]) -> Tensor:
    """Return ``comparison_groups`` of the rows of a batch."""
    return comparison_groups(batch["group_ids"], batch.get("role_ids"), batch.get("turn_ids"))


def has_no_variance(group: Mapping[str, Any]) -> bool:
    """Return whether a group of several samples has one reward wherever rows are compared, so that it would train nothing.

    Args:
        group: the columns ``COMPARED`` of a group.
    """
    trained = trainable_rows(group)
    if group["sample_ids"][trained].unique().numel() < 2:
        return False
    compared, rewards = compared_rows(group)[trained], group["rewards"][trained]
    return all(bool((part == part[0]).all()) for part in (rewards[compared == each] for each in compared.unique()))


def games_won(rows: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """Count games, and those that the trained players won; a draw counts one half.

    A sample is a game. It is won if the best reward of its trained rows is above that of its other rows; a player without a row has 0.

    Args:
        rows: trajectories with ``rewards``, ``sample_ids`` and ``trainable``.

    Returns:
        Number of games, and of games won.
    """
    best: dict[int, list[float | None]] = {}  # sample -> best reward of the others, and of trained players
    for part in rows:
        columns = part["sample_ids"].tolist(), trainable_rows(part).tolist(), part["rewards"].tolist()
        for sample, is_trained, reward in zip(*columns, strict=True):
            pair = best.setdefault(sample, [None, None])
            pair[is_trained] = max(reward, pair[is_trained] if pair[is_trained] is not None else reward)
    scores = [(own or 0.0) - (others or 0.0) for others, own in best.values()]
    return len(scores), sum(1.0 if score > 0 else 0.5 if score == 0 else 0.0 for score in scores)


def rows_by_role(batch: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the rows of each role that is trained, by its name; ``ENVIRONMENT/ROLE`` if there are several environments.

    Empty if the rows name no roles.
    """
    roles = batch.get("role")
    if roles is None or not any(roles):
        return {}
    environments: Sequence[str] = batch.get("environment") or [""] * len(roles)
    several = len(set(environments)) > 1
    found: dict[str, list[int]] = {}
    for row, is_trained in enumerate(trainable_rows(batch).tolist()):
        if is_trained and roles[row]:
            name = "/".join(filter(None, (environments[row] if several else "", roles[row])))
            found.setdefault(name, []).append(row)
    return dict(sorted(found.items()))
