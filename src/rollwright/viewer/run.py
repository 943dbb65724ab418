"""Queries about one run: its curves, steps, groups, samples and tokens, read from the files of its directory."""

from __future__ import annotations

import contextlib
import re
import shlex
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rollwright.atomic import read_json
from rollwright.config.loading import is_as_written
from rollwright.errors import DataError, JournalError
from rollwright.experience.journal.reading import journal_files
from rollwright.tracking.learning_signs import signs_of
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import MARKER, flattened, is_claimed
from rollwright.viewer import reading, search
from rollwright.viewer.curves import Curves, groups_of
from rollwright.viewer.evaluations import last_evaluation
from rollwright.viewer.index import Index
from rollwright.viewer.samples import NOT_UNDONE, Samples
from rollwright.viewer.timeline import timeline
from rollwright.viewer.tokens import Vocabulary, find_vocabulary
from rollwright.viewer.tree import parting, prefix_tree

logger = getLogger("viewer")

_POINTS_OF_SPARKLINE = 40
_FOLLOWED_EVERY = 1.0  # seconds between two looks at the files
_COMPARED = 16  # most better samples of its group to compare a sample with
_WORKED_FOR = 0.5  # seconds of a transaction; readers see its rows afterwards

FRAMES = ("samples", "tokens", "metrics", "publications")
#: Columns of the frame ``tokens``: name in a row -> name in the frame.
_TOKEN_COLUMNS = {
    "ids": "token",
    "texts": "text",
    "mask": "trained",
    "logprobs": "logprob",
    "versions": "version",
    "advantages": "advantage",
    "trainer_logprobs": "trainer_logprob",
    "entropies": "entropy",
    "teacher_logprobs": "teacher_logprob",
    "values": "value",
}


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
        path: the directory. If the run has several stages or processes, the only one with a journal (or else metrics) is used.

    Raises:
        DataError: the directory is not a run, or it has several candidate stages or processes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_part(Path(path))
        self.curves = Curves(self.path / "metrics.jsonl")
        self._config: tuple[int, dict[str, Any]] = (-1, {})  # modification time of the file, and its content
        self._config_problem = ""
        self._following: threading.Event | None = None
        self._lock = threading.Lock()
        self._grown = 0

    @cached_property
    def name(self) -> str:
        """Name of the experiment, the trial, and the stage or process."""
        marker = _read_json(self._root / MARKER)
        names = [str(marker.get("experiment", "")), str(marker.get("trial", ""))] if marker else []
        return "/".join([*names, *([self.path.name] if self._root != self.path else [])]) or self.path.name

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
            is_intact = is_as_written(text, has_checksum=self._has_checksums())
            self._config_problem = "" if is_intact else "it is not as the run wrote it: it was changed or damaged"
            try:
                found = yaml.load(text, loader)
            except yaml.YAMLError as error:
                logger.warning("%s cannot be read, so its values are not shown: %s", file, error)
                self._config_problem = f"it cannot be read, so its values are not shown ({str(error).splitlines()[0]})"
                found = None
            self._config = written, flattened(found) if isinstance(found, dict) else {}
        return dict(self._config[1])

    @property
    def _marker(self) -> dict[str, Any]:
        return _read_json(self.path / MARKER) or _read_json(self.path.parent / MARKER)

    @property
    def is_running(self) -> bool:
        """True if a process owns the run's directory."""
        return is_claimed(self.path) or is_claimed(self.path.parent)

    def info(self) -> dict[str, Any]:
        """Summarise the run for lists: state, dates, last step and values, and its reward (or loss) curve."""
        marker, results = self._marker, self._results()
        curve = "reward" if self.curves.points("reward") else "loss"
        points = self.curves.series([curve], _POINTS_OF_SPARKLINE, 0.0)[curve]
        finished = bool(results) or bool(marker.get("finished"))
        times, planned = self.curves.times, results.get("steps") or self.config.get("total_train_steps")
        return {
            "path": str(self.path),
            "name": self.name,
            "kind": results.get("kind") or self._stage().get("kind") or ("rl" if self.has_journal else "sft"),
            "state": "finished" if finished else "running" if self.is_running else "stopped",
            "began": _unix_time(marker.get("began")),
            "updated": self._updated(),
            "last_step": times[-1][0] if times else 0,
            "total_steps": int(planned) if planned else None,
            "reward": self.curves.last("reward"),
            "eval": self.curves.last("eval/reward"),
            "sparkline": [value for _, value in points],
            "curve": curve,
            "has_journal": self.has_journal,
            "samples": self._index.progress()["samples"] if self._has_index() else None,
        }

    def _updated(self) -> float | None:
        """Return the time of the last write. If the run has ended, metrics give it, because copied files have newer dates."""
        times = self.curves.times
        if times and times[-1][1] and not self.is_running:
            return times[-1][1]
        return max((path.stat().st_mtime for path in self._files()), default=None)

    def _results(self) -> dict[str, Any]:
        """Return the final results of the stage; empty before it ends."""
        own = list(_read_json(self.path / "stages.json").values())
        return _read_json(self.path.parent / "stages.json").get(self.path.name) or (own[0] if len(own) == 1 else {})

    def _stage(self) -> dict[str, Any]:
        stages = (self._marker.get("config") or {}).get("stages") or []
        return next((stage for stage in stages if stage.get("name") == self.path.name), stages[0] if len(stages) == 1 else {})

    @property
    def has_journal(self) -> bool:
        """True if episodes were recorded."""
        return bool(journal_files(self.path / "journal"))

    def _files(self) -> list[Path]:
        return [*([self.curves.path] if self.curves.path.exists() else []), *journal_files(self.path / "journal")[-1:]]

    @property
    def stamp(self) -> str:
        """A value that changes when the run writes metrics or journal records, or its index grows."""
        found = [(path.stat().st_mtime_ns, path.stat().st_size) for path in self._files()]
        return f"{hash(tuple(found)) & (2**64 - 1):016x}-{self._grown}"

    # -- the index ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _index(self) -> Index:
        if not self.has_journal:
            raise DataError(
                f"{self.path} has no journal, so nothing is known of its samples: journal.enabled was false, or it samples nothing."
            )
        return Index(self.path / "journal", self.vocabulary)

    def _has_index(self) -> bool:
        return "_index" in self.__dict__

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The run's tokenizer, or None if it is not on this machine."""
        return find_vocabulary(self.path, self.config)

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to one string; to their ids in ``⟨⟩`` if there is no tokenizer."""
        return "".join(self.texts(ids)) if self.vocabulary is None else self.vocabulary.text(ids)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token to a string."""
        return [f"⟨{token}⟩" for token in ids] if self.vocabulary is None else self.vocabulary.texts(ids)

    def refresh(self, seconds: float | None = None) -> dict[str, Any]:
        """Bring the index up to date, for at most about ``seconds`` if given. Returns ``progress()``."""
        if self.has_journal:
            self._index.advance(seconds)
            self._grown += 1
        return self.progress()

    def progress(self) -> dict[str, Any]:
        """Return the progress of the index: ``samples``, ``bytes`` read ``of_bytes``, and the share of samples with searchable ``text``."""
        nothing = {"samples": 0, "bytes": 0, "of_bytes": 0, "text": 1.0, "is_complete": True}
        return self._index.progress() if self.has_journal else nothing

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
                    self._grown -= 1  # nothing new
                is_complete = after["is_complete"]
            except sqlite3.Error as error:
                logger.warning("the index of %s cannot be read: %s", self.path, error)
                with contextlib.suppress(OSError, JournalError, DataError, sqlite3.Error):
                    self._index.advance(_WORKED_FOR)  # rebuilds a damaged index
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
            self._index.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _samples(self) -> Samples:
        return Samples(self._index, self.is_running)

    # -- steps, groups and samples -----------------------------------------------------------------------------------------

    def steps(self, offset: int = 0, limit: int | None = None, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the steps, from ``metrics.jsonl`` and the index.

        Args:
            offset, limit: index of the first step, and number of steps.
            undone: include steps that a resume undid and that have not been repeated yet (marked ``is_undone``).
        """
        indexed = {row["step"]: row for row in self._samples.steps(undone=undone)} if self.has_journal else {}
        rewards, counts = (dict(self.curves.points(name)) for name in ("reward", "samples"))
        times = dict(reversed(self.curves.times))
        unknown = dict.fromkeys(("groups", "reward_min", "reward_max", "tokens", "dropped", "without_variance", "version"))
        steps = []
        for step in sorted({*indexed, *rewards}):
            shown = {"step": step, "reward": rewards.get(step), "samples": counts.get(step), "time": times.get(step)}
            steps.append({**unknown, **shown, "is_undone": False, **indexed.get(step, {})})
        return steps[offset : None if limit is None else offset + limit]

    def step(self, step: int, bins: int = 20) -> dict[str, Any]:
        """Return a step: reward ``bins``, ``groups`` with their samples, ``counts`` of outcomes, ``publication``, ``phases``, ``evaluations``.

        Raises:
            DataError: the step is not in the index.
        """
        return self._samples.step(step, bins)

    def group(self, key: str | int, *, undone: bool = False) -> dict[str, Any]:
        """Return a group: its samples, task and prefix tree.

        Args:
            key: ordinal of the task; ``eval:5`` names the evaluation of task 5.
            undone: include samples that a resume undid.

        Raises:
            DataError: the group is not in the index.
        """
        group = self._samples.group(str(key), undone=undone)
        task, error, rows = None, "", []
        best = {
            sample["index"]: sample
            for sample in group["samples"]
            if not sample["key"].count("#") or sample["status"] == "accepted"
        }
        for sample in best.values() or group["samples"]:
            _, places, trained = self._samples.find(sample["key"])
            episode = self._episode(sample["key"], places)
            if task is None:
                task, error = episode.task(), episode.begin.task_error
            found = reading.rows_of(episode, reading.read_trained(self._index, trained))
            rows += [(sample["key"], number, row) for number, row in enumerate(found)]
        return {**group, "task": reading.plain_value(task), "task_error": error, "tree": prefix_tree(rows, self.text)}

    def _episode(self, key: str, places: bytes) -> reading.RecordedEpisode:
        try:
            return reading.read_episode(self._index, places)
        except OSError as error:
            raise JournalError(
                f"the records of sample {key} cannot be read ({error}): its file was removed (journal.keep) or not copied."
            ) from None

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
        sample, places, trained = self._samples.find(key)
        episode = self._episode(key, places)
        group = self._samples.group(sample["group"], undone=sample["is_undone"])["samples"]
        return {
            **sample,
            "task": reading.plain_value(episode.task()),
            "task_error": episode.begin.task_error,
            "gconfig": episode.calls[0].gconfig if episode.calls else {},
            "calls": [reading.plain_call(each) for each in episode.calls],
            "rows": self._rows(episode, trained),
            "messages": reading.chat_of(episode, self.text),
            "results": [reading.plain_result(each) for each in episode.results],
            "attempts": [self._attempt(each) for each in group if each["index"] == sample["index"]],
            "neighbours": _neighbours(sample, group),
            "parts": self._parting(sample, group),
            "replay": f"rollwright replay {shlex.quote(str(self.path))} {sample['key'].partition('#')[0]}",
        }

    def _rows(self, episode: reading.RecordedEpisode, trained: bytes | None) -> list[dict[str, Any]]:
        special = self.vocabulary.special if self.vocabulary else frozenset()
        plain = []
        for row in reading.rows_of(episode, reading.read_trained(self._index, trained)):
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

    def _parting(self, sample: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Find the first token that differs from all samples of the task with a higher reward; see ``sample``."""
        own = sample["reward"]
        better = {
            each["key"]: each for each in group if own is not None and each["reward"] is not None and each["reward"] > own
        }
        first = {}
        best_first = sorted(better, key=lambda key: -better[key]["reward"])
        for key in [sample["key"], *best_first[:_COMPARED]] if better else []:
            with contextlib.suppress(JournalError):  # the records of other samples in the group may be gone
                rows = reading.rows_of(self._episode(key, self._samples.find(key)[1]))
                first |= {key: rows[0]} if rows else {}
        row = first.pop(sample["key"], None)
        found = parting(row, first) if row is not None else None
        if found is None:
            return None
        token, key = found
        return {"token": token, "key": key, "reward": better[key]["reward"], "better": len(better), "compared": len(first)}

    def _attempt(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Describe an attempt of a sample, with the error that it raised."""
        traceback = ""
        if sample["status"] == "failed":
            end = self._episode(sample["key"], self._samples.find(sample["key"])[1]).end
            traceback = "" if end is None else end.traceback
        name, _, message = sample["reason"].partition(": ")
        is_error = sample["status"] == "failed" and re.fullmatch(r"[\w.]+", name) is not None
        return {
            "key": sample["key"],
            "attempt": sample["attempt"],
            "status": sample["status"],
            "class": name if is_error else "",
            "message": message if is_error else sample["reason"],
            "traceback": traceback,
        }

    # -- damage ------------------------------------------------------------------------------------------------------------

    def missing(self) -> list[dict[str, Any]]:
        """List damaged, truncated or missing parts of the run's files, including the journal; empty if all are intact.

        Returns:
            For each part: its ``file`` (relative to the run's directory), its bytes ``begin`` to ``end`` and the ``steps`` before and after
            it (if known), and a ``message`` with all of these.
        """
        found = [self._lacks(self.curves.path, each) for each in self.curves.missing()]
        last, known = max((step for step, _ in self.curves.times), default=0), self._last_known_step()
        if known and not self.curves.path.exists():
            found.append(self._lacks(self.curves.path, "it is missing: there are no curves"))
        elif known and not self.curves.path.stat().st_size:
            found.append(self._lacks(self.curves.path, "it is empty: there are no curves"))
        elif known > last:
            said = f"it ends with step {last}, but the run reached step {known}"
            found.append(self._lacks(self.curves.path, said, steps=(last + 1, known)))
        for root in dict.fromkeys((self._root, self.path)):
            for name in (MARKER, "stages.json"):
                problem = _problem_of(root / name)
                if name == MARKER and root == self._root and not (root / name).exists():
                    problem = "it is missing: the run cannot be resumed"
                if problem:
                    found.append(self._lacks(root / name, problem))
        _ = self.config
        if not (self.path / "config.yaml").exists() and self.curves.times and self._has_checksums():
            found.append(self._lacks(self.path / "config.yaml", "it is gone"))
        elif self._config_problem:
            found.append(self._lacks(self.path / "config.yaml", self._config_problem))
        return [*found, *self._missing_in_journal()]

    def _missing_in_journal(self) -> list[dict[str, Any]]:
        """List damaged bytes, truncated ends and missing files with their steps, and steps missing from the journal or the metrics."""
        journal = self.path / "journal"
        if not journal.is_dir():
            kept = self.config.get("journal.enabled") and self.config.get("mode", "both") in ("both", "explore", "serve")
            is_expected = kept and "gconfig.n_samples" in self.config
            return [self._lacks(journal, "it is missing: the samples are unknown")] if is_expected else []
        if not self.has_journal:
            return [self._lacks(journal, "it is empty: its samples are unknown")]
        found = []
        for gap in self._index.missing(is_running=self.is_running, is_finished=self.info()["state"] == "finished"):
            said = str(gap).partition(": " if gap.note else ", ")[2]
            found.append(self._lacks(gap.path, said, gap.begin, gap.end, gap.steps))
        return [*found, *self._unlike()]

    def _unlike(self) -> list[dict[str, Any]]:
        """List the steps that only the journal or only the metrics have; both should have every step."""
        if self.is_running or not self._index.progress()["is_complete"]:
            return []
        indexed = {row["step"] for row in self._samples.steps()}
        logged = {step for step, _ in self.curves.points("reward")}
        found = []
        if lost := sorted(indexed - logged):
            found.append(
                self._lacks(self.curves.path, f"it lacks {_steps(lost)}, which the journal has", steps=(lost[0], lost[-1]))
            )
        if indexed and (
            lost := sorted(step for step in logged - indexed if step > min(indexed))
        ):  # journal.keep removes the first steps
            said = f"it lacks the end of {_steps(lost)}, which metrics.jsonl has"
            found.append(self._lacks(self.path / "journal", said, steps=(lost[0], lost[-1])))
        return found

    def _has_checksums(self) -> bool:
        """Return True if the run wrote checksums; version 0.1.0 did not."""
        marker = self._root / MARKER
        return marker.exists() and '"checksum"' in marker.read_text(encoding="utf-8", errors="replace")

    def _last_known_step(self) -> int:
        """Return the last step according to the recovery checkpoints and the stage's results, or 0."""
        made = [int(path.name.rpartition("_")[2]) for path in self.path.glob("recover/step_*") if path.name[5:].isdecimal()]
        steps = self._results().get("steps")
        return max([*made, steps if isinstance(steps, int) else 0], default=0)

    @property
    def _root(self) -> Path:
        """The directory of the whole run."""
        return self.path if (self.path / MARKER).exists() or not (self.path.parent / MARKER).exists() else self.path.parent

    def _lacks(
        self,
        path: Path,
        message: str,
        begin: int | None = None,
        end: int | None = None,
        steps: Sequence[int | None] = (None, None),
    ) -> dict[str, Any]:
        name = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else path.name
        return {"file": name, "begin": begin, "end": end, "steps": list(steps), "message": f"{name}: {message}"}

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
        return timeline(self._index, self._samples, start, end, lanes)

    def publications(self, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the publications of weights: ``step``, ``version``, ``way``, ``seconds``, ``bytes``, ``engines``, ``audit``, ``time``.

        Args:
            undone: include steps that a resume undid and that have not been repeated yet.
        """
        return self._samples.publications(undone=undone)

    def checkpoints(self) -> list[dict[str, Any]]:
        """List recovery checkpoints: ``step``, ``frontier`` (first open ordinal), ``time``, finished groups ``beyond`` it, ``unfinished`` episodes."""
        rows = self._index.rows("SELECT step, frontier, time, beyond, unfinished FROM checkpoints ORDER BY writer, step")
        return [dict(row) for row in rows]

    def resumes(self) -> list[dict[str, Any]]:
        """List the resumes: ``step``, ``version`` and ``frontier``, and the number of ``episodes`` and ``tokens`` reused."""
        return [dict(row) for row in self._index.rows("SELECT * FROM resumes ORDER BY writer")]

    def search(self, **query: Any) -> dict[str, Any]:
        """Find samples; the arguments are those of ``viewer.search.search``.

        Returns:
            ``total`` (None if not all texts were searched), ``samples`` with ``snippet`` (parts of text, each flagged if it is a
            match), ``scanned``, ``is_cut`` (the time limit ended the search before enough were found), and ``indexed`` (the share of
            samples whose text is in the index).

        Raises:
            DataError: a filter or pattern is invalid.
        """
        found = search.search(self._index, self._samples, **query)
        return {**found, "indexed": self._index.progress()["text"]}

    def frame(self, what: str, **query: Any) -> Any:
        """Return a pandas ``DataFrame`` of ``samples``, ``tokens``, ``metrics`` or ``publications``.

        Args:
            what: name of the table.
            query: for samples and tokens, arguments of ``viewer.search.search``, such as ``step=12``; for publications, ``undone``.

        Raises:
            DataError: there is no such table, or pandas is not installed.
        """
        if what not in FRAMES:
            raise DataError(f"there is no frame of {what!r}: choose from {', '.join(FRAMES)}.")
        try:
            import pandas
        except ModuleNotFoundError:
            said = "frames need pandas: pip install pandas; run.steps(), run.search() and run.sample() do not."
            raise DataError(said) from None
        if what == "metrics":
            series = {name: pandas.Series(dict(self.curves.points(name))) for name in self.curves.names()}
            return pandas.DataFrame(series).rename_axis("step")
        if what == "publications":
            return pandas.json_normalize(self.publications(**query))
        answer = self.search(**{"limit": -1, **query})
        if answer["is_cut"]:
            raise DataError(f"the pattern takes too long: {answer['scanned']} samples were looked through; add filters.")
        found = answer["samples"]
        if what == "samples":
            return pandas.DataFrame(found).drop(columns=["snippet", "preview"], errors="ignore")
        return pandas.DataFrame([token for sample in found for token in self._tokens_of(sample["key"])])

    def _tokens_of(self, key: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of the frame ``tokens``: one for each token of a sample's rows."""
        _, places, trained = self._samples.find(key)
        for number, row in enumerate(self._rows(self._episode(key, places), trained)):
            columns = {name: row[column] or [None] * len(row["ids"]) for column, name in _TOKEN_COLUMNS.items()}
            for position, values in enumerate(zip(*columns.values(), strict=True)):
                place = {"key": key, "step": row["step"], "row": number, "position": position}
                yield {**place, **dict(zip(columns, values, strict=True))}

    def last_evaluation(self) -> dict[str, float]:
        """Return the mean reward of each task in the last evaluation, by the task's ``query_id``, or else a digest of the task."""
        return last_evaluation(self._index) if self.has_journal else {}

    def last_samples(self, limit: int = 50, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the newest samples, unfinished ones first, also before any training; ``undone`` includes those that a resume undid."""
        where = "" if undone else f"WHERE {NOT_UNDONE} "
        ended = self._samples.listed(f"{where}ORDER BY samples.id DESC LIMIT ?", limit)
        return [*self._samples.running(undone=undone), *ended][:limit]


def find_part(path: Path) -> Path:
    """Return ``path`` if it is a run, stage or process itself, or else its only stage or process with a journal (or else metrics).

    Raises:
        DataError: there is no candidate, or there are several.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no directory: give that of a run, such as runs/quickstart/trial.")
    if is_part(path):
        return path
    parts = [child for child in sorted(path.iterdir()) if child.is_dir() and is_part(child)]
    journaled = [part for part in parts if journal_files(part / "journal")]
    for some in (journaled, parts):
        if len(some) == 1:
            return some[0]
    if not parts:
        raise DataError(f"{path} is no run: it has neither metrics.jsonl nor a journal.")
    raise DataError(f"{path} has several stages or processes: give one of {', '.join(map(str, journaled or parts))}.")


def is_part(path: Path) -> bool:
    """Return True if a directory holds metrics or episodes of a run, stage or process."""
    return (path / "metrics.jsonl").exists() or bool(journal_files(path / "journal"))


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing, damaged or being written."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _problem_of(path: Path) -> str | None:
    """Return why a JSON file cannot be read, or None if it can be read or does not exist."""
    try:
        read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error}), so it is not shown"
    return None


def _unix_time(text: Any) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _neighbours(sample: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the keys of the previous and next sample in a group, and of those with the highest and lowest reward."""
    keys = [each["key"] for each in group]
    place = keys.index(sample["key"]) if sample["key"] in keys else -1
    rewarded = sorted((each for each in group if each["reward"] is not None), key=lambda each: each["reward"])
    return {
        "previous": keys[place - 1] if place > 0 else None,
        "next": keys[place + 1] if 0 <= place < len(keys) - 1 else None,
        "best": rewarded[-1]["key"] if rewarded else None,
        "worst": rewarded[0]["key"] if rewarded else None,
    }
