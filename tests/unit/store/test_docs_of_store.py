"""The code of docs/experience-store.md runs: an explorer fills a store, a trainer empties it, an operator stands between them."""

import re
import types
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from rollwright.config.modes import OperatorConfig, StoreConfig
from rollwright.experience.experience import Experience
from rollwright.experience.operators import OPERATORS
from rollwright.store import ExperienceStore

PAGE = Path(__file__).resolve().parents[3] / "docs" / "experience-store.md"
TASKS = 7


def run(task: int) -> list[Experience]:
    """Two samples of a task; every other task has one that is too long."""
    lengths = (3, 3 if task % 2 else 30)
    return [
        Experience(
            tokens=[task + 1] * length, prompt_length=1, reward=1.0, logprobs=[-0.5] * (length - 1), versions=[0] * (length - 1)
        )
        for length in lengths
    ]


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    explorer, trainer, operator = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    trained, renamed = [], []

    monkeypatch.setattr(OPERATORS, "_entries", dict(OPERATORS._entries))
    exec(compile(operator, "an operator", "exec"), {"__name__": "docs_of_store"})
    config = types.SimpleNamespace(store=StoreConfig(operators=[OperatorConfig("short_only", {"max_tokens": 10})]))
    names = {
        "config": config,
        "identity": "a/b",
        "total": TASKS,
        "limit": TASKS,
        "run": run,
        "task_of": lambda ordinal: ordinal,
    }
    exec(compile(explorer, "the explorer", "exec"), names)

    with ExperienceStore("sqlite:///runs/a/b/experiences.db", run="a/b") as store:
        assert store.status().drops == {"short_only": (TASKS + 1) // 2}
        names = {
            "store": store,
            "checkpoint": None,
            "train": trained.append,
            "path": "weights",
            "version": 1,
            "time_to_save": True,
            "temporary": "temporary",
            "name": "step-1",
            "write_checkpoint": lambda path: None,
            "rename": lambda old, new: renamed.append(new),
        }
        exec(compile(trainer.replace("groups=64", f"groups={TASKS}"), "the trainer", "exec"), names)
        assert sum(map(len, trained)) == 2 * TASKS - (TASKS + 1) // 2
        assert renamed == ["step-1"]
        assert store.announcements.newest().version == 1
        assert store.recover("step-1") == 0
