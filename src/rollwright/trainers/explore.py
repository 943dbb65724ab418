"""Exploring: claim tasks from the store, sample them with the newest weights that a trainer published, store their groups.

Invariants:

* a claimed task starts with weights at least as new as those whose publication made room for it;
* a task is finished by storing its group (or that there is none) in one transaction; what is left when the explorer ends is
  released;
* a task that is claimed again goes on from what explorers before had been answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from rollwright.config.experiment import PPOConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import RolloutError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.reading import TaskFiles
from rollwright.experience.operators import ExperiencePipeline, PipelineResult, report_operators, samples_of
from rollwright.experience.trajectory import Trajectory
from rollwright.rollout.engines import RolloutEngine
from rollwright.rollout.resume import PastEpisodes, read_past
from rollwright.rollout.staleness import Staleness
from rollwright.store import Announcement, TaskClaim
from rollwright.tracking.learning_signs import warn_of_reasons
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.evaluation import evaluate
from rollwright.trainers.loop import StopSignal
from rollwright.trainers.reporting import StageRun, sample_means
from rollwright.trainers.rollout_backend import make_rollout_engine
from rollwright.trainers.shared_run import (
    PARTS,
    EvaluationTurns,
    follow_trainer,
    open_run_database,
    run_length,
    trial_path,
)
from rollwright.trainers.task_services import TaskServices
from rollwright.trainers.tasks import (
    count_tasks,
    held_out_tasks,
    refuse_missing_chat_template,
    training_tasks,
    training_workflow,
)

logger = getLogger("explorer")

POLL_SECONDS = 0.05
REMINDER_SECONDS = 60.0
EPOCHS_WITHOUT_GROUP = 2


@dataclass(frozen=True)
class Finished:
    """How a task ended."""

    claim: TaskClaim
    group: Trajectory | None = None  # None: rejected or failed
    operated: PipelineResult | None = None  # what the operators made of it
    stored: int = 0  # experiences
    reason: str = ""  # why there is no group


class Explorer:
    """An explorer of mode ``explore``; several may run at once.

    Args:
        config: the experiment, the same as the trainer's but for ``mode``.
        directory: claimed for this process; its name is the explorer's.
    """

    def __init__(self, config: PPOConfig, directory: RunDirectory) -> None:
        self.config = config
        self.directory = directory
        self.name = directory.trial
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        refuse_missing_chat_template(config, self.tokenizer)
        self.tasks = training_tasks(config)
        self.spec = run_length(config, count_tasks(self.tasks.source))
        rollout = config.rollout
        staleness = Staleness(rollout.max_head_offpolicyness, config.train_dataset.batch_size, rollout.over_sampling)
        self.limit = int(staleness.places)  # groups of all explorers that run, wait, or are trained on
        self.loaded: Announcement | None = None  # of the weights that sample now
        self.turns = EvaluationTurns(trial_path(config) / "evaluation.lock")
        self.groups = 0  # stored so far
        self.claimed: list[TaskClaim] = []  # tasks that have not begun
        self.running: dict[Future[Finished], TaskClaim] = {}
        # Those of them that are being stored, or are stored. A task whose lease ran out may be claimed again while its first claim runs.
        self.finishing: set[TaskClaim] = set()
        self.missed = 0  # tasks in a row that gave no group
        self.task_files = TaskFiles()

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Explorer:
        config = self.config
        with ExitStack() as opened:  # closes what is open where something fails here
            self.store = opened.enter_context(open_run_database(config))
            assert config.store is not None
            self.lease_seconds = config.store.lease_seconds
            torch.manual_seed(config.seed)
            self.pipeline = ExperiencePipeline(config.store.operators)
            self.operating = threading.Lock()
            services = opened.enter_context(TaskServices(config, self.tokenizer, self.directory.logs))
            self.workflow = training_workflow(config, self.tokenizer, self.tasks.source, services)
            rows, *self.evaluated = held_out_tasks(config, self.tokenizer, services)
            self.evaluation_tasks = rows[: config.evaluator.limit]
            self.pool = ThreadPoolExecutor(self.limit, thread_name_prefix="explored-task")
            opened.callback(self.pool.shutdown, wait=True, cancel_futures=True)
            self._ending = False
            self._start_engine()
            opened.callback(self._stop_engine)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def _start_engine(self) -> RolloutEngine:
        self.rollout = make_rollout_engine(self.config, None, self.tokenizer, self.directory)
        self.rollout.initialize()
        return self.rollout

    def _stop_engine(self) -> None:
        self._ending = True
        self.rollout.destroy()
        wait(self.running)
        self._ending = False

    # -- the loop ------------------------------------------------------------------------------------------------------

    def explore(self) -> dict[str, Any]:
        """Explore until the trainer has published its last version or a signal comes.

        Where no trainer has announced anything, it ends when the groups of all steps are stored.

        Returns:
            ``{"groups", "version", "eval": {version: reward}}``.
        """
        evaluations: dict[int, float] = {}
        steps = self.spec.total_steps
        with (
            StopSignal() as stop,
            StageRun(self.config, self.directory, total_steps=steps, resume_step=None, tokenizer=self.tokenizer) as run,
            self.store.keeping_claims(self.name, lease_seconds=self.lease_seconds),
        ):
            warn_of_reasons(self.config)
            self._release_left()
            self._wait_for_first_weights(stop)
            last_news = time.monotonic()
            while not self._is_over() and stop.received is None:
                self.claimed = self._claim()
                if self._follow_trainer():
                    self._report(run, evaluations)
                self._begin_claimed()
                if not self.running:
                    time.sleep(POLL_SECONDS)
                for future in wait(self.running, POLL_SECONDS, FIRST_COMPLETED).done:
                    self.finishing.discard(self.running.pop(future))
                    self._note(run, future.result())
                    last_news = time.monotonic()
                if time.monotonic() - last_news > REMINDER_SECONDS:
                    last_news = time.monotonic()
                    logger.info(
                        "%d tasks run; at the limit of %d groups ahead of the trainer (version %d); is a trainer running?",
                        len(self.running),
                        self.limit,
                        self.rollout_version,
                    )
            for future in self._stored():
                self._note(run, future.result())
            self._follow_trainer()
            self._report(run, evaluations, last=stop.received is None)
            self._stop_engine()  # before the claims that are left are released
        return {"groups": self.groups, "version": self.rollout_version, "eval": evaluations}

    def _claim(self) -> list[TaskClaim]:
        """A few tasks at a time, so that explorers share what there is."""
        room = min(self.limit - len(self.running), max(1, self.config.train_dataset.batch_size // 2))
        if room <= 0 or self._is_enough():
            return []
        return self.store.claim_tasks(self.name, room, lease_seconds=self.lease_seconds, max_outstanding=self.limit)

    def _begin_claimed(self) -> None:
        """Run the tasks that were claimed."""
        past = self._past_of(self.claimed)
        for claim in self.claimed:
            task = past.row({**self.tasks.row(claim.ordinal), "ordinal": claim.ordinal})
            self.running[self.pool.submit(self._run, claim, task, past)] = claim
        self.claimed = []

    def _stored(self) -> set[Future[Finished]]:
        """The tasks that are being stored, when their threads have ended: the store has them before that."""
        return wait([future for future, claim in self.running.items() if claim in self.finishing]).done

    def _release_left(self) -> None:
        """Release at once, and not when their leases run out, the tasks of explorers of this machine that have ended."""
        trial = trial_path(self.config)
        for path in trial.glob(f"{PARTS['explore']}-*"):
            directory = RunDirectory(trial.parent, trial.name, path.name)
            if path.name != self.name and directory.was_left() and (count := self.store.release_claims(path.name)):
                logger.info("%d tasks of %s, which has ended, are released", count, path.name)

    def _past_of(self, claims: Sequence[TaskClaim]) -> PastEpisodes:
        """What explorers had been answered, this one or others, in tasks that are claimed again: their journals have it."""
        again = {claim.ordinal for claim in claims if claim.attempt > 0}
        journals = sorted(trial_path(self.config).glob(f"{PARTS['explore']}-*/journal")) if again else []
        past = read_past(journals, again.__contains__, self.rollout.journal, self.task_files)
        oldest = self.rollout_version - self.config.rollout.max_head_offpolicyness if self._drops_old_groups else 0
        for ordinal, samples in past.episodes.items():
            kept = {index: each for index, each in samples.items() if _oldest_version(each) >= oldest}
            if len(kept) < len(samples):
                logger.info("%d samples of task %d are too old to go on and begin anew", len(samples) - len(kept), ordinal)
            past.episodes[ordinal] = kept
        if past.episodes:
            logger.info("%d tasks go on from the journal, where they have %d tokens", len(past.episodes), past.tokens)
        return past

    def _run(self, claim: TaskClaim, task: dict[str, Any], past: PastEpisodes) -> Finished:
        """One task, in a thread of its own: sample its group, pass it through the operators, store it."""
        rollout, samples = self.rollout, self.config.gconfig.n_samples
        if (end := past.given_up.get(claim.ordinal)) is not None:
            self.store.finish_task(claim, [], drops={"no_group": 1})
            return Finished(claim, reason=end.reason)
        mine = past.episodes.get(claim.ordinal, {})
        newest = max((each.newest_version for each in mine.values()), default=-1)
        while newest > self.rollout_version and not self._ending:  # of weights that a trainer which began again is to make anew
            time.sleep(POLL_SECONDS)
        try:
            group = rollout.wait_for_task(rollout.submit(task, self.workflow, group_size=samples, past=mine))
        except RolloutError as error:
            if self._ending or rollout.executor.stopped_by is not None:
                raise  # the claim is released
            self.store.finish_task(claim, [], drops={"no_group": 1})
            return Finished(claim, reason=str(error))
        with self.operating:  # an operator may count what it sees
            result = self.pipeline.apply(samples_of(group, claim.ordinal))
        self.finishing.add(claim)
        kept = self.store.finish_task(claim, result.samples, drops=result.drops)
        stored = sum(map(len, result.samples)) if kept else 0
        reason = "" if stored else "nothing left by the operators" if kept else "claim was lost"
        return Finished(claim, group, result, stored, reason)

    @property
    def _drops_old_groups(self) -> bool:
        """True where the trainer drops groups older than ``max_head_offpolicyness``."""
        return self.config.store is not None and self.config.store.uses == 1

    def _is_over(self) -> bool:
        newest = self.store.latest_version()  # None: nobody trains yet; what was asked for may be there
        return self._is_enough() if newest is None else newest.version >= self.spec.total_steps

    def _is_enough(self) -> bool:
        """True where all groups of the run's steps are stored; not known where the store decides what a step is."""
        config = self.config
        assert config.store is not None
        if config.store.uses != 1 or config.store.train_batch_size is not None:
            return False
        status = self.store.status()
        return status.unused_groups + status.used_groups >= self.spec.total_steps * config.train_dataset.batch_size

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def rollout_version(self) -> int:
        """Version that the next token is sampled with."""
        return 0 if self.loaded is None else self.loaded.version

    def _follow_trainer(self) -> bool:
        """Load the weights that were announced last; true where they are others than before."""
        before = self.loaded
        self.loaded = follow_trainer(self.rollout, self.store, before, self.config.rollout.logprob_tolerance, self._begin_anew)
        return self.loaded is not before

    def _begin_anew(self) -> RolloutEngine:
        """Release the tasks that run, and those that are to: the weights that sample them no longer exist. Stored ones are counted."""
        logger.warning("the tasks that run are released")
        self._stop_engine()
        stored = self._stored()
        self.running = {future: claim for future, claim in self.running.items() if future in stored}
        self.finishing.intersection_update(self.running.values())
        self.claimed = []
        self.store.release_claims(self.name)
        return self._start_engine()

    def _wait_for_first_weights(self, stop: StopSignal) -> None:
        """Where the engine does not hold the run's first weights, there is nothing to begin with until they are announced.

        Weights made at random are the trainer's own, and servers that run already may hold the weights of another run.
        """
        holds_others = self.rollout.get_version() != 0
        is_waiting = holds_others or self.config.actor.init_from_scratch
        reason = "the servers hold weights of another version" if holds_others else "actor.init_from_scratch"
        while is_waiting and stop.received is None:
            logger.info("waiting for the trainer's first weights (%s)", reason)
            is_waiting = self.store.wait_for_version(0, REMINDER_SECONDS, lambda: stop.received is not None) is None

    # -- what is reported ----------------------------------------------------------------------------------------------

    def _note(self, run: StageRun, finished: Finished) -> None:
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
            run.dumper.dump(self.rollout_version, finished.group)
        if finished.operated is not None:
            report_operators(finished.operated, run.tracker)

    def _report(self, run: StageRun, evaluations: dict[int, float], last: bool = False) -> None:
        """Log what was noted since the last version; evaluate where it is due since the last time, in one of the explorers."""
        version, every = self.rollout_version, self.config.evaluator.every_steps
        numbers = run.tracker.export(reset=True)
        if "reward" in numbers:
            run.log(version, numbers)
            run.display.step(version, numbers["reward"])
        before, evaluated = -1 if self.config.evaluator.at_start else 0, self.turns.last(self.loaded)
        done = before if evaluated is None else max(before, evaluated)
        due = every is not None and version // every > done // every
        if version == done or not self.evaluation_tasks or not (due or last or (done < 0 and version == 0)):
            return
        with self.turns.taken(self.loaded) as is_mine:
            if is_mine:
                workflow, kwargs = self.evaluated
                result = evaluate(self.rollout, self.evaluation_tasks, workflow, kwargs, self.config.evaluator.gconfig)
                evaluations[version] = result.reward
                run.report_evaluation(version, result)


def _oldest_version(episode: RecordedEpisode) -> int:
    """Of what an episode was answered; that of its beginning where it was answered nothing."""
    return min((int(each.versions.min()) for each in episode.calls if each.call.output), default=episode.begin.version)
