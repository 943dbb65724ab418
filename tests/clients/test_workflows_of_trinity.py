"""The workflow files of the published package of Trinity-RFT, read from the package, run with nothing changed but their imports.

``scripts/make_client_envs.sh`` fetches the package; without it these tests are skipped.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollwright
from rollwright.compat.replacements import TRINITY as REPLACEMENTS
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.errors import RolloutError
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.task_runner import TaskRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "workflows"))
from parts import Script, tool_tokenizer  # noqa: E402

FILES = ROOT / ".venv-clients-sources" / "trinity" / "common" / "workflows"
if not FILES.is_dir():
    pytest.skip("the package trinity-rft is not there: scripts/make_client_envs.sh fetches it", allow_module_level=True)

SIZE = 3
#: The names that stand for something else here, as docs/coming-from.md says.
RENAMED = {"GenerationConfig": "GenerationHyperparameters as GenerationConfig"}
_IMPORT = re.compile(r"^( *)from (trinity[\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)
#: What the package's own files import from one another is not Rollwright's.
_OWN = re.compile(r"trinity\.common\.workflows\.(envs|agentscope)\.")


def ported(text: str) -> str:
    """A file with the whole module path of its imports changed to ``rollwright``."""

    def change(match: re.Match[str]) -> str:
        names = [name.strip() for name in match[3].strip("()").split(",") if name.strip()]
        return f"{match[1]}from rollwright import {', '.join(RENAMED.get(name, name) for name in names)}"

    return _IMPORT.sub(change, text)


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """The files as a package of ours, ``trinity_files``."""
    folder = tmp_path_factory.mktemp("ported")
    for source in [*FILES.glob("*.py"), *(FILES / "envs" / "sudoku").glob("*.py")]:
        target = folder / "trinity_files" / source.relative_to(FILES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(ported(source.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "trinity_files" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    shutil.rmtree(folder)


def rows_of(workflow, row, replies, *, reward_fn=None, judge=None, group=SIZE, layout=None, **workflow_args):
    """What an executor makes of one task, and what was asked."""
    tokenizer = tool_tokenizer()
    taskset = TasksetConfig(
        workflow=f"trinity_files.{workflow}",
        reward_fn=reward_fn,
        format=FormatConfig(prompt_key="question", response_key="answer", **(layout or {})),
        gconfig=GenerationHyperparameters(temperature=0.7, max_new_tokens=64),
        group_size=group,
        workflow_args=workflow_args,
    )
    services = SimpleNamespace(openai_front=None, auxiliary_models=[judge] if judge else [])
    engine, runner = Script(tokenizer, *replies), TaskRunner([taskset], tokenizer, services=services)
    with RolloutExecutor(engine, RolloutConfig(max_sample_retries=0)) as executor:
        return executor.rollout_batch([{**row, "ordinal": 0}], runner), engine


def judge_that_says(text):
    def create(**request):
        assert request["model"] == "judge"
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])

    return SimpleNamespace(model_path="judge", chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


MATH = {"question": "2+2=", "answer": "4"}
RIGHT = "<think>a</think><answer>4</answer>"


@pytest.mark.parametrize("name", ["MathBoxedWorkflow", "AsyncMathBoxedWorkflow"])
@pytest.mark.parametrize("use_base", [False, True])
def test_customised_mathematics(name, use_base):
    batch, engine = rows_of(f"customized_math_workflows.{name}", MATH, [r"\boxed{4}"], use_base=use_base, with_think=True)
    assert batch["rewards"].tolist() == pytest.approx([0.9] * SIZE)  # right, and without a thought
    assert batch["details"][0]["metrics"] == {"accuracy": 1.0, "format_score": -0.1}
    assert engine.requests[0].gconfig.temperature == 0.7
    assert engine.requests[0].gconfig.max_new_tokens == 64


def test_calls_of_tools():
    row = {
        "question": "1+2?",
        "tools": json.dumps([{"name": "add", "parameters": {}}]),
        "raw_system": "",
        "conversations": [{"from": "human", "value": "1+2?"}],
        "answer": json.dumps([{"name": "add", "arguments": {"a": 1}}]),
    }
    right = '<think>a</think> <tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'
    batch, _ = rows_of("customized_toolcall_workflows.ToolCallWorkflow", row, [right])
    assert batch["rewards"].tolist() == [1.0] * SIZE


@pytest.mark.parametrize("name", ["MathEvalWorkflow", "AsyncMathEvalWorkflow"])
def test_an_evaluation_in_the_style_of_qwen(name):
    tokenizer = tool_tokenizer()
    taskset = TasksetConfig(
        workflow=f"trinity_files.eval_workflow.{name}",
        format=FormatConfig(prompt_key="question", response_key="answer"),
        group_size=1,
    )
    engine = Script(tokenizer, r"so \boxed{4}")
    with RolloutExecutor(engine, RolloutConfig(max_sample_retries=0)) as executor:
        batch = executor.rollout_batch([{**MATH, "ordinal": 0}], TaskRunner([taskset], tokenizer, is_eval=True))
    assert batch["rewards"].tolist() == [1.0]  # the accuracy, where a workflow gives no reward
    assert batch["details"][0]["metrics"] == {"accuracy": 1.0}
    assert engine.requests[0].gconfig.temperature == 0.6


class RewardModel(rollwright.RewardFn):
    """Scores by itself, as those of a reward gallery do."""

    def __call__(self, response, messages, ground_truth):
        return {"quality": float(ground_truth in response.response_text) + 0.25 * (messages[-1]["role"] == "user")}


@pytest.mark.parametrize("name", ["MathRMWorkflow", "AsyncMathRMWorkflow"])
def test_a_reward_model(name):
    batch, _ = rows_of(f"math_rm_workflow.{name}", MATH, ["4"], reward_fn=f"{__name__}:RewardModel")
    assert batch["rewards"].tolist() == [1.25] * SIZE


@pytest.mark.parametrize("name", ["MathRULERWorkflow", "AsyncMathRULERWorkflow"])
def test_a_ruler(name):
    batch, _ = rows_of(f"math_ruler_workflow.{name}", MATH, [RIGHT], judge=judge_that_says("[0.5]"), group=1)
    assert batch["rewards"].tolist() == [0.5]
    assert batch["details"][0]["metrics"] == {"accuracy": 1.0, "format_score": 0.1, "gold_reward": 1.1, "judge_success": 1.0}


def test_a_ruler_without_a_judge_is_told_so_by_the_file():
    with pytest.raises(RolloutError, match="requires that auxiliary_models is not None"):
        rows_of("math_ruler_workflow.MathRULERWorkflow", MATH, [RIGHT], group=1)


def test_a_ruler_that_is_trained(monkeypatch):
    module = importlib.import_module("trinity_files.math_trainable_ruler_workflow")
    monkeypatch.setattr(module, "PROBABILITY_GROUND_TRUTH_AVAILABLE", 0.0)
    batch, engine = rows_of("math_trainable_ruler_workflow.MathTrainableRULERWorkflow", MATH, [RIGHT, "[0.75]"], group=1)
    assert batch["rewards"].tolist() == [0.75]
    assert len(engine.requests) == 2


@pytest.mark.parametrize("name", ["RubricJudgeWorkflow"])
def test_a_rubric(name):
    row = {**MATH, "rubric": [{"weight": 1.0, "description": "short"}]}
    batch, _ = rows_of(f"rubric_judge_workflow.{name}", row, ["4"], judge=judge_that_says('```json\n{"rating": 7}\n```'))
    assert batch["rewards"].tolist() == pytest.approx([0.7] * SIZE)


class Parts(rollwright.RewardFn):
    """A reward in the style of the package."""

    def __call__(self, response, truth=None, **kwargs):
        return {"accuracy": float(response == truth)}


@pytest.mark.parametrize("name", ["SimpleMMWorkflow", "AsyncSimpleMMWorkflow"])
def test_a_conversation_that_may_have_images(name):
    row = {**MATH, "pictures": []}
    batch, _ = rows_of(
        f"simple_mm_workflow.{name}", row, ["4"], reward_fn=f"{__name__}:Parts", layout={"image_key": "pictures"}
    )
    assert batch["rewards"].tolist() == [1.0] * SIZE
    with pytest.raises(RolloutError, match="chat accepts only text, and a message has a block of type 'image'"):
        rows_of(
            f"simple_mm_workflow.{name}",
            {**row, "pictures": ["a.png"]},
            ["4"],
            reward_fn=f"{__name__}:Parts",
            layout={"image_key": "pictures"},
        )


STEPS = """
from {module} import {base}

class Counting({base}):
    max_step_num = 2
    def __init__(self, **kwargs):
        super().__init__(use_openai_client=False, **kwargs)
    def step(self, step_num):
        self.model.chat([{{"role": "user", "content": f"step {{step_num}}"}}])
        return True
    async def step_async(self, step_num):
        await self.model.chat_async([{{"role": "user", "content": f"step {{step_num}}"}}])
        return True
    def reward(self, exps, step_num=5):
        return float(step_num)
    async def reward_async(self, exps, step_num=5):
        return float(step_num)
"""


@pytest.mark.parametrize("base", [f"{a}{b}Workflow" for a in ("", "Async") for b in ("StepWiseReward", "RewardPropagation")])
def test_steps(base):
    """The package's classes and those of the same name here do the same."""
    made = []
    for number, module in enumerate(("trinity_files.step_wise_workflow", "rollwright")):
        name = f"steps_{base}_{number}"
        folder = Path(importlib.import_module("trinity_files").__file__).parent
        (folder / f"{name}.py").write_text(STEPS.format(module=module, base=base))
        batch, _ = rows_of(f"{name}.Counting", MATH, ["x"], group=1)
        made.append((batch["rewards"].tolist(), [detail["metrics"] for detail in batch["details"]]))
    assert made[0] == made[1]
    assert made[0][0] == ([0.0, 1.0] if "StepWise" in base else [5.0, 5.0])


def test_a_sudoku():
    solution = [[(row * 3 + row // 3 + column) % 9 + 1 for column in range(9)] for row in range(9)]
    puzzle = [list(row) for row in solution]
    puzzle[0][0] = 0
    row = {"question": "", "puzzle": puzzle, "solution": solution}
    batch, _ = rows_of("envs.sudoku.sudoku_workflow.SudokuWorkflow", row, ["0 0 1"], group=1)
    assert batch["rewards"].tolist() == [1.0]


def test_a_teacher_is_told_to_be_missing():
    with pytest.raises(
        RolloutError, match=r"auxiliary models are OpenAI clients, .*Teachers that score tokens are not supported"
    ):
        rows_of("on_policy_distill_workflow.OnPolicyDistillWorkflow", MATH, ["4"], judge=judge_that_says(""), group=1)


def test_each_name_that_the_files_import_is_there_or_has_advice():
    missing = {}
    for file in FILES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("trinity") and not _OWN.match(f"{module}."):
                for alias in node.names:
                    if alias.name not in rollwright.__all__ and alias.name not in REPLACEMENTS:
                        missing[alias.name] = str(file.relative_to(FILES))
    assert missing == {}
