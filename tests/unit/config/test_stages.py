"""Several stages in one file."""

import pytest
import yaml

from rollwright.config.experiment import EvalConfig, GRPOConfig, NewModelConfig, SFTConfig
from rollwright.config.loading import dump_yaml, load_eval_stages, load_stages
from rollwright.errors import ConfigError

TEXT = """\
experiment_name: quick
seed: 3
tokenizer_path: ${run_dir}/model
reward_fn: arithmetic_reward
workflow: rollwright.workflows.rlvr.RLVRWorkflow
gconfig: {max_new_tokens: 32, n_samples: 8}
train_dataset: {path: arithmetic, batch_size: 16, kwargs: {digits: 2}}
stages:
  - kind: model
    name: model
    path: ${run_dir}/model
  - kind: sft
    name: warmup
    model: {path: "${stages.0.path}"}
    train_dataset: {kwargs: {size: 100}}
  - kind: rl
    name: grpo
    actor: {path: "${run_dir}/warmup"}
    seed: 9
  - kind: eval
    name: after
    path: ${run_dir}/grpo
    dataset: {path: arithmetic}
    samples: 8
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return file

    return write


def fault(file, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_stages(file, overrides)
    return str(caught.value)


def test_each_kind_has_its_class_and_shared_keys_reach_those_that_have_them(write):
    model, warmup, grpo, after = load_stages(write(TEXT))
    assert [type(stage.config) for stage in (model, warmup, grpo, after)] == [NewModelConfig, SFTConfig, GRPOConfig, EvalConfig]
    assert [stage.name for stage in (model, warmup, grpo, after)] == ["model", "warmup", "grpo", "after"]
    assert model.config.path == "runs/quick/trial/model"  # run_dir, though a model stage has no experiment_name
    assert warmup.config.model.path == "runs/quick/trial/model"
    assert warmup.config.train_dataset.kwargs == {"digits": 2, "size": 100}
    assert warmup.config.train_dataset.type == "sft"
    assert grpo.config.train_dataset.kwargs == {"digits": 2}
    assert [stage.config.seed for stage in (model, warmup, grpo, after)] == [3, 3, 9, 3]
    assert after.config.gconfig.max_new_tokens == 32
    assert after.config.dataset.split == "test"


def test_the_command_line_wins_over_the_file_in_all_stages_or_in_one(write):
    stages = load_stages(write(TEXT), ["seed=11", "stages.grpo.seed=12", "stages.3.samples=2", "trial_name=0130"])
    assert [stage.config.seed for stage in stages] == [11, 11, 12, 11]
    assert stages[3].config.samples == 2
    assert stages[0].config.path == "runs/quick/0130/model"


def test_a_file_without_stages_is_one_stage_of_its_kind(write):
    (stage,) = load_stages(write("actor: {path: m}\ntrain_dataset: {path: arithmetic}\nworkflow: w\n"))
    assert (stage.kind, stage.name) == ("rl", "rl")
    (stage,) = load_stages(write("kind: sft\nname: warm\nmodel: {path: m}\ntrain_dataset: {path: arithmetic}\n"))
    assert (stage.kind, stage.name) == ("sft", "warm")
    sft = write("model: {path: m}\ntrain_dataset: {path: arithmetic}\n")
    (stage,) = load_stages(sft, ["kind=sft", "name=warm"])
    assert (stage.kind, stage.name) == ("sft", "warm")
    assert "did you mean 'actor'?" in fault(write("actr: {path: m}\n"))


def test_a_shared_key_that_no_stage_has_is_refused(write):
    assert "c.yaml:1: seeed: no stage of this file has such a key; did you mean 'seed'?" in fault(write("seeed: 1\n" + TEXT))
    assert "override 'seeed=1': seeed: no stage" in fault(write(TEXT), "seeed=1")
    for key in ("kind: rl", "name: x", "run_dir: x"):
        assert "c.yaml:1: " in fault(write(f"{key}\n{TEXT}"))
    assert "has no key 'run_dir'" in fault(write("run_dir: x\nactor: {path: m}\n"))


def test_faults_of_all_stages_are_told_at_once_each_once(write):
    text = TEXT.replace("name: warmup", "name: warmup\n    stop_acuracy: 0.5").replace("kind: rl", "kind: lr")
    message = fault(write(text), "gconfig.temperature=-1")
    assert "c.yaml:14: stop_acuracy: SFTConfig has no key 'stop_acuracy'; did you mean 'stop_accuracy'?" in message
    assert "stages.2: kind: there is no kind 'lr'" in message
    assert message.count("gconfig.temperature: must be at least 0.0") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("name: grpo", "name: warmup"), "the name 'warmup' is taken by stage 1"),
        (("    path: ${run_dir}/grpo\n", ""), "path: is not set: the model to evaluate"),
        (("workflow: rollwright.workflows.rlvr.RLVRWorkflow\n", ""), "workflow: is not set: the code of an episode"),
        (("  - kind: eval\n    name: after", "  - name: after"), "stages.3: has no kind"),
        (("stages:\n", "stages: 3\nstage:\n"), "stages: expected a list"),
        (("dataset: {path: arithmetic}\n    samples: 8", "samples: 8"), "dataset.path: is not set"),
        (("    samples: 8", "    samples: 0\n    greedy: false"), "nothing would be evaluated"),
    ],
)
def test_refused(write, change, expected):
    assert expected in fault(write(TEXT.replace(*change)))


def test_overrides_of_stages_that_are_not_there(write):
    assert "known: model, warmup, grpo, after" in fault(write(TEXT), "stages.warm.seed=1")
    assert "did you mean 'seed'?" in fault(write(TEXT), "stages.warmup.seedd=1")


def test_resolved_stages_load_to_themselves(write):
    stages = load_stages(write(TEXT))
    again = load_stages(write(dump_yaml({"stages": [stage.to_dict() for stage in stages]})))
    assert [stage.to_dict() for stage in again] == [stage.to_dict() for stage in stages]
    assert yaml.safe_load(dump_yaml(stages[2].to_dict()))["name"] == "grpo"


def test_evaluations_alone(write):
    (after,) = load_eval_stages(write(TEXT), ["path=elsewhere"])
    assert (after.name, after.config.path, after.config.samples) == ("after", "elsewhere", 8)
    rl = "actor: {path: m}\nvalid_dataset: {path: arithmetic, limit: 5}\nworkflow: w\ngconfig: {temperature: 0.5}\n"
    (made,) = load_eval_stages(write(rl), ["path=elsewhere", "samples=2"])
    assert (made.config.dataset.limit, made.config.dataset.split, made.config.gconfig.temperature) == (5, "valid", 0.5)
    (alone,) = load_eval_stages(None, ["path=m", "dataset.path=arithmetic", "dataset.split=valid"])
    assert alone.config.dataset.split == "valid"
    with pytest.raises(ConfigError, match="path: is not set"):
        load_eval_stages(None, ["dataset.path=arithmetic"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sampels=2", "no eval stage has such a key; did you mean 'samples'?"),
        ("actor.optimizer.lr=1e-4", "no eval stage has such a key"),
        ("stages.grpo.seed=4", "no eval stage has such a key; only after is carried out"),
        ("served_model=m", "served_model: is set, but not read: path names a model that is loaded here"),
        ("rollout.setup_timeout=5", "rollout.setup_timeout: is set, but not read: an evaluation samples in its own process"),
    ],
)
def test_an_override_of_an_evaluation_has_an_effect_or_is_refused(write, override, told):
    for file, others in ((write(TEXT), []), (None, ["path=m", "dataset.path=arithmetic"])):
        if file is None and override.startswith("stages."):
            continue
        with pytest.raises(ConfigError) as refused:
            load_eval_stages(file, [*others, override])
        assert f"override {override!r}: {told}" in str(refused.value)


def test_an_override_may_reach_an_evaluation_through_an_interpolation(write):
    text = TEXT.replace("path: ${run_dir}/grpo", "path: ${stages.0.path}/${train_dataset.path}")
    (after,) = load_eval_stages(write(text), ["stages.model.path=m", "train_dataset.path=t"])
    assert after.config.path == "m/t"


def test_a_file_may_have_keys_that_its_evaluations_do_not_read(write):
    text = TEXT.replace("seed: 3\n", "seed: 3\nrollout: {setup_timeout: 5}\n")
    (after,) = load_eval_stages(write(text))
    assert after.config.rollout.setup_timeout == EvalConfig().rollout.setup_timeout


def test_a_trinity_shaped_file_is_translated_and_overridden_in_either_shape(write):
    text = (
        "mode: both\nproject: p\nname: n\nmodel: {model_path: m}\nalgorithm: {algorithm_type: grpo, repeat_times: 4}\n"
        "buffer:\n  batch_size: 2\n  explorer_input:\n    taskset:\n      path: t.jsonl\n"
        "      default_workflow_type: math_workflow\n"
    )
    (stage,) = load_stages(write(text), ["model.model_path=other", "actor.optimizer.lr=1e-4"])
    assert stage.config.actor.path == "other"
    assert stage.config.actor.optimizer.lr == 1e-4
    assert stage.config.gconfig.n_samples == 4
    assert stage.config.tasksets[0].path == "t.jsonl"
