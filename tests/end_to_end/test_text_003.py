"""The guide to task-style workflows: its code, with only the import lines changed, does what the guide says, and trains."""

from __future__ import annotations

import inspect
import json
import re
import sys

import pytest

from rollwright import WORKFLOWS, Experience, ModelWrapper, Task, Workflow
from rollwright.compat.dialects import Trinity
from rollwright.config.loading import load_stages
from rollwright.config.source import Origins, parse_yaml

IMPORTS = "from typing import List\n\nfrom rollwright import Experience, ModelWrapper, Task, Workflow\n"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def with_our_imports(code: str) -> str:
    """The rule of docs/coming-from.md: the whole module path becomes ``rollwright``."""
    return re.sub(r"from trinity[\w.]* import", "from rollwright import", code)


@pytest.fixture
def text(shared) -> str:
    return shared("seeds/003_230c1e899ca1aba5.txt").read_text(encoding="utf-8")


@pytest.fixture
def registry():
    """What a test registers is forgotten behind it."""
    before = dict(WORKFLOWS._entries)
    yield WORKFLOWS
    WORKFLOWS._entries.clear()
    WORKFLOWS._entries.update(before)


def full_example(text: str) -> str:
    """The guide's last listing, behind the import line that it shows for the registry."""
    python = blocks(text, "python")
    (line,) = [line for block in python for line in block.splitlines() if line.endswith("import WORKFLOWS")]
    return IMPORTS + with_our_imports(line) + "\n\n" + python[-1]


def executed(code: str, name: str) -> dict:
    namespace: dict = {"__name__": name}
    exec(compile(code, name, "exec"), namespace)
    return namespace


def test_the_base_class_takes_what_the_guide_shows(text):
    shown = executed(
        "from abc import ABC, abstractmethod\nfrom typing import Optional\nimport types\n"
        "openai = types.SimpleNamespace(OpenAI=object)\n" + IMPORTS + blocks(text, "python")[0],
        "guide_interface",
    )["Workflow"]
    theirs = inspect.signature(shown.__init__).parameters
    ours = inspect.signature(Workflow.__init__).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


def test_a_class_without_run_cannot_be_run(text, registry):
    """The registering listing is a class whose body is ``pass``."""
    (code,) = [block for block in blocks(text, "python") if re.search(r"^    pass$", block, re.MULTILINE)]
    namespace = executed(IMPORTS + with_our_imports(code), "guide")
    assert registry.get("example_workflow") is namespace["ExampleWorkflow"]


def test_the_guide_registers_one_name_several_times(text, registry):
    first = executed(full_example(text), "guide")["ExampleWorkflow"]
    second = executed(full_example(text), "guide")["ExampleWorkflow"]
    assert first is not second
    assert registry.get("example_workflow") is second


def test_a_task_holds_what_the_guide_lists(text):
    listed = re.findall(r"^- \*\*`(\w+)`\*\*", text, re.MULTILINE)
    assert listed == ["workflow", "reward_fn", "raw_task", "format_args", "rollout_args", "workflow_args"]
    assert set(listed) <= set(vars(Task()))


@pytest.mark.parametrize("number", [0, 1])
def test_the_yaml_of_the_guide_is_understood(text, tmp_path, monkeypatch, number):
    """Both listings are parts of a file: what the guide leaves out as "other fields" is put before them."""
    monkeypatch.setenv("TRINITY_TASKSET_PATH", str(tmp_path / "tasks.jsonl"))
    head = f"model: {{model_path: {tmp_path}}}\n"
    tail = "  batch_size: 2\n"
    file = tmp_path / "guide.yaml"
    file.write_text(head + blocks(text, "yaml")[number].rstrip() + "\n" + tail)
    (stage,) = load_stages(file)
    (taskset,) = stage.config.tasksets
    if number == 0:
        assert taskset.path == str(tmp_path / "tasks.jsonl")
        assert taskset.workflow == "math_workflow"
        assert (taskset.format.prompt_key, taskset.format.response_key) == ("question", "answer")
    else:
        assert (taskset.path, taskset.workflow) == ("/path/to/taskset", "example_workflow")


def test_the_guide_s_name_for_the_taskset_section_is_read_too():
    document = parse_yaml("buffer: {explorer_input: {task_set: {path: a.jsonl, default_workflow_type: w}}}", "guide.yaml")
    assert Trinity().translate(document.data, Origins(document)).data["tasksets"][0]["path"] == "a.jsonl"


class Model:
    """Stands where a workflow's model stands; answers ``n`` times."""

    def __init__(self):
        self.calls = []

    def chat(self, messages, n, temperature):
        self.calls.append((messages, n, temperature))
        return [Experience(tokens=[5, 6, 7], prompt_length=2, logprobs=[-0.5], response_text=str(i)) for i in range(n)]


def test_the_example_runs_and_is_given_its_next_task(text, registry):
    kind = executed(full_example(text), "guide")["ExampleWorkflow"]
    task = Task(workflow="example_workflow", raw_task={"question": "1+0=", "answer": "1"})
    task.rollout_args = task.rollout_args.new(n=3, temperature=0.7)
    model = Model()
    workflow = task.to_workflow(model)
    assert isinstance(workflow, kind)
    experiences = workflow.run()
    assert [experience.reward for experience in experiences] == [0.0, 1.0, 0.0]
    assert model.calls == [([{"role": "user", "content": "Question:\n1+0="}], 3, 0.7)]
    assert workflow.resettable()
    workflow.reset(Task(raw_task={"question": "2+0=", "answer": "2"}))
    assert [experience.reward for experience in workflow.run()] == [0.0, 0.0, 1.0]


def test_the_model_s_methods_are_those_of_the_guide(text):
    for name in re.findall(r"(?<![_\w])model\.(\w+)\(", text):
        assert callable(getattr(ModelWrapper, name)), name


TRINITY_FILE = """
mode: both
project: guide
name: example
checkpoint_root_dir: {root}
model: {{model_path: {model}, max_response_tokens: 6}}
algorithm: {{algorithm_type: grpo, repeat_times: 4, optimizer: {{lr: 1.0e-3}}}}
buffer:
  batch_size: 2
  total_steps: 2
  explorer_input:
    taskset:
      path: {tasks}
      default_workflow_type: example_workflow
      format: {{prompt_key: question, response_key: answer}}
      rollout_args: {{temperature: 0.7}}
    eval_tasksets:
      - name: held_out
        path: {tasks}
        default_workflow_type: example_workflow
        format: {{prompt_key: question, response_key: answer}}
explorer: {{eval_interval: 2}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("found_by", ["plugin directory", "module"])
def test_the_example_trains_through_a_trinity_shaped_file(text, registry, tiny_model, tmp_path, monkeypatch, found_by):
    from rollwright.cli.main import main

    jsonl = [line for line in blocks(text, "json")[0].splitlines() if line.startswith("{")]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(jsonl * 2) + "\n")
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "guide_example.py").write_text(full_example(text))
    content = TRINITY_FILE.format(root=tmp_path / "runs", model=tiny_model, tasks=tasks)
    options = ["--plugin-dir", str(plugins)]
    if found_by == "module":
        monkeypatch.syspath_prepend(str(plugins))
        content = content.replace("example_workflow", "guide_example.ExampleWorkflow")
        options = []
    file = tmp_path / "guide.yaml"
    file.write_text(content)
    monkeypatch.setenv("ROLLWRIGHT_PLUGIN_PATH", "")

    assert main(["run", "--config", str(file), *options, "stats_logger.display=none"]) == 0

    run = tmp_path / "runs" / "guide" / "example"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {number: {k: v for step in steps if step["step"] == number for k, v in step.items()} for number in (1, 2)}
    assert [by_step[number]["samples"] for number in (1, 2)] == [8.0, 8.0]  # 2 tasks of 4 samples: the workflow makes its own n
    assert by_step[2]["version"] == 2.0
    assert "eval/reward" in by_step[2]
    assert (run / "checkpoints" / "final" / "model.safetensors").exists()
    sys.modules.pop("guide_example", None)
