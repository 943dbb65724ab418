"""A solver and a critic play the game of ``guessing``: one model in two roles, which learns from both.

The solver proposes a guess. The critic sees how many numbers it leaves below and above, and says ``safe`` or ``risky``; a solver that
hears ``risky`` guesses once more. The last guess is not judged, because no number is better than another then::

    solver    27-33 27 | risky | 27-33 30 | higher | 31-33 32 | lower | 31-31 31      reward: the game's
    critic    0 6: risky                                                             reward: 1 if the verdict is right
    critic    1 1: safe
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.engine import InferenceEngine
from rollwright.workflows.episode import EpisodeWorkflow
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.self_play import POLICY, Player

RISKY = "risky"


@WORKFLOWS.register_module("solver_critic")
class SolverCritic(EpisodeWorkflow):
    """Plays a game; returns the solver's row, and one row for each of the critic's verdicts.

    Args:
        gconfig: how each turn is sampled.
        tokenizer: the policy's tokenizer.
        critic: False lets the solver play alone.
        max_turns: guesses that count.
        turn_discount: factor on the solver's reward for each further guess.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        critic: bool = True,
        max_turns: int = 3,
        turn_discount: float = 0.9,
    ) -> None:
        super().__init__(None, gconfig, tokenizer)
        self.game = resolve_function("guessing_game", "game")
        self.has_critic, self.max_turns, self.turn_discount = critic, max_turns, turn_discount

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Play one game. Returns its rows, or None if a request was aborted or a conversation is full."""
        game, solver, verdicts, reward, objections = self.game(data), self._player(engine), [], 0.0, 0
        for turn in range(self.max_turns):
            reply = await solver.answer(game.observation())
            after = self.max_turns - turn - 1
            if reply is not None and self.has_critic and after > 0:
                critic = self._player(engine)
                said = await critic.answer(game.sides(reply))
                if said is None:
                    return None
                right = said == game.right_verdict(reply, after)
                verdicts.append({**critic.turns.row(float(right)), "role": "critic", "turn_ids": turn})
                if said == RISKY:
                    objections += 1
                    reply = await solver.answer(RISKY)
            if reply is None:
                return None
            reward = game.step(reply).reward * self.turn_discount**turn
            if game.done:
                break
        self.report(solved=game.done, guesses=turn + 1, objections=objections)
        rows = [{**solver.turns.row(reward), "role": "solver", "turn_ids": 0}, *verdicts]
        return [{**row, "agent": POLICY, "environment": "guessing"} for row in rows]

    def _player(self, engine: InferenceEngine) -> Player:
        return Player(engine, POLICY, self.gconfig, self.tokenizer, self.enable_thinking)
