"""`rollwright export RUN --to …`: everything that a run's journal and metrics hold, as plain records and as JSON lines."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, JournalError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.records import unpack_value
from rollwright.tracking.metrics_file import LineReader
from rollwright.viewer import reading
from rollwright.viewer.run import Run
from rollwright.viewer.runs import parts_below

#: Tables of the index that are exported as they are: all but those about samples, and those by which the index finds its way.
_TABLES = ("groups", "steps", "phases", "checkpoints", "resumes")


@dataclass
class Exported:
    """What an export of one stage or process wrote.

    Attributes:
        path: the stage's or process's directory.
        files: the written files or directories.
        about: what they hold, in words.
        left_out: what the run holds and the format has no place for, in words; empty if there is nothing.
    """

    path: Path
    files: list[Path]
    about: str
    left_out: str = ""


def export_run(path: Path, directory: Path, write: Callable[[Run, Path], Exported]) -> list[Exported]:
    """Export each stage and process of a run.

    Args:
        path: directory of the run, or of a stage or process of it.
        directory: the destination, which must be empty or new. It is removed again if the export fails.
        write: writes one stage or process into a directory.

    Raises:
        ConfigError: ``path`` is no run, or the destination is not empty.
    """
    parts = list(parts_below(path)) if path.is_dir() else []
    if not parts:
        raise ConfigError(f"{path} is not a run: neither metrics.jsonl nor a journal is in it or below it.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; choose another, nothing is overwritten.")
    written = []
    try:
        for part in parts:
            place = directory if len(parts) == 1 else directory / part.relative_to(path)
            place.mkdir(parents=True, exist_ok=True)
            with Run(part) as run:
                while not run.refresh()["is_complete"]:
                    pass
                written.append(write(run, place))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return written


# -- records -------------------------------------------------------------------------------------------------------------


def metric_records(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the intact lines of ``metrics.jsonl`` without their checksums; ``Run.missing`` names the others."""
    reader = LineReader()
    if not run.curves.path.exists():
        return
    with run.curves.path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not line.strip():
                continue
            try:
                yield reader.record(line)
            except ValueError:
                continue


def table_records(run: Run, table: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one of the index's tables about groups, steps and checkpoints, with lists and mappings as such."""
    for row in run.index.rows(f"SELECT * FROM {table}"):
        yield {
            name: json.loads(row[name] or "null") if name in ("engines", "audit") else row[name]
            for name in row.keys()  # noqa: SIM118  # sqlite3.Row is no mapping
            if name not in ("id", "number", "place")
        }


def sample_records(run: Run, is_eval: bool | None = None, version: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield every sample in the order of their ends, with all that the journal holds about it.

    Args:
        run: the run, whose index is complete.
        is_eval, version: see ``Samples.everything``.

    Returns:
        Mappings like those of ``Run.sample``, without what is derived from other samples; see ``docs/export.md``. A sample whose records
        are lost has only what the index knows of it, and a ``problem``.
    """
    for sample, places, trained in run.samples.everything(is_eval, version):
        yield _recorded(run, sample, places, trained)


def _recorded(run: Run, sample: Mapping[str, Any], places: bytes, trained: bytes | None) -> dict[str, Any]:
    sample = {name: value for name, value in sample.items() if name != "preview"}
    try:
        episode = reading.read_episode(run.index, places)
        given = reading.read_trained(run.index, trained)
        rows = reading.rows_of(episode, given)
    except (OSError, JournalError) as error:
        return {**sample, "problem": f"its records cannot be read: {error}"}
    return {
        **sample,
        "problem": "some of its records are lost" if sample["is_damaged"] else "",
        "task": reading.plain_value(episode.task()),
        "task_error": episode.begin.task_error,
        "calls": _calls(episode),
        "results": [
            {
                **reading.plain_result(each),
                "state": None if each.state is None else base64.b64encode(each.state).decode("ascii"),
            }
            for each in episode.results
        ],
        "rows": [{**row.plain(), "texts": run.texts(row.ids.tolist())} for row in rows],
        "trained_rows": [{"step": each.step, "reward": each.reward, "tokens": each.tokens} for each in given],
        "messages": reading.chat_of(episode, run.text),
        "traceback": "" if episode.end is None else episode.end.traceback,
    }


def _calls(episode: RecordedEpisode) -> list[dict[str, Any]]:
    calls = []
    for each in episode.calls:
        metadata = None if each.call.metadata is None else reading.plain_value(unpack_value(each.call.metadata))
        calls.append({**reading.plain_call(each), "layout": each.call.layout, "metadata": metadata})
    return calls


def about_run(run: Run) -> dict[str, Any]:
    """Return what is known of the run as a whole: name, state, results, config, and what is missing from its files."""
    info = {name: value for name, value in run.info().items() if name not in ("sparkline", "curve")}
    return {
        **info,
        "results": run.results,
        "ending": run.ending(),
        "missing": [each["message"] for each in run.missing()],
        "config": run.config,
        "rollwright": version("rollwright"),
    }


# -- JSON lines ----------------------------------------------------------------------------------------------------------


def write_jsonl(run: Run, directory: Path) -> Exported:
    """Write ``run.json``, ``metrics.jsonl``, ``samples.jsonl`` and a file for each other table, for one stage or process."""
    tables: dict[str, Iterable[Mapping[str, Any]]] = {"metrics": metric_records(run)}
    if run.has_journal:
        tables |= {name: table_records(run, name) for name in _TABLES}
        tables["samples"] = sample_records(run)
    files, counts = [directory / "run.json"], []
    files[0].write_text(json.dumps(about_run(run), default=str, indent=1) + "\n", encoding="utf-8", errors="replace")
    for name, records in tables.items():
        file, count = directory / f"{name}.jsonl", 0
        with file.open("w", encoding="utf-8", errors="replace") as opened:
            for record in records:
                opened.write(json.dumps(record, default=str) + "\n")
                count += 1
        files.append(file)
        counts.append(f"{count:,} {name}")
    return Exported(run.path, files, ", ".join(counts))
