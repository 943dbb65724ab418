"""Rows from files, directories and Hugging Face datasets, as they stand there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollwright.errors import DataError
from rollwright.registry import nearest

Row = dict[str, Any]


class Rows(list[Row]):
    """Rows that know where each was read: ``places[i]`` is ``file:line``, or the file and the row's number."""

    def __init__(self, rows: Iterable[Row] = (), places: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.places = list(places)

    def take(self, row: Row, place: str) -> None:
        """Append one row."""
        self.append(row)
        self.places.append(place)

    def first(self, count: int) -> Rows:
        """The first ``count`` rows."""
        return Rows(self[:count], self.places[:count])


#: File endings and the kind of file each is.
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}

#: Names under which people keep a split, for each split that is asked for.
SPLIT_NAMES = {"valid": ("valid", "validation", "val", "dev"), "validation": ("validation", "valid", "val", "dev")}


def read_rows(path: str | Path, split: str = "train", name: str | None = None, limit: int | None = None) -> Rows:
    """Read the rows of a dataset.

    Args:
        path: a file (``.jsonl``, ``.json``, ``.parquet``), a directory of such files named by split
            (``train.jsonl``, ``test-00000.parquet``), a directory written by ``Dataset.save_to_disk``, or the name of a
            Hugging Face dataset. A file holds one split, which ``split`` need not name.
        split: which split of a directory or dataset; slices such as ``train[:100]`` only for Hugging Face names.
        name: subset (configuration) of a Hugging Face dataset.
        limit: read only the first rows.

    Returns:
        The rows in their order, at least one.

    Raises:
        DataError: nothing is there, a row is broken (with file and line), or there are no rows.
    """
    local = Path(path).expanduser()
    if local.is_file():
        rows = _read_file(local, limit)
    elif local.is_dir():
        rows = _read_directory(local, split, name, limit)
    elif local.suffix in ENDINGS or str(path).startswith((".", "/", "~")):
        raise DataError(f"there is no file or directory {path} (looked from {Path.cwd()}); check the dataset's path.")
    else:
        rows = _read_hub(str(path), split, name, limit)
    if not rows:
        raise DataError(f"{path} ({split}) holds no rows.")
    return rows


def _read_file(file: Path, limit: int | None) -> Rows:
    kind = ENDINGS.get(file.suffix)
    if kind is None:
        raise DataError(f"{file}: files ending in {file.suffix or 'nothing'} are not read; known: {', '.join(ENDINGS)}.")
    return {"jsonl": _read_jsonl, "json": _read_json, "parquet": _read_parquet}[kind](file, limit)


def _read_jsonl(file: Path, limit: int | None) -> Rows:
    rows = Rows()
    for number, line in _lines(file):
        if limit is not None and len(rows) >= limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{file}:{number}: this line is not JSON ({error.msg} at column {error.colno}): {line.strip()[:80]!r}. "
                "A .jsonl file holds one object a line."
            ) from error
        rows.take(_checked(row, f"{file}:{number}"), f"{file}:{number}")
    return rows


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


def _read_json(file: Path, limit: int | None) -> Rows:
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
    rows = Rows()
    for index, row in enumerate(content[:limit]):
        rows.take(_checked(row, f"{file}: row {index}"), f"{file}: row {index}")
    return rows


def _read_parquet(file: Path, limit: int | None) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {' '.join(str(error).split())[:200]}.") from error
    rows = (table if limit is None else table.slice(0, limit)).to_pylist()
    return Rows(rows, (f"{file}: row {index}" for index in range(len(rows))))


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is an object of columns, this is {json.dumps(row)[:80]}.")
    return row


def _read_directory(directory: Path, split: str, name: str | None, limit: int | None) -> Rows:
    if (directory / "dataset_dict.json").exists() or (directory / "dataset_info.json").exists():
        return _read_saved(directory, split, limit)
    base = directory / name if name else directory
    wanted = SPLIT_NAMES.get(split, (split,))
    files = sorted(file for file in base.rglob("*") if file.suffix in ENDINGS and file.is_file())
    for word in wanted:
        found = [
            f
            for f in files
            if f.stem == word or f.stem.startswith((f"{word}-", f"{word}_", f"{word}.")) or f.parent.name == word
        ]
        if found:
            rows = Rows()
            for file in found:
                part = _read_file(file, None if limit is None else limit - len(rows))
                rows.extend(part)
                rows.places.extend(part.places)
                if limit is not None and len(rows) >= limit:
                    break
            return rows
    listed = ", ".join(str(file.relative_to(base)) for file in files[:10]) or "no data files"
    raise DataError(f"{base} has no file of split {split!r} (such as {split}.jsonl); it has {listed}.")


def _read_saved(directory: Path, split: str, limit: int | None) -> Rows:
    import datasets

    dataset = datasets.load_from_disk(str(directory))
    if isinstance(dataset, datasets.DatasetDict):
        chosen = next((word for word in SPLIT_NAMES.get(split, (split,)) if word in dataset), None)
        if chosen is None:
            raise DataError(f"{directory} has no split {split!r}; {nearest(split, map(str, dataset))}")
        dataset = dataset[chosen]
    return _rows_of(dataset, f"{directory} ({split})", limit)


def _read_hub(path: str, split: str, name: str | None, limit: int | None) -> Rows:
    import datasets

    try:
        dataset = datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library raises whatever its file systems and builders raise
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{path!r} is no file or directory here, no registered dataset, and Hugging Face does not give it (split {split!r}"
            f"{f', subset {name!r}' if name else ''}): {cause}"
        ) from error
    return _rows_of(dataset, f"{path} ({split})", limit)


def _rows_of(dataset: Any, source: str, limit: int | None) -> Rows:
    if limit is not None and limit < len(dataset):
        dataset = dataset.select(range(limit))
    return Rows((dict(row) for row in dataset), (f"{source}: row {index}" for index in range(len(dataset))))
