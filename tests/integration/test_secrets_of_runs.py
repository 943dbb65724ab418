"""A run whose config holds secrets: nothing in its directory has them, no sink gets them, and only its user may look."""

import json

import pytest

from rollwright import load_stages
from rollwright.tracking.sinks import SINKS
from rollwright.trainers.stages import run_config

FROM_ENVIRONMENT, LITERAL = "sk-4f9a1c77d2", "sk-77aa10bc3e"

CONFIG = f"""
experiment_name: secrets
trial_name: first
cluster: {{fileroot: ROOT}}
stages:
  - {{kind: model, name: model, path: "${{run_dir}}/model", hidden_size: 16, layers: 1, heads: 1}}
  - kind: rl
    name: rl
    actor: {{path: "${{run_dir}}/model"}}
    train_dataset: {{path: arithmetic, batch_size: 1, kwargs: {{digits: 1, size: 4}}}}
    workflow: rlvr
    reward_fn: numeric_reward
    gconfig: {{n_samples: 2, max_new_tokens: 2, stop: ["${{oc.env:OUR_KEY}}"]}}
    total_train_steps: 1
    service: {{api_key: "{LITERAL}"}}
    vllm: {{env: {{HF_TOKEN: "{LITERAL}"}}}}
    stats_logger: {{sinks: [spy], display: none, dump_rollouts: -1}}
"""


@pytest.fixture
def sent():
    """What a sink is told when a run begins."""
    told = []

    @SINKS.register("spy")
    class Spy:
        def __init__(self, run):
            told.append(run)

        def write(self, step, metrics):
            told.append(metrics)

        def close(self):
            pass

    yield told
    del SINKS["spy"]


def files_with(text: str, directory) -> list[str]:
    return [str(file) for file in directory.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_a_run_leaves_no_secret_behind(tmp_path, monkeypatch, sent):
    monkeypatch.setenv("OUR_KEY", FROM_ENVIRONMENT)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("ROOT", str(tmp_path / "runs")))
    assert run_config(load_stages(file), source_path=file) == 0
    directory = tmp_path / "runs" / "secrets" / "first"
    for secret in (FROM_ENVIRONMENT, LITERAL):
        assert files_with(secret, directory) == []
        assert secret not in repr(sent)
        assert secret not in json.dumps([run.config for run in sent if hasattr(run, "config")])
    assert len(sent) >= 2
    assert len(files_with("${oc.env:OUR_KEY}", directory)) >= 3  # run.json, config.yaml and the copy of the file
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_command_that_fails_leaves_no_secret_behind(tmp_path, warm):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("ROOT", str(tmp_path / "runs")).replace("layers: 1", "layers: 1, vocabulary_from: nowhere"))
    done = warm.run(
        ["rollwright", "run", file, f"service.api_key={LITERAL}"],
        tmp_path,
        {"OUR_KEY": FROM_ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 1
    assert "error:" in done.stderr
    for secret in (FROM_ENVIRONMENT, LITERAL):
        assert secret not in done.stdout + done.stderr
        assert files_with(secret, tmp_path / "runs") == []
        assert files_with(secret, tmp_path / "cache") == []
