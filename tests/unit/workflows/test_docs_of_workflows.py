"""The code of docs/workflows.md runs as it stands there."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest

from rollwright import BuiltinEngine, GenerationHyperparameters, load_tokenizer
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task_runner import TaskRunner

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "workflows.md").read_text(encoding="utf-8")
GCONFIG = GenerationHyperparameters(max_new_tokens=8)


@pytest.fixture(scope="module")
def names(request):
    """What the blocks that define classes define."""
    namespace = {"__name__": "docs_of_workflows"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        if "class " in block or "async def " in block:
            exec(compile(block, "docs/workflows.md", "exec"), namespace)
    return namespace


class Recording:
    def __init__(self, engine):
        self.engine, self.recorder = engine, Recorder()

    async def agenerate(self, request):
        response = await self.engine.agenerate(request)
        self.recorder.record(request, response)
        return response


def test_the_ten_lines_give_a_row_that_keeps_the_contract(names, tiny_model):
    first = re.search(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[1]
    assert len([line for line in first[first.index("@") :].splitlines() if line.strip()]) <= 10
    tokenizer = load_tokenizer(tiny_model)
    with BuiltinEngine(str(tiny_model)) as engine:
        recording = Recording(engine)
        task = {"messages": [{"role": "user", "content": "6*7="}]}
        result = asyncio.run(names["Brief"](GCONFIG, tokenizer).arun_episode(recording, task))
        row = normalise(result, recording.recorder)
    check_trajectory(row)
    assert row["loss_mask"].sum() == len(recording.recorder.records[0].output_ids)


@pytest.mark.slow
def test_the_page_followed_to_the_letter_trains(tmp_path, warm):
    code = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    (tmp_path / "my_module.py").write_text(code[0])
    (tmp_path / "config.yaml").write_text(re.search(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)[1])
    (tmp_path / "try_it.py").write_text(code[-1])
    commands = re.search(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)[1].splitlines()
    assert [command.split()[:2] for command in commands] == [["rollwright", "model"], ["rollwright", "run"]]
    for command in [*(shlex.split(command, comments=True) for command in commands), [tmp_path / "try_it.py"]]:
        done = warm.run(command, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "'output_ids': [" in done.stdout
    run = tmp_path / "runs" / "experiment" / "trial"
    rewards = [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rewards[0] < 0.2 < 0.4 < rewards[-1]
    assert "sampled tokens of" in (run / "rollouts" / "step-000020.txt").read_text()


def test_the_loop_over_turns_runs(names, tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    with BuiltinEngine(str(tiny_model)) as engine:
        workflow = names["Converse"]("exact_match_reward", GCONFIG, tokenizer)
        row = asyncio.run(workflow.arun_episode(engine, {"question": "6*7=", "answer": "42"}))
    check_trajectory(row)
    assert "\nGo on. " in tokenizer.decode(row["input_ids"][0])


def test_the_task_style_class_runs(names, tiny_model):
    taskset = TasksetConfig(format=FormatConfig(prompt_key="question", response_key="answer"))
    taskset.workflow = names["Echo"]
    tokenizer = load_tokenizer(tiny_model)
    runner = TaskRunner([taskset], tokenizer, gconfig=GCONFIG, group_size=3)
    with BuiltinEngine(str(tiny_model)) as engine:
        experiences = asyncio.run(runner.arun_episode(engine, {"question": "6*7=", "answer": "42"}))
    assert len(experiences) == 3
    assert all(experience.reward is not None for experience in experiences)


def test_every_built_in_workflow_is_described():
    described = set(re.findall(r"`(\w+)`", TEXT))
    assert set(WORKFLOWS.built_in) <= described, "a built-in workflow is missing in docs/workflows.md"
    assert all((DOCS / link).exists() for link in re.findall(r"\]\((\w[\w-]*\.md)\)", TEXT))
