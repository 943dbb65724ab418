"""The dataset ``harbor``: a directory of task folders as rows, and the folder of a row."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollwright.data.rows import SPLIT_NAMES, Row
from rollwright.environments.harbor import terminal_bench
from rollwright.environments.harbor.folder import HarborOptions, TaskFolder, read_harbor_folder
from rollwright.environments.harbor.images import refuse_needs
from rollwright.errors import DataError, WorkflowError

#: Column of a row that holds its folder and the taskset's options.
COLUMN = "task_folder"
_FILES = ("task.toml", terminal_bench.FILE)
#: Files that list tasks which are elsewhere.
_LISTS = ("dataset.toml", "registry.json")


def harbor(split: str = "train", path: str = "", **options: Any) -> list[Row]:
    """Read a task folder, or a directory of them, as tasks.

    Args:
        split: a subdirectory of that name is read if there is one, otherwise the whole directory.
        path: the folder or directory.
        options: fields of ``HarborOptions``.

    Returns:
        Rows ``{"messages": [user: the instruction], "query_id": the task's name, "task_folder": {"path", …}, "metadata"}``.

    Raises:
        DataError: lists every fault of every folder, with file and line.
    """
    checked = HarborOptions.of(options)
    rows, faults = [], []
    for place in task_folders(path, split):
        try:
            folder = read_task_folder(place, checked)
            refuse_needs(folder, checked.sandbox or "")
        except DataError as error:
            faults.append(str(error))
        else:
            rows.append(_row(folder))
    if faults:
        raise DataError("\n  ".join([f"{len(faults)} of {len(faults) + len(rows)} tasks cannot be run:", *faults]))
    return rows


def _row(folder: TaskFolder) -> Row:
    given = folder.options.model_dump(mode="json", exclude_defaults=True)
    metadata = {"metadata": dict(folder.metadata)} if folder.metadata else {}
    return {
        "messages": [{"role": "user", "content": folder.steps[0].instruction}],
        "query_id": folder.name,
        COLUMN: {"path": str(folder.path), **given},
        **metadata,
    }


def task_folders(path: str | Path, split: str = "") -> list[Path]:
    """Return the task folders at or below a path, sorted; those of a split if the directory has one of that name.

    Raises:
        DataError: there are none.
    """
    root = Path(path).expanduser()
    if not str(path) or not root.is_dir():
        raise DataError(f"{str(path) or 'the taskset'}: there is no such directory of task folders (looked from {Path.cwd()}).")
    names = SPLIT_NAMES.get(split, (split,)) if split else ()
    part = next((root / name for name in names if (root / name).is_dir() and not _is_task(root)), root)
    if found := list(_below(part.absolute())):
        return found
    if lists := [name for name in _LISTS if (part / name).exists()]:
        raise DataError(f"{part / lists[0]} lists tasks that are elsewhere; download their folders and give that directory.")
    raise DataError(f"{part} has no task folder: a directory with {' or '.join(_FILES)}.")


def _is_task(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES)


def _below(path: Path) -> Iterator[Path]:
    if _is_task(path):
        yield path
    elif path.is_dir():
        for each in sorted(path.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                yield from _below(each)


def read_task_folder(path: Path, options: HarborOptions | None = None) -> TaskFolder:
    """Read a folder of Harbor or of Terminal-Bench.

    Raises:
        DataError: it is neither, or has faults.
    """
    options = options or HarborOptions()
    if (path / "task.toml").is_file():
        return read_harbor_folder(path, options)
    if (path / terminal_bench.FILE).is_file():
        return terminal_bench.read_terminal_bench_folder(path, options)
    raise DataError(f"{path} is no task folder: it has neither {' nor '.join(_FILES)}.")


def folder_of(row: Mapping[str, Any]) -> TaskFolder:
    """Return the task folder of a row of the dataset ``harbor``.

    Raises:
        WorkflowError: the row has none.
    """
    given = row.get(COLUMN)
    if not isinstance(given, Mapping) or "path" not in given:
        raise WorkflowError(
            f"the task has no {COLUMN!r} (it has {', '.join(sorted(row)) or 'nothing'}): read it with kind: harbor."
        )
    options = {name: value for name, value in given.items() if name != "path"}
    return _read(str(given["path"]), json.dumps(options, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _read(path: str, options: str) -> TaskFolder:
    return read_task_folder(Path(path), HarborOptions.of(json.loads(options)))
