"""Runs `rollwright run` on a tiny model with a plugin file of a user's."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwright import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rollwright.registry import PLUGIN_VARIABLE

#: What a user may write for one extension.
MOST_LINES = 30

CONFIG = """
experiment_name: extension
trial_name: trial
cluster: {{fileroot: {root}, threads: 1}}
plugins: [mine.py]
stages:
  - {{name: model, kind: model, path: "${{run_dir}}/model", architecture: qwen3, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1,
     head_dim: 16, intermediate_size: 64, max_position_embeddings: 128, characters: "0123456789+-*= ", pieces: ["<answer>", "</answer>"]}}
  - name: grpo
    kind: rl
    actor: {{path: "${{run_dir}}/model", optimizer: {{}}}}
    stats_logger: {{display: plain}}
    workflow: rollwright.workflows.rlvr.RLVRWorkflow
    reward_fn: numeric_reward
    gconfig: {{n_samples: 4, max_new_tokens: 4}}
    train_dataset: {{path: arithmetic, split: train, batch_size: 2}}
    total_train_steps: 2
"""


@pytest.fixture
def run_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, str]]:
    """``run_with(plugin, "stages.grpo.key=value", …)``: the stage's run directory, and what the command printed."""
    from rollwright.cli.main import main

    monkeypatch.setenv(PLUGIN_VARIABLE, "")  # the plugin must not be imported by processes of later tests

    def run(plugin: str, *overrides: str, succeeds: bool = True) -> tuple[Path, str]:
        plugin = textwrap.dedent(plugin).strip() + "\n"
        assert plugin.count("\n") < MOST_LINES
        (tmp_path / "mine.py").write_text(plugin)
        config = tmp_path / "config.yaml"
        config.write_text(CONFIG.format(root=tmp_path / "runs"))
        status = main(["run", str(config), *overrides])
        output = "".join(capfd.readouterr())
        assert (status == 0) == succeeds, output
        return tmp_path / "runs" / "extension" / "trial" / "grpo", output

    return run


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """``user_module(name, text)``: a module that can be imported until the test ends; its directory."""
    names, registered = [], [(registry, set(registry)) for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)]

    def write(name: str, text: str) -> Path:
        directory = tmp_path / "modules"
        directory.mkdir(exist_ok=True)
        (directory / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(directory)
        names.append(name)
        return directory

    yield write
    for name in names:
        sys.modules.pop(name, None)
    for registry, before in registered:
        for name in set(registry) - before:
            del registry[name]
