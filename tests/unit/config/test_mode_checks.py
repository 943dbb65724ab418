"""What a mode cannot do is refused before anything runs."""

import pytest

from rollwright import GRPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.loading import build_stages
from rollwright.config.modes import StoreConfig
from rollwright.config.rules import faults_of
from rollwright.config.sections import JournalConfig, RecoverConfig, RolloutConfig
from rollwright.config.source import parse_yaml
from rollwright.config.tasksets import DatasetConfig, FormatConfig, TasksetConfig
from rollwright.errors import ConfigError


def faults(mode: str, store: StoreConfig | None, **keys) -> dict[str, str]:
    config = GRPOConfig(mode=mode, store=store, **keys)
    return {".".join(map(str, path)): message for path, message in faults_of(config)}


@pytest.mark.parametrize("mode", ["explore", "train", "serve"])
def test_processes_of_one_run_share_a_store(mode):
    assert "needs a store" in faults(mode, None)["mode"]
    assert "mode" not in faults(mode, StoreConfig())


@pytest.mark.parametrize(
    ("key", "value"), [("order", "freshest"), ("uses", 2), ("url", "sqlite:///x.db"), ("train_batch_size", 8)]
)
def test_mode_both_refuses_what_only_a_store_does(key, value):
    assert "mode both" in faults("both", StoreConfig(**{key: value}))[f"store.{key}"]


def test_weights_that_move_seldom_need_room_for_what_is_sampled_meanwhile():
    seldom = RolloutConfig(weight_update_every_steps=3, max_head_offpolicyness=1)
    assert "set that to 2 or more" in faults("both", None, rollout=seldom)["rollout.weight_update_every_steps"]
    enough = RolloutConfig(weight_update_every_steps=3, max_head_offpolicyness=2)
    assert "rollout.weight_update_every_steps" not in faults("both", None, rollout=enough)


def test_steps_that_explorers_may_not_fill_are_refused():
    assert (
        "raise rollout.max_head_offpolicyness" in faults("explore", StoreConfig(train_batch_size=9))["store.train_batch_size"]
    )
    assert "store.train_batch_size" not in faults("explore", StoreConfig(train_batch_size=8))
    assert "store.train_batch_size" not in faults("train", StoreConfig(train_batch_size=9))  # a service may feed it


def test_a_journal_that_meets_no_checkpoints_cannot_count_them():
    journal = JournalConfig(keep=2)
    assert "mode explore" in faults("explore", StoreConfig(), journal=journal)["journal.keep"]
    assert "recover.mode off" in faults("both", None, journal=journal, recover=RecoverConfig(mode="off"))["journal.keep"]
    assert "journal.keep" not in faults("both", None, journal=journal)
    assert "journal.keep" not in faults("explore", StoreConfig())


def test_files_are_read_and_not_explored_into():
    assert "cannot claim tasks" in faults("explore", StoreConfig(type="file"))["store.type"]
    assert "store.type" not in faults("train", StoreConfig(type="file"))


def test_what_goes_by_arrival_is_not_deterministic():
    assert "mode both" in faults("explore", StoreConfig(), deterministic=True)["deterministic"]


def test_a_process_of_several_has_no_other_stages(tmp_path):
    from rollwright.trainers.stages import run_config

    text = f"""
experiment_name: x
cluster: {{fileroot: {tmp_path}}}
stages:
  - {{name: m, kind: model, path: {tmp_path}/m}}
  - {{name: r, kind: rl, mode: explore, store: {{}}, actor: {{path: {tmp_path}/m}}, train_dataset: {{path: arithmetic}}, workflow: rlvr}}
"""
    with pytest.raises(ConfigError, match="no other stages"):
        run_config(build_stages(parse_yaml(text, "x.yaml"), []))


@pytest.mark.parametrize(
    ("key", "remedy"), [("chosen_key", "kind dpo"), ("rejected_key", "kind dpo"), ("image_key", "vision_rlvr")]
)
def test_a_taskset_refuses_columns_that_its_workflows_do_not_read(key, remedy):
    taskset = TasksetConfig(path="tasks.jsonl", format=FormatConfig(**{key: "column"}))
    assert remedy in faults("both", None, tasksets=[taskset])[f"tasksets.0.format.{key}"]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_samples_nothing_is_a_stage_and_no_recipe(kind):
    text = f"experiment_name: x\nactor: {{path: m, recipe: {kind}}}\ntrain_dataset: {{path: arithmetic}}\nworkflow: rlvr\n"
    with pytest.raises(ConfigError, match=f"`kind: {kind}`"):
        build_stages(parse_yaml(text, "x.yaml"), [])


def test_generation_arguments_that_no_task_is_sampled_with_are_told():
    gconfig = GenerationHyperparameters(n_samples=8, temperature=0.7, max_new_tokens=64)
    own = TasksetConfig(name="own", gconfig=GenerationHyperparameters(max_new_tokens=64))
    told = faults("both", None, gconfig=gconfig, tasksets=[own])
    assert "every taskset has a gconfig of its own" in told["gconfig.temperature"]
    assert "gconfig.max_new_tokens" not in told  # said in both places
    assert "gconfig.n_samples" not in told  # the group size is the run's
    assert "gconfig.temperature" not in faults("both", None, gconfig=gconfig, tasksets=[own, TasksetConfig(name="plain")])


def test_keys_of_the_other_way_to_give_tasks_are_told():
    tasks = [TasksetConfig(name="sums")]
    told = faults("both", None, tasksets=tasks, reward_fn="gsm8k_reward", valid_dataset=DatasetConfig(path="arithmetic"))
    assert "a taskset has its own reward_fn" in told["reward_fn"]
    assert "give eval_tasksets" in told["valid_dataset"]
    assert "give valid_dataset" in faults("both", None, workflow="rlvr", eval_tasksets=tasks)["eval_tasksets"]
    assert "eval_tasksets" not in faults("bench", None, workflow="rlvr", eval_tasksets=tasks)  # bench evaluates either
    assert "eval_tasksets" not in faults("both", None, tasksets=tasks, eval_tasksets=tasks)


def test_a_file_keeps_what_was_used():
    assert "keeps what was read" in faults("train", StoreConfig(type="file", keep_used=False))["store.keep_used"]
    assert "store.keep_used" not in faults("train", StoreConfig(keep_used=False))


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("name", "main", "is called subset"),
        ("workflow", "rlvr", "takes it from the run's own keys"),
        ("selector", "random", "takes it from the run's own keys"),
    ],
)
def test_keys_that_a_dataset_does_not_read_are_told(key, value, remedy):
    dataset = DatasetConfig(path="arithmetic", **{key: value})
    assert remedy in faults("both", None, workflow="rlvr", train_dataset=dataset)[f"train_dataset.{key}"]


def test_keys_that_a_taskset_does_not_read_are_told():
    told = faults("both", None, tasksets=[TasksetConfig(path="a.jsonl", batch_size=4)])
    assert "not in a taskset" in told["tasksets.0.batch_size"]
