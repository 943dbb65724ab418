"""The GSM8K examples on real rows, with a tiny model that cannot solve them: the reward stays 0, everything else works."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def test_the_example_is_short():
    assert len((REPOSITORY / "examples" / "gsm8k_grpo.yaml").read_text().splitlines()) <= 35


@pytest.mark.parametrize(("example", "saved"), [("gsm8k_grpo", "model"), ("gsm8k_small", "adapter_model")])
def test_two_steps_on_gsm8k(example, saved, shared, tiny_model, run_example):
    rows = shared("data/gsm8k/train.jsonl")
    run = run_example(
        example,
        *(f"actor.path={tiny_model}", f"train_dataset.path={rows}", "valid_dataset=null", "evaluator=null"),
        *("train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=16", "total_train_steps=2"),
        "reward_fn=accuracy_reward",
    )
    records = run.steps("reward", stage="")
    assert [record["step"] for record in records] == [1, 2]
    assert {record["reward"] for record in records} == {0.0}
    assert (run.directory / "checkpoints" / "final" / f"{saved}.safetensors").exists()
