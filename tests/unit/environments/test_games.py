"""Games and their exact solvers, against facts that are known of them."""

import itertools
import random
from functools import cache

import pytest

from rollwright.environments.games import KuhnPoker, Nim, make_game
from rollwright.environments.games.game import moves_not_held_out
from rollwright.environments.games.kuhn import (
    DEALS,
    best_response_values,
    exploitability,
    information,
    information_sets,
    uniform_policy,
    value,
)
from rollwright.environments.games.nim import NimPosition
from rollwright.errors import DataError, WorkflowError


def equilibrium(alpha):
    """Kuhn's family of equilibria, by the probability of the first player's bluff with a jack."""
    bets = {"J": alpha, "Q": 0.0, "K": 3 * alpha}
    calls = {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0}
    second_bets, second_calls = {"J": 1 / 3, "Q": 0.0, "K": 1.0}, {"J": 0.0, "Q": 1 / 3, "K": 1.0}
    policy = {}
    for card, history in information_sets():
        yes, no, chances = {
            (): ("bet", "check", bets),
            ("check",): ("bet", "check", second_bets),
            ("bet",): ("call", "fold", second_calls),
            ("check", "bet"): ("call", "fold", calls),
        }[history]
        policy[card, history] = {yes: chances[card], no: 1 - chances[card]}
    return policy


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_nothing_is_won_from_an_equilibrium(alpha):
    policy = equilibrium(alpha)
    assert value(policy, policy) == pytest.approx(-1 / 18)
    assert exploitability(policy) == pytest.approx(0.0, abs=1e-12)
    assert best_response_values(policy) == pytest.approx((-1 / 18, 1 / 18))


def test_the_uniform_policy_loses_what_is_known():
    assert exploitability(uniform_policy()) == pytest.approx(11 / 24)  # OpenSpiel: 0.458333


def test_a_policy_that_always_folds_loses_its_stake():
    policy = {each: {move: float(move in ("check", "fold")) for move in moves} for each, moves in uniform_policy().items()}
    assert best_response_values(policy) == pytest.approx((1.0, 1.0))


def test_players_of_kuhn_are_told_their_own_card_only():
    game = KuhnPoker()
    seen = {}
    for cards in DEALS:
        for moves in itertools.product(("check", "bet", "fold", "call"), repeat=2):
            state = game.start({"cards": "".join(cards)})
            told = {0: [], 1: []}
            for move in (*moves, None):
                seat = game.player(state)
                if seat is None:
                    break
                told[seat].append(game.says(state))
                seen.setdefault((seat, tuple(told[seat])), set()).add(information(state))
                if move not in game.moves(state):
                    break
                state = game.play(state, move)
    assert len(seen) == 12
    assert all(len(each) == 1 for each in seen.values())


@pytest.mark.parametrize(
    ("moves", "won"),
    [
        (["check", "check"], -1.0),
        (["bet", "call"], -2.0),
        (["bet", "fold"], 1.0),
        (["check", "bet", "fold"], -1.0),
        (["check", "bet", "call"], -2.0),
    ],
)
def test_the_higher_card_wins_the_pot(moves, won):
    game = KuhnPoker()
    state = game.start({"cards": "QK"})
    for move in moves:
        assert game.player(state) is not None
        state = game.play(state, move)
    assert game.player(state) is None
    assert game.rewards(state) == (won, -won)


@pytest.mark.parametrize(("heaps", "largest"), [(1, 5), (2, 6), (3, 4)])
def test_the_best_moves_of_nim_are_those_of_a_search(heaps, largest):
    game = Nim(heaps, largest)

    @cache
    def is_won(state):
        seat = game.player(state)
        if seat is None:
            return game.rewards(state)[state.seat] > 0
        return any(not is_won(game.play(state, move)) for move in game.moves(state))

    for position in map(NimPosition, itertools.product(range(largest + 1), repeat=heaps)):
        winning = [move for move in game.moves(position) if not is_won(game.play(position, move))]
        assert game.best_moves(position) == winning
        assert bool(winning) == is_won(position)


def test_no_heaps_of_a_held_out_position_are_trained_in_any_order():
    game = Nim(2, 9)
    rows = {split: [tuple(row["heaps"]) for row in game.tasks(split)] for split in ("train", "valid", "test")}
    sets = {split: {tuple(sorted(heaps)) for heaps in each} for split, each in rows.items()}
    assert not sets["train"] & (sets["valid"] | sets["test"])
    assert not sets["valid"] & sets["test"]
    assert min(map(len, rows.values())) >= 10
    for split, each in rows.items():
        assert all(game.is_held_out(NimPosition(heaps)) == (split != "train") for heaps in each)
    assert all(game.best_moves(NimPosition(heaps)) for heaps in rows["test"])
    assert all(min(heaps) > 0 for heaps in rows["test"])
    assert all((size, size) in rows["train"] for size in range(1, 10))


@pytest.mark.parametrize(("heaps", "largest"), [(2, 13), (3, 5)])
def test_a_game_can_stay_out_of_held_out_positions(heaps, largest):
    game = Nim(heaps, largest)
    for task in game.tasks("train"):
        allowed = moves_not_held_out(game, game.start(task))
        assert set(task["best"]) <= set(allowed) <= set(game.moves(game.start(task)))
    assert any(
        len(moves_not_held_out(game, game.start(task))) < len(game.moves(game.start(task))) for task in game.tasks("train")
    )


def test_a_game_without_a_way_out_says_so(monkeypatch):
    game = Nim()
    monkeypatch.setattr(game, "is_held_out", lambda state: True)
    with pytest.raises(
        WorkflowError, match=r"game nim: all legal moves from .*heaps=\(1, 2\).* lead to states that are held out"
    ):
        moves_not_held_out(game, NimPosition((1, 2)))


def test_heaps_can_be_drawn():
    game = Nim(2, 3, drawn=True)
    assert game.says(NimPosition((1, 2))) == "3 ..\n2 .#\n1 ##\n  ab"
    assert game.says(NimPosition((0, 3))) == "3 .#\n2 .#\n1 .#\n  ab"


def test_every_game_of_nim_ends_with_one_winner():
    game, dice = Nim(3, 7), random.Random(1)
    for task in game.tasks("train")[::7]:
        state, moves = game.start(task), 0
        while game.player(state) is not None:
            state, moves = game.play(state, dice.choice(game.moves(state))), moves + 1
        assert game.rewards(state) == ((1.0, -1.0) if moves % 2 else (-1.0, 1.0))


def test_games_are_found_by_name():
    assert make_game({"name": "nim", "heaps": 3, "largest": 4}).heaps == 3
    assert isinstance(make_game("kuhn"), KuhnPoker)
    game = Nim()
    assert make_game(game) is game


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("nimm", "Did you mean 'nim'"),
        ({"heaps": 3}, "give its name"),
        ({"name": "nim", "piles": 3}, "piles"),
        ({"name": "nim", "heaps": 0}, "0 heaps"),
    ],
)
def test_wrong_games_are_refused(game, message):
    with pytest.raises(WorkflowError, match=message):
        make_game(game)


def test_a_split_that_does_not_exist_is_refused():
    with pytest.raises(DataError, match="no split 'dev'"):
        Nim().tasks("dev")
