"""The command of lm-eval, against completions and against chat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASKS = Path(__file__).with_name("lm_eval_tasks")


def _evaluate(kind, task, address, api_key, tokenizer, *options):
    model = {"base_url": address, "model": "default", "tokenizer": tokenizer, "max_retries": 1, "max_length": 4096}
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", task, "--include_path", str(TASKS)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items() if value is not None)]
        command += ["--output_path", output, "--log_samples", *options]
        caches = {"HF_HOME": output, "HF_DATASETS_OFFLINE": "1"}
        ran = subprocess.run(
            command, cwd=TASKS, env={**os.environ, **caches, "OPENAI_API_KEY": api_key}, capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError(ran.stderr[-4000:])
        (samples,) = Path(output).rglob(f"samples_{task}_*.jsonl")
        (results,) = Path(output).rglob("results_*.json")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        return json.loads(results.read_text())["results"][task], [line["resps"] for line in lines]


def generate_until(base_url, api_key, model_path):
    return _evaluate("local-completions", "sums_generate", f"{base_url}/completions", api_key, model_path)


def multiple_choice(base_url, api_key, model_path):
    return _evaluate("local-completions", "sums_choice", f"{base_url}/completions", api_key, model_path)


def chat(base_url, api_key, model_path):
    kind, address = "local-chat-completions", f"{base_url}/chat/completions"
    return _evaluate(kind, "sums_generate", address, api_key, None, "--apply_chat_template")
