"""The protocol of games played in text, and the registry of games.

A state is an immutable value, so a game can be continued from any state, any number of times.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rollwright.errors import WorkflowError
from rollwright.registry import Registry, why_not_called

State = TypeVar("State", bound=Hashable)

#: Games by name; ``GAMES.register("chess")(Chess)`` adds one. An import path needs no registration.
GAMES: Registry[Any] = Registry(
    "game",
    WorkflowError,
    variable="GAMES",
    built_in={
        "nim": "rollwright.environments.games.nim:Nim",
        "kuhn": "rollwright.environments.games.kuhn:KuhnPoker",
    },
)


class Game(Protocol[State]):
    """Rules of a game.

    Attributes:
        name: name of the game, the ``environment`` of its rows.
        roles: names of the seats, in order.
    """

    name: str
    roles: Sequence[str]

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the initial positions of a split (train, valid or test) as tasks, each with a ``query_id``."""
        ...

    def start(self, task: Mapping[str, Any]) -> State:
        """Return the initial state. What chance decides, such as the deal, is in the task."""
        ...

    def player(self, state: State) -> int | None:
        """Return the seat that moves, or None if the game is over."""
        ...

    def says(self, state: State) -> str:
        """Return the message to the player to move: what is new to it since its last turn, and nothing that is hidden from it."""
        ...

    def moves(self, state: State) -> Sequence[str]:
        """Return the legal moves, as the player writes them."""
        ...

    def play(self, state: State, move: str) -> State:
        """Return the state after a legal move."""
        ...

    def rewards(self, state: State) -> Sequence[float]:
        """Return the reward of each seat in a state in which the game is over."""
        ...

    def is_held_out(self, state: State) -> bool:
        """Return whether evaluations begin in this state, so no game that begins in a state that is not held out enters it.

        From a state that is not held out, a legal move has to lead to another that is not, or end the game. What ``says`` returns has to be the
        whole position, because a player is not told that another move was made in place of its own.
        """
        ...


#: A game, its name in ``GAMES`` or its import path, or ``{"name": …, **arguments}``.
NamedGame = Any


def make_game(game: NamedGame) -> Any:
    """Return the game that a name, or a mapping with a name and arguments, stands for.

    Raises:
        WorkflowError: there is no such game, or it does not accept the arguments.
    """
    if not isinstance(game, str | Mapping):
        return game
    arguments = {"name": game} if isinstance(game, str) else dict(game)
    if "name" not in arguments:
        raise WorkflowError(f"game is {game!r}: give its name, or a mapping with its name and arguments.")
    name = arguments.pop("name")
    factory = GAMES.get(name)
    if why := why_not_called(factory, **arguments):
        raise WorkflowError(f"game {name!r} cannot be made from {', '.join(arguments) or 'no arguments'}: {why}.")
    return factory(**arguments)


def enters_held_out(game: Any, state: Any, move: str) -> bool:
    """Return whether a legal move leads to a state that is held out. A move that ends the game does not."""
    after = game.play(state, move)
    return game.player(after) is not None and game.is_held_out(after)


def moves_not_held_out(game: Any, state: Any) -> list[str]:
    """Return the legal moves that do not lead to a state that is held out.

    Raises:
        WorkflowError: all of them do.
    """
    moves = [move for move in game.moves(state) if not enters_held_out(game, state, move)]
    if not moves:
        raise WorkflowError(
            f"game {game.name}: all legal moves from {state} lead to states that are held out, so a game that began in a state that is not "
            "cannot go on. Let is_held_out leave it one."
        )
    return moves
