"""The command of Inspect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def _evaluate(base_url, api_key, model, *options):
    with tempfile.TemporaryDirectory() as logs:
        command = [str(Path(sys.executable).with_name("inspect")), "eval", "inspect_task.py"]
        command += ["--model", model, "--model-base-url", base_url, "--log-dir", logs, "--log-format", "json"]
        command += ["--display", "none", "--max-retries", "0", *options]
        keys = {"OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}
        ran = subprocess.run(command, cwd=Path(__file__).parent, env={**os.environ, **keys}, capture_output=True, text=True)
        written = sorted(Path(logs).glob("*.json"))
        if ran.returncode or not written:
            raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-4000:])
        log = json.loads(written[0].read_text())
    if log["status"] != "success":
        raise RuntimeError(json.dumps(log.get("error") or log["samples"][0].get("error"))[:4000])
    sample = log["samples"][0]
    score = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    return score, [message["role"] for message in sample["messages"]], sample["output"]["completion"]


def default(base_url, api_key, model_path):
    return _evaluate(base_url, api_key, "openai/default")


def chat(base_url, api_key, model_path):
    return _evaluate(base_url, api_key, "openai/default", "-M", "responses_api=false")


def messages(base_url, api_key, model_path):
    return _evaluate(base_url.removesuffix("/v1"), api_key, "anthropic/default")
