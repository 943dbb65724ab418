"""The command vf-eval of verifiers, with its client for evaluation and with the one that training uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _evaluate(base_url, api_key, *options):
    with tempfile.TemporaryDirectory() as output:
        command = [str(Path(sys.executable).with_name("vf-eval")), "sums-taskset", "--env.agent.harness.id", "sums-harness"]
        command += ["--env.agent.runtime.type", "subprocess", "--model", "default", "--client.base-url", base_url]
        command += ["--client.api-key-var", "FRONT_KEY", "--no-push", "--no-rich", "--output-dir", output, *options]
        variables = {**os.environ, "FRONT_KEY": api_key, "PYTHONPATH": str(HERE)}
        ran = subprocess.run(command, cwd=output, env=variables, capture_output=True, text=True)
        traces = list(Path(output).rglob("traces.jsonl"))
        if ran.returncode or not traces:
            raise RuntimeError(ran.stdout[-3000:] + ran.stderr[-4000:])
        (trace,) = [json.loads(line) for line in traces[0].read_text().splitlines()]
        if trace.get("errors") or trace.get("error"):
            raise RuntimeError(json.dumps(trace)[-6000:])
        return trace


def evaluation(base_url, api_key, model_path):
    return _evaluate(base_url, api_key)


def train(base_url, api_key, model_path):
    renderer = ["--client.renderer-model-name", model_path, "--client.renderer.name", "qwen3"]
    return _evaluate(base_url, api_key, "--client.type", "train", *renderer)
