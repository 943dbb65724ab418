"""The quickstart learns: what `make quickstart` runs, read as its user reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_quickstart_learns(tmp_path):
    command = [sys.executable, "-m", "rollwright", "run", "examples/quickstart.yaml", f"cluster.fileroot={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "quickstart" / "trial"
    summary = json.loads((run / "summary.json").read_text())
    assert 0.2 <= summary["eval"]["before"]["greedy"] <= 0.5
    assert summary["eval"]["after"]["greedy"] >= 0.9
    assert summary["eval"]["after"]["mean@8"] > summary["eval"]["before"]["mean@8"]

    # what the user reads
    for shown in ("tasks never seen in training", "run directory", "reward.png", "checkpoint", "step 1/"):
        assert shown in done.stdout
    assert (run / "grpo" / "reward.png").stat().st_size > 10_000
    assert list((run / "grpo" / "rollouts").glob("step-*.txt"))

    # engine and trainer agree on every token of every step
    records = [json.loads(line) for line in (run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    differences = [record["actor/logprob_difference/max"] for record in records if "actor/logprob_difference/max" in record]
    assert len(differences) == max(record["step"] for record in records)
    assert max(differences) < 1e-4

    # the checkpoint is anybody's
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = run / "grpo" / "checkpoints" / "final"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "21+32="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    assert "53" in tokenizer.decode(output[0])
