"""Errands in a directory of files, as Harbor task folders: one shell command does each, and its tests compare all files.

errands(size=2, folders="tasks")   # the dataset errands: rows with a worked command; writes the folders of all splits to tasks/
write_folders("tasks")             # tasks/{train,valid,test}/NAME/{task.toml,instruction.md,environment/,tests/,solution/}
rollwright check-tasks tasks       # every solution scores 1, doing nothing 0

``move fig and ink to red`` is done by ``mv fig ink red``. Each file holds its own name, so the tests know where it went.
"""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.atomic import replaced_directory
from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import SPLIT_SHARES, check_split, split_of
from rollwright.errors import DataError

FILES = ("ash", "bee", "cat", "dew", "elk", "fig", "gem", "hay", "ink", "jam", "kit", "log")
DIRECTORIES = ("red", "blue", "gold", "pink", "gray", "lime")
_USER, _ASSISTANT, _END = "<|user|>", "<|assistant|>", "<|end|>"
_TEST = """#!/bin/sh
# The files of the working directory have to be those of expected/, with the same content.
if diff -r . /tests/expected > /logs/verifier/difference.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Errand:
    """What is asked, and the command that does it."""

    verb: str
    names: tuple[str, ...]

    @property
    def instruction(self) -> str:
        """The request."""
        *first, last = self.names
        words = {"move": ("move", " to "), "copy": ("copy", " to "), "drop": ("drop", ""), "link": ("name", " also ")}
        verb, between = words[self.verb]
        return f"{verb} {' and '.join(first)}{between}{last}" if first else f"{verb} {last}"

    @property
    def command(self) -> str:
        """The shell command."""
        program = {"move": "mv", "copy": "cp", "drop": "rm", "link": "cp"}[self.verb]
        return " ".join([program, *self.names])

    @property
    def hurried(self) -> str:
        """The command of a clerk in a hurry, who takes the first file only and moves what was to be copied: mostly wrong."""
        names = [self.names[0], self.names[-1]] if len(self.names) > 1 else [*self.names]
        return " ".join(["rm" if self.verb == "drop" else "mv", *names])

    @property
    def files(self) -> list[str]:
        """The files at first: those that are named, and others."""
        return self._with_others(FILES, 5 if self.verb != "link" else 4, without=self.names[1:] if self.verb == "link" else ())

    @property
    def directories(self) -> list[str]:
        """The directories: the one that is named, and others."""
        return self._with_others(DIRECTORIES, 3)

    def _with_others(self, names: tuple[str, ...], count: int, without: tuple[str, ...] = ()) -> list[str]:
        named = [name for name in names if name in self.names and name not in without]
        others = [name for name in names if name not in self.names]
        return sorted([*named, *random.Random(self.instruction).sample(others, count - len(named))])

    def done(self) -> dict[str, str]:
        """Return the files afterwards: path -> content."""
        files = {name: name for name in self.files}
        *sources, last = self.names
        if self.verb == "drop":
            del files[last]
        elif self.verb == "link":
            files[last] = files[sources[0]]
        else:
            files.update({f"{last}/{name}": files[name] for name in sources})
            for name in sources if self.verb == "move" else ():
                del files[name]
        return files


def all_errands() -> list[Errand]:
    """Return every errand once."""
    one = [(verb, (name, place)) for verb in ("move", "copy") for name in FILES for place in DIRECTORIES]
    two = [
        (verb, (*names, place))
        for verb in ("move", "copy")
        for names in itertools.permutations(FILES, 2)
        for place in DIRECTORIES
    ]
    others = [("drop", (name,)) for name in FILES] + [("link", names) for names in itertools.permutations(FILES, 2)]
    return [Errand(verb, names) for verb, names in [*one, *two, *others]]


def errands_of(split: str, size: int | None = None, seed: int = 1) -> list[Errand]:
    """Return errands of a split in a random order; no two splits share one.

    Raises:
        DataError: there is no such split, or it has fewer errands.
    """
    check_split("errands", split)
    found = [each for each in all_errands() if split_of(each.instruction) == split]
    random.Random(f"{split} {seed}").shuffle(found)
    if size is not None and size > len(found):
        raise DataError(f"errands: {size} were asked for, split {split!r} has {len(found)}.")
    return found[:size]


@DATASET_REGISTRY.register("errands")
def errands(
    split: str = "train",
    size: int | None = None,
    hurried: float = 0.5,
    seed: int = 1,
    folders: str | None = None,
    counts: dict[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Worked errands for supervised training, as ``segments``; ``answer`` is the command that does the whole errand.

    Args:
        split: train, valid or test.
        size: number of rows; errands may be repeated. None: all of the split.
        hurried: share of the rows whose command is that of a clerk in a hurry.
        seed: which errands, in which order.
        folders: also write the task folders of all splits to this directory, if it does not exist.
        counts: number of folders of each split.
    """
    if folders is not None:
        write_folders(folders, counts or {}, seed)
    draw = random.Random(f"worked {split} {seed}")
    known = errands_of(split, seed=seed)
    rows = []
    for index in range(len(known) if size is None else size):
        errand = known[index % len(known)]
        command = errand.hurried if draw.random() < hurried else errand.command
        asked = {"text": f"{_USER}{errand.instruction}{_END}{_ASSISTANT}", "train": False}
        messages = [{"role": "user", "content": errand.instruction}]
        segments = [asked, {"text": f"{command}{_END}", "train": True}]
        rows.append({"query_id": errand.instruction, "messages": messages, "answer": errand.command, "segments": segments})
    return rows


def write_folders(directory: str | Path, counts: dict[str, int] | None = None, seed: int = 1) -> None:
    """Write task folders, ``directory/SPLIT/NAME``, unless the directory exists.

    Args:
        directory: where to.
        counts: number of tasks of each split; all tasks of a split that is not named.
        seed: which tasks.
    """
    if Path(directory).exists():
        return
    with replaced_directory(directory, durable=False) as made:
        for split in SPLIT_SHARES:
            for errand in errands_of(split, (counts or {}).get(split), seed):
                write_folder(Path(made) / split / errand.instruction.replace(" ", "-"), errand)


def write_folder(folder: Path, errand: Errand) -> None:
    """Write the task folder of an errand."""
    for place in ("environment", "tests/expected"):
        for name in errand.directories:
            (folder / place / name).mkdir(parents=True)
    texts = {
        "task.toml": "[agent]\ntimeout_sec = 20.0\n\n[verifier]\ntimeout_sec = 20.0\n",
        "instruction.md": errand.instruction,
        "tests/test.sh": _TEST,
        "solution/solve.sh": f"#!/bin/sh\n{errand.command}\n",
        **{f"environment/{name}": name for name in errand.files},
        **{f"tests/expected/{path}": text for path, text in errand.done().items()},
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n" * (not text.endswith("\n")), encoding="utf-8")


if __name__ == "__main__":
    import sys

    target = sys.argv[1] if len(sys.argv) > 1 else "tasks"
    shutil.rmtree(target, ignore_errors=True)
    write_folders(target)
