"""The base class of task-style workflows: what is refused and when, generation arguments, the names that ported files use."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from parts import Script

import rollwright
from rollwright import MathBoxedRewardFn, MultiTurnWorkflow, Task, Workflow, get_logger, logging
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.errors import WorkflowError
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import WorkflowPool, class_trait
from rollwright.workflows.task_runner import TaskRunner

TASK = Task(raw_task={"question": "2+2="}, rollout_args=GenerationHyperparameters(temperature=0.7))


@pytest.fixture
def model(tokenizer):
    return ModelWrapper(Script(tokenizer, "4"), tokenizer)


@pytest.mark.parametrize("base", [Workflow, MultiTurnWorkflow])
def test_a_class_with_nothing_to_run_is_refused_when_it_is_built_and_not_before(base, model):
    empty = WORKFLOWS.register_module(f"runs_nothing_{base.__name__}")(type("Empty", (base,), {}))
    assert WORKFLOWS.get(f"runs_nothing_{base.__name__}") is empty
    with pytest.raises(WorkflowError, match=r"Empty defines neither run\(\) nor run_async\(\)"):
        empty(task=TASK, model=model)
    type("Runs", (empty,), {"run": lambda self: None})(task=TASK, model=model)


def test_multi_turn_workflow_says_what_it_needs():
    with pytest.raises(WorkflowError, match="MultiTurnWorkflow needs reward_fn and tokenizer; or task and model"):
        MultiTurnWorkflow()


def test_what_the_nearest_class_defines_is_what_runs():
    async def run_async(self): ...

    waits = type("Waits", (Workflow,), {"run_async": run_async})
    assert class_trait(waits, "asynchronous", TASK)
    assert not class_trait(type("Plain", (waits,), {"run": lambda self: None}), "asynchronous", TASK)
    assert not class_trait(type("Of", (rollwright.SimpleWorkflow,), {"run": lambda self: None}), "asynchronous", TASK)


class Default(Workflow):
    resettable = True

    def reset(self, task): ...

    def run(self): ...


class Assigned(Default):
    def __init__(self, *, task, model, auxiliary_models=None):
        self.reset(task)  # before the base class is initialised, as the math workflows do
        super().__init__(task=task, model=model)

    def reset(self, task):
        self.rollout_args = asdict(task.rollout_args)


class Computed(Default):
    @property
    def rollout_args(self):
        return asdict(self.task.rollout_args)


@pytest.mark.parametrize("kind", [Default, Assigned, Computed])
def test_generation_arguments_are_the_task_s_however_a_class_keeps_them(kind, model):
    pool = WorkflowPool()
    for temperature in (0.7, 0.3):
        task = Task(workflow=kind, rollout_args=GenerationHyperparameters(temperature=temperature))
        with pool.workflow(task, model, list) as workflow:
            arguments = workflow.rollout_args
            assert (arguments if kind is Default else GenerationHyperparameters(**arguments)).temperature == temperature
    assert len(next(iter(pool._idle.values()))) == 1


def test_the_names_that_ported_files_use(model, tokenizer):
    assert get_logger is logging.getLogger
    assert not model.enable_history  # this one has no record
    logged = Default(task=TASK, model=model)
    assert logged.logger.name.endswith(Default.__module__)
    score = MathBoxedRewardFn()
    assert score(response="so \\boxed{18}", truth="18") == {"accuracy": 1.0, "format_score": 0.0}
    assert score("\\boxed{3}", truth="18", with_think=True, format_score_coef=0.2) == {"accuracy": 0.0, "format_score": -0.2}


def test_a_conversation_that_ends_with_the_assistant_is_gone_on_with(tokenizer):
    engine = Script(tokenizer, " four")
    model = ModelWrapper(engine, tokenizer)
    (reply,) = model.chat([{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "It is"}])
    assert tokenizer.decode(engine.requests[0].input_ids).endswith("<|assistant|>It is")
    assert reply.response_text == " four"


def test_a_truncated_conversation_is_marked(tokenizer):
    class Short(MultiTurnWorkflow):
        can_repeat = False

        async def run_async(self):
            assert self.model.enable_history
            messages = [{"role": "user", "content": "go"}]
            (reply,) = await self.model.chat_async(messages, n=1)
            messages.append({"role": "assistant", "content": reply.response_text})
            return [self.process_messages_to_experience(messages, 0.5, {"steps": 1, "map": "a"}, "response_truncated")]

    runner = TaskRunner([TasksetConfig(workflow=Short, format=FormatConfig(prompt_key="question"))], tokenizer, group_size=2)
    with RolloutExecutor(Script(tokenizer, "left")) as executor:
        batch = executor.rollout_batch([{"question": "x", "ordinal": 0}], runner)
    assert batch["rewards"].tolist() == [0.5, 0.5]
    assert batch["details"][0] == {"info": {"steps": 1, "map": "a"}, "metrics": {"steps": 1.0}}


def test_workflows_are_importable_from_the_package():
    from rollwright.workflows import RLVRWorkflow, registry

    assert RLVRWorkflow is rollwright.RLVRWorkflow
    assert registry.__name__ == "rollwright.workflows.registry"
    with pytest.raises(ImportError, match="Nope"):
        from rollwright.workflows import Nope  # noqa: F401


CONTRIBUTED = """
from rollwright import WORKFLOWS, Workflow

@WORKFLOWS.register_module("contributed_workflow")
class ContributedWorkflow(Workflow):
    def run(self): ...
"""


@pytest.mark.parametrize("first", ["from rollwright import WORKFLOWS", "import rollwright.workflows.task"])
def test_a_workflow_that_is_contributed_registers_where_the_package_imports_it(tmp_path, first):
    package = Path(rollwright.__file__).parent
    shutil.copytree(package, tmp_path / "rollwright")  # with what was compiled
    (tmp_path / "rollwright/workflows/contributed.py").write_text(CONTRIBUTED)
    init = tmp_path / "rollwright/workflows/__init__.py"
    line = "from rollwright.workflows.contributed import ContributedWorkflow\n__all__ = ['ContributedWorkflow']\n"
    init.write_text(init.read_text().replace("import rollwright\n", f"import rollwright\n{line}", 1))
    code = f"{first}\nfrom rollwright import WORKFLOWS\nprint(WORKFLOWS.get('contributed_workflow').__name__)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "ContributedWorkflow", ran.stderr


def test_a_failing_constructor_is_the_cause_by_itself(model):
    class Breaks(Workflow):
        def __init__(self, **_):
            raise ValueError("its own mistake")

        def run(self): ...

    with (
        pytest.raises(ValueError, match="its own mistake") as raised,
        WorkflowPool().workflow(Task(workflow=Breaks), model, list),
    ):
        pass
    assert raised.value.__context__ is None  # not "IndexError: pop from empty list"


def test_a_synchronous_engine_call_in_a_coroutine_is_told(model):
    async def ask():
        model.chat([{"role": "user", "content": "x"}])

    with pytest.raises(WorkflowError, match="_async"):
        asyncio.run(ask())
