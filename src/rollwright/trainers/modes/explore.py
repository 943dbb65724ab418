"""Exploring: claim tasks from the store, sample them with the newest published weights, store their groups.

An explorer uses the same executor as a run of one process, with a different source and sink. ``LeasedTasks`` claims tasks from the store,
the executor samples them, ``GroupSink`` stores each group when it is complete, and ``WeightFollower`` loads the trainer's weights.

Invariants:

* a claimed task starts with weights at least as new as those whose publication released its slot;
* one transaction finishes a task and stores its group, or records that it has none; unfinished claims are released when the explorer ends;
* a task that is claimed again continues from the answers that earlier explorers recorded.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwright.config.experiment import PPOConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import RolloutError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.reading import TaskFiles
from rollwright.experience.journal.writing import Journal
from rollwright.experience.operators import ExperiencePipeline, PipelineResult, report_operators, samples_of
from rollwright.experience.trajectory import Trajectory
from rollwright.placement.local_rollout import make_rollout_engine
from rollwright.placement.task_services import TaskServices
from rollwright.rollout.engines import RolloutEngine
from rollwright.rollout.resume import read_past
from rollwright.store import ExperienceStore, TaskClaim
from rollwright.tracking.learning_signs import warn_of_reasons
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.drawn_tasks import (
    count_tasks,
    held_out_tasks,
    refuse_missing_chat_template,
    training_tasks,
    training_workflow,
)
from rollwright.trainers.loops.evaluation import evaluate
from rollwright.trainers.loops.loop import StopSignal
from rollwright.trainers.loops.reporting import StageRun, sample_means
from rollwright.trainers.modes.published_weights import WeightFollower
from rollwright.trainers.modes.shared_run import (
    EvaluationTurns,
    StoreStaleness,
    open_run_database,
    process_directories,
    run_length,
    trial_path,
)

logger = getLogger("explorer")

POLL_SECONDS = 0.05
REMINDER_SECONDS = 60.0
EPOCHS_WITHOUT_GROUP = 2


@dataclass(frozen=True)
class ClaimedTask:
    """A claimed task, and what earlier explorers recorded of it.

    Attributes:
        row: the task.
        past: recorded episode of each sample, by index.
        refused: reason that an earlier explorer recorded for getting no group from the task. Empty if there is none.
    """

    claim: TaskClaim
    row: dict[str, Any]
    past: Mapping[int, RecordedEpisode] = field(default_factory=dict)
    refused: str = ""

    @property
    def newest_version(self) -> int:
        """Newest version of the recorded tokens, or -1 if there are none."""
        return max((each.newest_version for each in self.past.values()), default=-1)


@dataclass(frozen=True)
class FinishedTask:
    """The result of a task.

    Attributes:
        group: the sampled group. None if it was rejected or failed.
        operated: result of the operators. None if there was no group.
        stored: number of experiences stored.
        reason: why no group was stored. Empty if a group was stored.
    """

    claim: TaskClaim
    group: Trajectory | None = None
    operated: PipelineResult | None = None
    stored: int = 0
    reason: str = ""


class LeasedTasks:
    """The source of an explorer's tasks: claims them from the store under leases.

    A task that is claimed again continues from what its earlier explorers recorded in their journals.

    Args:
        config: the experiment.
        explorer: name of the explorer.
        store: the store.
        row_of: returns the task that has a given ordinal.
        journal: journal of this process, which redacts the same secrets as those of the other explorers. If None, nothing is redacted.
        total_steps: steps of the run.
    """

    def __init__(
        self,
        config: PPOConfig,
        explorer: str,
        store: ExperienceStore,
        row_of: Callable[[int], dict[str, Any]],
        journal: Journal | None,
        total_steps: int,
    ) -> None:
        assert config.store is not None
        self._config, self._explorer, self._store = config, explorer, store
        self._row_of, self._journal = row_of, journal
        self._staleness = StoreStaleness(config)
        self._lease_seconds = config.store.lease_seconds
        has_fixed_length = config.store.uses == 1 and config.store.train_batch_size is None
        self._total_groups = total_steps * config.train_dataset.batch_size if has_fixed_length else None
        self._claimed: list[TaskClaim] = []
        self._deferred: list[ClaimedTask] = []  # wait until the trainer has again reached the versions of their recorded tokens
        self._task_files = TaskFiles()

    @property
    def limit(self) -> int:
        """Maximum number of groups, over all explorers, that are running, waiting or being trained on."""
        return self._staleness.places

    @property
    def all_stored(self) -> bool:
        """True if the groups of all steps are stored. Always False if the run needs no fixed number of groups."""
        if self._total_groups is None:
            return False
        status = self._store.status()
        return status.unused_groups + status.used_groups >= self._total_groups

    def claim(self, running: int) -> None:
        """Claim tasks, only a few at a time so that explorers share them.

        Args:
            running: number of this explorer's tasks that have not ended.
        """
        room = min(self.limit - running - len(self._deferred), max(1, self._config.train_dataset.batch_size // 2))
        if room > 0 and not self.all_stored:
            self._claimed = self._store.tasks.claim(
                self._explorer, room, lease_seconds=self._lease_seconds, max_outstanding=self.limit
            )

    def startable(self, version: int) -> list[ClaimedTask]:
        """Return the claimed tasks that can start with the weights of ``version``, because they have no newer recorded tokens.

        The other claimed tasks are kept for a later call.
        """
        tasks = [*self._deferred, *self._with_past(self._claimed, version)]
        self._claimed, self._deferred = [], [task for task in tasks if task.newest_version > version]
        return [task for task in tasks if task.newest_version <= version]

    def release(self) -> None:
        """Release all claims."""
        self._claimed, self._deferred = [], []
        self._store.tasks.release(self._explorer)

    def release_left(self) -> None:
        """Release the tasks of ended explorers on this machine at once, instead of waiting until the leases expire."""
        for directory in process_directories(self._config, "explore"):
            name = directory.path.name
            if name != self._explorer and directory.was_left() and (count := self._store.tasks.release(name)):
                logger.info("%d tasks of %s, which has ended, are released", count, name)

    def _with_past(self, claims: Sequence[TaskClaim], version: int) -> list[ClaimedTask]:
        again = {claim.ordinal for claim in claims if claim.attempt > 0}
        explorers = process_directories(self._config, "explore") if again else []
        past = read_past([each.journal for each in explorers], again.__contains__, self._journal, self._task_files)
        oldest = self._staleness.oldest(version) or 0
        for ordinal, samples in past.episodes.items():
            young = {index: each for index, each in samples.items() if _oldest_version(each) >= oldest}
            if len(young) < len(samples):
                logger.info("%d samples of task %d are too old and begin anew", len(samples) - len(young), ordinal)
            past.episodes[ordinal] = young
        if past.episodes:
            logger.info("%d tasks continue from the journal, which has %d of their tokens", len(past.episodes), past.tokens)
        tasks = []
        for claim in claims:
            row = past.row({**self._row_of(claim.ordinal), "ordinal": claim.ordinal})
            end = past.rejected.get(claim.ordinal)
            reason = "" if end is None else end.reason or end.state
            tasks.append(ClaimedTask(claim, row, past.episodes.get(claim.ordinal, {}), reason))
        return tasks


class GroupSink:
    """The sink of an explorer's groups: starts claimed tasks on the executor, and stores their groups in a thread when they end.

    Args:
        rollout: samples the tasks.
        workflow: runs their episodes.
        group_size: number of samples per task.
        store: receives the groups.
        operators: applied to a group before it is stored.
    """

    def __init__(
        self, rollout: RolloutEngine, workflow: Any, group_size: int, store: ExperienceStore, operators: ExperiencePipeline
    ) -> None:
        self._rollout = rollout
        self._workflow = workflow
        self._group_size = group_size
        self._store = store
        self._operators = operators
        self._running: dict[int, TaskClaim] = {}  # by the executor's task number
        self._storing = threading.Lock()  # held while a group is stored
        self._finished: queue.SimpleQueue[FinishedTask | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._store_groups, name="stores-groups", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of running tasks."""
        return len(self._running)

    def begin(self, task: ClaimedTask) -> None:
        """Start a task. If an earlier explorer found that the task gives no group, finish it at once."""
        with self._storing:
            if task.refused:
                self._finished.put(self._finish(task.claim, task.refused))
                return
            number = self._rollout.submit(task.row, self._workflow, group_size=self._group_size, past=task.past)
            self._running[number] = task.claim

    def finished(self, timeout: float = 0.0) -> Iterator[FinishedTask]:
        """Yield the tasks that have ended since the last call, after waiting up to ``timeout`` seconds for the first one.

        Raises:
            RollwrightError: rollout has stopped, or a group could not be stored.
        """
        with suppress(queue.Empty):
            while True:
                task = self._finished.get(timeout > 0, timeout)
                timeout = 0.0
                if isinstance(task, Exception):
                    raise task
                yield task

    def abandon(self) -> None:
        """Cancel the running tasks, after the group that is being stored, if any, is stored."""
        with self._storing:
            self._rollout.abandon(self._running)
            self._running.clear()

    def close(self) -> None:
        """Stop the engine, and wait for the group that is being stored."""
        self._rollout.destroy()
        self._thread.join()

    def _store_groups(self) -> None:
        try:
            while True:
                ended = self._rollout.wait_for_any()
                for number, outcome in ended.items():
                    if (error := self._rollout.executor.stopped_by) is not None:
                        raise error
                    with self._storing:
                        if (claim := self._running.pop(number, None)) is not None:  # None: abandoned in the meantime
                            self._finished.put(self._finish(claim, outcome))
        except Exception as error:  # raised again in the exploring thread
            self._finished.put(error)

    def _finish(self, claim: TaskClaim, outcome: Trajectory | str) -> FinishedTask:
        """Store a task's group, or record in the store that the task gave none."""
        if isinstance(outcome, str):
            self._store.tasks.finish(claim, [], drops={"no_group": 1})
            return FinishedTask(claim, reason=outcome)
        result = self._operators.apply(samples_of(outcome, claim.ordinal))
        is_stored = self._store.tasks.finish(claim, result.samples, drops=result.drops)
        stored = sum(map(len, result.samples)) if is_stored else 0
        reason = "" if stored else "nothing left by the operators" if is_stored else "claim was lost"
        return FinishedTask(claim, outcome, result, stored, reason)


class Explorer:
    """The process of mode ``explore``. Several explorers may run at once.

    Args:
        config: the experiment, the same as the trainer's except for ``mode``.
        directory: run directory claimed for this process. Its name is the explorer's name.
    """

    def __init__(self, config: PPOConfig, directory: RunDirectory) -> None:
        self.config = config
        self.directory = directory
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        refuse_missing_chat_template(config, self.tokenizer)
        self.drawn = training_tasks(config)
        self.spec = run_length(config, count_tasks(self.drawn.source))
        self.turns = EvaluationTurns(trial_path(config) / "evaluation.lock")
        self.groups = 0  # stored so far
        self.missed = 0  # tasks in a row that gave no group

    def __enter__(self) -> Explorer:
        config = self.config
        with ExitStack() as opened:  # closes what is open if something fails here
            self.store = opened.enter_context(open_run_database(config))
            assert config.store is not None
            self.lease_seconds = config.store.lease_seconds
            torch.manual_seed(config.seed)
            operators = ExperiencePipeline(config.store.operators)
            services = opened.enter_context(TaskServices(config, self.tokenizer, self.directory.logs))
            workflow = training_workflow(config, self.tokenizer, self.drawn.source, services)
            rows, *self.evaluated = held_out_tasks(config, self.tokenizer, services)
            self.evaluation_tasks = rows[: config.evaluator.limit]
            self.rollout = opened.enter_context(make_rollout_engine(config, None, self.tokenizer, self.directory))
            name, steps = self.directory.trial, self.spec.total_steps
            self.tasks = LeasedTasks(config, name, self.store, self.drawn.row, self.rollout.journal, steps)
            self.sink = GroupSink(self.rollout, workflow, config.group_size, self.store, operators)
            opened.callback(self.sink.close)
            tolerance = config.rollout.logprob_tolerance
            self.weights = WeightFollower(self.rollout, self.store.announcements, tolerance, self._release_running)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def explore(self) -> dict[str, Any]:
        """Explore until the trainer has published its last version or a signal comes.

        If no trainer has announced weights, exploring ends when the groups of all steps are stored.

        Returns:
            ``{"groups", "version", "eval": {version: reward}}``.
        """
        evaluations: dict[int, float] = {}
        steps = self.spec.total_steps
        with (
            StopSignal() as stop,
            StageRun(self.config, self.directory, total_steps=steps, resume_step=None, tokenizer=self.tokenizer) as run,
            self.store.tasks.keeping_claims(self.directory.trial, lease_seconds=self.lease_seconds),
        ):
            warn_of_reasons(self.config)
            self.tasks.release_left()
            self._wait_for_first_weights(stop)
            last_news = time.monotonic()
            while not self._is_over() and stop.received is None:
                self.tasks.claim(len(self.sink))
                if self.weights.follow():
                    self._report(run, evaluations)
                for task in self.tasks.startable(self.weights.version):
                    self.sink.begin(task)
                for finished in self.sink.finished(POLL_SECONDS):
                    self._note(run, finished)
                    last_news = time.monotonic()
                if time.monotonic() - last_news > REMINDER_SECONDS:
                    last_news = time.monotonic()
                    logger.info(
                        "%d tasks run; at the limit of %d groups ahead of the trainer (version %d); is a trainer running?",
                        len(self.sink),
                        self.tasks.limit,
                        self.weights.version,
                    )
            self.sink.abandon()  # before their claims are released
            for finished in self.sink.finished():
                self._note(run, finished)
            self.weights.follow()
            self._report(run, evaluations, last=stop.received is None)
        return {"groups": self.groups, "version": self.weights.version, "eval": evaluations}

    def _release_running(self) -> None:
        """Cancel and release all claimed tasks, because the weights that sample them no longer exist."""
        logger.warning("the tasks that run are released")
        self.sink.abandon()
        self.tasks.release()

    def _is_over(self) -> bool:
        newest = self.store.announcements.newest()
        return self.tasks.all_stored if newest is None else newest.version >= self.spec.total_steps

    def _wait_for_first_weights(self, stop: StopSignal) -> None:
        """Wait for the first announcement if the engine does not hold the run's first weights.

        Only the trainer knows weights that it initialised at random, and servers started before the run may hold another run's weights.
        """
        holds_others = self.rollout.get_version() != 0
        is_waiting = holds_others or self.config.actor.init_from_scratch
        reason = "the servers hold weights of another version" if holds_others else "actor.init_from_scratch"
        while is_waiting and stop.received is None:
            logger.info("waiting for the trainer's first weights (%s)", reason)
            is_waiting = self.store.announcements.wait_for(0, REMINDER_SECONDS, lambda: stop.received is not None) is None

    # -- what is reported ----------------------------------------------------------------------------------------------

    def _note(self, run: StageRun, finished: FinishedTask) -> None:
        if finished.stored:
            self.groups += 1
            self.missed = 0
        else:
            self.missed += 1
            logger.info("task %d is stored without a group: %s", finished.claim.ordinal, finished.reason)
        per_epoch = max(1, self.spec.steps_per_epoch * self.config.train_dataset.batch_size)
        if self.missed > EPOCHS_WITHOUT_GROUP * per_epoch:
            raise RolloutError(
                f"no group of the last {self.missed} tasks was kept, which is more than {EPOCHS_WITHOUT_GROUP} epochs: "
                f"look at the workflow, rollout.dynamic_filter and store.operators. The last: {finished.reason}"
            )
        if finished.group is not None:
            rewards = sample_means(finished.group, finished.group["rewards"])
            run.tracker.scalar(
                reward=float(rewards.mean()), response_tokens=float(finished.group["loss_mask"].sum()) / len(rewards)
            )
            run.tracker.sum(groups=1.0, samples=float(len(rewards)))
            run.dumper.dump(self.weights.version, finished.group)
        if finished.operated is not None:
            report_operators(finished.operated, run.tracker)

    def _report(self, run: StageRun, evaluations: dict[int, float], last: bool = False) -> None:
        """Log the metrics since the last version. If an evaluation is due, one of the explorers runs it."""
        version, every = self.weights.version, self.config.evaluator.every_steps
        numbers = run.tracker.export(reset=True)
        if "reward" in numbers:
            run.metrics.log(version, numbers)
            run.display.step(version, numbers["reward"])
        before, evaluated = -1 if self.config.evaluator.at_start else 0, self.turns.last(self.weights.loaded)
        done = before if evaluated is None else max(before, evaluated)
        due = every is not None and version // every > done // every
        if version == done or not self.evaluation_tasks or not (due or last or (done < 0 and version == 0)):
            return
        with self.turns.taken(self.weights.loaded) as is_mine:
            if is_mine:
                workflow, kwargs = self.evaluated
                result = evaluate(self.rollout, self.evaluation_tasks, workflow, kwargs, self.config.evaluator.gconfig)
                evaluations[version] = result.reward
                run.report_evaluation(version, result)


def _oldest_version(episode: RecordedEpisode) -> int:
    """Return the oldest version of an episode's recorded answers, or the version at its beginning if it has no answers."""
    return min((int(each.versions.min()) for each in episode.calls if each.call.output), default=episode.begin.version)
