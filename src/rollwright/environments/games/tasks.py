"""Tasks of games: initial positions, conversations from games of random moves, and a reward for best moves."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from rollwright.environments.games.game import NamedGame, make_game, moves_not_held_out
from rollwright.errors import DataError


def games(
    split: str = "train",
    game: NamedGame = "nim",
    size: int | None = None,
    seed: int = 1,
    worked: bool = False,
    history: bool = True,
    preferences: float = 0.0,
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
            are random, and none leads to a state that is held out.
        history: with ``worked``, False makes each move a conversation of its own, as for the workflow ``self_play``.
        preferences: spread of the random preferences of worked games. With 0 all legal moves are equally likely. Above 0 a move's
            probability is proportional to ``exp(preferences * u)``, where ``u`` is drawn between -1 and 1 for each conversation and
            move. The model then has to read everything that a player knows, but learns no strategy: preferences are not related to
            rewards.
        seats: return each task once for each seat, named in the column ``seat``, to evaluate a policy against an opponent in every seat.

    Raises:
        DataError: there is no such split, ``size`` is below 1, or ``preferences`` is negative.
    """
    rules = make_game(game)
    if size is not None and size < 1:
        raise DataError(f"games: size is {size}; ask for at least one task.")
    if preferences < 0:
        raise DataError(f"games: preferences is {preferences}; 0 makes all moves equally likely, more makes them less so.")
    dice = random.Random(f"{split} {seed}")
    beginnings = rules.tasks(split)
    if not beginnings:
        raise DataError(f"games: {rules.name} has no initial positions in split {split!r}.")
    dice.shuffle(beginnings)
    wanted = len(beginnings) if size is None else size
    if worked:
        rows: list[dict[str, Any]] = []
        while len(rows) < wanted:
            rows += _worked_game(rules, beginnings[dice.randrange(len(beginnings))], dice, history, preferences, seed)
        return rows[:wanted]
    rows = [dict(beginnings[index % len(beginnings)]) for index in range(wanted)]
    for row in rows:
        row["messages"] = [{"role": "user", "content": rules.says(rules.start(row))}]
    if not seats:
        return rows
    return [
        {**row, "seat": seat, "query_id": f"{row['query_id']} {role}"} for row in rows for seat, role in enumerate(rules.roles)
    ]


def _worked_game(
    rules: Any, task: dict[str, Any], dice: random.Random, history: bool, preferences: float, seed: int
) -> list[dict[str, Any]]:
    """Play a game with random moves, and return the conversations of the players."""
    state = rules.start(task)
    conversations: list[list[list[dict[str, Any]]]] = [[] for _ in rules.roles]
    known: list[list[str]] = [[] for _ in rules.roles]
    while (seat := rules.player(state)) is not None:
        says, moves = rules.says(state), moves_not_held_out(rules, state)
        known[seat].append(says)
        move = dice.choices(moves, _weights(moves, f"{seed} {known[seat]}", preferences))[0]
        known[seat].append(move)
        if not (history and conversations[seat]):
            conversations[seat].append([])
        conversations[seat][-1] += [{"role": "user", "content": says}, {"role": "assistant", "content": move}]
        state = rules.play(state, move)
    return [{"messages": each, "query_id": task["query_id"]} for player in conversations for each in player]


def _weights(moves: Sequence[str], known: str, preferences: float) -> list[float]:
    """Return the weight of each move in a position of which a player knows this much."""
    if not preferences:
        return [1.0] * len(moves)
    return [math.exp(preferences * random.Random(f"{known} {move}").uniform(-1.0, 1.0)) for move in moves]


def best_move(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, best: list[str], **_: Any) -> float:
    """Score the first move of a task with its best moves: 1 if it is one of them, else 0. A reward function."""
    return float(completion.strip() in best)
