"""Serving: a deployed agent samples from the policy, its tokens are recorded, and feedback turns its runs into experiences.

The agent (or its launcher) opens a run, passes the ``base_url`` and ``api_key`` of the response to its OpenAI client, and reports the
result::

    POST /runs      {"task": "refund"}                     -> {"run": …, "base_url": …, "api_key": …}
    POST /feedback  {"run": …, "reward": 1.0}              -> {"stored": 2}      the run ends, its experiences are stored
    POST /feedback  {"run": …, "reward": 0.5, "turn": 0, "final": false}         a reward for a turn; the run continues
    GET  /status                                           -> counts, and the version that samples

All three need the service's own key as a bearer token. ``gconfig.n_samples`` runs with the same task form a group. A run without a
task forms its own group, and so needs a recipe without a group baseline, such as reinforceplusplus. A trainer of mode ``train`` on the
same store trains on the groups, and the service loads its weights.

Open runs outlive the process: requests, responses and rewards are in the journal, and a restarted service has the same addresses and
keys. Feedback is idempotent: if it is sent again, it gets the same response and counts once.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from pydantic import Field

from rollwright.atomic import write_json
from rollwright.config.experiment import PPOConfig
from rollwright.config.source import plain
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import JournalError, RollwrightError, WorkflowError
from rollwright.experience.experience import ExperienceId
from rollwright.experience.journal.episodes import RecordedEpisode, read_episodes
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import Begin, DurableResult, End, pack_value, unpack_value
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.experience.operators import ExperiencePipeline
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.front.openai_episode import OpenAIEpisode, Reward
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.server.bodies import Body
from rollwright.inference.server.exchange import RequestError, Routes
from rollwright.inference.server.service import ServerThread, make_service
from rollwright.inference.server.settings import ServiceSettings
from rollwright.placement.local_rollout import make_rollout_engine
from rollwright.store import ExperienceStore
from rollwright.tracking import logging
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.loops.loop import StopSignal
from rollwright.trainers.modes.published_weights import WeightFollower
from rollwright.trainers.modes.shared_run import SERVICE_FILE, open_run_database

logger = getLogger("service")

POLL_SECONDS = 0.5
LONGEST_TASK = 128  # characters; the task is part of the name of a group in the store
ENDED_KEPT = 65_536  # ended runs whose repeated feedback is still answered
WORKFLOW = "serve"  # name of the workflow in the journal; there is no workflow that could run again
_LAST_WORD = "serve.last_word"


class NewRun(Body):
    """Body of ``POST /runs``."""

    task: str | None = Field(
        None,
        min_length=1,
        max_length=LONGEST_TASK,
        description=f"the name of what the agent is to do, as text of 1 to {LONGEST_TASK} characters",
    )


class Feedback(Reward):
    """Body of ``POST /feedback``."""

    run: str = ""
    final: bool = Field(True, description="true (the run ends) or false (it goes on)")


@dataclass
class OpenRun:
    """A run of an agent that has not ended."""

    name: str
    task: str | None
    episode: OpenAIEpisode
    journal: EpisodeWriter
    last_word: LastWord | None = None  # final feedback that could not be stored yet
    touched: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class LastWord:
    """The final feedback of a run, and the position of the run's sample in a group. Journaled before the sample is stored.

    Attributes:
        given: the feedback.
        group: name of the group; empty if the operators left nothing.
        index: index of the sample in the group.
        stored: number of experiences.
    """

    given: dict[str, Any]
    group: str = ""
    index: int = 0
    stored: int = 0


class RunBook:
    """The open runs of a service. Feedback turns them into experiences. Thread-safe.

    Args:
        front: records the runs.
        engine: answers requests.
        store: receives the experiences.
        config: the experiment.
        name: name of this service, which separates its groups from those of other services on the same store.
        journal: records the runs, so that they outlive the process. If None, open runs are lost when the process ends.
    """

    def __init__(
        self,
        front: OpenAIFront,
        engine: InferenceEngine,
        store: ExperienceStore,
        config: PPOConfig,
        name: str,
        journal: Journal | None = None,
    ) -> None:
        self.front, self.engine, self.store, self.config, self.name = front, engine, store, config, name
        self.pipeline = ExperiencePipeline(config.store.operators if config.store is not None else ())
        self.counts = {"opened": 0, "stored": 0, "dropped": 0, "experiences": 0}
        self._journal = journal
        self._opened = 0  # number of runs that all processes have opened
        self._runs: dict[str, OpenRun] = {}
        self._ended: dict[str, LastWord] = {}  # of the latest runs
        self._samples_of: dict[str, int] = {}  # number of samples that were assigned to the groups of a task
        self._lock = threading.Lock()

    def open(self, task: str | None) -> dict[str, str]:
        """Open a run. Returns its name, and the URL and key for the agent's OpenAI client."""
        with self._lock:
            if len(self._runs) >= self.config.service.max_open_runs:
                raise RequestError(
                    f"{len(self._runs)} runs are open (service.max_open_runs): give feedback to some, or raise the limit.",
                    status=429,
                )
            run = self._begin(secrets.token_urlsafe(12), task, self._opened)
            self._opened += 1
            self.counts["opened"] += 1
        return {"run": run.name, "base_url": run.episode.base_url, "api_key": run.episode.api_key}

    def _begin(self, name: str, task: str | None, ordinal: int, api_key: str | None = None) -> OpenRun:
        """Begin a new run, or one that an earlier process left open."""
        journal = EpisodeWriter(self._journal)
        gconfig = self.config.gconfig.new(n_samples=1)
        episode = self.front.episode(self.engine, gconfig=gconfig, journal=journal, api_key=api_key)
        facts = {"ordinal": ordinal, "index": 0, "attempt": 0, "is_eval": False, "version": self.engine.get_version()}
        packed = pack_value({"run": name, "task": task, "api_key": episode.api_key})
        try:
            journal.begin(**facts, workflow=WORKFLOW, samples_asked=1, task=packed, task_error="")
        except BaseException:
            episode.close()
            raise
        self._runs[name] = run = OpenRun(name, task, episode, journal)
        return run

    def feedback(self, given: Feedback) -> int:
        """Reward a run, a turn or a call. Final feedback ends the run and stores its experiences. Idempotent.

        Returns:
            The number of experiences stored.

        Raises:
            RequestError: there is no such open run (404), or no such turn or call (400).
        """
        said = given.model_dump()
        with self._lock:
            opened, ended = self._runs.get(given.run), self._ended.get(given.run)
            if ended is not None and ended.given == said:
                return ended.stored
            if opened is None:
                raise RequestError(f"There is no open run {given.run!r}: it has ended, or was never opened.", status=404)
            try:
                opened.episode.set_reward(given.reward, turn=given.turn, call=given.call)
            except RollwrightError as error:
                if not isinstance(error, WorkflowError):
                    raise  # not the caller's fault, such as a full disk
                raise RequestError(str(error)) from error
            opened.touched = time.monotonic()
            return self._end(opened, said) if given.final else 0

    def drop_idle(self) -> None:
        """End the runs that got no feedback for ``service.feedback_seconds``."""
        with self._lock:
            limit = time.monotonic() - self.config.service.feedback_seconds
            for run in [run for run in self._runs.values() if run.touched < limit]:
                try:
                    self._forget(run, "cut", f"no feedback in {self.config.service.feedback_seconds:g} s")
                except JournalError as error:  # such as a full disk; tried again soon
                    logger.warning("the run %s could not be dropped: %s", run.name, error)
                    return

    def end(self) -> None:
        """Complete the groups that still wait for further runs of their task, with the runs that they have."""
        with self._lock:
            completed = sum(self.store.complete_group(name) for name in self.store.open_groups(f"{self.name}/"))
            if completed:
                logger.info("%d groups have fewer than %d runs and are trained as they are", completed, self.config.group_size)

    def status(self) -> dict[str, Any]:
        """Return counts of runs and experiences, and the version of the weights that sample."""
        with self._lock:
            return {**self.counts, "open": len(self._runs), "version": self.engine.get_version()}

    # -- the end of a run ----------------------------------------------------------------------------------------------

    def _end(self, run: OpenRun, given: dict[str, Any]) -> int:
        """Store a run's experiences under a group name and an index in the group. A retry uses the same name and index."""
        experiences = run.episode.experiences()
        for experience in experiences:
            experience.eid = ExperienceId(batch=self.name, task="", run=0)
        result = self.pipeline.apply([experiences])
        size = self.config.group_size if run.task is not None else 1
        rows = [experience for sample in result.samples for experience in sample]
        if run.last_word is not None and run.last_word.group:
            group, index = run.last_word.group, run.last_word.index
        elif rows:
            taken = self._samples_of.get(run.task or "", 0)
            number, index = divmod(taken, size)
            group = f"{self.name}/{run.name}" if run.task is None else f"{self.name}/{run.task}/{number}"
        else:
            group, index = "", 0
        run.last_word = LastWord(given, group, index, len(rows))
        run.journal.result(_LAST_WORD, 0, "recorded", time.time(), value=pack_value(run.last_word))
        if group and run.task is not None:
            self._take_place(run.task, group, index)
        for experience in rows:
            experience.eid.task, experience.eid.run = group, index
        if rows:
            self.store.append(result.samples, name=group, index=index, group_size=size)
        self.store.count_drops(result.drops)
        # after it is stored; if that fails, the same feedback may be sent again
        self._forget(run, *(("accepted", "") if rows else ("rejected", "operators left nothing of it")))
        self._remember(run.name, run.last_word)
        self.counts["experiences"] += len(rows)
        return len(rows)

    def _forget(self, run: OpenRun, outcome: str, reason: str) -> None:
        """End an open run in the journal, and close its endpoint."""
        run.journal.end(outcome, reason)
        run.episode.close()
        del self._runs[run.name]
        self.counts["stored" if outcome == "accepted" else "dropped"] += 1

    def _take_place(self, task: str, group: str, index: int) -> None:
        number = int(group.rpartition("/")[2])
        self._samples_of[task] = max(self._samples_of.get(task, 0), number * self.config.group_size + index + 1)

    def _remember(self, name: str, last_word: LastWord) -> None:
        self._ended[name] = last_word
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    # -- from one process to the next ----------------------------------------------------------------------------------

    def restore(self, directory: Path) -> int:
        """Continue the runs that earlier processes left open, and return the number of open runs.

        A run whose final feedback was journaled but not stored is stored now.

        Args:
            directory: directory of the journal.
        """
        with self._lock, self.front.holding_calls():
            pasts = self._read_ended(directory)
            for record in read_episodes(directory, lambda writer, begin: begin.workflow == WORKFLOW and begin.ordinal in pasts):
                pasts[record.begin.ordinal].append(record)
            for past in pasts.values():
                self._go_on(sorted(past, key=lambda record: record.writer))
            size, still_open = self.config.group_size, self.store.open_groups(f"{self.name}/")
            for task, taken in self._samples_of.items():
                if taken % size and f"{self.name}/{task}/{taken // size}" not in still_open:  # it was completed with fewer runs
                    self._samples_of[task] = (taken // size + 1) * size
            return len(self._runs)

    def _read_ended(self, directory: Path) -> dict[int, list[RecordedEpisode]]:
        """Remember the runs that have ended. Returns the ordinals of the open runs, each with an empty list for its records."""
        names: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        is_open: dict[int, list[RecordedEpisode]] = {}
        words: dict[int, LastWord] = {}
        for place, record in read_records(directory):
            if isinstance(record, Begin) and record.workflow == WORKFLOW and record.task is not None:
                names[place.writer, record.episode] = record.ordinal, unpack_value(record.task)
                is_open.setdefault(record.ordinal, [])
                self._opened = max(self._opened, record.ordinal + 1)
            elif isinstance(record, DurableResult | End) and (place.writer, record.episode) in names:
                ordinal, facts = names[place.writer, record.episode]
                if isinstance(record, End):
                    is_open.pop(ordinal, None)
                    if ordinal in words:
                        self._remember(facts["run"], words.pop(ordinal))
                elif record.name == _LAST_WORD and record.value is not None:
                    words[ordinal] = word = LastWord(**unpack_value(record.value))
                    if word.group and facts["task"] is not None:
                        self._take_place(facts["task"], word.group, word.index)
        return is_open

    def _go_on(self, past: list[RecordedEpisode]) -> None:
        facts = past[0].task() or {}
        run = self._begin(facts["run"], facts["task"], past[0].begin.ordinal, facts["api_key"])
        try:
            run.episode.restore(past)
        except RollwrightError as error:
            logger.error("the run %s cannot go on, and is dropped: %s", run.name, error)
            self._forget(run, "failed", str(error))
            return
        words = [result.value for episode in past for result in episode.results if result.name == _LAST_WORD]
        if words and words[-1] is not None:
            run.last_word = LastWord(**unpack_value(words[-1]))
            self._end(run, run.last_word.given)


def application(book: RunBook, settings: ServiceSettings) -> FastAPI:
    """Make the service's web application, whose routes require the service's key."""

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


def _port(url: str | None) -> int:
    """Return the port of a URL, or 0 if there is none."""
    return (urlsplit(url).port or 0) if url else 0


def serve(config: PPOConfig, directory: RunDirectory, *, is_over: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Serve until a signal comes. ``service.json`` in the run directory (readable only by its owner) holds the URL and the key.

    If the directory is that of an earlier service, the new service reuses its addresses and key, and continues its open runs.

    Args:
        config: the experiment.
        directory: run directory claimed for this process.
        is_over: called twice a second. The service ends when it returns True.

    Returns:
        The service's counts.
    """
    file = directory.path / SERVICE_FILE
    left = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # written by an earlier service
    api_key = config.service.api_key or left.get("api_key") or f"service-{secrets.token_urlsafe(24)}"
    with ExitStack() as opened:
        stop = opened.enter_context(StopSignal())  # before the first request
        store = opened.enter_context(open_run_database(config))
        tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        rollout = opened.enter_context(make_rollout_engine(config, None, tokenizer, directory))
        limits: dict[str, Any] = {
            name: getattr(config.service, name) for name in ("max_body_bytes", "allowed_hosts", "receive_seconds")
        }
        front = OpenAIFront(tokenizer, config.actor.path, host=config.service.host, port=_port(left.get("agents")), **limits)
        opened.callback(front.close)
        book = RunBook(front, rollout.client, store, config, directory.trial, rollout.journal)
        if left and (count := book.restore(directory.journal)):
            logger.info("%d runs that were open go on", count)
        settings = ServiceSettings(config.service.host, config.service.port or _port(left.get("url")), api_key, **limits)
        server = ServerThread(application(book, settings), settings)
        opened.callback(server.stop)
        told = plain(config.service)["api_key"] or api_key
        write_json(file, {"url": server.url, "api_key": told, "agents": front.url}, mode=0o600)
        logging.console().print(f"serving at {server.url}; the key is in {directory.path / 'service.json'}")
        weights = WeightFollower(rollout, store.announcements, config.rollout.logprob_tolerance)
        while stop.received is None and not is_over():
            weights.follow()
            book.drop_idle()
            time.sleep(POLL_SECONDS)
        server.stop()
        book.end()
        return book.status()
