"""A service whose agents work on while it is killed: what they were answered and what they said of it is stored once."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from rollwright.store import ExperienceStore

from .parts import LIMIT, Part
from .proof import Proof
from .proxy import Proxy
from .run import Run


@dataclass
class Worked:
    """What an agent knows of a run."""

    reward: float  # of this run alone
    answers: list[list[int]] = field(default_factory=list)  # tokens of the calls that were answered
    tried_again: int = 0  # tokens of answers that came at a second attempt
    stored: int = 0


class Serve(Run):
    """One service, and agents that open runs, talk, and give feedback, each until it is answered."""

    kinds = ("kill", "early", "stop", "disk", "drop", "delay")
    agents, runs_each = 3, 10

    def open(self) -> None:
        """One part; a proxy before the service, and one before the front that agents talk to."""
        self.service, self.front = Proxy(), Proxy()
        self.proxies = [self.service, self.front]
        self.write_config(1, "{port: 1}", "store: {}\n")
        self.parts = [Part(self.warm, "service", ["run", "config.yaml", "mode=serve"], self.root)]
        self.worked: list[Worked] = []
        self._key = ""
        self._lock = threading.Lock()
        self._is_closed = False
        self.failed: list[str] = []
        self.threads = [threading.Thread(target=self._agent, args=(number,), daemon=True) for number in range(self.agents)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """End the agents and the proxies."""
        self._is_closed = True
        super().close()

    @property
    def trial(self) -> Path:
        """The directory of the store; the service's is inside."""
        return self.root / "runs/faults/trial"

    def directory_of(self, part: Part) -> Path:
        """Of the service."""
        return max(self.trial.glob("service-*"), default=self.trial / "none")

    def is_over(self) -> bool:
        """True when every agent has done its work."""
        return not any(thread.is_alive() for thread in self.threads)

    def prove(self) -> Proof:
        """Each run is stored once, with its reward and every token that its agent was answered."""
        (service,) = self.parts
        if not service.runs:
            service.start()
        self._wait_until(self._is_serving, "the service listens")  # it may have been started again a moment ago
        service.look()
        os.kill(service.pid, signal.SIGTERM)
        service.wait()
        proof = Proof(wrong=list(self.failed))
        if service.status != 0:
            proof.wrong.append(f"the service ended with {service.status}: {service.said()}")
        stored: dict[float, dict[tuple[str, int], list[int]]] = {}
        with ExperienceStore(f"sqlite:///{self.trial}/experiences.db", create=False) as store:
            for group in store.groups(partial=True):
                for each in group.experiences:
                    samples = stored.setdefault(round(each.reward or 0.0, 6), {})
                    samples.setdefault((group.name, int(each.eid.run)), []).extend([*each.tokens.tolist(), -1])
        for worked in self.worked:
            samples = list(stored.get(round(worked.reward, 6), {}).values())
            proof.duplicated += max(0, len(samples) - 1)
            proof.in_flight_tokens += worked.tried_again
            missing = [answer for answer in worked.answers if not any(_holds(sample, answer) for sample in samples)]
            proof.lost_tokens += sum(map(len, missing))
            if not samples or missing:
                proof.lost += 1
            if samples and not worked.stored:
                proof.wrong.append(f"run {worked.reward} was stored, and its feedback was answered with 0")
        if len(self.worked) != self.agents * self.runs_each:
            proof.wrong.append(f"{len(self.worked)} runs were worked on, not {self.agents * self.runs_each}")
        return proof

    def _is_serving(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.service.target), timeout=1).close()
        except OSError:
            return False
        return True

    # -- an agent ------------------------------------------------------------------------------------------------------

    def _agent(self, number: int) -> None:
        try:
            with httpx.Client(timeout=10.0, verify=False) as client:
                for index in range(self.runs_each):
                    self._work(client, number * 100 + index)
        except Exception as error:  # told by the proof
            self.failed.append(f"agent {number}: {type(error).__name__}: {error}")

    def _work(self, client: httpx.Client, number: int) -> None:
        worked = Worked(reward=(number + 1) / 1000)
        run, _ = self._ask(client, self.service, "/runs", {"task": f"task-{number % 4}"}, None)
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number}+1="}]
        for turn in range(2):
            body = {"model": "default", "messages": messages, "max_tokens": 8, "return_token_ids": True, "logprobs": True}
            answer, attempts = self._ask(client, self.front, "/v1/chat/completions", body, run["api_key"])
            (choice,) = answer["choices"]
            worked.answers.append(choice["token_ids"])
            worked.tried_again += len(choice["token_ids"]) * (attempts > 1)
            messages += [choice["message"], {"role": "user", "content": "and now?"}]
            given = {"run": run["run"], "reward": 0.25, "turn": turn, "final": False}
            self._ask(client, self.service, "/feedback", given, None)
        last = {"run": run["run"], "reward": worked.reward}
        for _ in range(2):  # said twice, it counts once
            worked.stored = self._ask(client, self.service, "/feedback", last, None)[0]["stored"]
        with self._lock:
            self.worked.append(worked)

    def _ask(self, client: httpx.Client, proxy: Proxy, path: str, body: Any, key: str | None) -> tuple[dict[str, Any], int]:
        """The answer to a request that is made until it is answered, and how often it was made."""
        deadline, attempts = time.monotonic() + LIMIT, 0
        while time.monotonic() < deadline and not self._is_closed:
            self._look_up()
            attempts += 1
            try:
                headers = {"Authorization": f"Bearer {key or self._key}"}
                answer = client.post(f"http://127.0.0.1:{proxy.port}{path}", json=body, headers=headers)
            except httpx.HTTPError:
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                return answer.json(), attempts
            if answer.status_code < 500:
                raise AssertionError(f"{path} was answered with {answer.status_code}: {answer.text}")
            time.sleep(0.05)
        raise AssertionError(f"{path} was not answered in {LIMIT:.0f} s")

    def _look_up(self) -> None:
        """Where the service and its front listen, once it said so."""
        if self.front.target:
            return
        for path in self.trial.glob("service-*/service.json"):
            said = json.loads(path.read_text())
            self._key = said["api_key"]
            self.service.target = urlsplit(said["url"]).port or 0
            self.front.target = urlsplit(said["agents"]).port or 0


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1))
