"""Names in a config that nothing has are told before anything runs, with their lines; names that something has are not."""

from __future__ import annotations

import shutil
import sys

import pytest

from rollwright import Workflow
from rollwright.config.loading import load_stages
from rollwright.errors import ConfigError
from rollwright.processes.sandbox import close_jails
from rollwright.trainers.checks.unknown_names import refuse_unknown_names
from tests.conftest import REPOSITORY

MODULE = """
from rollwright import RolloutWorkflow, Workflow

class Asks(RolloutWorkflow):
    def __init__(self, tokenizer, gconfig, level=1): ...
    async def arun_episode(self, engine, data): ...

class Unevaluated(RolloutWorkflow):
    def __init__(self, tokenizer): ...
    async def arun_episode(self, engine, data): ...

class Task(Workflow):
    def run(self): ...

def tool(x: int) -> int:
    return x

def tries(prompt, completion, prompt_ids, completion_ids, **columns):
    return 0.0

tries.uses_sandbox = True

class OwnBox:
    workdir = "/work"
    def __init__(self, spec): ...
    async def start(self): ...
    async def stop(self): ...

class FullBox(OwnBox):
    async def start(self):
        from rollwright.errors import SandboxError
        raise SandboxError("it has no room")

def strict(prompt, completion, prompt_ids, completion_ids, *, answer, weight=1.0):
    return 0.0
"""

RL = """
actor: {path: /models/tiny}
train_dataset: {path: arithmetic}
workflow: parts_of_a_user.Asks
"""
TASKS = """
actor: {path: /models/tiny}
tasksets:
  - path: tasks.jsonl
    default_workflow_type: math_workflow
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "parts_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("parts_of_a_user", None)


@pytest.fixture
def refusal(tmp_path):
    def of(text: str, *overrides: str) -> str:
        file = tmp_path / "config.yaml"
        file.write_text(text.lstrip())
        stages = load_stages(file, overrides)
        try:
            refuse_unknown_names(stages)
        except ConfigError as error:
            return str(error)
        return ""

    return of


def test_what_is_there_is_not_refused(refusal):
    assert refusal(RL) == ""
    assert refusal(RL, "workflow=rlvr", "reward_fn=gsm8k_reward") == ""
    assert refusal(RL, "workflow_kwargs.level=2", "valid_dataset.path=arithmetic", "valid_dataset.split=valid") == ""
    assert refusal(TASKS) == ""
    own = "reward_fn_args: {weight: 2.0}\n    selector: difficulty\n    selector_args: {target_reward: 0.3}\n"
    assert refusal(TASKS + f"    default_reward_fn_type: parts_of_a_user.strict\n    {own}") == ""
    assert refusal(TASKS.replace("math_workflow", "parts_of_a_user.Task")) == ""


def test_names_that_nothing_has_are_told_with_their_lines(refusal):
    message = refusal(RL + "reward_fn: gsm8k_rewart\nstore: {operators: [{name: reward_filtre}]}\n", "workflow=rvlr")
    assert "override 'workflow=rvlr': workflow: workflow 'rvlr' was not found. Did you mean 'rlvr'?" in message
    assert "config.yaml:4: reward_fn: reward function 'gsm8k_rewart' was not found" in message
    assert "config.yaml:5: store.operators.0: " in message
    assert "Did you mean 'reward_filter'" in message
    assert message.startswith("3 faults:")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            "    default_reward_fn_type: math_rewart\n",
            "tasksets.0.default_reward_fn_type (here tasksets.0.reward_fn): reward function 'math_rewart' was not found",
        ),
        ("    kind: harbour\n", "tasksets.0.kind: dataset 'harbour' was not found. Did you mean 'harbor'?"),
        ("    kind: harbor\n    subset: x\n", "tasksets.0.subset: is set, but not read"),
        ("    selector_args: {sed: 1}\n", "tasksets.0.selector_args: selector 'shuffle' was given 1, seed=1, sed=1"),
        (
            "    default_reward_fn_type: math_boxed_reward\n    reward_fn_args: {with_thinking: true}\n",
            "tasksets.0.reward_fn_args.with_thinking: math_boxed_reward has no parameter 'with_thinking'",
        ),
    ],
)
def test_of_a_taskset(refusal, more, told):
    assert told in refusal(TASKS + more)


def test_a_taskset_without_a_workflow_is_told(refusal):
    text = TASKS.replace("    default_workflow_type: math_workflow\n", "")
    assert "tasksets.0.workflow: is not set" in refusal(text)
    assert refusal(text + "    format: {workflow_key: kind}\n") == ""


def test_each_way_to_write_a_workflow_has_its_place(refusal):
    assert "it has arun_episode: set it as workflow" in refusal(TASKS, "tasksets=[{path: x, default_workflow_type: rlvr}]")
    assert "name it in a taskset" in refusal(RL, "workflow=math_workflow")
    assert hasattr(Workflow, "run")


def test_arguments_that_a_constructor_does_not_take(refusal):
    assert "workflow_kwargs: parts_of_a_user.Asks cannot be built with" in refusal(RL, "workflow_kwargs.depth=2")
    evaluated = "valid_dataset: {path: arithmetic, split: valid}\n"
    unevaluated = RL.replace("Asks", "Unevaluated")
    assert refusal(unevaluated) == ""
    assert "cannot be evaluated with" in refusal(unevaluated + evaluated)


def test_a_process_looks_up_what_it_needs(refusal):
    """A trainer of its own may be where the workflow is not installed."""
    missing = RL.replace("parts_of_a_user.Asks", "elsewhere.Asks") + "store: {}\n"
    assert "elsewhere" in refusal(missing, "mode=explore")
    assert refusal(missing, "mode=train") == ""
    pytest.importorskip("sqlalchemy")
    assert "store.priority_fn: priority function 'oldest' was not found" in refusal(
        RL, "mode=train", "store.order=priority", "store.priority_fn=oldest"
    )


@pytest.fixture
def no_bubblewrap(monkeypatch):
    """A machine that has no bwrap."""
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *rest: None if name == "bwrap" else which(name, *rest))
    close_jails()
    yield
    close_jails()


TOOLS = RL.replace("parts_of_a_user.Asks", "tool_integrated") + "reward_fn: math_reward\n"


def test_a_run_whose_sandbox_is_missing_is_told_what_to_install(refusal, no_bubblewrap):
    for text, overrides in (
        (TOOLS, []),
        (TASKS.replace("math_workflow", "tool_calling_workflow"), []),
        (RL + "reward_fn: parts_of_a_user.tries\n", []),
        (RL, ["valid_dataset.path=arithmetic", "eval_workflow=tool_integrated", "reward_fn=math_reward"]),
    ):
        assert "rollout.sandbox: bubblewrap, which contains programs that a model writes, is not installed" in refusal(
            text, *overrides
        )
    assert "apt-get install bubblewrap" in refusal(TOOLS)


def test_a_run_that_needs_no_sandbox_does_not_miss_it(refusal, no_bubblewrap):
    assert refusal(RL) == ""
    assert refusal(TOOLS, "workflow_kwargs.run_scripts=false") == ""
    assert refusal(TOOLS, "rollout.sandbox=unsafe") == ""
    own_tools = "    workflow_args: {tools: [parts_of_a_user.tool]}\n"
    assert refusal(TASKS.replace("math_workflow", "tool_calling_workflow") + own_tools) == ""
    for name in ("quickstart", "gsm8k_grpo", "parallel_sums"):
        refuse_unknown_names(load_stages(REPOSITORY / "examples" / f"{name}.yaml", []))


def test_a_sandbox_of_an_unknown_name_is_refused_even_where_none_is_needed(refusal):
    assert "rollout.sandbox: there is no sandbox 'chroot'" in refusal(RL, "rollout.sandbox=chroot")


def test_the_sandbox_that_is_there_is_not_refused(refusal, bubblewrap):
    assert refusal(TOOLS) == ""


AGENT = (
    RL.replace("parts_of_a_user.Asks", "command_agent")
    + f"workflow_kwargs: {{agent: {{command: a-program}}, verifier: {__file__}}}\n"
)


def test_an_agent_runs_in_a_box_also_of_a_users_own(refusal, no_bubblewrap):
    assert "rollout.sandbox: the box does not start: bubblewrap, which contains" in refusal(AGENT)
    assert refusal(AGENT, "rollout.sandbox=unsafe") == ""
    assert refusal(AGENT, "rollout.sandbox=parts_of_a_user.OwnBox") == ""
    assert "rollout.sandbox: it has no room" in refusal(AGENT, "rollout.sandbox=parts_of_a_user.FullBox")
    assert "box 'chroot' was not found" in refusal(AGENT, "rollout.sandbox=chroot")
    assert "there is no sandbox 'parts_of_a_user.OwnBox'" in refusal(TOOLS, "rollout.sandbox=parts_of_a_user.OwnBox")


def test_an_agent_whose_container_is_missing_is_told(refusal, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "rollout.sandbox: the box does not start: docker is not installed" in refusal(AGENT, "rollout.sandbox=docker:mine")
    shell = TASKS.replace("math_workflow", "shell_workflow")
    assert "rollout.sandbox: docker is not installed" in refusal(shell, "rollout.sandbox=docker")
    assert "rollout.sandbox: task folders write to paths such as /logs" in refusal(shell, "rollout.sandbox=unsafe")
