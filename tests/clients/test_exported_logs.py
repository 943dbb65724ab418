"""Logs that ``rollwright export --to inspect`` writes, read back by Inspect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_cases import environment_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "viewer"))

from quiet_ports import quiet_ports
from recorded import record_run

from rollwright.cli.main import main
from rollwright.viewer.run import Run

PROGRAM = Path(__file__).parent / "programs" / "inspect_logs.py"


def test_inspect_reads_every_sample_of_an_exported_run(tiny_model, tmp_path):
    python = environment_of("evaluators_inspect") / "bin" / "python"
    path = record_run(tmp_path, tiny_model, steps=2)
    assert main(["export", str(path), str(tmp_path / "logs"), "--to", "inspect"]) == 0
    command = [str(python), str(PROGRAM), str(tmp_path / "logs"), str(quiet_ports(1)[0])]
    said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)}, check=False)
    assert said.returncode == 0, said.stderr[-3000:]
    read = json.loads(said.stdout)
    assert read["view"] == sorted(file.name for file in (tmp_path / "logs").iterdir())
    logs = {(log["task"].rpartition("/")[2], log["model"].rpartition("@")[2]): log for log in read["logs"]}
    with Run(path) as run:
        run.refresh()
        versions = {sample["group"].rpartition("@")[2] for sample in run.search(is_eval=True, limit=-1)["samples"]}
        assert {version for task, version in logs if task == "held-out"} == versions
        samples = {sample["key"]: (sample, log) for log in read["logs"] for sample in log["samples"]}
        (total,) = run.index.rows("SELECT count(*) AS count FROM samples")
        assert len(samples) == total["count"] == sum(log["summaries"] for log in read["logs"])
        for key, (sample, _) in samples.items():
            whole = run.sample(key)
            assert sample["reward"] == whole["reward"]
            assert sample["tokens"] == [len(call["output"]) for call in whole["calls"]]
            assert sample["output_tokens"] == sum(sample["tokens"])
            assert sample["events"].count("tool") == len(whole["results"])
            if whole["calls"]:
                assert sample["completion"] == run.text(whole["calls"][-1]["output"]).removesuffix("<|end|>")
                prompts = [run.text(call["prompt"]).replace("<|end|>", "") for call in whole["calls"]]
                assert ["".join(texts) for texts in sample["inputs"]] == prompts
                assert sample["roles"][0] == "user"
                assert sample["roles"][-1] == "assistant"
        trained = [each["reward"] for each, log in samples.values() if not each["key"].startswith("eval:")]
        rewards = [reward for reward in trained if reward is not None]
        (training,) = [log for (task, _), log in logs.items() if task == "train"]
        assert training["status"] == "success"
        assert training["metrics"]["mean"] == pytest.approx(sum(rewards) / len(rewards))
        (failed,) = [sample for sample, _ in samples.values() if sample["error"]]
        assert "the calculator is broken" in failed["error"]
