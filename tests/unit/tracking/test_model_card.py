"""The card of a checkpoint tells what its run directory records."""

import json

import pytest
import yaml

from rollwright.config.experiment import DPOConfig, GRPOConfig
from rollwright.config.loading import to_yaml
from rollwright.config.sections import LoraConfig
from rollwright.errors import CheckpointError
from rollwright.tracking.model_card import write_model_card


def checkpoint_of(tmp_path, config, metrics):
    checkpoint = tmp_path / "grpo" / "checkpoints" / "final"
    checkpoint.mkdir(parents=True)
    (tmp_path / "grpo" / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "grpo" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    return checkpoint


def front_matter_and_text(path):
    _, front, text = path.read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_base_data_algorithm_and_results_up_to_the_step(tmp_path):
    config = GRPOConfig(experiment_name="adding", trial_name="one", workflow="rlvr", reward_fn="numeric_reward")
    config.actor.path, config.actor.recipe, config.train_dataset.path = "Qwen/Qwen3-0.6B", "dr_grpo", "arithmetic"
    config.gconfig.n_samples = 8
    metrics = [
        {"step": 2, "reward": 0.25},
        {"step": 2, "eval/reward": 0.5},
        {"step": 4, "reward": 0.75},
        {"step": 6, "reward": 1.0},
    ]
    front, text = front_matter_and_text(write_model_card(checkpoint_of(tmp_path, config, metrics), 4))
    assert front["base_model"] == "Qwen/Qwen3-0.6B"
    assert set(front["tags"]) == {"rollwright", "dr_grpo", "reinforcement-learning"}
    for fact in (
        "# adding/one",
        "| base model | `Qwen/Qwen3-0.6B` |",
        "| trained on | `arithmetic`, train |",
        "| episodes | `rlvr`, scored by `numeric_reward` |",
        "| algorithm | dr_grpo |",
        "| reward on held-out tasks | 0.500 at step 2 |",
        "| reward in training | 0.750 at step 4 (0.250 at step 2) |",
        "torch ",
    ):
        assert fact in text
    assert "1.000" not in text


def test_a_directory_of_this_machine_is_no_base_on_the_hub(tmp_path):
    config = DPOConfig()
    config.model.path, config.train_dataset.path = str(tmp_path / "model"), "pairs.jsonl"
    front, text = front_matter_and_text(write_model_card(checkpoint_of(tmp_path, config, [{"step": 3, "loss": 0.5}]), 3))
    assert "base_model" not in front
    assert "| algorithm | dpo |" in text
    assert "| loss | 0.500 at step 3 |" in text


def test_a_checkpoint_outside_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        write_model_card(tmp_path / "a" / "b", 1)


def test_an_adapter_is_loaded_with_peft(tmp_path):
    config = GRPOConfig(workflow="rlvr", reward_fn="numeric_reward")
    config.actor.path, config.train_dataset.path = "Qwen/Qwen3-0.6B", "arithmetic"
    config.actor.lora = LoraConfig(rank=8, targets=["q_proj", "v_proj"])
    front, text = front_matter_and_text(write_model_card(checkpoint_of(tmp_path, config, []), 4))
    assert (front["library_name"], front["base_model"]) == ("peft", "Qwen/Qwen3-0.6B")
    assert "| trained weights | a LoRA adapter of rank 8, alpha 32, on q_proj, v_proj |" in text
    assert "AutoPeftModelForCausalLM.from_pretrained(path)" in text
