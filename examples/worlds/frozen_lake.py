"""Frozen lakes on random maps: walk from the start to the goal, around the holes that the map shows.

lakes(size=2)      # the dataset frozen_lakes: tasks {"environment_args": {"desc": ["SFFH", …]}, "query_id": "SFFH/…"}
lake(seed, desc)   # the environment frozen_lake: Gymnasium's, with the map as the first observation, then the cell that was reached
episode(desc)      # a worked episode along the shortest way; ``episode(desc, knows=False)``: one that wanders around the holes
shortest_way(desc) # the moves of the shortest way
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import check_split, split_of
from rollwright.environments.gymnasium_text import GymnasiumText
from rollwright.errors import DataError
from rollwright.workflows.registry import FUNCTIONS

MOVES = ("left", "down", "right", "up")  # the order of Gymnasium's actions
_STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_USER, _ASSISTANT, _END = "<|user|>", "<|assistant|>", "<|end|>"


@DATASET_REGISTRY.register("frozen_lakes")
def lakes(
    split: str = "train",
    size: int = 1000,
    seed: int = 1,
    side: int = 4,
    frozen: float = 0.7,
    worked: bool = False,
    walks: int = 4,
    knowing_share: float = 0.2,
    max_turns: int = 10,
) -> list[dict[str, Any]]:
    """A taskset of lakes whose goal can be reached, each map once.

    Args:
        split: train, valid or test; no two share a map.
        size: number of maps; train has 3,050 of 4 x 4 cells, test 403.
        seed: which maps, in which order.
        side: cells of a side, at most 9.
        frozen: share of the cells that are not holes.
        worked: return worked episodes instead, rows with ``segments``, for supervised training.
        walks: worked episodes for each map.
        knowing_share: share of the worked episodes that go the shortest way, spread evenly; the others wander.
        max_turns: maximum number of moves of a worked episode.

    Raises:
        DataError: there is no such split, or an argument is out of range.
    """
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    check_split("lakes", split)
    if not (0.0 <= knowing_share <= 1.0 and 0.0 < frozen <= 1.0 and 2 <= side <= 9):
        raise DataError(
            f"lakes: knowing_share {knowing_share} and frozen {frozen} are shares, and side {side} is between 2 and 9."
        )
    draw = random.Random(f"lakes {split} {seed}")
    maps: dict[str, list[str]] = {}
    tries = 0
    while len(maps) < size:
        tries += 1
        if tries > 100 * size:
            raise DataError(
                f"lakes: {size} maps of {side} x {side} were asked for, only {len(maps)} of split {split!r} were found."
            )
        desc = generate_random_map(side, frozen, draw.randrange(2**31))
        if split_of(name := "/".join(desc)) == split:
            maps.setdefault(name, desc)
    tasks = [{"query_id": name, "seed": 0, "environment_args": {"desc": desc}} for name, desc in maps.items()]
    if not worked:
        return tasks
    rows = [task for task in tasks for _ in range(walks)]
    draw.shuffle(rows)
    knowing = [int((index + 1) * knowing_share) > int(index * knowing_share) for index in range(len(rows))]
    return [
        {**row, "segments": episode(row["environment_args"]["desc"], knows, max_turns, draw)}
        for row, knows in zip(rows, knowing, strict=True)
    ]


@FUNCTIONS.register("frozen_lake")
def lake(seed: int | None, desc: list[str]) -> GymnasiumText:
    """The environment on one map."""
    return GymnasiumText(seed, "FrozenLake-v1", {"desc": desc, "is_slippery": False}, action_names=MOVES, observation=observe)


def observe(_: Any, environment: Any) -> str:
    """The text of an observation: at the start the map, cell by cell; after a move the cell that it led to."""
    lake = environment.unwrapped
    if lake.lastaction is None:
        return whole_map([[cell.decode() for cell in row] for row in lake.desc])
    return _name(*divmod(int(lake.s), lake.ncol))


def whole_map(desc: Any) -> str:
    """The map in text: ``a1Sa2Fa3H…``, rows by letters, columns by numbers."""
    return "".join(f"{_name(row, column)}{cell}" for row, cells in enumerate(desc) for column, cell in enumerate(cells))


def episode(
    desc: list[str], knows: bool = True, max_turns: int = 10, draw: random.Random | None = None
) -> list[dict[str, Any]]:
    """A worked episode as ``segments``, ``[{"text", "train"}]``, in the form that ``environment_workflow`` plays.

    Args:
        desc: the map.
        knows: walk the shortest way, instead of at random around the holes.
        max_turns: maximum number of moves.
        draw: draws the random moves.
    """
    draw = draw or random.Random("/".join(desc))
    way = shortest_way(desc) if knows else []
    seen, cell, segments = whole_map(desc), (0, 0), []
    for turn in range(max_turns):
        move = way[turn] if knows else draw.choice(_dry(desc, cell))
        segments.append({"text": f"{_USER}{seen}{_END}{_ASSISTANT}", "train": False})
        segments.append({"text": f"{move}{_END}", "train": True})
        cell = _neighbours(desc, cell)[move]
        if desc[cell[0]][cell[1]] == "G":
            break
        seen = _name(*cell)
    return segments


def shortest_way(desc: list[str]) -> list[str]:
    """The moves of the shortest way from the start to the goal, the first one by the order of the search.

    Raises:
        DataError: the goal cannot be reached.
    """
    ways: dict[tuple[int, int], list[str]] = {(0, 0): []}
    waiting = deque(ways)
    while waiting:
        cell = waiting.popleft()
        if desc[cell[0]][cell[1]] == "G":
            return ways[cell]
        for move, there in _neighbours(desc, cell).items():
            if there not in ways and desc[there[0]][there[1]] != "H":
                ways[there] = [*ways[cell], move]
                waiting.append(there)
    raise DataError(f"the goal of the lake {'/'.join(desc)} cannot be reached.")


def _neighbours(desc: list[str], cell: tuple[int, int]) -> dict[str, tuple[int, int]]:
    reached = {move: (cell[0] + down, cell[1] + right) for move, (down, right) in _STEPS.items()}
    return {move: (row, column) for move, (row, column) in reached.items() if 0 <= row < len(desc) and 0 <= column < len(desc)}


def _dry(desc: list[str], cell: tuple[int, int]) -> list[str]:
    return [move for move, (row, column) in _neighbours(desc, cell).items() if desc[row][column] != "H"]


def _name(row: int, column: int) -> str:
    return f"{'abcdefghi'[row]}{column + 1}"
