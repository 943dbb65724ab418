"""A server of OpenEnv: guess a number from "higher" and "lower". The package makes the server, this file the environment."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Verdict(Observation):
    text: str
    guesses: int = 0


class Guessing(Environment):
    """Guesses are numbers; other words make the environment fail, end or hang."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, largest: int = 20, **_: Any) -> Verdict:
        self.number = random.Random(seed).randint(1, largest)
        self._state = State(episode_id=episode_id)
        return Verdict(text=f"1-{largest}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Verdict:
        if action.message == "fail":
            raise RuntimeError("the dice fell off the table")
        if action.message == "end":
            os._exit(7)
        if action.message == "wait":
            time.sleep(3)
        if action.message == "forget":
            return Verdict(text="right", done=True)
        self._state.step_count += 1
        guess, count = int(action.message), self._state.step_count
        if guess == self.number:
            return Verdict(text="right", guesses=count, reward=1.0, done=True)
        return Verdict(text="higher" if guess < self.number else "lower", guesses=count, reward=-0.1 if count > 1 else None)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Guessing, Guess, Verdict, env_name="guessing", max_concurrent_envs=int(sys.argv[2]))

    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listening:
        print("started", flush=True)
        uvicorn.run(app, fd=listening.fileno(), log_level="warning")
