"""Writes task folders for tests."""

from __future__ import annotations

from pathlib import Path

from rollwright.environments.harbor.folder import HarborOptions, TaskFolder
from rollwright.environments.harbor.tasks import read_task_folder

#: Scores 1 if the agent wrote "done" to answer.txt.
TEST = """#!/bin/sh
if [ "$(cat answer.txt 2>/dev/null)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = "#!/bin/sh\necho done > answer.txt\n"


def write(path: Path, files: dict[str, str], toml: str = "") -> Path:
    """Write a folder: a working task, changed by ``files`` (None removes one)."""
    content = {
        "task.toml": toml,
        "instruction.md": "Write done to answer.txt.\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLVE,
        **files,
    }
    for name, text in content.items():
        if text is not None:
            place = path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    return path


def read(path: Path, files: dict[str, str] | None = None, toml: str = "", **options) -> TaskFolder:
    """Write a folder and read it."""
    return read_task_folder(write(path, files or {}, toml), HarborOptions(**options))
