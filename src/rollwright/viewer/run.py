"""Queries about one run: its curves, steps, groups, samples and tokens, read from the files of its directory."""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rollwright.config.loading import is_as_written
from rollwright.errors import DataError, JournalError
from rollwright.experience.journal.reading import journal_files
from rollwright.tracking.curve_signs import signs_of
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import MARKER, flattened, is_claimed
from rollwright.tracking.summary import measures_of
from rollwright.viewer import reading, search
from rollwright.viewer.curves import Curves, groups_of
from rollwright.viewer.damage import has_checksums, missing_parts
from rollwright.viewer.ending import ending_of, last_lines
from rollwright.viewer.episodes import Episodes, neighbours
from rollwright.viewer.evaluations import held_out_tasks, last_evaluation
from rollwright.viewer.frames import frame
from rollwright.viewer.index import Index
from rollwright.viewer.reported import reported
from rollwright.viewer.run_parts import find_part, read_file, root_of, stages_of, unix_time
from rollwright.viewer.samples import NOT_UNDONE, Samples
from rollwright.viewer.timeline import timeline
from rollwright.viewer.tokens import Vocabulary, find_vocabulary
from rollwright.viewer.tree import prefix_tree

logger = getLogger("viewer")

_POINTS_OF_SPARKLINE = 40
_FOLLOWED_EVERY = 1.0  # seconds between two looks at the files
_FAILED = 8  # failed samples that are named where a run died
_WORKED_FOR = 0.5  # seconds of a transaction; readers see its rows afterwards


class Run:
    """A run, or one stage or process of it: a directory with ``metrics.jsonl`` or a journal.

    Opening reads nothing. Queries read the current files, even while the run trains or after a crash. Steps, groups and samples come
    from an index that is derived from the journal: ``refresh`` brings it up to date, and ``follow`` keeps it up to date. Thread-safe.

    ::

        run = rollwright.Run("runs/quickstart/trial")
        run.refresh()
        run.frame("samples").groupby("step").reward.mean()
        run.sample("12/3")["rows"][0]["trainer_logprobs"]

    Args:
        path: the directory. If the run has several stages or processes, the only one that trained on samples is used, or else the only one
            with a journal (or else metrics).

    Raises:
        DataError: the directory is not a run, or it has several candidate stages or processes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_part(Path(path))
        self.curves = Curves(self.path / "metrics.jsonl")
        self._config: tuple[int, dict[str, Any]] = (-1, {})  # modification time of the file, and its content
        self.config_problem = ""
        self._following: threading.Event | None = None
        self._lock = threading.Lock()
        self.grown = 0  # how often the index has grown

    @cached_property
    def name(self) -> str:
        """Name of the experiment, the trial, and the stage or process."""
        marker = read_file(self.root / MARKER)
        names = [str(marker.get("experiment", "")), str(marker.get("trial", ""))] if marker else []
        return "/".join([*names, *([self.path.name] if self.root != self.path else [])]) or self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """The flattened config: ``{"actor.optimizer.lr": 1e-5, …}``. Secrets are already masked in the file."""
        file = self.path / "config.yaml"
        if not file.exists():
            return flattened(self._marker.get("config") or {})
        written = file.stat().st_mtime_ns
        if self._config[0] != written:
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            text = file.read_text(encoding="utf-8", errors="replace")
            is_intact = is_as_written(text, has_checksum=has_checksums(self))
            self.config_problem = "" if is_intact else "it is not as the run wrote it: it was changed or damaged"
            try:
                found = yaml.load(text, loader)
            except yaml.YAMLError as error:
                logger.warning("%s cannot be read, so its values are not shown: %s", file, error)
                self.config_problem = f"it cannot be read, so its values are not shown ({str(error).splitlines()[0]})"
                found = None
            self._config = written, flattened(found) if isinstance(found, dict) else {}
        return dict(self._config[1])

    @property
    def _marker(self) -> dict[str, Any]:
        return read_file(self.path / MARKER) or read_file(self.path.parent / MARKER)

    @property
    def is_running(self) -> bool:
        """True if a process owns the run's directory."""
        return is_claimed(self.path) or is_claimed(self.path.parent)

    def info(self) -> dict[str, Any]:
        """Summarise the run for lists: state, dates, last step and values, and its reward (or loss) curve."""
        results = self.results
        curve = "reward" if self.curves.points("reward") else "loss"
        points = self.curves.series([curve], _POINTS_OF_SPARKLINE, 0.0)[curve]
        times, planned = self.curves.times, results.get("steps") or self.config.get("total_train_steps")
        return {
            "path": str(self.path),
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "began": unix_time(self._marker.get("began")),
            "updated": self._updated(),
            "last_step": times[-1][0] if times else 0,
            "total_steps": int(planned) if planned else None,
            "reward": self.curves.last("reward"),
            "eval": self._held_out(),
            "sparkline": [value for _, value in points],
            "curve": curve,
            "loss": self.curves.last("loss"),
            "has_journal": self.has_journal,
            "samples": self.index.progress()["samples"] if self._has_index() else None,
        }

    @property
    def state(self) -> str:
        """``finished``, ``running`` or ``stopped``."""
        if self.results or self._marker.get("finished"):
            return "finished"
        return "running" if self.is_running else "stopped"

    def ending(self) -> dict[str, Any] | None:
        """Say why the run stopped: ``cause``, ``traceback``, ``failed`` samples and the last lines of the ``log``; None if it did not."""
        if self.state != "stopped":
            return None
        last = max((when for _, when in self.curves.times), default=0.0)
        failed = self.search(status="failed", order="-began", limit=_FAILED)["samples"] if self.has_journal else []
        return ending_of(self.path, self.root, last, failed)

    def log(self, lines: int) -> list[str]:
        """Return the last lines of the log of this stage, or else of the whole run."""
        return last_lines(self.path / "logs" / "run.log", lines) or last_lines(self.root / "logs" / "run.log", lines)

    @property
    def kind(self) -> str:
        """Kind of the stage: rl, sft, dpo or eval; a checkpoint in a benchmark is an eval."""
        if self.config.get("mode") == "bench":
            return "eval"
        return self.results.get("kind") or self._stage().get("kind") or ("rl" if self.has_journal else "sft")

    def _held_out(self) -> float | None:
        """Return the mean reward of the last evaluation."""
        if self.kind != "eval":
            return self.curves.last("eval/reward")
        if scores := list(self.scores().values()):
            return scores[-1]
        found = self.last_evaluation() if self._has_index() else {}
        return sum(found.values()) / len(found) if found else None

    def scores(self) -> dict[str, float]:
        """Return the scores of an evaluation stage, such as ``greedy`` and ``mean@8``; empty for other stages and before it ends."""
        return measures_of(self.results)

    def _updated(self) -> float | None:
        """Return the time of the last write. If the run has ended, metrics give it, because copied files have newer dates."""
        times = self.curves.times
        if times and times[-1][1] and not self.is_running:
            return times[-1][1]
        return max((path.stat().st_mtime for path in self._files()), default=None)

    @property
    def results(self) -> dict[str, Any]:
        """The final results of the stage; empty before it ends."""
        own = list(read_file(self.path / "stages.json").values())
        return read_file(self.path.parent / "stages.json").get(self.path.name) or (own[0] if len(own) == 1 else {})

    def _stage(self) -> Mapping[str, Any]:
        stages = stages_of(self._marker)
        return next((stage for stage in stages if stage.get("name") == self.path.name), stages[0] if len(stages) == 1 else {})

    @property
    def has_journal(self) -> bool:
        """True if episodes were recorded."""
        return bool(journal_files(self.path / "journal"))

    def _files(self) -> list[Path]:
        return [*([self.curves.path] if self.curves.path.exists() else []), *journal_files(self.path / "journal")[-1:]]

    @property
    def stamp(self) -> str:
        """A value that changes when the run writes metrics or journal records, ends, or its index grows."""
        found = [(path.stat().st_mtime_ns, path.stat().st_size) for path in self._files()]
        return f"{hash((*found, self.state)) & (2**64 - 1):016x}-{self.grown}"

    # -- the index ---------------------------------------------------------------------------------------------------------

    @cached_property
    def index(self) -> Index:
        """The index of the journal."""
        if not self.has_journal:
            raise DataError(
                f"{self.path} has no journal, so nothing is known of its samples: journal.enabled was false, or it samples nothing."
            )
        return Index(self.path / "journal", self.vocabulary)

    def _has_index(self) -> bool:
        return "index" in self.__dict__

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The run's tokenizer, or None if it is not on this machine."""
        return find_vocabulary(self.path, self.config, self.root)

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to one string; to their ids in ``⟨⟩`` if there is no tokenizer."""
        return "".join(self.texts(ids)) if self.vocabulary is None else self.vocabulary.text(ids)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token to a string."""
        return [f"⟨{token}⟩" for token in ids] if self.vocabulary is None else self.vocabulary.texts(ids)

    def refresh(self, seconds: float | None = None) -> dict[str, Any]:
        """Bring the index up to date, for at most about ``seconds`` if given. Returns ``progress()``."""
        if self.has_journal:
            self.index.advance(seconds)
            self.grown += 1
        return self.progress()

    def progress(self) -> dict[str, Any]:
        """Return the progress of the index: ``samples``, ``bytes`` read ``of_bytes``, and the share of samples with searchable ``text``."""
        nothing = {"samples": 0, "bytes": 0, "of_bytes": 0, "text": 1.0, "is_complete": True}
        return self.index.progress() if self.has_journal else nothing

    def follow(self) -> None:
        """Keep the index up to date in a background thread until ``close``. Idempotent."""
        with self._lock:
            if self._following is None:
                self._following = threading.Event()
                threading.Thread(target=self._follow, args=(self._following,), name="rollwright-index", daemon=True).start()

    def _follow(self, ended: threading.Event) -> None:
        while not ended.is_set():
            is_complete = True
            try:
                before = self.progress()
                after = self.refresh(_WORKED_FOR)
                if after == before and self.has_journal:
                    self.grown -= 1  # nothing new
                is_complete = after["is_complete"]
            except sqlite3.Error as error:
                logger.warning("the index of %s cannot be read: %s", self.path, error)
                with contextlib.suppress(OSError, JournalError, DataError, sqlite3.Error):
                    self.index.advance(_WORKED_FOR)  # rebuilds a damaged index
            except (OSError, JournalError, DataError) as error:
                logger.warning("the index of %s does not go on: %s", self.path, error)
            ended.wait(_FOLLOWED_EVERY if is_complete else 0.0)

    def close(self) -> None:
        """Stop following and close all files."""
        with self._lock:
            if self._following is not None:
                self._following.set()
                self._following = None
        if self._has_index():
            self.index.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def samples(self) -> Samples:
        """Samples, groups and steps, from the index."""
        return Samples(self.index, self.is_running)

    # -- steps, groups and samples -----------------------------------------------------------------------------------------

    def steps(self, offset: int = 0, limit: int | None = None, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the steps, from ``metrics.jsonl`` and the index.

        Args:
            offset, limit: index of the first step, and number of steps.
            undone: include steps that a resume undid and that have not been repeated yet (marked ``is_undone``).
        """
        indexed = {row["step"]: row for row in self.samples.steps(undone=undone)} if self.has_journal else {}
        rewards, counts, held_out = (dict(self.curves.points(name)) for name in ("reward", "samples", "eval/reward"))
        seconds: dict[int, float] = {}
        for name in self.curves.names():
            if name.startswith("seconds/"):
                for step, value in self.curves.points(name):
                    seconds[step] = seconds.get(step, 0.0) + value
        times = dict(reversed(self.curves.times))
        unknown = dict.fromkeys(("groups", "reward_min", "reward_max", "tokens", "dropped", "without_variance", "version"))
        steps = []
        for step in sorted({*indexed, *rewards}):
            shown = {"step": step, "reward": rewards.get(step), "samples": counts.get(step), "time": times.get(step)}
            shown |= {"seconds": seconds.get(step), "eval": held_out.get(step)}
            steps.append({**unknown, **shown, "is_undone": False, **indexed.get(step, {})})
        return steps[offset : None if limit is None else offset + limit]

    def step(self, step: int, bins: int = 20) -> dict[str, Any]:
        """Return a step: reward ``bins``, ``groups`` with their samples, ``counts`` of outcomes, ``publication``, ``phases``, ``evaluations``.

        A step that the metrics have and the journal lacks (it was damaged, or ``journal.keep`` removed it) has no groups; ``is_lost`` is True.

        Raises:
            DataError: there is no such step.
        """
        try:
            return {**self.samples.step(step, bins), "is_lost": False}
        except DataError:
            measured = {name: dict(self.curves.points(name)) for name in self.curves.names()}
            if not any(step in points for points in measured.values()):
                raise
        phases = {
            name.removeprefix("seconds/"): points[step]
            for name, points in measured.items()
            if name.startswith("seconds/") and step in points
        }
        counts = {"drawn": 0, "trained": 0, "dropped": {}, "without_variance": 0}
        nothing = {"bins": [], "groups": [], "publication": None, "evaluations": []}
        return {"step": step, **nothing, "counts": counts, "phases": phases, "is_lost": True}

    def group(self, key: str | int, *, undone: bool = False) -> dict[str, Any]:
        """Return a group: its samples, task and prefix tree.

        Args:
            key: ordinal of the task; ``eval:5`` names the evaluation of task 5.
            undone: include samples that a resume undid.

        Raises:
            DataError: the group is not in the index.
        """
        samples = self.samples
        group = samples.group(str(key), undone=undone)
        task, error, rows = Episodes(self.index, samples).task_and_rows(group["samples"])
        return {**group, "task": reading.plain_value(task), "task_error": error, "tree": prefix_tree(rows, self.text)}

    def sample(self, key: str) -> dict[str, Any]:
        """Return all about a sample: ``calls``, ``rows`` of tokens, ``messages``, ``results`` of durable calls, ``attempts``, ``neighbours``.

        ``parts`` says where the sample diverges from better ones: ``token`` is the first position in its first row at which it differs from
        every compared sample with a higher reward; ``key`` and ``reward`` are those of a sample that shares all tokens before. Of the
        ``better`` samples, at most 16 are ``compared``.

        Args:
            key: the key as in lists: ``12/3``, ``eval:12/3@v4``. ``12/3#0`` is the first attempt, ``12/3@0`` the sample of process 0.

        Raises:
            DataError: the sample is not in the index.
            JournalError: the sample's records were removed.
        """
        samples = self.samples
        episodes = Episodes(self.index, samples)
        sample, places, trained = samples.find(key)
        episode = episodes.at(key, places)
        group = samples.group(sample["group"], undone=sample["is_undone"])["samples"]
        return {
            **sample,
            "task": reading.plain_value(episode.task()),
            "task_error": episode.begin.task_error,
            "gconfig": episode.calls[0].gconfig if episode.calls else {},
            "calls": [reading.plain_call(each) for each in episode.calls],
            "rows": self._rows(episode, trained),
            "messages": reading.chat_of(episode, self.text),
            "lanes": reading.lanes_of(episode),
            "results": [reading.plain_result(each) for each in episode.results],
            "attempts": [episodes.attempt(each) for each in group if each["index"] == sample["index"]],
            "neighbours": neighbours(sample, group),
            "parts": episodes.parting(sample, group),
            "replay": ""
            if self.kind == "eval"
            else f"rollwright replay {shlex.quote(str(self.path))} {sample['key'].partition('#')[0]}",
        }

    def episode(self, key: str) -> reading.RecordedEpisode:
        """Return a sample's recorded episode; see ``sample``."""
        return Episodes(self.index, self.samples).of(key)

    def token_rows(self, key: str) -> list[dict[str, Any]]:
        """Return the rows of tokens of a sample; see ``sample``."""
        samples = self.samples
        _, places, trained = samples.find(key)
        return self._rows(Episodes(self.index, samples).at(key, places), trained)

    def _rows(self, episode: reading.RecordedEpisode, trained: bytes | None) -> list[dict[str, Any]]:
        special = self.vocabulary.special if self.vocabulary else frozenset()
        plain = []
        for row in reading.rows_of(episode, reading.read_trained(self.index, trained)):
            ids = row.ids.tolist()
            advantages = [] if row.advantages is None else row.advantages[row.mask].tolist()
            said = {
                "reward": None if row.reward != row.reward else row.reward,
                "texts": self.texts(ids),
                "special": [token in special for token in ids],
                "advantage": sum(advantages) / len(advantages) if advantages else None,
            }
            plain.append({**row.plain(), **said})
        return plain

    def missing(self) -> list[dict[str, Any]]:
        """List damaged, truncated or missing parts of the run's files, including the journal; empty if all are intact.

        Returns:
            For each part: its ``file`` (relative to the run's directory), its bytes ``begin`` to ``end`` and the ``steps`` before and after
            it (if known), and a ``message`` with all of these.
        """
        return missing_parts(self)

    @property
    def root(self) -> Path:
        """The directory of the whole run."""
        return root_of(self.path)

    # -- the rest ----------------------------------------------------------------------------------------------------------

    def metrics(self, names: Iterable[str] | None = None, points: int = 600, smoothing: float = 0.0) -> dict[str, Any]:
        """Return curves: ``{"series": {name: [[step, value], …]}, "groups": {title: [name, …]}}``.

        Args:
            names: names of the metrics; all if None.
            points: approximate limit of points per curve; peaks are kept.
            smoothing: weight of the past in a moving average, from 0 to below 1.
        """
        return {"series": self.curves.series(names, points, smoothing), "groups": groups_of(self.curves.names())}

    def diagnosis(self) -> list[dict[str, Any]]:
        """List problems and the settings that fix them: ``rule``, ``level`` (bad, warn or info), ``message``, ``setting`` and ``step``."""
        return [asdict(sign) for sign in signs_of(self.curves.points, self.config)]

    def timeline(self, start: float | None = None, end: float | None = None, lanes: int = 24) -> dict[str, Any]:
        """Return the lanes of samples, engines and the trainer between two times; see ``viewer.timeline``."""
        return timeline(self.index, self.samples, start, end, lanes)

    def publications(self, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the publications of weights: ``step``, ``version``, ``way``, ``seconds``, ``bytes``, ``engines``, ``audit``, ``time``.

        Args:
            undone: include steps that a resume undid and that have not been repeated yet.
        """
        return self.samples.publications(undone=undone)

    def checkpoints(self) -> list[dict[str, Any]]:
        """List recovery checkpoints: ``step``, ``frontier`` (first open ordinal), ``time``, finished groups ``beyond`` it, ``unfinished`` episodes."""
        rows = self.index.rows("SELECT step, frontier, time, beyond, unfinished FROM checkpoints ORDER BY writer, step")
        return [dict(row) for row in rows]

    def resumes(self) -> list[dict[str, Any]]:
        """List the resumes: ``step``, ``version`` and ``frontier``, and the number of ``episodes`` and ``tokens`` reused."""
        return [dict(row) for row in self.index.rows("SELECT * FROM resumes ORDER BY writer")]

    def search(self, **query: Any) -> dict[str, Any]:
        """Find samples; the arguments are those of ``viewer.search.search``, or those of addresses: ``eval=1``, ``step="5-20"``.

        Returns:
            ``total`` (None if not all texts were searched), ``samples`` with ``snippet`` (parts of text, each flagged if it is a
            match), ``scanned``, ``is_cut`` (the time limit ended the search before enough were found), and ``indexed`` (the share of
            samples whose text is in the index).

        Raises:
            DataError: a filter or pattern is invalid.
        """
        found = search.search(self.index, self.samples, **search.as_arguments(query))
        return {**found, "indexed": self.index.progress()["text"]}

    def reported(self) -> dict[str, bool]:
        """Return the names that samples reported (``report.NAME`` in filters and frames), each with True if its values are texts."""
        return reported(self.index) if self.has_journal else {}

    def frame(self, what: str, **query: Any) -> Any:
        """Return a pandas ``DataFrame`` of ``samples``, ``tokens``, ``metrics`` or ``publications``.

        Args:
            what: name of the table.
            query: for samples and tokens, arguments of ``viewer.search.search``, such as ``step=12``; for publications, ``undone``.

        Raises:
            DataError: there is no such table, or pandas is not installed.
        """
        return frame(self, what, query)

    def last_evaluation(self) -> dict[str, float]:
        """Return the mean reward of each task in the last evaluation, by the task's ``query_id``, or else a digest of the task."""
        found = last_evaluation(self.index) if self.has_journal else None
        return {} if found is None else found.rewards

    def held_out(self, limit: int = 100) -> dict[str, Any]:
        """List the tasks of the last evaluation, those with the lowest reward first.

        Returns:
            ``tasks``, each with its name ``task``, mean ``reward``, number of ``samples``, ``group`` and the beginning of an ``answer``;
            and the ``total`` number, the ``version`` of the weights and the ``mean`` over all tasks.
        """
        return (
            held_out_tasks(self.index, limit) if self.has_journal else {"tasks": [], "total": 0, "version": None, "mean": None}
        )

    def last_samples(self, limit: int = 50, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the newest samples, unfinished ones first, also before any training; ``undone`` includes those that a resume undid."""
        where = "" if undone else f"WHERE {NOT_UNDONE} "
        ended = self.samples.listed(f"{where}ORDER BY samples.id DESC LIMIT ?", limit)
        return [*self.samples.running(undone=undone), *ended][:limit]
