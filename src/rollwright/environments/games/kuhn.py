"""Kuhn poker: three cards, two players, one bet (Kuhn, 1950); and how much a policy loses to its best response.

The first message to a player is its card, followed by the opponent's move if the opponent has moved: ``K`` or ``Q bet``. The second is
the opponent's move: ``bet``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollwright.errors import WorkflowError

CARDS = "JQK"
DEALS = tuple(itertools.permutations(CARDS, 2))

#: Legal moves after the moves so far.
LEGAL_MOVES = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("fold", "call"),
    ("check", "bet"): ("fold", "call"),
}

#: Information set: the card and the moves so far. The number of moves says whose turn it is.
Information = tuple[str, tuple[str, ...]]

#: Probability of each move in each information set.
Policy = Mapping[Information, Mapping[str, float]]


class KuhnState(NamedTuple):
    """The card of each seat, and the moves so far."""

    cards: tuple[str, ...]
    history: tuple[str, ...] = ()


class KuhnPoker:
    """The rules: both players put in one chip, a bet or a call adds one more, and the higher card wins. Rewards are the chips won."""

    name = "kuhn"
    roles: Sequence[str] = ("first", "second")

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the six possible deals, in every split."""
        return [{"cards": "".join(cards), "query_id": f"kuhn {''.join(cards)}"} for cards in DEALS]

    def start(self, task: Mapping[str, Any]) -> KuhnState:
        """See ``Game.start``."""
        cards = tuple(task["cards"])
        if cards not in DEALS:
            raise WorkflowError(f"kuhn: the task deals {task['cards']!r}; a deal is two different cards of {CARDS}.")
        return KuhnState(cards)

    def player(self, state: KuhnState) -> int | None:
        """See ``Game.player``."""
        return len(state.history) % 2 if state.history in LEGAL_MOVES else None

    def says(self, state: KuhnState) -> str:
        """See ``Game.says``."""
        seat, last = len(state.history) % 2, state.history[-1:]
        return " ".join([state.cards[seat], *last] if len(state.history) < 2 else last)

    def moves(self, state: KuhnState) -> tuple[str, ...]:
        """See ``Game.moves``."""
        return LEGAL_MOVES[state.history]

    def play(self, state: KuhnState, move: str) -> KuhnState:
        """See ``Game.play``."""
        return KuhnState(state.cards, (*state.history, move))

    def rewards(self, state: KuhnState) -> tuple[float, float]:
        """See ``Game.rewards``."""
        if state.history[-1] == "fold":
            won = 1.0 if len(state.history) % 2 == 0 else -1.0  # the first player wins if the second folds
        else:
            stake = 2.0 if state.history[-1] == "call" else 1.0
            first, second = map(CARDS.index, state.cards)
            won = stake if first > second else -stake
        return won, -won

    def is_held_out(self, state: KuhnState) -> bool:
        """See ``Game.is_held_out``: every state is trained."""
        return False


def information(state: KuhnState) -> Information:
    """Return what the player to move knows."""
    return state.cards[len(state.history) % 2], state.history


def conversation(known: Information) -> list[dict[str, Any]]:
    """Return the messages that a player has seen and sent when it has to move with this information."""
    (card, history), messages = known, []
    other = next(each for each in CARDS if each != card)
    seat = len(history) % 2
    cards = (card, other) if seat == 0 else (other, card)
    for turn in range(seat, len(history) + 1, 2):
        messages.append({"role": "user", "content": _GAME.says(KuhnState(cards, history[:turn]))})
        if turn < len(history):
            messages.append({"role": "assistant", "content": history[turn]})
    return messages


def information_sets() -> list[Information]:
    """Return all twelve information sets, in a fixed order."""
    return [(card, history) for history in LEGAL_MOVES for card in CARDS]


def uniform_policy() -> dict[Information, dict[str, float]]:
    """Return the policy that makes every legal move with the same probability."""
    return {
        (card, history): dict.fromkeys(LEGAL_MOVES[history], 1 / len(LEGAL_MOVES[history]))
        for card, history in information_sets()
    }


def value(first: Policy, second: Policy) -> float:
    """Return the chips that the first player wins per game if the players follow these policies."""
    return sum(_value(KuhnState(cards), (first, second)) for cards in DEALS) / len(DEALS)


def _value(state: KuhnState, policies: tuple[Policy, Policy]) -> float:
    seat = _GAME.player(state)
    if seat is None:
        return _GAME.rewards(state)[0]
    chances = policies[seat][information(state)]
    return sum(chances[move] * _value(_GAME.play(state, move), policies) for move in _GAME.moves(state))


def best_response_values(policy: Policy) -> tuple[float, float]:
    """Return the chips per game that a best response to a policy wins in the first seat, and in the second.

    All deterministic strategies are tried: 64 for each seat.
    """
    values = []
    for seat in (0, 1):
        own = [each for each in information_sets() if len(each[1]) % 2 == seat]
        strategies = itertools.product(*(LEGAL_MOVES[history] for _, history in own))
        candidates = (
            {each: {**dict.fromkeys(LEGAL_MOVES[each[1]], 0.0), move: 1.0} for each, move in zip(own, chosen, strict=True)}
            for chosen in strategies
        )
        values.append(max(value(each, policy) if seat == 0 else -value(policy, each) for each in candidates))
    return values[0], values[1]


def exploitability(policy: Policy) -> float:
    """Return the chips that a best response wins from a policy per game, as the mean over both seats; 0 in an equilibrium.

    This is half of NashConv (Lanctot et al., 2017). The uniform policy's is 11/24.
    """
    return sum(best_response_values(policy)) / 2


_GAME = KuhnPoker()
