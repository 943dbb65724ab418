"""The command line, in this process: what commands print, how they fail."""

import json
import os
import re
import sys
import types

import pytest
import typer

from rollwright.cli import failures
from rollwright.cli import run as cli_run
from rollwright.cli.main import COMMANDS, build_app, main
from rollwright.errors import ConfigError, RolloutError

TEXT = """\
experiment_name: quick
cluster: {fileroot: FILEROOT}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
stages:
  - {kind: model, name: model, path: "${run_dir}/model", layers: 2}
  - {kind: sft, name: warmup, model: {path: "${run_dir}/model"}, train_dataset: {path: arithmetic}, total_train_steps: 5}
  - {kind: rl, name: grpo, actor: {path: "${run_dir}/model"}, train_dataset: {path: arithmetic, limit: 64}}
  - {kind: eval, name: after, path: "${run_dir}/model", dataset: {path: arithmetic}, samples: 4}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(TEXT.replace("FILEROOT", str(tmp_path / "runs")))
    return str(file)


@pytest.fixture
def run_config(monkeypatch):
    """Stands in for carrying out the stages: remembers them, and ends as the test wants."""
    calls = []
    module = types.ModuleType("rollwright.trainers.stages")

    def carry_out(stages, *, source_path):
        calls.append(([stage.name for stage in stages], stages, source_path))
        if module.error:
            raise module.error
        return module.status

    module.run_config, module.error, module.status = carry_out, None, 0
    module.calls = calls
    monkeypatch.setitem(__import__("sys").modules, "rollwright.trainers.stages", module)
    return module


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(failures, "_directory", None)
    return tmp_path / "cache" / "rollwright" / "failure.log"


def test_run_carries_out_the_stages_with_overrides(config, run_config):
    assert main(["run", config, "seed=5", "stages.grpo.seed=6"]) == 0
    ((names, stages, source),) = run_config.calls
    assert names == ["model", "warmup", "grpo", "after"]
    assert [stage.config.seed for stage in stages] == [5, 5, 6, 5]
    assert str(source) == config
    assert main(["run", "--config", config]) == 0
    assert len(run_config.calls) == 2


@pytest.mark.parametrize(("load", "own", "policy"), [(0.2, None, None), (1e6, None, "PASSIVE"), (1e6, "ACTIVE", "ACTIVE")])
def test_on_a_busy_machine_threads_that_wait_give_up_their_processor(monkeypatch, load, own, policy):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setenv("OMP_WAIT_POLICY", own or "")
    if own is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(ConfigError):
        cli_run.run(arguments=["nothing.yaml"])  # told after the choice, before torch is loaded
    assert os.environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.parametrize("place", ["{kind: ray}", "{kind: slurm, workers: 2}"])
def test_a_checkpoint_in_the_background_is_refused_of_every_training_that_ray_places(tmp_path, capsys, place):
    file = tmp_path / "stages.yaml"
    file.write_text(
        f"experiment_name: x\ncluster: {place}\nrecover: {{in_background: true}}\nstages:\n"
        "  - {kind: sft, name: warmup, model: {path: m}, train_dataset: {path: arithmetic}, total_train_steps: 1}\n"
    )
    assert main(["run", str(file), "--dry-run"]) == 1
    assert "recover.in_background: is true, and on a Ray cluster a lost rank is replaced" in capsys.readouterr().err


def test_a_dry_run_says_what_would_happen_and_does_nothing(config, run_config, capsys, tmp_path):
    assert main(["run", config, "--dry-run", "trial_name=first"]) == 0
    out = capsys.readouterr().out
    assert f"This would run 4 stages in {tmp_path}/runs/quick/first:" in out
    assert "2. warmup: train" in out
    assert "on the completions of arithmetic (train), 5 steps" in out
    assert "arithmetic (train, first 64 rows), 8 tasks × 1 samples a step" in out
    assert "greedily and 4 times a task" in out
    assert not run_config.calls
    assert not (tmp_path / "runs").exists()


def test_what_is_printed_resolved_can_be_run(config, run_config, capsys, tmp_path):
    assert main(["config", "show", config]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert main(["run", str(again)]) == 0
    assert main(["run", config]) == 0
    first, second = (stages for _, stages, _ in run_config.calls)
    assert [stage.to_dict() for stage in first] == [stage.to_dict() for stage in second]


def test_check(config, capsys):
    assert main(["config", "check", config]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["config", "check", config, "sed=1"]) == 1
    assert capsys.readouterr().err.startswith("error: override 'sed=1': sed: no stage")


def test_check_finds_plugins_and_tells_names_that_nothing_has(config, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLWRIGHT_PLUGIN_PATH", "")  # what the command sets is taken back
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "rewards_of_check.py").write_text(
        "from rollwright import REWARD_FUNCTIONS\n"
        "@REWARD_FUNCTIONS.register_module('from_the_plugin')\n"
        "def score(prompt, completion, prompt_ids, completion_ids):\n    return 0.0\n"
    )
    named = "stages.grpo.reward_fn=from_the_plugin"
    assert main(["config", "check", config, named]) == 1
    assert f"override {named!r}: reward_fn: reward function 'from_the_plugin' was not found" in capsys.readouterr().err
    assert main(["config", "check", config, named, "--plugin-dir", str(tmp_path / "plugins")]) == 0


def test_schema(capsys, tmp_path):
    assert main(["config", "schema", "--class", "rollwright.SFTConfig"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "SFTConfig"
    file = tmp_path / "schema.json"
    assert main(["config", "schema", "-o", str(file)]) == 0
    assert "stages" in json.loads(file.read_text())["properties"]


def test_a_config_error_is_one_line_without_a_traceback(config, run_config, capsys, cache):
    assert main(["run", config, "gconfig.temperature=-1"]) == 1
    err = capsys.readouterr().err
    assert err == "error: override 'gconfig.temperature=-1': gconfig.temperature: must be at least 0.0, got -1\n"
    assert not cache.exists()


def test_a_failed_run_leaves_one_line_and_its_traceback_in_the_log(config, run_config, capsys, tmp_path):
    logs = tmp_path / "runs" / "quick" / "trial" / "logs"
    logs.mkdir(parents=True)
    run_config.error = RolloutError("13 of 64 samples failed: the tool said no")
    assert main(["run", config]) == 1
    err = capsys.readouterr().err
    assert err == f"error: RolloutError: 13 of 64 samples failed: the tool said no [traceback: {logs}/failure.log]\n"
    assert "carry_out" in (logs / "failure.log").read_text()


def test_the_log_of_tracebacks_does_not_grow_for_ever(config, run_config, cache, monkeypatch):
    monkeypatch.setattr(failures, "LOG_BYTES", 10)
    for number in range(3):
        run_config.error = KeyError(f"cause {number}")
        assert main(["run", config]) == 1
    assert "cause 2" in cache.read_text()
    assert "cause 1" in cache.with_name("failure.old.log").read_text()
    assert len(list(cache.parent.iterdir())) == 2


def test_a_bug_is_one_line_too(config, run_config, capsys, cache):
    run_config.error = KeyError("first\nsecond")
    assert main(["run", config]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "KeyError" in err
    assert str(cache) in err
    assert "Traceback" in cache.read_text()


@pytest.mark.parametrize(
    ("command", "service", "package", "extra"),
    [
        (["serve-model", "directory"], "rollwright.inference.server.application", "uvicorn", "server"),
        (["retrieve", "--corpus", "file"], "rollwright.environments.retrieval_service", "fastapi", "retrieval"),
        (["serve-boxes"], "rollwright.environments.box_service", "fastapi", "server"),
    ],
)
def test_a_command_whose_packages_are_missing_names_the_extra(command, service, package, extra, monkeypatch, capsys):
    for module in (service, "rollwright.inference.server.service"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command) == 1
    assert f"needs the package {package}: pip install 'rollwright[{extra}]'" in capsys.readouterr().err


def test_statuses(config, run_config, capsys):
    run_config.status = 3
    assert main(["run", config]) == 3
    run_config.status, run_config.error = 0, KeyboardInterrupt()
    assert main(["run", config]) == 130
    assert main(["nope"]) == 2
    assert main(["run", "--nope"]) == 2
    assert main(["run"]) == 1  # no file
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rollwright 0.")


def test_eval_makes_its_own_trial(config, run_config, tmp_path):
    assert main(["eval", config, "--samples", "2"]) == 0
    assert main(["eval", "--model", "m", "--dataset", "arithmetic", "--reward", "arithmetic_reward", "dataset.limit=3"]) == 0
    (names, (after,), _), (_, (alone,), source) = run_config.calls
    assert names == ["after"]
    assert after.config.samples == 2
    assert after.config.path == f"{tmp_path}/runs/quick/trial/model"  # of the run, while it writes elsewhere
    assert after.config.trial_name.startswith("trial-eval-")
    assert (alone.config.path, alone.config.dataset.limit, alone.config.reward_fn) == ("m", 3, "arithmetic_reward")
    assert source is None


def test_new_models_are_never_written_over(tmp_path, capsys):
    place = tmp_path / "model"
    assert (
        main(["model", "new", str(place), "--layers", "1", "--hidden-size", "16", "--heads", "2", "pieces=['<answer>']"]) == 0
    )
    assert json.loads((place / "config.json").read_text())["num_hidden_layers"] == 1
    assert "<answer>" in (place / "tokenizer.json").read_text()
    assert main(["model", "new", str(place)]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["model", "new", str(tmp_path / "b"), "layer=3"]) == 1
    assert "did you mean 'layers'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_in_the_table_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert len(capsys.readouterr().out) > 200


def helped(command):
    """Every command below one of click's, with the words that lead to it."""
    yield [], command
    for name, each in getattr(command, "commands", {}).items():
        yield from (([name, *words], below) for words, below in helped(each))


def test_help_shows_all_that_its_texts_say(capsys, monkeypatch):
    """Tags such as ``</answer>`` are not markup."""
    monkeypatch.setenv("COLUMNS", "400")
    checked = 0
    for words, command in helped(typer.main.get_command(build_app("*"))):
        texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        tags = {tag for text in texts for tag in re.findall(r"</?[a-z_.]+>", text)}
        if not tags:
            continue
        assert main([*words, "--help"]) == 0
        out = capsys.readouterr().out
        assert [tag for tag in sorted(tags) if tag not in out] == []
        checked += len(tags)
    assert checked >= 5
