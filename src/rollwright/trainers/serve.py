"""Serving: an agent in use talks to the policy, is recorded token for token, and what users think of it becomes experiences.

The agent (or what starts it) opens a run, points its OpenAI client at the ``base_url`` and ``api_key`` that it is given, and tells
what came of it::

    POST /runs      {"task": "refund"}                     -> {"run": …, "base_url": …, "api_key": …}
    POST /feedback  {"run": …, "reward": 1.0}              -> {"stored": 2}      the run ends, its experiences are stored
    POST /feedback  {"run": …, "reward": 0.5, "turn": 0, "final": false}         a reward for a turn; the run goes on
    GET  /status                                           -> counts, and the version that samples

All three want the service's own key as a bearer token. Runs that name the same task become one group when there
are ``gconfig.n_samples`` of them; a run without a task is a group of its own (which wants a recipe whose baseline is not the
group's, such as reinforceplusplus). A trainer of mode ``train`` on the same store trains on the groups; its weights are loaded here.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from pydantic import Field

from rollwright.atomic import write_json
from rollwright.config.experiment import PPOConfig
from rollwright.config.source import plain
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import RollwrightError
from rollwright.experience.experience import ExperienceId
from rollwright.experience.operators import ExperiencePipeline
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.server.bodies import Body
from rollwright.inference.server.exchange import RequestError, Routes
from rollwright.inference.server.service import ServerThread, make_service
from rollwright.inference.server.settings import ServiceSettings
from rollwright.rollout.openai_episode import OpenAIEpisode, Reward
from rollwright.rollout.openai_front import OpenAIFront
from rollwright.store import Announcement, ExperienceStore
from rollwright.tracking import logging
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.loop import StopSignal
from rollwright.trainers.rollout_backend import make_rollout_engine
from rollwright.trainers.shared_run import follow_trainer, open_run_database

logger = getLogger("service")

POLL_SECONDS = 0.5
LONGEST_TASK = 128  # characters; the name of a group in the store holds it


class NewRun(Body):
    """``/runs``."""

    task: str | None = Field(
        None,
        min_length=1,
        max_length=LONGEST_TASK,
        description=f"the name of what the agent is to do, as text of 1 to {LONGEST_TASK} characters",
    )


class Feedback(Reward):
    """``/feedback``."""

    run: str = ""
    final: bool = Field(True, description="true (the run ends) or false (it goes on)")


@dataclass
class OpenRun:
    """A run of an agent that has not ended."""

    name: str
    task: str | None
    episode: OpenAIEpisode
    touched: float = field(default_factory=time.monotonic)


class RunBook:
    """The open runs, and what becomes of them: feedback in, experiences out. Safe to use from several threads.

    Args:
        front: records the runs.
        engine: answers them.
        store: where experiences go.
        config: the experiment.
        name: of this service, so that two on one store do not mix their groups.
    """

    def __init__(
        self, front: OpenAIFront, engine: InferenceEngine, store: ExperienceStore, config: PPOConfig, name: str
    ) -> None:
        self.front, self.engine, self.store, self.config, self.name = front, engine, store, config, name
        self.pipeline = ExperiencePipeline(config.store.operators if config.store is not None else ())
        self.counts = {"opened": 0, "stored": 0, "dropped": 0, "experiences": 0}
        self._runs: dict[str, OpenRun] = {}
        self._samples_of: dict[str, int] = {}  # finished runs of each task
        self._lock = threading.Lock()

    def open(self, task: str | None) -> dict[str, str]:
        """Open a run; returns its name, and what its OpenAI client is pointed at."""
        with self._lock:
            if len(self._runs) >= self.config.service.max_open_runs:
                raise RequestError(
                    f"{len(self._runs)} runs are open (service.max_open_runs): give feedback to some, or raise the limit.",
                    status=429,
                )
            name = secrets.token_urlsafe(12)
            episode = self.front.episode(self.engine, gconfig=self.config.gconfig.new(n_samples=1))
            self._runs[name] = OpenRun(name, task, episode)
            self.counts["opened"] += 1
        return {"run": name, "base_url": episode.base_url, "api_key": episode.api_key}

    def feedback(self, given: Feedback) -> int:
        """Reward a run, a turn or a call; where it is the final word, the run ends and its experiences are stored.

        Returns:
            How many experiences were stored.

        Raises:
            RequestError: there is no such open run (404), or no such turn or call (400).
        """
        with self._lock:
            opened = self._runs.get(given.run)
            if opened is None:
                raise RequestError(f"There is no open run {given.run!r}: it has ended, or was never opened.", status=404)
            try:
                opened.episode.set_reward(given.reward, turn=given.turn, call=given.call)
            except RollwrightError as error:
                raise RequestError(str(error)) from error
            opened.touched = time.monotonic()
            if not given.final:
                return 0
            opened.episode.close()
            stored = self._store(opened)
            del self._runs[given.run]  # not before it is stored: where that fails, the same feedback may be given again
            return stored

    def drop_idle(self) -> None:
        """End the runs that have waited too long for feedback."""
        with self._lock:
            limit = time.monotonic() - self.config.service.feedback_seconds
            for name in [name for name, run in self._runs.items() if run.touched < limit]:
                self._runs.pop(name).episode.close()
                self.counts["dropped"] += 1

    def end(self) -> None:
        """Groups that wait for further runs of their task are complete with those that came: no more will come of this service."""
        with self._lock:
            size = self.config.gconfig.n_samples
            waiting = [f"{self.name}/{task}/{runs // size}" for task, runs in self._samples_of.items() if task and runs % size]
            completed = sum(self.store.complete_group(name) for name in waiting)
            if completed:
                logger.info("%d groups have fewer than %d runs and are trained as they are", completed, size)

    def status(self) -> dict[str, Any]:
        """Counts, and the version that samples."""
        with self._lock:
            return {**self.counts, "open": len(self._runs), "version": self.engine.get_version()}

    def _store(self, run: OpenRun) -> int:
        """Store what a run was rewarded for. Nothing here changes before the store has it."""
        finished = self._samples_of.get(run.task or "", 0)
        size = self.config.gconfig.n_samples if run.task is not None else 1
        group, index = divmod(finished, size)
        name = f"{self.name}/{run.name}" if run.task is None else f"{self.name}/{run.task}/{group}"
        experiences = run.episode.experiences()
        for experience in experiences:
            experience.eid = ExperienceId(batch=self.name, task=name, run=0)
        result = self.pipeline.apply([experiences])
        for sample in result.samples:
            for experience in sample:
                experience.eid.run = index
        stored = self.store.append(result.samples, name=name, index=index, group_size=size) if result.samples else 0
        self.store.count_drops(result.drops)
        if not result.samples:
            self.counts["dropped"] += 1
            return 0
        self._samples_of[run.task or ""] = finished + 1
        self.counts["stored"] += 1
        self.counts["experiences"] += stored
        return stored


def application(book: RunBook, settings: ServiceSettings) -> FastAPI:
    """The service's routes, behind its key."""

    async def open_run(body: NewRun) -> dict[str, str]:
        return book.open(body.task)

    async def feedback(body: Feedback) -> dict[str, int]:
        return {"stored": book.feedback(body)}

    async def status() -> dict[str, Any]:
        return book.status()

    table = [("POST", "/runs", open_run, NewRun), ("POST", "/feedback", feedback, Feedback), ("GET", "/status", status, None)]
    elsewhere = "an agent talks to the base_url of its run, which POST /runs gives"
    refused = {f"/v1/{path}": elsewhere for path in ("chat/completions", "responses", "messages")}
    return make_service("rollwright service", [Routes(table)], settings, refused=refused)


def serve(config: PPOConfig, directory: RunDirectory, *, is_over: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Serve until a signal comes; ``service.json`` in the run directory (readable by its owner alone) holds URL and key.

    Args:
        config: the experiment.
        directory: claimed for this process.
        is_over: asked twice a second; true ends the service.

    Returns:
        The service's counts.
    """
    api_key = config.service.api_key or f"service-{secrets.token_urlsafe(24)}"
    with ExitStack() as opened:
        store = opened.enter_context(open_run_database(config))
        tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        rollout = opened.enter_context(make_rollout_engine(config, None, tokenizer, directory))
        limits = {"max_body_bytes": config.service.max_body_bytes, "allowed_hosts": config.service.allowed_hosts}
        front = OpenAIFront(tokenizer, config.actor.path, host=config.service.host, **limits)
        opened.callback(front.close)
        book = RunBook(front, rollout.client, store, config, directory.trial)
        settings = ServiceSettings(config.service.host, config.service.port, api_key, **limits)
        server = ServerThread(application(book, settings), settings)
        opened.callback(server.stop)
        told = plain(config.service)["api_key"] or api_key
        write_json(directory.path / "service.json", {"url": server.url, "api_key": told}, mode=0o600)
        logging.console().print(f"serving at {server.url}; the key is in {directory.path / 'service.json'}")
        loaded: Announcement | None = None
        with StopSignal() as stop:
            while stop.received is None and not is_over():
                loaded = follow_trainer(rollout, store, loaded, config.rollout.logprob_tolerance)
                book.drop_idle()
                time.sleep(POLL_SECONDS)
        server.stop()
        book.end()
        return book.status()
