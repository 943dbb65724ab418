"""Nim: players take turns to take any number of objects from one heap; whoever takes the last object wins.

If the bitwise XOR of the heap sizes is 0, the player to move loses against perfect play (Bouton, 1901). The message to a player lists the
heap sizes, ``5 9``, or draws the heaps; the player answers with the letter of a heap and the number of objects to leave in it: ``b5`` takes 4
from the second heap.
"""

from __future__ import annotations

import itertools
import operator
import string
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

from rollwright.data.splits import check_split, split_of
from rollwright.errors import WorkflowError

#: Share of the positions in each split, in percent. There are few of them, so more than usual are held out.
SHARES = {"train": 70, "valid": 10, "test": 20}


class NimPosition(NamedTuple):
    """Heaps, and the seat that moves."""

    heaps: tuple[int, ...]
    seat: int = 0


class Nim:
    """The rules. Rewards are 1 for the winner and -1 for the loser.

    The split of a position does not depend on the order of its heaps, so a held-out position is new in every order. Positions that the
    player to move cannot win, and those with a single heap, are never held out.

    Args:
        heaps: number of heaps, at most 26.
        largest: most objects of a heap.
        drawn: draw the heaps side by side above their letters, in ``largest`` + 1 lines with their heights::

            3 ..
            2 .#
            1 ##
              ab

    """

    name = "nim"
    roles: Sequence[str] = ("first", "second")

    def __init__(self, heaps: int = 2, largest: int = 9, drawn: bool = False) -> None:
        if not 1 <= heaps <= len(string.ascii_lowercase) or largest < 1:
            raise WorkflowError(f"nim: {heaps} heaps of at most {largest}; there are 1 to 26 heaps of at least 1.")
        self.heaps = heaps
        self.largest = largest
        self.drawn = drawn

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the positions of a split, with their ``best`` moves."""
        check_split("nim", split, SHARES)
        positions = map(NimPosition, itertools.product(range(self.largest + 1), repeat=self.heaps))
        return [
            {"heaps": list(position.heaps), "query_id": f"nim {_sizes(position)}", "best": self.best_moves(position)}
            for position in positions
            if any(position.heaps) and self.split(position) == split
        ]

    def split(self, position: NimPosition) -> str:
        """Return the split that a position belongs to, whatever the order of its heaps."""
        return _split(tuple(sorted(position.heaps)))

    def start(self, task: Mapping[str, Any]) -> NimPosition:
        """See ``Game.start``."""
        return NimPosition(tuple(task["heaps"]))

    def player(self, state: NimPosition) -> int | None:
        """See ``Game.player``."""
        return state.seat if any(state.heaps) else None

    def says(self, state: NimPosition) -> str:
        """See ``Game.says``."""
        if not self.drawn:
            return _sizes(state)
        heights = range(self.largest, 0, -1)
        lines = [f"{height} " + "".join("#" if heap >= height else "." for heap in state.heaps) for height in heights]
        return "\n".join([*lines, "  " + string.ascii_lowercase[: self.heaps]])

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
        return self.split(state) != "train"

    def best_moves(self, state: NimPosition) -> list[str]:
        """Return the winning moves, those that leave heap sizes whose XOR is 0; an empty list if the position is lost."""
        return [move for move in self.moves(state) if not reduce(operator.xor, self.play(state, move).heaps)]


def _sizes(position: NimPosition) -> str:
    """Return the heap sizes as text."""
    return " ".join(map(str, position.heaps))


@lru_cache(maxsize=65536)
def _split(heaps: tuple[int, ...]) -> str:
    """Return the split of sorted heaps."""
    can_be_held_out = len(heaps) - heaps.count(0) > 1 and reduce(operator.xor, heaps)
    return split_of(f"nim {list(heaps)}", SHARES) if can_be_held_out else "train"
