"""The training loop that every trainer shares: steps, evaluation, checkpoints, recovery, and an orderly end.

A trainer opens its model and engine and defines a step. This loop decides when to evaluate and save, how a run resumes, and how it ends on
a signal.
"""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from rollwright.config.experiment import BaseExperimentConfig, FinetuneSpec
from rollwright.config.rules import refuse_dicts
from rollwright.config.sections import IntervalConfig, TrainEngineConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import LostRankError, TrainingError
from rollwright.experience.journal.writing import Journal
from rollwright.inference.weights.files import keep_newest
from rollwright.placement.placement import placement_of
from rollwright.placement.rank_processes import follow_config
from rollwright.tracking.learning_signs import warn_of_reasons
from rollwright.tracking.logging import getLogger
from rollwright.tracking.model_card import write_model_card
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.loops.reporting import EvaluationResult, StageRun
from rollwright.training import parallel

logger = getLogger("trainer")


class Part(Protocol):
    """A part of the run whose state is in a recovery checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer(ABC):
    """A training run. ``with`` opens it and resumes it if it was interrupted; ``train`` trains it to its end and saves the model.

    Args:
        config: the experiment.
        model: section of the trained model. Its path names the tokenizer if ``tokenizer_path`` is empty.
        directory: directory of the run.
    """

    spec: FinetuneSpec  #: length of the run; set by the subclass
    trained_part = "actor"  #: name of the trained engine in a recovery checkpoint
    curve = "reward"  #: the metric that ``make_step`` returns
    shares_weights = False  #: an engine in this process may compute with the trained tensors
    evaluates = False  #: there are held-out tasks and an engine to run them with
    journal: Journal | None = None  #: receives what each step trained on

    def __init__(self, config: BaseExperimentConfig, model: TrainEngineConfig, directory: RunDirectory) -> None:
        refuse_dicts(config)
        self.config: Any = config
        self.directory = directory
        self.tokenizer = load_tokenizer(config.tokenizer_path or model.path, model.trust_remote_code)
        self.step = self._saved_step = 0  # steps made, and the step of the newest recovery checkpoint
        #: True if the engines hold the weights of the last step. Only then can this step be evaluated or resumed from.
        self.is_published = True

    # -- defined by subclasses ----------------------------------------------------------------------------------------

    def claim(self, opened: ExitStack) -> None:  # noqa: B027 - the caller may have done so
        """Claim what only this run may use, such as its directory, before anything is loaded."""

    @abstractmethod
    def open(self, opened: ExitStack) -> None:
        """Open the inference engine and other resources, and register them with ``opened``, which closes them.

        ``self.ranks`` is already open.
        """

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """Return the parts in a recovery checkpoint besides the trained engine, by name."""

    def begin(self, resumed: bool) -> None:  # noqa: B027 - a trainer may have nothing to do
        """Prepare for the first step, after everything is open and the newest checkpoint, if any, is loaded."""

    @abstractmethod
    def make_step(self, run: StageRun, stop: StopSignal) -> float | None:
        """Make step ``self.step + 1``, count it and report it.

        Returns:
            The value of the metric ``curve``, or None if nothing is left to train on or a signal came first.
        """

    def evaluate(self) -> EvaluationResult:
        """Run the held-out tasks with the current weights."""
        raise NotImplementedError

    def is_done(self, evaluation: float | None) -> bool:
        """Return whether the evaluation of the last step ends the run."""
        return False

    def before_recover_visible(self) -> Callable[[], object] | None:
        """Return a function that commits external state together with this step's recovery checkpoint.

        The function is called just before the checkpoint becomes visible. With ``recover.in_background``, a thread calls it during
        later steps.
        """
        return None

    # -- from start to end ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.placement = placement_of(self.config.cluster)
        self.placement.join([self.config])
        self._opened = ExitStack()
        if self._follows():
            return self
        with ExitStack() as opened:  # closes everything if something fails
            self.claim(opened)
            self.ranks = self.placement.ranks(self.config, self.spec, self.directory, shares_weights=self.shares_weights)
            self.trained = self.ranks.engine
            opened.callback(self.trained.destroy)
            self.open(opened)
            self.recover = self.ranks.recover
            opened.push(self._wait_for_recover)
            if self.config.recover.if_damaged == "begin_again" and self.directory.resumed:
                self._set_aside_damaged()
            resumed = bool(self.directory.resumed and self.recover.steps())
            if resumed:
                self.step, state = self.ranks.call("load_recover", part=self.trained_part)
                self._saved_step = self.step
                for name, part in self.parts().items():
                    part.load_state_dict(state[name])
                logger.info("resumed %s after step %d", self.directory.path, self.step)
            self.begin(resumed)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._follows() and kind in (None, SystemExit):
            self.ranks.finish()
        self._opened.__exit__(kind, error, trace)

    def _set_aside_damaged(self) -> None:
        """If no recovery checkpoint is intact, move them all away, so that the run starts as if it had not saved one yet."""
        into = self.directory.next_attempt()
        if steps := self.recover.set_aside_damaged(into):
            logger.warning(
                "The recovery checkpoints of steps %s are all damaged and were moved to %s: the run restarts from its initial weights%s "
                "(recover.if_damaged).",
                steps,
                into,
                ", with its journal's episodes" if self.directory.has_journal else "",
            )

    def _wait_for_recover(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.recover.wait()
        except Exception as failed:  # a CheckpointError, or what its callback raised
            if kind in (None, SystemExit):
                raise
            logger.error("the newest recovery checkpoint was not written: %s", failed)  # the error that ended the run is raised

    def _follows(self) -> bool:
        """Return True on every rank except the first, which owns the run and calls the others."""
        return parallel.rank() > 0

    def train(self) -> dict[str, Any]:
        """Train until the last step, until ``is_done``, until nothing is left to train on, or until a signal asks to stop.

        Returns:
            ``{"steps", "reward" (or "loss"), "eval": {step: reward}, "seconds": {...}, "checkpoint": path}``; empty on other ranks.
        """
        if self._follows():
            follow_config(self.config)
            return {}
        config = self.config
        total = self.total_steps = self.spec.total_steps
        saving, recovering, evaluating = (
            Schedule(section, self.spec.steps_per_epoch) for section in (config.saver, config.recover, config.evaluator)
        )
        evaluations: dict[int, float] = {}
        value = float("nan")
        with (
            self.directory.explaining_failures(),
            StopSignal() as stop,
            StageRun(
                config,
                self.directory,
                total_steps=total,
                resume_step=self.step if self.directory.resumed else None,
                tokenizer=self.tokenizer,
                value_name=self.curve,
                journal=self.journal,
            ) as run,
        ):
            warn_of_reasons(config)
            if self.evaluates and config.evaluator.at_start and self.step == 0:
                evaluations[0] = self._evaluate(run)
            while self.step < total and (stop.received is None or not self.is_published):
                self.directory.check_lock()
                made = self.make_step(run, stop)
                if made is None:
                    break
                value = made
                if self.evaluates and (evaluating.due_by_now(self.step, self.is_published) or self.step == total):
                    evaluations[self.step] = self._evaluate(run)
                with run.timer.phase("checkpoint"):
                    if saving.due(self.step):
                        self._save_step()
                    if recovering.due_by_now(self.step, self.is_published):
                        self._save_recover()
                if self.is_done(evaluations.get(self.step)):
                    run.display.done(f"a reward of {evaluations[self.step]:.3f} held out, as asked for")
                    break
            if self.step != self._saved_step:
                self._save_recover()  # to resume from after a signal, or if the run is extended
            if stop.received is not None and self.step < total:
                raise SystemExit(stop.exit_code)
            checkpoint = self.save(self.directory.checkpoints / "final")
            if self.curve == "reward":
                run.plot(f"{config.experiment_name}: reward{', in training and held out' if self.evaluates else ''}")
            return {
                "steps": self.step,
                self.curve: value,
                "eval": evaluations,
                "seconds": run.timer.totals,
                "checkpoint": str(checkpoint),
            }

    def save(self, path: Any) -> Any:
        """Write weights, tokenizer and model card as a Hugging Face checkpoint, and return its path."""
        self.ranks.save(path, self.tokenizer)
        write_model_card(path, self.step)
        return path

    def _save_step(self) -> None:
        self.directory.check_lock()
        self.save(self.directory.checkpoints / f"step-{self.step:06d}")
        if self.config.saver.keep is not None:
            keep_newest(self.directory.checkpoints, "step-", self.config.saver.keep)

    def _save_recover(self) -> None:
        if self.config.recover.mode != "off":
            self.directory.check_lock()
            first_rank = {
                "rest": {name: part.state_dict() for name, part in self.parts().items()},
                "before_visible": self.before_recover_visible(),
            }
            self.ranks.call("save_recover", step=self.step, part=self.trained_part, first_rank=first_rank)
            self._saved_step = self.step

    def _evaluate(self, run: StageRun) -> float:
        with run.timer.phase("eval"):
            result = self.evaluate()
        reported = run.tracker.get("eval").export(reset=True)
        run.report_evaluation(self.step, result, reported)
        return result.reward


class Schedule:
    """Decides after which steps an ``IntervalConfig`` is due.

    Args:
        interval: number of steps, epochs or seconds between two events. If all are None, no event is ever due.
        steps_per_epoch: number of steps of one pass over the dataset.
    """

    def __init__(self, interval: IntervalConfig, steps_per_epoch: int) -> None:
        self._interval = interval
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._last = time.monotonic()
        self._postponed = False

    def due(self, step: int) -> bool:
        """Return whether the event is due after step ``step``, counted from 1."""
        interval = self._interval
        by_steps = interval.every_steps is not None and step % interval.every_steps == 0
        by_epochs = interval.every_epochs is not None and step % (interval.every_epochs * self._steps_per_epoch) == 0
        by_clock = interval.every_seconds is not None and time.monotonic() - self._last >= interval.every_seconds
        if by_clock:
            self._last = time.monotonic()
        return by_steps or by_epochs or by_clock

    def due_by_now(self, step: int, possible: bool) -> bool:
        """Return whether the event is ``possible`` and due after step ``step``, or was due earlier when it was not possible."""
        self._postponed = self.due(step) or self._postponed
        if not (self._postponed and possible):
            return False
        self._postponed = False
        return True


class StopSignal:
    """Handles SIGTERM and SIGINT inside the context: the current step is finished and saved, then the run exits.

    A second signal has its usual effect. If signals were ignored when the process started, as with ``nohup`` or with ``&`` in a script,
    a second signal ends the process. If a rank on this host has ended, the first signal raises ``LostRankError`` at once instead.

    Attributes:
        received: number of the first signal, or None if none has arrived.
        then: function that is called in the main thread when the first signal arrives.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.then: Callable[[], object] | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """Exit status of a process that a signal ended, by the shell's convention."""
        return 128 + (self.received or 0)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
        if self.received is not None and isinstance(error, LostRankError):  # the run is not reopened
            raise TrainingError(
                f"{error}. The run was asked to stop, and the current step is lost: the same command resumes from the newest recover "
                "checkpoint."
            ) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (lost := parallel.lost_neighbour()) is not None:
            raise LostRankError(f"rank {lost} has ended, so this step cannot be finished")
        self.received = number
        by_default: dict[int, object] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        self._previous = {
            kind: by_default[kind] if handler in (signal.SIG_IGN, None) else handler for kind, handler in self._previous.items()
        }
        self._restore()
        if self.then is not None:
            self.then()
        logger.warning("%s: this step is finished and saved, then the run exits", signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous.clear()
