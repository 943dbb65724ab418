"""Replay of a run: its config, its workflows, and the selected episodes of its journal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from rollwright.config.experiment import GRPOConfig, PPOConfig
from rollwright.config.loading import load_expr_config
from rollwright.config.recipes import apply_recipe
from rollwright.config.secrets import HIDDEN
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError, ReplayError
from rollwright.experience.journal.episodes import RecordedEpisode, Wanted, last_of_each_name, read_episodes
from rollwright.experience.journal.reading import journal_files
from rollwright.experience.journal.records import ImageDigest, digest_of, images_in
from rollwright.placement.local_rollout import make_local_engine
from rollwright.placement.task_services import TaskServices
from rollwright.rewards.wrapper import REWARD_CALLS
from rollwright.rollout.replay import Replayed, Replayer
from rollwright.tracking.logging import getLogger
from rollwright.trainers import drawn_tasks
from rollwright.trainers.modes.shared_run import SERVICE_FILE
from rollwright.workflows.registry import WORKFLOWS

logger = getLogger("replay")

_SAMPLE = re.compile(r"(eval:)?(\d+)(?:/(\d+))?(?:@v(\d+))?(?:@(\d+))?")


def journaled_directory(run: str | Path) -> Path:
    """Return the directory that holds the journal: that of the run, of the only stage that trained on one, or of the only stage that has one.

    Raises:
        ConfigError: this is not a run's directory, there is no journal, or several stages have one.
    """
    run = Path(run)
    if not run.is_dir():
        raise ConfigError(f"{run} is not a directory: give that of a run, such as runs/quickstart/trial/grpo.")
    candidates = [run, *sorted(path for path in run.glob("*") if path.is_dir())]
    found = [path for path in candidates if journal_files(path / "journal")]
    trained = [path for path in found if (path / "metrics.jsonl").exists()]
    if len(trained) == 1 or len(found) == 1:
        return (trained if len(trained) == 1 else found)[0]
    if not found:
        raise ConfigError(f"{run} has no journal: give the directory of a run that kept one (journal.enabled).")
    raise ConfigError(f"{run} has the journals of several stages: give one of {', '.join(map(str, found))}.")


def selected(samples: str) -> Wanted:
    """Parse a selection of episodes: ``12/3`` (sample 3 of task 12), ``12`` (all of its samples), ``eval:12`` or ``all``.

    The suffix ``@v5`` selects episodes that began with version 5 of the weights; ``@0`` selects episodes of the first process that
    wrote the journal.

    Raises:
        ConfigError: the string is not a valid selection.
    """
    if samples == "all":
        return lambda writer, begin: True
    match = _SAMPLE.fullmatch(samples)
    if match is None:
        raise ConfigError(
            f"{samples!r} names no sample: write ORDINAL/SAMPLE, ORDINAL, eval:ORDINAL, or all; @vVERSION and @PROCESS may follow."
        )
    asked = (bool(match[1]), *(None if number is None else int(number) for number in match.groups()[1:]))
    return lambda writer, begin: all(
        number is None or number == its
        for number, its in zip(asked, (begin.is_eval, begin.ordinal, begin.index, begin.version, writer), strict=True)
    )


def load_run_config(directory: Path) -> PPOConfig:
    """Load the config of a run or stage, without its secrets.

    Raises:
        ConfigError: the directory has no config, or belongs to a service or to an evaluation stage.
    """
    if (directory / SERVICE_FILE).exists():
        raise ConfigError(f"{directory} is that of a service: its runs have no workflow that could run again.")
    file = directory / "config.yaml"
    if not file.exists():
        raise ConfigError(f"{file} is missing: the run wrote it when it began; give the run directory as it was left.")
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "actor" not in written:
        raise ConfigError(
            f"{directory} is an evaluation stage, whose samples are not replayed: rollwright view shows them, and evaluations of a stage "
            "that trains can be replayed (eval:ORDINAL)."
        )
    hidden = [f"{path}=null" for path in _hidden_keys(written, ())]
    return load_expr_config([str(file), *hidden], GRPOConfig)[0]


def _hidden_keys(value: Any, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _hidden_keys(item, (*path, str(key)))
    elif isinstance(value, str) and HIDDEN in value:
        yield ".".join(path)


class RunReplay:
    """Replays recorded episodes of a run.

    Args:
        run: directory of the run.
        workflow: name or import path of another workflow. If None, the run's own.
        reward_fn: another reward function. Its rewards are shown beside the recorded rewards and not compared with them. If None, the
            run's own.
        model: model that samples new answers. If None, the answers are those in the journal.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        workflow: str | None = None,
        reward_fn: str | None = None,
        model: str | None = None,
    ) -> None:
        self.directory = journaled_directory(run)
        config = apply_recipe(load_run_config(self.directory))
        WORKFLOWS.load_plugins()
        given = {"workflow": workflow, "reward_fn": reward_fn}
        changed: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        kwargs = {key: value for key, value in config.workflow_kwargs.items() if reward_fn is None or key != "reward_fn"}
        tasksets = [replace(taskset, **changed) for taskset in config.tasksets]
        self.config = config = replace(config, **changed, workflow_kwargs=kwargs, tasksets=tasksets)
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        self._opened = ExitStack()
        self._runners: dict[bool, tuple[Any, dict[str, Any] | None, int]] = {}
        engine = None
        if model is not None:
            engine = self._opened.enter_context(make_local_engine(config, model, self.tokenizer)).client
        self.replayer = Replayer(
            self._runner,
            seed=config.seed,
            sandbox=config.rollout.sandbox,
            engine=engine,
            fresh=(REWARD_CALLS,) if reward_fn is not None else (),
            compares_rewards=reward_fn is None,
            find_image=self._find_image,
        )
        self._rows: Iterator[dict[str, Any]] | None = None
        self._images: dict[ImageDigest, Any] = {}

    def __enter__(self) -> RunReplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def episodes(self, samples: str) -> Iterator[RecordedEpisode]:
        """Yield the selected episodes that were accepted or rejected. If several have the same name, only the last is yielded."""
        journal = self.directory / "journal"
        chosen = last_of_each_name(journal, selected(samples), ("accepted", "rejected"))
        for episode in read_episodes(journal, lambda writer, begin: (writer, begin.episode) in chosen):
            if episode.damage is not None:
                logger.warning("%s is left out: %s", episode.name, episode.damage)
            elif episode.end is not None:  # always true unless a file was removed in the meantime
                episode.names_writer = chosen[episode.writer, episode.begin.episode]
                yield episode

    def replay(self, samples: str) -> Iterator[Replayed]:
        """Run the selected episodes again."""
        return self.replayer.replay(self.episodes(samples))

    def _find_image(self, wanted: ImageDigest) -> Any:
        """Find the image of a recorded task: the image in the run's datasets that has the same pixels."""
        if self._rows is None:
            self._rows = chain(drawn_tasks.training_rows(self.config), drawn_tasks.evaluation_rows(self.config))
        while wanted not in self._images:
            row = next(self._rows, None)
            if row is None:
                raise ReplayError(
                    f"{wanted} is in no row of the datasets that the run's config names, and the journal has only a digest of it: replay "
                    "the run where these are what they were. Datasets that a script gave to its trainer are not known here."
                )
            for image in images_in(row):
                with suppress(TypeError):  # it could not be read when the journal was written either
                    self._images[digest_of(image)] = image
        return self._images[wanted]

    def _runner(self, episode: RecordedEpisode) -> tuple[Any, dict[str, Any] | None, int]:
        is_eval = episode.begin.is_eval
        if is_eval not in self._runners:
            self._runners[is_eval] = self._evaluated() if is_eval else self._trained()
        return self._runners[is_eval]

    def _trained(self) -> tuple[Any, dict[str, Any] | None, int]:
        config = self.config
        if config.tasksets:
            source: Any = drawn_tasks.task_source(config)
            return drawn_tasks.training_workflow(config, self.tokenizer, source, self._services()), None, 1
        kwargs = drawn_tasks.workflow_arguments(config, config.workflow, config.workflow_kwargs, self.tokenizer)
        return config.workflow, kwargs, config.group_size

    def _evaluated(self) -> tuple[Any, dict[str, Any] | None, int]:
        config, gconfig = self.config, self.config.evaluator.gconfig
        workflow, kwargs = drawn_tasks.evaluating(
            *drawn_tasks.evaluation_workflow(config, self.tokenizer, self._services()), gconfig
        )
        return workflow, kwargs, 1 if config.eval_tasksets else gconfig.n_samples

    def _services(self) -> TaskServices:
        return self._opened.enter_context(TaskServices(self.config, self.tokenizer, self.directory / "logs"))
