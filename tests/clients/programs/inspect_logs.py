"""Reads logs with Inspect: run as ``python inspect_logs.py DIRECTORY``, prints what ``read_eval_log`` and ``inspect view`` find."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def _read(directory: str) -> list[dict]:
    from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries

    logs = []
    for info in list_eval_logs(directory):
        log = read_eval_log(info, resolve_attachments="full")
        (score,) = log.results.scores
        samples = [
            {
                "key": sample.metadata["key"],
                "roles": [message.role for message in sample.messages],
                "completion": sample.output.completion,
                "reward": sample.scores["reward"].value if sample.scores else None,
                "error": sample.error.message if sample.error else None,
                "events": [event.event for event in sample.events],
                "tokens": [len(event.output.choices[0].logprobs.content) for event in sample.events if event.event == "model"],
                "inputs": [[message.text for message in event.input] for event in sample.events if event.event == "model"],
                "output_tokens": sum(usage.output_tokens for usage in sample.model_usage.values()),
            }
            for sample in log.samples
        ]
        metrics = {name: metric.value for name, metric in score.metrics.items()}
        summaries = len(read_eval_log_sample_summaries(info))
        about = {
            "task": log.eval.task,
            "model": log.eval.model,
            "status": log.status,
            "metrics": metrics,
            "summaries": summaries,
        }
        logs.append({**about, "samples": samples})
    return logs


def _view(directory: str) -> list[str]:
    """Return the names of the logs that the pages of ``inspect view`` list."""
    command = [str(Path(sys.executable).with_name("inspect")), "view", "start", "--log-dir", directory, "--port", sys.argv[2]]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/api/logs", timeout=10) as answer:
                    return sorted(re.findall(r"[^/\"]+\.eval", answer.read().decode()))
            except OSError:
                if server.poll() is not None:
                    raise
        raise TimeoutError("inspect view does not answer")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    print(json.dumps({"logs": _read(sys.argv[1]), "view": _view(sys.argv[1])}))
