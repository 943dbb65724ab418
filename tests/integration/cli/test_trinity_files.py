"""Trinity-shaped files at the command line: what the user is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FILE = """\
model: {model_path: tiny}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 2
  total_steps: 1
  explorer_input:
    taskset: {path: tasks.jsonl, default_workflow_type: WORKFLOW, format: {prompt_key: question}}
"""


@pytest.fixture
def rollwright(tmp_path):
    """Runs a command line in a process of its own, as users do: what is logged where depends on who came first."""

    def run(*arguments):
        environment = {**os.environ, "COLUMNS": "200", "XDG_CACHE_HOME": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-m", "rollwright", *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    return run


def test_what_became_of_the_keys_is_told_and_the_printed_config_stays_yaml(rollwright, tmp_path):
    (tmp_path / "trinity.yaml").write_text(FILE.replace("WORKFLOW", "math_workflow"))
    shown = rollwright("config", "show", "trinity.yaml")
    assert shown.returncode == 0
    assert "algorithm.repeat_times -> gconfig.n_samples: 4" in shown.stderr
    assert "it is read as this project's config" in shown.stderr
    assert shown.stdout.startswith("stages:")


def test_a_plugin_directory_that_is_none_is_told_as_it_was_given(rollwright, tmp_path):
    (tmp_path / "trinity.yaml").write_text(FILE.replace("WORKFLOW", "mine"))
    missing = rollwright("config", "check", "trinity.yaml", "--plugin-dir", "nowhere")
    assert missing.returncode == 1
    assert (
        missing.stderr.strip()
        == f"error: plugin 'nowhere': {tmp_path}/nowhere does not exist; give a Python file, a directory that holds Python files, or a module."
    )
    (tmp_path / "plugins").mkdir()
    unknown = rollwright("config", "check", "trinity.yaml", "--plugin-dir", "plugins")
    assert "buffer.explorer_input.taskset.default_workflow_type (here tasksets.0.workflow)" in unknown.stderr
    assert "in a plugin: plugins: in the config, --plugin-dir, ROLLWRIGHT_PLUGIN_PATH" in unknown.stderr
