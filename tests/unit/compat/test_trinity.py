"""Trinity-shaped files become the project's own config, or are refused by key."""

import pytest

from rollwright.compat.dialects import Trinity
from rollwright.config.source import Origins, parse_yaml
from rollwright.errors import ConfigError

FILE = """
mode: both
project: shop
name: first
model: {model_path: /models/tiny, max_response_tokens: 64}
algorithm: {algorithm_type: grpo, repeat_times: 8, optimizer: {lr: 1e-4}}
buffer:
  batch_size: 4
  total_epochs: 2
  explorer_input:
    taskset:
      path: tasks.jsonl
      default_workflow_type: example_workflow
      format: {prompt_key: question, response_key: answer}
      rollout_args: {temperature: 0.7, n: 3}
    eval_tasksets:
      - {name: held-out, path: valid.jsonl, default_workflow_type: example_workflow}
explorer: {eval_interval: 5}
"""


def translated(text):
    document = parse_yaml(text, "trinity.yaml")
    return Trinity().translate(document.data, Origins(document))


def test_the_keys_of_a_file_are_translated():
    translation = translated(FILE)
    data = translation.data
    assert data["experiment_name"] == "shop"
    assert data["trial_name"] == "first"
    assert data["actor"] == {"path": "/models/tiny", "recipe": "grpo", "optimizer": {"lr": 1e-4}}
    assert data["gconfig"] == {"max_new_tokens": 64, "n_samples": 8}
    assert data["evaluator"] == {"every_steps": 5}
    (taskset,) = data["tasksets"]
    assert taskset["format"] == {"prompt_key": "question", "response_key": "answer"}
    assert taskset["gconfig"] == {"temperature": 0.7, "n_samples": 3, "max_new_tokens": 64}
    assert data["eval_tasksets"][0]["name"] == "held-out"
    assert "algorithm.repeat_times -> gconfig.n_samples: 8" in translation.notes


def test_every_key_is_told():
    notes = "\n".join(translated(FILE).notes)
    for key in ("mode", "model.model_path", "buffer.explorer_input.taskset.path", "explorer.eval_interval"):
        assert key in notes


def test_what_cannot_be_honoured_is_refused_with_its_line():
    with pytest.raises(ConfigError) as error:
        translated(FILE + "synchronizer: {sync_interval: 0, sync_intervall: 1}\n")
    message = str(error.value)
    assert "trinity.yaml:19: synchronizer.sync_interval is 0" in message
    assert "did you mean 'synchronizer.sync_interval'?" in message


def test_another_name_for_the_workflow_is_read_and_told():
    translation = translated(
        FILE.replace("      default_workflow_type: example_workflow\n", "      default_workflow: example_workflow\n")
    )
    assert translation.data["tasksets"][0]["workflow"] == "example_workflow"
    assert any("the name is default_workflow_type" in note for note in translation.notes)


def test_our_own_files_are_not_taken_for_trinitys():
    assert Trinity().recognises(parse_yaml(FILE).data)
    assert not Trinity().recognises({"actor": {"path": "x"}, "stages": []})
