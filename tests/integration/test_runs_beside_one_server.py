"""Two runs that train adapters beside one ``serve-model``: each samples with its own versions only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from real_servers import write_model
from warm import WarmProcess, shared_warm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "inference"))

from server_parts import served

from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
CONFIG = """
experiment_name: {run}
trial_name: trial
cluster: {{fileroot: {root}/runs}}
actor: {{path: {model}, lora: {{rank: 4}}, optimizer: {{lr: 1.0e-2}}}}
rollout: {{backend: sglang, addresses: ["{address}"], api_key: "key of {run}", max_head_offpolicyness: 1, logprob_tolerance: 1.0e-4}}
gconfig: {{n_samples: 4, max_new_tokens: 12, temperature: 0.7}}
train_dataset: {{path: arithmetic, split: train, batch_size: 4, kwargs: {{digits: 1}}}}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: rewards_of_runs.share_of_{what}
total_train_steps: {steps}
stats_logger: {{display: none}}
"""
REWARDS = """
def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def share_of_letters(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isalpha() for character in completion) / max(1, len(completion))
"""


def start(root: Path, model: Path, address: str, run: str, what: str) -> WarmProcess:
    """Start ``rollwright run`` for one of the runs."""
    file = root / f"{run}.yaml"
    file.write_text(CONFIG.format(run=run, root=root, model=model, address=address, what=what, steps=STEPS))
    return shared_warm().start(["run", str(file)], root, root / f"{run}.log", {"OMP_NUM_THREADS": "1"})


def test_two_runs_train_beside_one_server(tmp_path):
    model = write_model(tmp_path / "model")
    (tmp_path / "rewards_of_runs.py").write_text(REWARDS)
    engine = BuiltinEngine(str(model), max_adapters=16, threads=1)
    before = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    settings = ServerSettings(
        api_key="own", weights_roots=[str(tmp_path / "shared")], run_keys={"first": "key of first", "second": "key of second"}
    )
    (tmp_path / "shared").mkdir()
    with served(create_application(engine, settings, model_path=str(model))) as address:
        runs = {"first": "digits", "second": "letters"}
        processes = {run: start(tmp_path, model, address, run, what) for run, what in runs.items()}
        for run, process in processes.items():
            process.wait(500)
            assert process.returncode == 0, (tmp_path / f"{run}.log").read_text()[-4000:]
        assert {adapter.run for adapter in engine.adapters} <= set(runs)
        for name, tensor in engine.model.named_parameters():
            assert tensor.equal(before[name]), "the base has changed"
    for run in runs:
        (file,) = (tmp_path / "runs" / run).rglob("metrics.jsonl")
        steps = [step for step in map(json.loads, file.read_text().splitlines()) if "actor/loss" in step]
        assert len(steps) == STEPS
        assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
        differences = [step[name] for step in steps for name in step if name.startswith("actor/logprob_difference/")]
        assert len(differences) >= STEPS
        assert max(differences) <= 1e-4
