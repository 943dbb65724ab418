"""Nim: take from one heap as much as you like; whoever takes the last object wins.

A position is lost for the player to move if the exclusive or of its heaps is 0 (Bouton, 1901). A player is told the heaps, ``5 9``, and
answers with a heap and what it leaves in it: ``b5`` takes 4 from the second heap.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import string
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from rollwright.errors import DataError, WorkflowError

#: Share of the positions in each split, in percent.
SPLIT_SHARES = {"train": 70, "valid": 10, "test": 20}


class NimPosition(NamedTuple):
    """Heaps, and the seat that moves."""

    heaps: tuple[int, ...]
    seat: int = 0


class Nim:
    """The rules. Rewards are 1 for the winner and -1 for the loser.

    Positions are divided into splits by their heaps in any order, so a held-out position is new in every order. Games begin at training
    positions. They may reach a held-out one; what a player does there is not trained.

    Args:
        heaps: number of heaps, at most 26.
        largest: most objects of a heap.
    """

    name = "nim"
    roles: Sequence[str] = ("first", "second")

    def __init__(self, heaps: int = 2, largest: int = 9) -> None:
        if not 1 <= heaps <= len(string.ascii_lowercase) or largest < 1:
            raise WorkflowError(f"nim: {heaps} heaps of at most {largest}; there are 1 to 26 heaps of at least 1.")
        self.heaps = heaps
        self.largest = largest

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the positions of a split; for valid and test, those that the player to move can win, with their ``best`` moves."""
        if split not in SPLIT_SHARES:
            raise DataError(f"nim: there is no split {split!r}; there are {', '.join(SPLIT_SHARES)}.")
        rows = []
        for heaps in itertools.product(range(self.largest + 1), repeat=self.heaps):
            position = NimPosition(heaps)
            if not any(heaps) or self.split(position) != split:
                continue
            best = self.best_moves(position)
            if split == "train" or best:
                rows.append({"heaps": list(heaps), "query_id": f"nim {self.says(position)}", "best": best})
        return rows

    def split(self, position: NimPosition) -> str:
        """Return the split that a position belongs to, whatever the order of its heaps."""
        digest = hashlib.blake2b(f"nim {sorted(position.heaps)}".encode(), digest_size=8).digest()
        bucket, ends = int.from_bytes(digest, "big") % 100, itertools.accumulate(SPLIT_SHARES.values())
        return next(split for split, end in zip(SPLIT_SHARES, ends, strict=True) if bucket < end)

    def start(self, task: Mapping[str, Any]) -> NimPosition:
        """See ``Game.start``."""
        return NimPosition(tuple(task["heaps"]))

    def player(self, state: NimPosition) -> int | None:
        """See ``Game.player``."""
        return state.seat if any(state.heaps) else None

    def says(self, state: NimPosition) -> str:
        """See ``Game.says``."""
        return " ".join(map(str, state.heaps))

    def moves(self, state: NimPosition) -> list[str]:
        """See ``Game.moves``."""
        named = zip(string.ascii_lowercase, state.heaps, strict=False)
        return [f"{name}{left}" for name, heap in named for left in range(heap)]

    def play(self, state: NimPosition, move: str) -> NimPosition:
        """See ``Game.play``."""
        heaps = list(state.heaps)
        heaps[string.ascii_lowercase.index(move[0])] = int(move[1:])
        return NimPosition(tuple(heaps), 1 - state.seat)

    def rewards(self, state: NimPosition) -> tuple[float, float]:
        """See ``Game.rewards``: the player to move has nothing left to take, so the other has won."""
        return (-1.0, 1.0) if state.seat == 0 else (1.0, -1.0)

    def is_held_out(self, state: NimPosition) -> bool:
        """See ``Game.is_held_out``."""
        return any(state.heaps) and self.split(state) != "train"

    def best_moves(self, state: NimPosition) -> list[str]:
        """Return the moves that win, which leave heaps whose exclusive or is 0; none if the position is lost."""
        return [move for move in self.moves(state) if not reduce(operator.xor, self.play(state, move).heaps)]
