"""Workflows by class, instance, registered name, import path and plugin; and errors that list what was tried."""

import re
import sys
from pathlib import Path

import pytest

import rollwright.workflows
from rollwright.errors import WorkflowError
from rollwright.registry import PLUGIN_VARIABLE
from rollwright.workflows.registry import (
    FUNCTIONS,
    WORKFLOWS,
    resolve_function,
    resolve_workflow,
    workflow_name,
)

PLUGIN = """
from rollwright.workflows.registry import WORKFLOWS

@WORKFLOWS.register_module("{name}")
class Plugged:
    def __init__(self, reward=1.0):
        self.reward = reward

    async def arun_episode(self, engine, data):
        return None
"""


class Plain:
    def __init__(self, max_turns=3):
        self.max_turns = max_turns

    async def arun_episode(self, engine, data):
        return None


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module on the path."""
    (tmp_path / "my_agents.py").write_text(
        "class Agent:\n    async def arun_episode(self, engine, data):\n        return None\n\nclass Outer:\n    Inner = Agent\n"
    )
    (tmp_path / "broken_agents.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "failing_agents.py").write_text("raise RuntimeError('no model configured')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_agents", "broken_agents", "failing_agents"):
        sys.modules.pop(name, None)


def test_class_instance_factory_and_arguments():
    assert resolve_workflow(Plain, {"max_turns": 5}).max_turns == 5
    instance = Plain()
    assert resolve_workflow(instance) is instance
    assert resolve_workflow(lambda max_turns: Plain(max_turns), {"max_turns": 7}).max_turns == 7
    with pytest.raises(WorkflowError, match=r"given with an instance of Plain"):
        resolve_workflow(instance, {"max_turns": 5})
    with pytest.raises(WorkflowError, match=r"unexpected keyword argument 'turns'.*signature is Plain\(max_turns=3\)"):
        resolve_workflow(Plain, {"turns": 5})


def test_what_is_no_workflow_is_refused_with_a_hint():
    class WithRun:
        def run(self): ...

    class Synchronous:
        def arun_episode(self, engine, data): ...

    with pytest.raises(WorkflowError, match=r"no method arun_episode.*task-style"):
        resolve_workflow(WithRun)
    with pytest.raises(WorkflowError, match=r"arun_episode is not async"):
        resolve_workflow(Synchronous())


def test_import_paths(module):
    assert workflow_name(resolve_workflow("my_agents.Agent")) == "Agent"
    assert workflow_name(resolve_workflow("my_agents:Agent")) == "Agent"
    assert workflow_name(resolve_workflow("my_agents.Outer.Inner")) == "Agent"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_agents.Agnet", r"did you mean 'Agent'"),
        ("no_such_package.module.Agent", r"there is no module 'no_such_package'"),
        ("my_agents.deeper.Agent", r"module 'my_agents.deeper'.*it has no 'deeper'"),
        ("broken_agents.Agent", r"'broken_agents'.*cannot be imported.*a_package_that_is_not_there"),
        ("failing_agents.Agent", r"cannot be imported: RuntimeError: no model configured"),
        ("rlrv", r"Did you mean 'rlvr'\?.*registered names \(.*multi_turn.*rlvr"),
    ],
)
def test_an_error_lists_what_was_tried(module, path, message):
    with pytest.raises(WorkflowError, match=message):
        resolve_workflow(path)


def test_the_same_class_replaces_and_another_is_refused():
    source = "class Agent:\n    marker = {}\n"
    versions = []
    try:
        for number in (1, 2):
            scope = {"__name__": "a_notebook"}
            exec(source.format(number), scope)
            versions.append(WORKFLOWS.register_module("test_agent")(scope["Agent"]))
        assert WORKFLOWS.get("test_agent") is versions[1]
        with pytest.raises(WorkflowError, match=r"'test_agent' is taken by a_notebook\.Agent"):
            WORKFLOWS.register_module("test_agent")(Plain)
    finally:
        del WORKFLOWS["test_agent"]
    with pytest.raises(WorkflowError, match=r"give the name as text"):
        WORKFLOWS.register_module(Plain)


def test_plugin_directories(tmp_path, monkeypatch):
    (tmp_path / "agents.py").write_text(PLUGIN.format(name="test_plugged_agent"))
    (tmp_path / "_private.py").write_text("raise RuntimeError('not to be imported')\n")
    with pytest.raises(WorkflowError, match=r"not found"):
        WORKFLOWS.get("test_plugged_agent")
    monkeypatch.setenv(PLUGIN_VARIABLE, str(tmp_path))
    try:
        assert resolve_workflow("test_plugged_agent", {"reward": 2.0}).reward == 2.0
        assert "test_plugged_agent" in WORKFLOWS.names()
    finally:
        del WORKFLOWS["test_plugged_agent"]


def test_functions_by_name_and_import_path(module):
    def shout(text):
        return text.upper()

    FUNCTIONS.register("test_shout")(shout)
    try:
        assert resolve_function("test_shout", "feedback_fn") is shout
    finally:
        del FUNCTIONS["test_shout"]
    assert resolve_function("my_agents:Agent", "agent").__name__ == "Agent"
    assert resolve_function("execute_python", "tool").__name__ == "execute_python"
    with pytest.raises(
        WorkflowError, match=r"feedback_fn: function 'execute_pyton' was not found. Did you mean 'execute_python'"
    ):
        resolve_function("execute_pyton", "feedback_fn")
    with pytest.raises(WorkflowError, match=r"tool is 3, which cannot be called"):
        resolve_function(3, "tool")


def test_every_built_in_workflow_is_found_by_its_name_without_an_import():
    """A workflow that is registered in this package has to stand in BUILT_IN too."""
    registered = {}
    for file in Path(rollwright.workflows.__path__[0]).glob("*.py"):
        for name in re.findall(r"^@WORKFLOWS\.register_module\(\"(\w+)\"\)", file.read_text(), re.MULTILINE):
            registered[name] = f"rollwright.workflows.{file.stem}"
    listed = {name: path.rpartition(".")[0] for name, path in WORKFLOWS.built_in.items()}
    assert {name: path for name, path in listed.items() if path.startswith("rollwright.workflows.")} == registered
    for name in WORKFLOWS.built_in:
        assert WORKFLOWS.built_in[name].endswith(f".{WORKFLOWS.get(name).__name__}")


def test_a_path_of_another_system_leads_to_the_class_here():
    with pytest.raises(WorkflowError, match=r"Did you mean 'rollwright\.workflows\.multi_turn\.MultiTurnWorkflow'\?"):
        WORKFLOWS.get("areal.workflow.multi_turn.MultiTurnWorkflow")
    with pytest.raises(WorkflowError, match=r"Did you mean 'rollwright\.workflows\.simple\.MathWorkflow'\?"):
        WORKFLOWS.get("trinity.common.workflows.MathWorkflow")


def test_a_task_style_workflow_is_not_asked_for_arguments_but_sent_to_a_taskset():
    with pytest.raises(WorkflowError, match=r"MathWorkflow is no workflow: .* over a taskset that names them"):
        resolve_workflow("math_workflow", {"tokenizer": None})
