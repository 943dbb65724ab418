"""Starting ranks: how many, and what becomes of one whose agent has ended."""

import sys
from pathlib import Path

import pytest

from rollwright.cli.main import main
from rollwright.errors import ConfigError, TrainingError
from rollwright.placement.torchrun import start_ranks
from rollwright.training import parallel

CONFIG = "stages: [{kind: model, path: '${run_dir}/model', hidden_size: 8, layers: 1}]"


def test_far_more_ranks_than_processors_are_refused_before_one_starts():
    with pytest.raises(ConfigError, match=r"cluster\.processes is 1000000, and this machine has \d+ processors"):
        start_ranks(["run", "config.yaml"], 1_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank looks at its parent once a second")
def test_a_rank_whose_agent_ended_while_it_began_does_nothing(tmp_path, warm):
    file = tmp_path / "model.yaml"
    file.write_text(CONFIG)
    done = warm.run(
        ["rollwright", "run", file], tmp_path, {"TORCHELASTIC_RUN_ID": "rollwright-1"}
    )  # of another process than the parent
    assert (done.returncode, done.stderr) == (1, "")
    assert not (tmp_path / "runs").exists()


def test_a_world_size_that_is_no_number_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "two")
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(
        "{actor: {path: m}, train_dataset: {path: arithmetic}, workflow: rlvr, reward_fn: numeric_reward}"
    )
    assert main(["run", "grpo.yaml"]) == 1
    assert capsys.readouterr().err == "error: WORLD_SIZE is 'two' in the environment, and torchrun sets a number: unset it.\n"


def test_a_world_size_without_the_rest_says_how_to_start(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match=r"no RANK and no MASTER_ADDR.*cluster\.processes or torchrun.*WORLD_SIZE unset"):
        parallel.join_processes(parallel.torch.device("cpu"))
