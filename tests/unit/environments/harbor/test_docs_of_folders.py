"""The first lines of docs/tasks.md work when typed."""

import re
import subprocess
from pathlib import Path

from rollwright.cli.main import main

PAGE = Path(__file__).parents[4] / "docs" / "tasks.md"


def test_the_first_task_is_proven(tmp_path, monkeypatch, capsys):
    (typed,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[:1]
    script, _, command = typed.strip().rpartition("\n")
    assert len(typed.splitlines()) <= 10
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()[1:]) == 0
    assert re.search(r"hello +1 +0 +[\d.]+ +ok", capsys.readouterr().out)
