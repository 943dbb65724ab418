"""What a run says of itself before it begins."""

import pytest

from rollwright.config.loading import load_stages
from rollwright.config.plan import describe, in_words

AREAL = """\
experiment_name: x
workflow: rlvr
reward_fn: numeric_reward
actor: {path: m, KL}
train_dataset: {path: arithmetic}
saver: {freq_epochs: 1}
"""
TRINITY = """\
model: {model_path: m}
algorithm: {algorithm_type: grpo, repeat_times: 2, kl_loss_fn: k2, kl_loss_fn_args: {kl_coef: 0.2}}
buffer: {explorer_input: {taskset: {path: a.jsonl, default_workflow_type: math_workflow}}}
"""


def stage_of(tmp_path, text, *overrides):
    file = tmp_path / "file.yaml"
    file.write_text(text)
    (stage,) = load_stages(file, overrides)
    return stage


@pytest.mark.parametrize(("keys", "overrides"), [("kl_ctl: 0.05", []), ("kl_ctl: 0.0", ["actor.kl_ctl=0.05"])])
def test_the_kl_is_said_to_be_no_penalty_on_the_reward(tmp_path, keys, overrides):
    stage = stage_of(tmp_path, AREAL.replace("KL", keys), *overrides)
    wanted = "KL to the reference: a term of the loss, 0.05 × k3; AReaL's kl_ctl takes it from the reward instead"
    assert wanted in in_words(stage)
    assert wanted in describe([stage])


def test_a_file_of_a_system_that_has_it_in_the_loss_says_no_more(tmp_path):
    words = in_words(stage_of(tmp_path, TRINITY))
    assert "a term of the loss, 0.2 × k2" in words
    assert "AReaL" not in words


def test_without_a_kl_nothing_is_said_of_it(tmp_path):
    assert "KL" not in in_words(stage_of(tmp_path, AREAL.replace("KL", "kl_ctl: 0.0")))


def test_what_an_adapter_leaves_in_memory_is_said(tmp_path):
    words = in_words(stage_of(tmp_path, AREAL.replace("KL", "dtype: bfloat16, lora: {rank: 8}")))
    assert "Trains a LoRA adapter of rank 8 on all linear layers except the output head" in words
    assert "In memory: the base, frozen in bfloat16 (once: the reference is the base with the adapter off)" in words
