"""One run to be looked at: its curves, steps, groups, samples and tokens, as files of its directory have them."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rollwright.errors import DataError, JournalError
from rollwright.experience.journal.files import journal_files
from rollwright.tracking.learning_signs import signs_of
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import MARKER, flattened, is_claimed
from rollwright.viewer import reading, search
from rollwright.viewer.curves import Curves, groups_of
from rollwright.viewer.index import Index
from rollwright.viewer.messages import chat_of
from rollwright.viewer.samples import Samples, plain_publication
from rollwright.viewer.timeline import timeline
from rollwright.viewer.tokens import Vocabulary, find_vocabulary
from rollwright.viewer.tree import prefix_tree

logger = getLogger("viewer")

_POINTS_OF_SPARKLINE = 40
_FOLLOWED_EVERY = 1.0  # seconds between two looks at the files
_WORKED_FOR = 0.5  # seconds of a transaction, after which readers see more
_FRAMES = ("samples", "tokens", "metrics", "publications")


class Run:
    """A run, or one stage or process of it: a directory with ``metrics.jsonl`` or a journal.

    Opening reads nothing. What is asked is answered from the files as they are now, also while the run trains or after it crashed. Steps,
    groups and samples come from an index that is derived from the journal: ``refresh`` brings it up to date, ``follow`` keeps it so. Safe to
    use from several threads.

    ::

        run = rollwright.Run("runs/quickstart/trial")
        run.refresh()
        run.frame("samples").groupby("step").reward.mean()
        run.sample("12/3")["rows"][0]["trainer_logprobs"]

    Args:
        path: of the directory; of a run of several stages or processes the one of them that has a journal (else metrics) is taken.

    Raises:
        DataError: it is no run, or several of its stages or processes are.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_part(Path(path))
        self.curves = Curves(self.path / "metrics.jsonl")
        self._following: threading.Event | None = None
        self._lock = threading.Lock()
        self._config: tuple[int, dict[str, Any]] = (-1, {})  # when the file was written, and what it says

    # -- who it is ---------------------------------------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        """Experiment and trial, and the stage or process."""
        root = self.path if (self.path / MARKER).exists() else self.path.parent
        marker = _read_json(root / MARKER)
        names = [str(marker.get("experiment", "")), str(marker.get("trial", ""))] if marker else []
        return "/".join([*names, *([self.path.name] if root != self.path else [])]) or self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """Its config, flat: ``{"actor.optimizer.lr": 1e-5, …}``; secrets are hidden in the file already."""
        file = self.path / "config.yaml"
        if not file.exists():
            return flattened(self._marker.get("config") or {})
        written = file.stat().st_mtime_ns
        if self._config[0] != written:
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            try:
                found = yaml.load(file.read_text(encoding="utf-8", errors="replace"), loader)
            except yaml.YAMLError as error:
                logger.warning("%s cannot be read, so its values are not shown: %s", file, error)
                found = None
            self._config = written, flattened(found) if isinstance(found, dict) else {}
        return dict(self._config[1])

    @property
    def _marker(self) -> dict[str, Any]:
        return _read_json(self.path / MARKER) or _read_json(self.path.parent / MARKER)

    @property
    def is_running(self) -> bool:
        """A process owns its directory."""
        return is_claimed(self.path) or is_claimed(self.path.parent)

    def info(self) -> dict[str, Any]:
        """What lists of runs show: state, dates, last step and values, and the curve of its reward (or loss)."""
        marker, results = self._marker, self._results()
        curve = "reward" if self.curves.points("reward") else "loss"
        points = self.curves.series([curve], _POINTS_OF_SPARKLINE, 0.0)[curve]
        finished = bool(results) or bool(marker.get("finished"))
        times = self.curves.times
        return {
            "path": str(self.path),
            "name": self.name,
            "kind": results.get("kind") or self._stage().get("kind") or ("rl" if self.has_journal else "sft"),
            "state": "finished" if finished else "running" if self.is_running else "stopped",
            "began": _unix_time(marker.get("began")),
            "updated": self._updated(),
            "last_step": times[-1][0] if times else 0,
            "total_steps": self._total_steps(results),
            "reward": self.curves.last("reward"),
            "eval": self.curves.last("eval/reward"),
            "sparkline": [value for _, value in points],
            "curve": curve,
            "has_journal": self.has_journal,
            "samples": self._index.progress()["samples"] if self._has_index() else None,
        }

    def _updated(self) -> float | None:
        """When it wrote last: as it said itself where it has ended, because a copy's files are new."""
        times = self.curves.times
        if times and times[-1][1] and not self.is_running:
            return times[-1][1]
        return max((path.stat().st_mtime for path in self._files()), default=None)

    def _results(self) -> dict[str, Any]:
        """What the stage said at its end; nothing before."""
        for place, name in ((self.path.parent, self.path.name), (self.path, None)):
            stages = _read_json(place / "stages.json")
            if name in stages or (name is None and len(stages) == 1):
                return stages[name] if name is not None else next(iter(stages.values()))
        return {}

    def _stage(self) -> dict[str, Any]:
        stages = (self._marker.get("config") or {}).get("stages") or []
        return next((stage for stage in stages if stage.get("name") == self.path.name), stages[0] if len(stages) == 1 else {})

    def _total_steps(self, results: Mapping[str, Any]) -> int | None:
        said = results.get("steps") or self.config.get("total_train_steps")
        return int(said) if said else None

    @property
    def has_journal(self) -> bool:
        """Episodes were recorded."""
        return bool(journal_files(self.path / "journal"))

    def _files(self) -> list[Path]:
        return [*([self.curves.path] if self.curves.path.exists() else []), *journal_files(self.path / "journal")[-1:]]

    @property
    def stamp(self) -> str:
        """Changes when something new can be asked: the run wrote metrics, or its index has grown."""
        found = [(path.stat().st_mtime_ns, path.stat().st_size) for path in self._files()]
        return f"{hash(tuple(found)) & (2**64 - 1):016x}-{self._grown}"

    _grown = 0

    # -- its index ---------------------------------------------------------------------------------------------------------

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
        """The run's tokenizer; None where it is not on this machine."""
        return find_vocabulary(self.path, self.config)

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens; their numbers where there is no tokenizer."""
        return "".join(self.texts(ids)) if self.vocabulary is None else self.vocabulary.text(ids)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [f"⟨{token}⟩" for token in ids] if self.vocabulary is None else self.vocabulary.texts(ids)

    def refresh(self, seconds: float | None = None) -> dict[str, Any]:
        """Bring the index up to date; at most for about ``seconds`` where they are given. Returns ``progress()``."""
        if self.has_journal:
            self._index.advance(seconds)
            self._grown += 1
        return self.progress()

    def progress(self) -> dict[str, Any]:
        """How far the index is: ``samples``, ``bytes`` read ``of_bytes``, the share of samples whose ``text`` can be searched."""
        nothing = {"samples": 0, "bytes": 0, "of_bytes": 0, "text": 1.0, "is_complete": True}
        return self._index.progress() if self.has_journal else nothing

    def follow(self) -> None:
        """Keep the index up to date in a thread of its own, until ``close``. Idempotent."""
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
                    self._index.advance(_WORKED_FOR)  # builds a damaged one anew
            except (OSError, JournalError, DataError) as error:
                logger.warning("the index of %s does not go on: %s", self.path, error)
            ended.wait(_FOLLOWED_EVERY if is_complete else 0.0)

    def close(self) -> None:
        """Stop following, and close what is open."""
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

    # -- curves ------------------------------------------------------------------------------------------------------------

    def metrics(self, names: Iterable[str] | None = None, points: int = 600, smoothing: float = 0.0) -> dict[str, Any]:
        """Curves: ``{"series": {name: [[step, value], …]}, "groups": {title: [name, …]}}``.

        Args:
            names: of metrics; None: all.
            points: of each at most; peaks are kept.
            smoothing: weight of the past in a moving average, from 0 to below 1.
        """
        return {"series": self.curves.series(names, points, smoothing), "groups": groups_of(self.curves.names())}

    def diagnosis(self) -> list[dict[str, Any]]:
        """What is wrong and which setting changes it: ``rule``, ``level`` (bad, warn or info), ``message``, ``setting`` and ``step``."""
        return [sign.plain() for sign in signs_of(self.curves.points, self.config)]

    # -- steps, groups and samples -----------------------------------------------------------------------------------------

    def steps(self, offset: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """All steps, from ``metrics.jsonl`` and with what the index has of them."""
        indexed = {row["step"]: row for row in self._samples.steps()} if self.has_journal else {}
        rewards, counts = (dict(self.curves.points(name)) for name in ("reward", "samples"))
        times = dict(reversed(self.curves.times))
        unknown = dict.fromkeys(("groups", "reward_min", "reward_max", "tokens", "dropped", "without_variance", "version"))
        steps = []
        for step in sorted({*indexed, *rewards}):
            shown = {"step": step, "reward": rewards.get(step), "samples": counts.get(step), "time": times.get(step)}
            steps.append({**unknown, **shown, **indexed.get(step, {})})
        return steps[offset : None if limit is None else offset + limit]

    def step(self, step: int, bins: int = 20) -> dict[str, Any]:
        """A step: ``bins`` of rewards, ``groups`` with their samples, ``counts`` that add up, ``publication``, ``phases``, ``evaluations``.

        Raises:
            DataError: it is not in the index.
        """
        return self._samples.step(step, bins)

    def group(self, key: str | int) -> dict[str, Any]:
        """A group by the ordinal of its task (``eval:5`` for one of evaluations): its samples, task and prefix tree.

        Raises:
            DataError: it is not in the index.
        """
        group = self._samples.group(str(key))
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
        writers = self._index.rows("SELECT writer FROM files WHERE id = ?", reading.first_file(places))
        try:
            return reading.read_episode(self._index, places, writers[0]["writer"] if writers else 0)
        except OSError as error:
            raise JournalError(
                f"the records of sample {key} cannot be read ({error}): its file was removed (journal.keep) or not copied."
            ) from None

    def sample(self, key: str) -> dict[str, Any]:
        """All of one sample: ``calls``, ``rows`` of tokens, ``messages``, ``results`` of durable calls, ``attempts``, ``neighbours``.

        Args:
            key: as lists have it: ``12/3``, ``eval:12/3@v4``; ``12/3#0`` is the first attempt, ``12/3@0`` that of the first process.

        Raises:
            DataError: it is not in the index.
            JournalError: its records are gone.
        """
        sample, places, trained = self._samples.find(key)
        episode = self._episode(key, places)
        rows = [self._plain_row(row) for row in reading.rows_of(episode, reading.read_trained(self._index, trained))]
        group = self._samples.group(sample["group"])["samples"]
        return {
            **sample,
            "task": reading.plain_value(episode.task()),
            "task_error": episode.begin.task_error,
            "gconfig": episode.calls[0].gconfig if episode.calls else {},
            "calls": [reading.plain_call(each) for each in episode.calls],
            "rows": rows,
            "messages": chat_of(episode, self.text),
            "results": [reading.plain_result(each) for each in episode.results],
            "attempts": [self._attempt(each) for each in group if each["index"] == sample["index"]],
            "neighbours": _neighbours(sample, group),
            "replay": f"rollwright replay {shlex.quote(str(self.path))} {sample['key'].partition('#')[0]}",
        }

    def _plain_row(self, row: reading.RowTokens) -> dict[str, Any]:
        special = self.vocabulary.special if self.vocabulary else frozenset()
        plain = row.plain()
        trained = [] if row.advantages is None else row.advantages[row.mask].tolist()
        return {
            **plain,
            "reward": None if row.reward != row.reward else row.reward,
            "texts": self.texts(plain["ids"]),
            "special": [token in special for token in plain["ids"]],
            "advantage": sum(trained) / len(trained) if trained else None,
        }

    def _attempt(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """An attempt of the sample, and what it raised."""
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

    # -- the rest ----------------------------------------------------------------------------------------------------------

    def timeline(self, start: float | None = None, end: float | None = None, lanes: int = 24) -> dict[str, Any]:
        """Lanes of samples, engines and the trainer between two times; see ``viewer.timeline``."""
        return timeline(self._index, self._samples, start, end, lanes)

    def publications(self) -> list[dict[str, Any]]:
        """Each publication of weights: ``step``, ``version``, ``way``, ``seconds``, ``bytes``, ``engines``, ``audit``, ``time``."""
        rows = self._index.rows("SELECT *, max(writer) FROM steps GROUP BY step ORDER BY step")
        return [plain_publication(row) for row in rows]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Recover checkpoints: ``step``, ``frontier``, ``time``, groups finished ``beyond`` it, and ``unfinished`` episodes then."""
        rows = self._index.rows("SELECT step, frontier, time, beyond, unfinished FROM checkpoints ORDER BY writer, step")
        return [dict(row) for row in rows]

    def resumes(self) -> list[dict[str, Any]]:
        """Each time that a process went on: from which ``step``, ``version`` and ``frontier``, with how many ``episodes`` and ``tokens``."""
        return [dict(row) for row in self._index.rows("SELECT * FROM resumes ORDER BY writer")]

    def search(self, **query: Any) -> dict[str, Any]:
        """Samples that match; the arguments are the fields of ``viewer.search.Query``.

        Returns:
            ``total`` (None: not all texts were looked through), ``samples`` with ``snippet`` (parts of text, each with whether it was
            found), ``scanned``, ``is_cut`` (the time was over before there was enough), and ``indexed``: the share of samples whose text
            is in the index.

        Raises:
            DataError: a filter or pattern is wrong.
        """
        found = search.search(self._index, self._samples, search.Query(**query))
        return {**found, "indexed": self._index.progress()["text"]}

    def frame(self, what: str, **query: Any) -> Any:
        """A pandas ``DataFrame`` of ``samples``, ``tokens``, ``metrics`` or ``publications``.

        Args:
            what: which of them.
            query: of samples and tokens, fields of ``viewer.search.Query``: ``run.frame("tokens", step=12)``.

        Raises:
            DataError: ``what`` is none of these, or pandas is not installed.
        """
        if what not in _FRAMES:
            raise DataError(f"there is no frame of {what!r}: choose from {', '.join(_FRAMES)}.")
        try:
            import pandas
        except ModuleNotFoundError:
            raise DataError(
                "frames need pandas: pip install pandas; run.steps(), run.search() and run.sample() do not."
            ) from None
        if what == "metrics":
            series = {name: pandas.Series(dict(self.curves.points(name))) for name in self.curves.names()}
            return pandas.DataFrame(series).rename_axis("step")
        if what == "publications":
            return pandas.json_normalize(self.publications())
        answer = self.search(**{"limit": -1, **query})
        if answer["is_cut"]:
            raise DataError(f"the pattern takes too long: {answer['scanned']} samples were looked through; add filters.")
        found = answer["samples"]
        if what == "samples":
            return pandas.DataFrame(found).drop(columns=["snippet", "preview"], errors="ignore")
        return pandas.DataFrame([token for sample in found for token in self._tokens_of(sample["key"])])

    def _tokens_of(self, key: str) -> Iterable[dict[str, Any]]:
        _, places, trained = self._samples.find(key)
        for number, row in enumerate(reading.rows_of(self._episode(key, places), reading.read_trained(self._index, trained))):
            plain = self._plain_row(row)
            named = {"ids": "token", "texts": "text", "mask": "trained", "logprobs": "logprob", "versions": "version"}
            named |= {"advantages": "advantage", "trainer_logprobs": "trainer_logprob", "entropies": "entropy"}
            columns = {name: plain[column] or [None] * len(plain["ids"]) for column, name in named.items()}
            for position, values in enumerate(zip(*columns.values(), strict=True)):
                place = {"key": key, "step": row.step, "row": number, "position": position}
                yield {**place, **dict(zip(columns, values, strict=True))}

    def last_samples(self, limit: int = 50) -> list[dict[str, Any]]:
        """The samples that ended last, for a run that has not trained yet."""
        return [*self._samples.running(), *self._samples.listed("ORDER BY samples.id DESC LIMIT ?", limit)][:limit]


def find_part(path: Path) -> Path:
    """The directory itself, or of a run of several stages or processes the one that has a journal, else metrics.

    Raises:
        DataError: there is none, or there are several.
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
    """A directory that a run, a stage or a process wrote metrics or episodes to."""
    return (path / "metrics.jsonl").exists() or bool(journal_files(path / "journal"))


def _neighbours(sample: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Keys of the samples before and behind it in its group, and of those with the highest and lowest reward."""
    keys = [each["key"] for each in group]
    place = keys.index(sample["key"]) if sample["key"] in keys else -1
    rewarded = sorted((each for each in group if each["reward"] is not None), key=lambda each: each["reward"])
    return {
        "previous": keys[place - 1] if place > 0 else None,
        "next": keys[place + 1] if 0 <= place < len(keys) - 1 else None,
        "best": rewarded[-1]["key"] if rewarded else None,
        "worst": rewarded[0]["key"] if rewarded else None,
    }


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none, or one that is being written or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unix_time(text: Any) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
