"""Games of several players whose best play is known: Nim and Kuhn poker. A game of your own has the methods of ``Game``."""

from rollwright.environments.games.game import Game, NamedGame, make_game
from rollwright.environments.games.kuhn import KuhnPoker
from rollwright.environments.games.nim import Nim

__all__ = ["Game", "KuhnPoker", "NamedGame", "Nim", "make_game"]
