"""docs/task-workflows.md, followed to the letter: its files and commands train a model from random weights."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "task-workflows.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_followed_to_the_letter_trains(tmp_path, warm):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "only_these.py").write_text(block("python"))
    (tmp_path / "tasks.jsonl").write_text(block("json"))
    (tmp_path / "config.yaml").write_text(block("yaml"))
    commands = [shlex.split(line, comments=True) for line in block("bash").splitlines()]
    assert [command[:2] for command in commands] == [["rollwright", "model"], ["rollwright", "run"]]
    for command in commands:
        done = warm.run(command, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "runs" / "experiment" / "trial" / "metrics.jsonl").read_text().splitlines()
    rewards = [each["reward"] for each in map(json.loads, lines) if "reward" in each]
    assert len(rewards) == 60
    assert rewards[0] < 0.15 < 0.85 < rewards[-1]
