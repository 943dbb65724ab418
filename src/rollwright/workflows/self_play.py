"""Games that the policy plays against itself, or against models that are not trained.

Each player has its own conversation, which becomes its own row, and never sees the messages to the others. Rows have ``agent``, ``role``
and ``environment``, so each role has its own baseline, and the rows of opponents are not trained (``rollwright.experience.players``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.conversation import ConversationTokens
from rollwright.environments.games.game import NamedGame, enters_held_out, make_game, moves_not_held_out
from rollwright.errors import WorkflowError
from rollwright.inference.engine import InferenceEngine, run_concurrently
from rollwright.workflows.episode import EpisodeWorkflow, task_name
from rollwright.workflows.opponents import POLICY, Opponents
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.turns import Turns


class Player:
    """The player in one seat, and its conversations with the tokens as they were sampled.

    Args:
        engine: the model that answers.
        agent: name of the model.
        gconfig: how it is sampled.
        tokenizer: its tokenizer.
        enable_thinking: passed to the chat template.
        history: True if the whole game is one conversation, False if each move is one.

    Attributes:
        conversations: the conversations, in order.
        seed: seed of the last answer; None if it was not sampled with one.
        is_aborted: True if a request was aborted.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        agent: str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool,
        history: bool = True,
    ) -> None:
        self.agent = agent
        self.conversations: list[Turns] = []
        self.seed: int | None = None
        self.is_aborted = False
        self._engine, self._gconfig, self._tokenizer, self._history = engine, gconfig, tokenizer, history
        self._conversation = ConversationTokens(tokenizer, enable_thinking=enable_thinking)
        self._messages: list[dict[str, Any]] = []

    @property
    def turns(self) -> Turns:
        """The last conversation."""
        return self.conversations[-1]

    async def answer(self, says: str) -> str | None:
        """Tell the player something, and return its answer; None if the context is full or the request was aborted.

        Raises:
            WorkflowError: the chat template rewrites earlier turns.
        """
        turns = self._turns(says)
        response = await anext(aiter(turns), None)
        if response is None:
            self.is_aborted = turns.is_aborted
            return None
        self.seed = response.seed
        text = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reply = {"role": "assistant", "content": text}
        self._conversation.remember(self._messages, reply, response.input_tokens, response.output_tokens)
        self._messages.append(reply)
        return text.strip()

    def _turns(self, says: str) -> Turns:
        """Return the conversation that a message belongs to, with the message."""
        if not self._history:
            self._messages = []
        self._messages.append({"role": "user", "content": says})
        ids = self._conversation.encode(self._messages)
        if len(self._messages) == 1:
            self.conversations.append(Turns(self._engine, ids, self._gconfig, self._tokenizer, max_turns=2**31))
            return self.turns
        turns = self.turns
        if ids[: len(turns)] != turns.input_ids:
            raise WorkflowError(
                f"self_play: the chat template of {type(self._tokenizer).__name__} changes earlier turns, so a player's conversation "
                "is not one sequence of the tokens that were sampled. Use a template that only appends, or history: false."
            )
        turns.append_context(ids[len(turns) :])
        return turns


@WORKFLOWS.register_module("self_play")
class SelfPlayWorkflow(EpisodeWorkflow):
    """Plays a game; returns one row for each conversation of each player.

    By default, the policy plays all seats. Against an opponent of ``opponents`` or the ``pool``, it has one seat, and the opponent, which is
    not trained, has the others. The task's columns ``seat`` and ``opponent`` name them (``opponent: None`` lets the policy play
    itself); what is missing is drawn for each task.

    An illegal move ends the game: its player gets ``illegal_reward``, the others 0. So does a conversation that leaves no room for a reply.
    A game that begins in a state that is not held out does not enter one that is: if a player's move leads there, a random one that does not is
    made in its place. The reply is trained as it was sampled, with the result of the game.

    Args:
        gconfig: how each turn is sampled.
        tokenizer: the policy's tokenizer.
        game: name of the game, or a mapping with its ``name`` and arguments.
        opponents: models that are not trained, by name: the directory of each. Every game is played against one of them. They are
            sampled with the policy's generation arguments.
        pool: arguments of :class:`Pool`: in a share of the games, an earlier version of this run is the opponent.
        history: False makes each move a conversation and a row of its own, so a player sees only the game's last message.
        illegal_reward: reward of a player that makes an illegal move.
        max_moves: moves after which a game is given up, and its sample rejected.
        enable_thinking, rollout_stat_scope: see :class:`EpisodeWorkflow`.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        game: NamedGame = "nim",
        opponents: Mapping[str, str] | None = None,
        pool: Mapping[str, Any] | None = None,
        history: bool = True,
        illegal_reward: float = -1.0,
        max_moves: int = 200,
        enable_thinking: bool = False,
        rollout_stat_scope: str = "rollout",
    ) -> None:
        super().__init__(None, gconfig, tokenizer, enable_thinking, rollout_stat_scope)
        self.game = make_game(game)
        self.draws = self.opponents = Opponents(self.tokenizer, opponents, pool)
        self.history = history
        self.illegal_reward = illegal_reward
        self.max_moves = max_moves

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Play the games of a task; see :class:`RolloutWorkflow`. Rows of one game are one sample."""
        count = self.group_size or self.gconfig.n_samples
        games = await run_concurrently(self.episode(engine, data) for _ in range(count))
        if any(game is None for game in games):
            return None
        return [{**row, "sample_ids": number} for number, game in enumerate(games) for row in game]

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Play one game. Returns the rows of its players, or None if it was not played to the end."""
        game = self.game
        state, players = game.start(data), self._players(engine, data)
        rewards, moves, replaced, stays_out = None, 0, 0, not game.is_held_out(state)
        while (seat := game.player(state)) is not None and rewards is None:
            answer = await players[seat].answer(game.says(state))
            if players[seat].is_aborted or moves >= self.max_moves:
                return None
            if answer in game.moves(state):
                if stays_out and enters_held_out(game, state, answer):
                    answer = random.Random(players[seat].seed).choice(moves_not_held_out(game, state))
                    replaced += 1
                state, moves = game.play(state, answer), moves + 1
            else:
                rewards = [self.illegal_reward if other == seat else 0.0 for other in range(len(players))]
        is_legal = rewards is None
        rewards = list(game.rewards(state)) if rewards is None else rewards
        self.report(moves=moves, replaced=replaced, illegal=not is_legal)
        if others := {player.agent for player in players} - {POLICY}:
            own = next(seat for seat, player in enumerate(players) if player.agent == POLICY)
            best = max(reward for seat, reward in enumerate(rewards) if seat != own)
            won = 1.0 if rewards[own] > best else 0.5 if rewards[own] == best else 0.0
            names = ("win_rate", f"win_rate/{game.roles[own]}", *(f"win_rate/{name}" for name in others))
            self.report(**dict.fromkeys(names, won))
        return [
            {
                **conversation.row(rewards[seat]),
                "agent": player.agent,
                "role": game.roles[seat],
                "environment": game.name,
                "trainable": player.agent == POLICY,
            }
            for seat, player in enumerate(players)
            for conversation in player.conversations
        ]

    def _players(self, engine: InferenceEngine, data: Mapping[str, Any]) -> list[Player]:
        """Seat the players of a game."""
        arguments = self.gconfig, self.tokenizer, self.enable_thinking, self.history
        seats, task = len(self.game.roles), f"{data.get('ordinal')} {task_name(data)}"
        name = self.opponents.complete(dict(data), engine.get_version()).get("opponent")
        if name is None:
            return [Player(engine, POLICY, *arguments) for _ in range(seats)]
        other = self.opponents.asked_in(engine, name)
        own = int(data["seat"]) if data.get("seat") is not None else random.Random(f"seat {task}").randrange(seats)
        return [Player(engine, POLICY, *arguments) if seat == own else Player(other, name, *arguments) for seat in range(seats)]
