"""Workflows in processes of their own: recorded like all others, killed by their time limit, replaced when they die."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import TasksetConfig
from rollwright.errors import RolloutError, WorkflowError
from rollwright.rollout.engines import LocalRolloutEngine
from rollwright.workflows.task_runner import TaskRunner

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("isolated_workflows", None)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from rollwright.data.tokenizer import load_tokenizer

    return load_tokenizer(str(tiny_model))


def runner_of(tokenizer, workflow: str, **taskset) -> TaskRunner:
    name = f"isolated_workflows.{workflow}"
    made = TasksetConfig(workflow=name, isolation="process", isolated_processes=1, **taskset)
    made.gconfig = GenerationHyperparameters(max_new_tokens=4)
    return TaskRunner([made], tokenizer)


def engine_of(tiny_model, tokenizer, **options) -> LocalRolloutEngine:
    return LocalRolloutEngine(RolloutConfig(max_sample_retries=0, **options), model=str(tiny_model), tokenizer=tokenizer)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_elsewhere_is_recorded_here_and_its_process_used_again(tiny_model, tokenizer):
    runner = runner_of(tokenizer, "Echo")
    with engine_of(tiny_model, tokenizer) as rollout:
        first = rollout.rollout_batch([{"question": "1+1="}], workflow=runner)
        second = rollout.rollout_batch([{"question": "2+2="}], workflow=runner)
    assert first["rewards"].item() == second["rewards"].item() != float(os.getpid())
    assert [batch["details"][0]["info"]["resets"] for batch in (first, second)] == [0, 1]
    assert first["temperature"].tolist() == [0.5]
    sampled = first["loss_mask"].bool()
    assert int(sampled.sum()) >= 2
    assert (first["logprobs"][sampled] < 0).all()
    assert first["versions"][sampled].unique().tolist() == [0]
    processes = runner._processes[runner.default_taskset.name]
    (process,) = processes._all
    processes.close()
    process._process._process.wait(120)


def test_the_time_limit_kills_what_hangs(tiny_model, tokenizer, tmp_path):
    note = tmp_path / "pid"
    runner = runner_of(tokenizer, "Hanging", workflow_args={"note": str(note)})

    async def scenario():
        class NoEngine:
            recorder = None

            def get_version(self):
                return 0

        run = asyncio.ensure_future(runner.arun_episode(NoEngine(), {"question": "1"}))
        while not note.exists() or not note.read_text():
            assert not run.done()
            await asyncio.sleep(0.05)
        process = int(note.read_text())
        assert is_alive(process)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        deadline = time.monotonic() + 120
        while is_alive(process):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    asyncio.run(scenario())


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_scripts_run_in_the_sandbox_of_the_run(tiny_model, tokenizer, isolation):
    made = TasksetConfig(workflow="isolated_workflows.Scripting", isolation=isolation, isolated_processes=1)
    made.gconfig = GenerationHyperparameters(max_new_tokens=4)
    with engine_of(tiny_model, tokenizer, sandbox="unsafe") as rollout:
        batch = rollout.rollout_batch([{"question": "1+1="}], workflow=TaskRunner([made], tokenizer))
    assert batch["details"][0]["info"]["sandbox"] == "unsafe"


def test_what_a_workflow_raises_and_how_it_dies_is_told(tiny_model, tokenizer):
    with engine_of(tiny_model, tokenizer) as rollout:
        with pytest.raises(RolloutError, match="the price is wrong"):
            rollout.rollout_batch([{"question": "1"}], workflow=runner_of(tokenizer, "Failing"))
        with pytest.raises(RolloutError, match="exit code 3"):
            rollout.rollout_batch([{"question": "1"}], workflow=runner_of(tokenizer, "Dying"))


def test_what_cannot_be_handed_over_is_refused(tokenizer):
    runner = runner_of(tokenizer, "Echo", workflow_args={"lock": __import__("threading").Lock()})

    async def scenario():
        class NoEngine:
            recorder = None

            def get_version(self):
                return 0

        with pytest.raises(WorkflowError, match="cannot be handed to a process"):
            await runner.arun_episode(NoEngine(), {"question": "1"})

    asyncio.run(scenario())


@pytest.mark.parametrize("workflow", ["AgentInProcess", "AsyncAgentInProcess"])
def test_openai_clients_of_a_process_are_recorded_as_those_of_a_thread(tiny_model, tokenizer, workflow):
    openai = pytest.importorskip("openai")
    from rollwright.inference.front.openai_front import OpenAIFront

    judge = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=5, timeout=3.0)
    judge.model_path = "judge"
    batches = {}
    with OpenAIFront(tokenizer, "policy") as front:
        services = SimpleNamespace(openai_front=front, auxiliary_models=[judge])
        for isolation in ("process", "thread"):
            taskset = TasksetConfig(workflow=f"isolated_workflows.{workflow}", isolation=isolation, isolated_processes=1)
            taskset.gconfig = GenerationHyperparameters(max_new_tokens=4, temperature=0.5)
            runner = TaskRunner([taskset], tokenizer, services=services, model_path="policy")
            tasks = [{"question": f"{number}+1=", "ordinal": number} for number in range(2)]
            with engine_of(tiny_model, tokenizer) as rollout:
                parts = [rollout.rollout_batch([task], workflow=runner) for task in tasks]
            batches[isolation] = parts

    for apart, beside in zip(batches["process"], batches["thread"], strict=True):
        assert apart["input_ids"].shape[0] == 1  # two calls, one of which extends the other
        for key in ("input_ids", "loss_mask", "versions", "rewards", "token_rewards", "temperature"):
            assert apart[key].tolist() == beside[key].tolist(), key
        assert apart["logprobs"].flatten().tolist() == pytest.approx(beside["logprobs"].flatten().tolist(), abs=1e-5)
        sampled = apart["loss_mask"].bool()
        assert (apart["logprobs"][sampled] < 0).all()
        assert apart["rewards"].item() == 0.25
        assert apart["token_rewards"].sum().item() == 0.5
    if workflow == "AgentInProcess":
        first, second = (part["details"][0]["info"] for part in batches["process"])
        assert first["process"] == second["process"] != os.getpid()
        assert first["retries"] == 0
        assert first["judge"] == ["judge", 5]
        assert second["earlier_client"] == "AuthenticationError"  # its run has ended, and with it its key
