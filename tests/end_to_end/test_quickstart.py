"""The quickstart learns: what `make quickstart` runs, read as its user reads it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_quickstart_learns(run_example):
    run = run_example("quickstart")
    scores = run.evaluations
    assert 0.2 <= scores["before"]["greedy"] <= 0.6
    assert scores["after"]["greedy"] >= 0.9
    assert scores["after"]["mean@8"] > scores["before"]["mean@8"]

    # what the user reads
    for shown in (
        "tasks never seen in training",
        f"rollwright view {run.directory}",
        "run directory",
        "reward.png",
        "checkpoint",
        "step 1/",
    ):
        assert shown in run.output
    assert (run.directory / "grpo" / "reward.png").stat().st_size > 10_000
    assert list((run.directory / "grpo" / "rollouts").glob("step-*.txt"))

    # engine and trainer agree on every token of every step
    differences = [record["actor/logprob_difference/max"] for record in run.steps("actor/logprob_difference/max")]
    assert len(differences) == max(record["step"] for record in run.steps("step"))
    assert max(differences) < 1e-3

    # the checkpoint is anybody's
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = run.directory / "grpo" / "checkpoints" / "final"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    right = 0
    for first, second in ((21, 32), (14, 15), (40, 27), (58, 31), (12, 64), (33, 33), (72, 16), (25, 61)):
        messages = [{"role": "user", "content": f"{first}+{second}="}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
        right += str(first + second) in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert right >= 5
    run.look_at()
