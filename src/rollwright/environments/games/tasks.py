"""Tasks of games: initial positions, conversations from games of random moves, and a reward for best moves."""

from __future__ import annotations

import random
from typing import Any

from rollwright.environments.games.game import NamedGame, make_game
from rollwright.errors import DataError


def games(
    split: str = "train",
    game: NamedGame = "nim",
    size: int | None = None,
    seed: int = 1,
    worked: bool = False,
    seats: bool = False,
) -> list[dict[str, Any]]:
    """Return the tasks of a game: its initial positions, each with the first message to the player that moves first.

    Args:
        split: train, valid or test.
        game: name of the game, or a mapping with its ``name`` and arguments.
        size: number of tasks, in a random order. If the split has fewer, its tasks repeat in the same order. By default, each task of the
            split occurs once.
        seed: seed of order and moves.
        worked: return conversations for supervised training instead: the messages to and from one player of a game in which all moves
            are random. A conversation ends before the player's first position that is held out.
        seats: return each task once for each seat, named in the column ``seat``, to evaluate a policy against an opponent in every seat.

    Raises:
        DataError: there is no such split, or ``size`` is below 1.
    """
    rules = make_game(game)
    if size is not None and size < 1:
        raise DataError(f"games: size is {size}; ask for at least one task.")
    dice = random.Random(f"{split} {seed}")
    beginnings = rules.tasks(split)
    if not beginnings:
        raise DataError(f"games: {rules.name} has no initial positions in split {split!r}.")
    dice.shuffle(beginnings)
    wanted = len(beginnings) if size is None else size
    if worked:
        rows: list[dict[str, Any]] = []
        while len(rows) < wanted:
            rows += _worked_game(rules, beginnings[dice.randrange(len(beginnings))], dice)
        return rows[:wanted]
    rows = [dict(beginnings[index % len(beginnings)]) for index in range(wanted)]
    for row in rows:
        row["messages"] = [{"role": "user", "content": rules.says(rules.start(row))}]
    if not seats:
        return rows
    return [
        {**row, "seat": seat, "query_id": f"{row['query_id']} {role}"} for row in rows for seat, role in enumerate(rules.roles)
    ]


def _worked_game(rules: Any, task: dict[str, Any], dice: random.Random) -> list[dict[str, Any]]:
    """Play a game with random moves, and return the conversation of each player."""
    state, messages = rules.start(task), [[] for _ in rules.roles]
    is_open = [True] * len(messages)
    while (seat := rules.player(state)) is not None:
        is_open[seat] &= not rules.is_held_out(state)
        move = dice.choice(list(rules.moves(state)))
        if is_open[seat]:
            messages[seat] += [{"role": "user", "content": rules.says(state)}, {"role": "assistant", "content": move}]
        state = rules.play(state, move)
    return [{"messages": each, "query_id": task["query_id"]} for each in messages if each]


def best_move(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, best: list[str], **_: Any) -> float:
    """Score the first move of a task with its best moves: 1 if it is one of them, else 0. A reward function."""
    return float(completion.strip() in best)
