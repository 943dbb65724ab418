"""``rollwright eval TASKS --model DIR|URL``: the same scores, journal and page from a directory and from a real server."""

from __future__ import annotations

import json

import pytest
from real_servers import served_model

from rollwright.cli.main import main
from rollwright.config.experiment import EvalConfig
from rollwright.config.rules import validate
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import ConfigError
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.viewer.run import Run

OPTIONS = [
    "--reward",
    "share_of_digits",
    "--samples",
    "2",
    "dataset.limit=4",
    "gconfig.max_new_tokens=12",
    "pass_at=[1,2]",
]


@REWARD_FUNCTIONS.register_module("share_of_digits", runs_inline=True)
def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion))


def evaluated(tmp_path, name, model, *more):
    """Run the command; returns its summary and what the viewer reads from the run's journal."""
    arguments = [
        "eval",
        "arithmetic",
        "--model",
        str(model),
        *OPTIONS,
        f"cluster.fileroot={tmp_path}",
        f"experiment_name={name}",
    ]
    assert main([*arguments, *more]) == 0
    [directory] = (tmp_path / name).iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    with Run(directory) as run:
        run.refresh()
        samples = run.search(limit=-1)["samples"]
        tasks = run.last_evaluation()
    return summary["stages"]["eval"], samples, tasks, directory


def test_a_directory_and_a_server_over_it_get_the_same_scores(tiny_model, tmp_path, capsys):
    here, samples, tasks, _ = evaluated(tmp_path, "directory", tiny_model)
    with served_model(tiny_model, tmp_path / "logs") as (servers, _):
        url = f"http://{servers.addresses[0]}"
        there, far_samples, far_tasks, directory = evaluated(tmp_path, "url", url, "greedy=true")
    assert there["greedy"] == pytest.approx(here["greedy"])
    low, high = there["intervals"]["greedy"]
    assert low <= there["greedy"] <= high
    assert {"mean@2", "pass@1", "pass@2"} <= set(here) & set(there)
    assert set(here["intervals"]) == set(there["intervals"]) == {"greedy", "mean@2", "pass@1", "pass@2"}
    assert len(samples) == len(far_samples) == 12  # of 4 tasks: 2 sampled, 1 greedy
    assert len(tasks) == len(far_tasks) == 4
    greedy, far_greedy = ([s["reward"] for s in found if s["ordinal"] >= 4] for found in (samples, far_samples))
    assert sorted(far_greedy) == pytest.approx(sorted(greedy))
    assert (directory / "tokenizer" / "tokenizer.json").is_file()
    output = capsys.readouterr().out
    assert "pass@2" in output
    assert "over 4 tasks" in output


def test_an_endpoint_that_is_not_there(tmp_path, capsys):
    arguments = ["eval", "arithmetic", "--model", "http://127.0.0.1:9", *OPTIONS, f"cluster.fileroot={tmp_path}"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "does not list its models" in error


def test_settings_of_an_engine_here_are_refused_with_a_url_and_those_of_a_url_without():
    common = {"workflow": "rollwright.workflows.rlvr.RLVRWorkflow", "dataset": DatasetConfig(path="arithmetic", split="test")}
    with pytest.raises(ConfigError, match="which loads nothing here"):
        validate(EvalConfig(path="https://host/v1", rollout=RolloutConfig(dtype="float32"), **common))
    with pytest.raises(ConfigError, match="not the URL of an endpoint"):
        validate(EvalConfig(path="model", served_model="m", **common))
    with pytest.raises(ConfigError, match="pass@k needs `samples`"):
        validate(EvalConfig(path="model", pass_at=[16], **common))


def test_a_key_reaches_neither_the_config_nor_the_log(tiny_model, tmp_path):
    assert main(
        [
            "eval",
            "arithmetic",
            "--model",
            "http://127.0.0.1:9",
            "--api-key",
            "sk-secret",
            *OPTIONS,
            f"cluster.fileroot={tmp_path}",
        ]
    )
    kept = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert kept
    assert not any(b"sk-secret" in content for content in kept)
