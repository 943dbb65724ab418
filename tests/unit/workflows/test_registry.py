"""Workflows by class, instance, registered name, import path and plugin; and errors that list what was tried."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import rollwright.workflows
from rollwright.errors import WorkflowError
from rollwright.workflows.registry import (
    BUILT_IN,
    PLUGIN_VARIABLE,
    WORKFLOWS,
    WorkflowRegistry,
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
    registry = WorkflowRegistry("rollwright.test_nothing")
    source = "class Agent:\n    marker = {}\n"
    versions = []
    for number in (1, 2):
        scope = {"__name__": "a_notebook"}
        exec(source.format(number), scope)
        versions.append(registry.register_module("agent")(scope["Agent"]))
    assert registry.get("agent") is versions[1]
    with pytest.raises(WorkflowError, match=r"'agent' stands for a_notebook\.Agent already and cannot also stand for .*Plain"):
        registry.register_module("agent")(Plain)
    with pytest.raises(WorkflowError, match=r"give the name as text"):
        registry.register_module(Plain)


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
        WORKFLOWS._modules.pop("test_plugged_agent", None)
    with pytest.raises(WorkflowError, match=r"does not exist"):
        WorkflowRegistry().add_plugin_directory(tmp_path / "nowhere")


def test_a_plugin_that_cannot_be_imported_is_an_error_every_time(tmp_path):
    registry = WorkflowRegistry("rollwright.test_nothing")
    (tmp_path / "agents.py").write_text("import a_package_that_is_not_there\n")
    registry.add_plugin_directory(tmp_path)
    for _ in range(2):
        with pytest.raises(WorkflowError, match=r"plugin .*agents.py cannot be imported: ModuleNotFoundError"):
            registry.get("anything")


def test_entry_points(tmp_path, monkeypatch):
    (tmp_path / "shipped.py").write_text("class Agent:\n    async def arun_episode(self, engine, data):\n        return None\n")
    info = tmp_path / "shipped-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwright.test_group]\nshipped_agent = shipped:Agent\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = WorkflowRegistry("rollwright.test_group")
    assert registry.get("shipped_agent").__name__ == "Agent"
    (info / "entry_points.txt").write_text("[rollwright.test_group]\nlost_agent = shipped:Lost\n")
    importlib.invalidate_caches()
    with pytest.raises(WorkflowError, match=r"plugin 'lost_agent' \(shipped:Lost"):
        WorkflowRegistry("rollwright.test_group").get("lost_agent")
    sys.modules.pop("shipped", None)


def test_every_built_in_workflow_is_found_by_its_name_without_an_import():
    """A workflow that is registered in this package has to stand in BUILT_IN too."""
    registered = {}
    for file in Path(rollwright.workflows.__path__[0]).glob("*.py"):
        for name in re.findall(r"^@WORKFLOWS\.register_module\(\"(\w+)\"\)", file.read_text(), re.MULTILINE):
            registered[name] = f"rollwright.workflows.{file.stem}"
    listed = {name: path.rpartition(".")[0] for name, path in BUILT_IN.items()}
    assert {name: path for name, path in listed.items() if path.startswith("rollwright.workflows.")} == registered
    for name in BUILT_IN:
        assert BUILT_IN[name].endswith(f".{WORKFLOWS.get(name).__name__}")


def test_a_path_of_another_system_leads_to_the_class_here():
    with pytest.raises(WorkflowError, match=r"Did you mean 'rollwright\.workflows\.multi_turn\.MultiTurnWorkflow'\?"):
        WORKFLOWS.get("areal.workflow.multi_turn.MultiTurnWorkflow")
    with pytest.raises(WorkflowError, match=r"Did you mean 'rollwright\.workflows\.simple\.MathWorkflow'\?"):
        WORKFLOWS.get("trinity.common.workflows.MathWorkflow")


def test_a_task_style_workflow_is_not_asked_for_arguments_but_sent_to_a_taskset():
    with pytest.raises(WorkflowError, match=r"MathWorkflow is no workflow: .* over a taskset that names them"):
        resolve_workflow("math_workflow", {"tokenizer": None})
