"""What the author of a Trinity-shaped file is told: the key as it was written, where, and what would be right."""

import pytest

from rollwright.compat.dialects import Trinity
from rollwright.config.loading import build_stages, load_stages
from rollwright.config.source import Origins, parse_yaml
from rollwright.errors import ConfigError

FILE = """
mode: both
model: {model_path: /models/tiny}
algorithm: {algorithm_type: grpo, repeat_times: 8}
buffer:
  batch_size: 4
  total_steps: 10
  explorer_input:
    default_workflow_type: math_workflow
    taskset: {path: tasks.jsonl, format: {prompt_key: question}}
"""


def translated(more=""):
    document = parse_yaml(FILE + more, "trinity.yaml")
    return Trinity().translate(document.data, Origins(document))


def refusal(more):
    with pytest.raises(ConfigError) as error:
        build_stages(translated(more), [])
    return str(error.value)


def of_taskset(keys):
    return FILE.replace("format: {prompt_key: question}", keys)


def test_a_fault_of_what_became_of_a_key_names_the_key_as_it_was_written():
    document = parse_yaml(FILE.replace("batch_size: 4", "batch_size: 0"), "trinity.yaml")
    with pytest.raises(ConfigError) as error:
        build_stages(Trinity().translate(document.data, Origins(document)), [])
    assert str(error.value) == "trinity.yaml:6: buffer.batch_size (here train_dataset.batch_size): must be at least 1, got 0"


def test_a_fault_of_an_override_is_placed_there(tmp_path):
    file = tmp_path / "trinity.yaml"
    file.write_text(FILE)
    with pytest.raises(ConfigError) as error:
        load_stages(file, ["buffer.batch_size=0"])
    assert "override 'buffer.batch_size=0': buffer.batch_size" in str(error.value)
    with pytest.raises(ConfigError) as error:
        load_stages(file, ["train_dataset.batch_size=0"])
    assert str(error.value).startswith("override 'train_dataset.batch_size=0': train_dataset.batch_size: must be")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("explorer: {auxiliary_models: {model_path: x}}", "explorer.auxiliary_models is a list of models"),
        ("explorer: {auxiliary_models: [x]}", "explorer.auxiliary_models is a list of models"),
        ("  train_batch_size: 8x", "buffer.train_batch_size is '8x'; it is a whole number of at least 1"),
        ("data_processor: {operators: [{name: reward_filter, args: 3}]}", "is a list of operators, each with a name and args"),
        ("monitor: wandb", "monitor is a section of keys, not 'wandb'"),
        ("explorer: [a]", "explorer is a section of keys, not ['a']"),
        ("    eval_tasksets: {path: b.jsonl}", "eval_tasksets is a list of tasksets: begin each with a dash"),
        ("    eval_tasksets: [b.jsonl]", "eval_tasksets.0 is a taskset, a section of keys, not 'b.jsonl'"),
    ],
)
def test_what_has_the_wrong_shape_is_told(more, message):
    assert message in refusal(more + "\n")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("rollout_args: x", "taskset.rollout_args is a section of keys, not 'x'"),
        ("format: question", "taskset.format is a section of keys, not 'question'"),
        ("data_selector: {selector_type: [x]}", "selector_type is ['x']; here there are sequential"),
        ("format: {video_key: film}", "taskset.format.video_key names films"),
        ("format: {enable_concatenated_multi_turn: true}", "enable_concatenated_multi_turn is of supervised rows"),
        ("default_workflow_typ: x", "did you mean 'buffer.explorer_input.taskset.default_workflow_type'?"),
    ],
)
def test_what_a_taskset_cannot_have_is_told(keys, message):
    document = parse_yaml(of_taskset(keys), "trinity.yaml")
    with pytest.raises(ConfigError) as error:
        Trinity().translate(document.data, Origins(document))
    assert message in str(error.value)


def test_a_list_of_tasksets_has_a_place_of_its_own():
    document = parse_yaml(FILE.replace("taskset: {path: tasks.jsonl, format: {prompt_key: question}}", "taskset: [{path: x}]"))
    with pytest.raises(ConfigError, match=r"taskset is one taskset; a list stands under buffer\.explorer_input\.tasksets"):
        Trinity().translate(document.data, Origins(document))


def test_an_aggregation_that_is_none_of_ours_is_refused_with_the_list():
    document = parse_yaml(FILE.replace("repeat_times: 8", "loss_agg_mode: seq-mean-token-sum"))
    with pytest.raises(ConfigError, match="loss_agg_mode is 'seq-mean-token-sum'; here there are token-mean"):
        Trinity().translate(document.data, Origins(document))


@pytest.mark.parametrize(
    "more",
    [
        "data_processor: {}",
        "monitor: {monitor_args: {}}",
        "stages: []",
        "service: {}",
        "trainer: {trainer_config: {}, ulysses_sequence_parallel_size: 1}",
        "cluster: {}",
        "explorer: {dynamic_timeout: {enable: false, ratio: 3.0}, over_rollout: {ratio: 0.0, wait_after_min: 30.0}}",
        "synchronizer: {sync_style: dynamic_by_trainer}",
    ],
)
def test_what_says_nothing_is_no_fault(more):
    build_stages(translated(more + "\n"), [])


def test_keys_of_the_facts_that_cannot_be_honoured_say_why():
    assert "nobody measures a sample's usual time" in refusal("explorer: {dynamic_timeout: {enable: true, ratio: 3.0}}\n")
    assert "are cut as soon as the batch is complete" in refusal(
        "explorer: {over_rollout: {ratio: 0.5, wait_after_min: 30.0}}\n"
    )


def test_a_hint_is_of_the_same_section_or_the_same_word():
    assert "did you mean 'explorer.rollout_model.enable_openai_api'?" in refusal(
        "explorer: {rollout_model: {enable_openai: true}}\n"
    )
    assert "did you mean 'synchronizer.sync_interval'?" in refusal("synchroniser: {sync_interval: 3}\n")
    assert "did you mean" not in refusal("explorer: {rollout_model: {use_v1: true}}\n")
    assert "did you mean" not in refusal("model: {lora_configs_path: x}\n")


def test_an_interval_of_evaluations_where_there_is_nothing_to_evaluate_is_told_and_left_aside():
    translation = translated("explorer: {eval_interval: 100, eval_on_startup: true}\n")
    assert "evaluator" not in translation.data
    assert any("there are no eval_tasksets, so nothing is evaluated" in note for note in translation.notes)
    build_stages(translation, [])


def test_a_taskset_s_own_length_wins_over_the_model_s():
    file = of_taskset("rollout_args: {max_tokens: 32}").replace("/models/tiny", "/models/tiny, max_response_tokens: 64")
    document = parse_yaml(file, "trinity.yaml")
    translation = Trinity().translate(document.data, Origins(document))
    (stage,) = build_stages(translation, [])
    assert stage.config.tasksets[0].gconfig.max_new_tokens == 32
    assert any("max_response_tokens: 64 is of no taskset that is trained on" in note for note in translation.notes)


def test_a_key_that_is_called_the_same_here_is_named_once():
    assert refusal("name: 3\n").startswith("trinity.yaml:11: name (here trial_name): ")
    document = parse_yaml(FILE.replace("mode: both", "mode: explorer"), "trinity.yaml")
    with pytest.raises(ConfigError, match=r"trinity\.yaml:2: mode: must be one of"):
        build_stages(Trinity().translate(document.data, Origins(document)), [])


def test_a_group_is_part_of_the_run_s_name():
    assert translated("project: p\ngroup: ablation\nname: n\n").data["trial_name"] == "ablation-n"
    assert translated("group: ''\nname: n\n").data["trial_name"] == "n"
    assert translated("group: g\n").data["trial_name"] == "g-trial"
