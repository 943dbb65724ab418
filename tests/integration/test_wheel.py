"""The wheel works away from the checkout. What it depends on is that of this environment: scripts/try_wheel.sh installs all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def call(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_workflow_trains_from_the_wheel_alone(tmp_path):
    source, environment, mine = tmp_path / "source", tmp_path / "env", tmp_path / "mine"
    source.mkdir()
    mine.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        source,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("rollwright-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    call(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # Packages of this environment can be imported. Its editable Rollwright cannot: links are followed only where a site begins.
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=mine).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = call(python, "-c", "import rollwright; print(rollwright.__file__)", cwd=mine)
    assert Path(where.strip()).is_relative_to(environment)

    rollwright = environment / "bin" / "rollwright"
    assert "two_readers.yaml" in call(rollwright, "new", "workflow", "two_readers", cwd=mine)
    call(rollwright, "run", "two_readers.yaml", "stats_logger.display=none", cwd=mine)
    assert list(mine.glob("runs/two_readers/first/grpo/checkpoints/final/*.safetensors"))
    call(rollwright, "view", "runs/two_readers/first/grpo", "--export", "report.html", cwd=mine)
    assert "uPlot" in (mine / "report.html").read_text()  # templates and static files are in the wheel
