"""Files of Trinity-RFT's shape train: PPO with its critic, and on-policy distillation with its teacher."""

from __future__ import annotations

import json

import pytest

from rollwright import load_stages, new_model
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.trainers.stages import run_config

pytestmark = pytest.mark.slow

FILE = """
mode: both
project: trinity
name: NAME
checkpoint_root_dir: ROOT
model: {model_path: MODEL, max_response_tokens: 6, max_model_len: 256}
cluster: {node_num: 1, gpu_per_node: 8}
algorithm: ALGORITHM
buffer:
  batch_size: 3
  total_steps: 2
  explorer_input:
    default_workflow_type: WORKFLOW
    taskset:
      name: sums
      storage_type: file
      path: TASKS
      format: {prompt_key: question, response_key: answer}
      rollout_args: {temperature: 0.8, logprobs: 0}
  trainer_input: {experience_buffer: {name: buffer, storage_type: queue, path: "sqlite:///x.db"}}
explorer: EXPLORER
trainer: TRAINER
synchronizer: {sync_method: nccl, sync_interval: 1}
"""


@pytest.fixture
def trained(tmp_path, tiny_model):
    """Runs the file with these parts; returns the metrics of its steps and its directory."""
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name, **parts):
        text = FILE.replace("NAME", name).replace("ROOT", str(tmp_path)).replace("TASKS", str(tmp_path / "tasks.jsonl"))
        for part, value in {"MODEL": str(tiny_model), "EXPLORER": "{}", "TRAINER": "{}", **parts}.items():
            text = text.replace(part, value)
        (tmp_path / f"{name}.yaml").write_text(text)
        assert run_config(load_stages(tmp_path / f"{name}.yaml", ["stats_logger.display=none"])) == 0
        directory = tmp_path / "trinity" / name
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        return [step for step in lines if "actor/loss" in step], directory

    return run


def test_ppo(trained):
    """Groups of one, a critic, and a KL that is taken from the reward."""
    steps, directory = trained(
        "ppo",
        WORKFLOW="math_workflow",
        ALGORITHM="{algorithm_type: ppo, optimizer: {lr: 1.0e-3}, advantage_fn_args: {lam: 0.95}, kl_penalty_fn: k1, kl_loss_fn: none}",
        TRAINER="{grad_clip: 1.0, trainer_config: {critic: {optim: {lr: 1.0e-2}, cliprange_value: 0.5}}}",
    )
    assert [step["samples"] for step in steps] == [3, 3]
    assert all(step["critic/optimizer_steps"] == 1 for step in steps)
    assert steps[1]["critic/values/mean"] != 0
    assert {"actor/kl", "actor/advantage/abs_mean"} <= steps[1].keys()
    assert (directory / "checkpoints" / "final" / "critic" / "config.json").is_file()


@pytest.mark.parametrize("workflow", ["on_policy_distill_workflow", "on_policy_distill_math_workflow"])
def test_on_policy_distillation(trained, tmp_path, workflow):
    teacher = tmp_path / "teacher"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512}
    new_model(teacher, tokenizer=build_character_tokenizer(), seed=7, **sizes)
    steps, _ = trained(
        "distill",
        WORKFLOW=workflow,
        ALGORITHM="{algorithm_type: on_policy_distill, repeat_times: 2, optimizer: {lr: 1.0e-3}, advantage_fn_args: {kl_coef: 1.0}}",
        EXPLORER=f"{{auxiliary_models: [{{model_path: {teacher}, engine_num: 1, tensor_parallel_size: 1, dtype: float32}}]}}",
    )
    assert [step["actor/teacher/taught_share"] for step in steps] == [1.0, 1.0]
    assert all(abs(step["actor/teacher/kl"]) > 1e-3 for step in steps)
    assert all(step["actor/advantage/abs_mean"] > 1e-3 for step in steps)
