"""Reads the rows of files, directories and Hugging Face datasets, unchanged."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rollwright.errors import DataError
from rollwright.registry import nearest

Row = dict[str, Any]


class Rows(list[Row]):
    """Rows with their sources: ``places[i]`` is the ``file:line`` of row ``i``, or its file and number."""

    def __init__(self, placed: Iterable[tuple[Row, str]] = ()) -> None:
        placed = list(placed)
        super().__init__(row for row, _ in placed)
        self.places = [place for _, place in placed]


#: Seconds to wait for an answer from Hugging Face; without one, only its local cache is used.
HUB_WAIT = 10.0

#: Requested split -> common names of that split.
SPLIT_NAMES = {"valid": ("valid", "validation", "val", "dev"), "validation": ("validation", "valid", "val", "dev")}


def read_rows(path: str | Path, split: str = "train", name: str | None = None, limit: int | None = None) -> Rows:
    """Read the rows of a dataset.

    Args:
        path: a file (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``), a directory of such files named by split
            (``train.jsonl``, ``test-00000.parquet``), a directory written by ``Dataset.save_to_disk``, or the name of a
            Hugging Face dataset. A file is read as a whole, whatever ``split`` is.
        split: split of a directory or dataset. Slices such as ``train[:100]`` work only for Hugging Face names.
        name: subset (configuration) of a Hugging Face dataset.
        limit: read only the first rows.

    Returns:
        The rows in their order, at least one.

    Raises:
        DataError: there is nothing at ``path``, a row is invalid (the message names file and line), or there are no rows.
    """
    local = Path(path).expanduser()
    if local.is_file():
        placed = _file_rows(local)
    elif local.is_dir():
        placed = _directory_rows(local, split, name)
    elif names_a_file(path):
        raise DataError(f"there is no file or directory {path} (looked from {Path.cwd()}); check the dataset's path.")
    else:
        placed = _hub_rows(str(path), split, name)
    rows = Rows(itertools.islice(placed, limit))
    if not rows:
        raise DataError(f"{path} ({split}) holds no rows.")
    return rows


def _file_rows(file: Path) -> Iterator[tuple[Row, str]]:
    if file.suffix not in ENDINGS:
        raise DataError(f"{file}: files ending in {file.suffix or 'nothing'} are not read; known: {', '.join(ENDINGS)}.")
    for row, place in ENDINGS[file.suffix](file):
        if not isinstance(row, dict):
            raise DataError(f"{place}: a row is an object of columns, this is {json.dumps(row)[:80]}.")
        yield row, place


def names_a_file(path: str | Path) -> bool:
    """Return True if a path looks like a local file rather than the name of a dataset."""
    return Path(path).suffix in ENDINGS or str(path).startswith((".", "/", "~"))


def _jsonl_rows(file: Path) -> Iterator[tuple[Any, str]]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            yield json.loads(line), f"{file}:{number}"
        except json.JSONDecodeError as error:
            raise DataError(
                f"{file}:{number}: this line is not JSON ({error.msg} at column {error.colno}): {line.strip()[:80]!r}. "
                "A .jsonl file holds one object a line."
            ) from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                yield number, line
    except UnicodeDecodeError as error:
        raise DataError(f"{file}:{number + 1}: this is not UTF-8 text ({error.reason}); convert the file.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}.") from error


def _csv_rows(file: Path, delimiter: str = ",") -> Iterator[tuple[Any, str]]:
    """Read rows with the names of the first line as keys; values are strings, or None for empty cells."""
    csv.field_size_limit(2**31 - 1)  # the text of a document may be one cell
    reader = csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(names) or (len(names) == 1 and {";", "\t"} & set(names[0])):
            raise DataError(
                f"{file}:1: the first line must name the columns, each once, between {delimiter!r}; it is {names!r:.200}. "
                "Columns are separated by commas in a .csv file and by tabs in a .tsv file."
            )
        for cells in filter(None, reader):
            if len(cells) != len(names):
                raise DataError(
                    f"{file}:{reader.line_num}: this row has {len(cells)} cells for {len(names)} columns; put cells that hold a "
                    'separator or a line break between double quotes, and write a quote in them as "".'
                )
            yield dict(zip(names, (cell or None for cell in cells), strict=True)), f"{file}:{reader.line_num}"
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: this is not CSV ({error}).") from error


def _json_rows(file: Path) -> Iterator[tuple[Any, str]]:
    text = "".join(line for _, line in _lines(file))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        hint = " It looks like one object a line: name it .jsonl." if error.msg == "Extra data" else ""
        raise DataError(f"{file}:{error.lineno}: this is not JSON ({error.msg} at column {error.colno}).{hint}") from error
    if isinstance(content, dict):
        lists = [key for key, value in content.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(
                f"{file}: expected a list of rows, or an object with one list; it has the keys {', '.join(content)}."
            )
        content = content[lists[0]]
    if not isinstance(content, list):
        raise DataError(f"{file}: expected a list of rows, got a {type(content).__name__}.")
    return _numbered(content, str(file))


def _parquet_rows(file: Path) -> Iterator[tuple[Any, str]]:
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(file).iter_batches()
        yield from _numbered((row for batch in batches for row in batch.to_pylist()), str(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {' '.join(str(error).split())[:200]}.") from error


def _numbered(rows: Iterable[Any], source: str) -> Iterator[tuple[Any, str]]:
    return ((row, f"{source}: row {index}") for index, row in enumerate(rows))


#: File ending -> function that reads such a file.
ENDINGS: dict[str, Callable[[Path], Iterator[tuple[Any, str]]]] = {
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": functools.partial(_csv_rows, delimiter="\t"),
    ".parquet": _parquet_rows,
}


def _directory_rows(directory: Path, split: str, name: str | None) -> Iterator[tuple[Row, str]]:
    if (directory / "dataset_dict.json").exists() or (directory / "dataset_info.json").exists():
        return _saved_rows(directory, split)
    base = directory / name if name else directory
    files = sorted(file for file in base.rglob("*") if file.suffix in ENDINGS and file.is_file())
    for word in SPLIT_NAMES.get(split, (split,)):
        beginnings = (f"{word}-", f"{word}_", f"{word}.")
        found = [f for f in files if f.stem == word or f.stem.startswith(beginnings) or f.parent.name == word]
        if found:
            return itertools.chain.from_iterable(map(_file_rows, found))
    listed = ", ".join(str(file.relative_to(base)) for file in files[:10]) or "no data files"
    raise DataError(f"{base} has no file of split {split!r} (such as {split}.jsonl); it has {listed}.")


def _saved_rows(directory: Path, split: str) -> Iterator[tuple[Row, str]]:
    import datasets

    dataset = datasets.load_from_disk(str(directory))
    if isinstance(dataset, datasets.DatasetDict):
        chosen = next((word for word in SPLIT_NAMES.get(split, (split,)) if word in dataset), None)
        if chosen is None:
            raise DataError(f"{directory} has no split {split!r}; {nearest(split, map(str, dataset))}")
        dataset = dataset[chosen]
    return _numbered(map(dict, dataset), f"{directory} ({split})")


def _hub_rows(path: str, split: str, name: str | None) -> Iterator[tuple[Row, str]]:
    import datasets
    import datasets.config

    unreachable = unreachable_hub()
    was_offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, bool(unreachable)
    try:  # offline, the library looks in its cache and does not try again for half a minute
        dataset = datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library raises whatever its file systems and builders raise
        cause = unreachable or " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{path!r} is no file or directory here, no registered dataset, and Hugging Face does not give it (split {split!r}"
            f"{f', subset {name!r}' if name else ''}): {cause}. Without a network, give a local path: a file that ends in "
            f"{', '.join(ENDINGS)}, or a directory of them (for a registered dataset, as its argument: `kwargs: {{path: ...}}`)."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
    return _numbered(map(dict, dataset), f"{path} ({split})")


def unreachable_hub() -> str:
    """Return why Hugging Face cannot be reached, after at most ``HUB_WAIT`` seconds; empty if it answers."""
    import datasets
    import datasets.config
    import huggingface_hub

    if datasets.config.HF_HUB_OFFLINE:
        return "offline mode is on (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE)"
    place = datasets.config.HF_ENDPOINT
    found = [f"{place} did not answer within {HUB_WAIT:g} s"]

    def ask() -> None:
        try:
            # Longer than the wait below, so that only one limit determines the message.
            huggingface_hub.get_session().head(place, timeout=10 * HUB_WAIT)
            found.append("")
        except Exception as error:  # its HTTP library raises many types
            found.append(f"{place} cannot be reached ({error or type(error).__name__})")

    asking = threading.Thread(target=ask, daemon=True)  # in a thread, because a DNS lookup has no time limit
    asking.start()
    asking.join(HUB_WAIT)
    return found[-1]
