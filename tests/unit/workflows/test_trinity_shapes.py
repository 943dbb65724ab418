"""What workflows from Trinity-RFT lean on: arguments that are a dict, rewards that are classes, no auxiliary models, marks and names."""

import dataclasses
from copy import deepcopy

import pytest
from parts import Script, tool_tokenizer

import rollwright
from rollwright import (
    Experience,
    GenerationHyperparameters,
    MathBoxedRewardFn,
    MathRewardFn,
    RewardFn,
    SimpleWorkflow,
    Workflow,
)
from rollwright.compat.replacements import TRINITY as REPLACEMENTS
from rollwright.compat.trinity_names import build_mm_message
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.errors import ConfigError, DataError, RewardError, WorkflowError
from rollwright.registry import import_path
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.task import Task
from rollwright.workflows.task_runner import TaskRunner


def test_arguments_are_read_as_a_dict_and_as_attributes():
    arguments = GenerationHyperparameters(n=3, max_tokens=7, temperature=0.5, logprobs=0)
    assert (arguments.n_samples, arguments.max_new_tokens) == (3, 7)
    assert dict(**arguments) == arguments.copy() == dict(arguments.items())
    assert (arguments["n"], arguments["n_samples"], arguments.get("max_tokens"), arguments.get("logprobs", 0)) == (3, 3, 7, 0)
    changed = deepcopy(arguments)
    changed["n"] = 1
    assert (changed.n, arguments.n) == (1, 3)
    assert GenerationHyperparameters().new(**arguments) == arguments
    assert GenerationHyperparameters(**dataclasses.asdict(arguments)) == arguments
    with pytest.raises(KeyError):
        arguments["no_such"]
    with pytest.raises(ConfigError, match="has no no_such"):
        arguments["no_such"] = 1


class Length(RewardFn):
    """A reward of the package's style: a class, whose call gives parts."""

    def __init__(self, weight=1.0):
        self.weight = weight

    def __call__(self, response, truth=None, level=0, **kwargs):
        return {"right": float(response == truth), "level": self.weight * level}


class NoParts(RewardFn):
    def __call__(self, response):
        return 1.0


class OwnRun(SimpleWorkflow):
    """A run in the package's style over whatever reward the taskset names."""

    def run(self):
        responses = self.model.chat(self.format_messages(), **self.rollout_args)
        for response in responses:
            parts = self.reward_fn(response=response.response_text, truth=self.truth)
            response.metrics.update(parts)
            response.reward = sum(parts.values())
        return responses


def rewards_of(workflow, reward_fn, row, **settings):
    tokenizer = tool_tokenizer()
    layout = FormatConfig(prompt_key="question", response_key="answer")
    taskset = TasksetConfig(workflow=workflow, reward_fn=reward_fn, format=layout, group_size=2, **settings)
    with RolloutExecutor(Script(tokenizer, "4"), RolloutConfig(max_sample_retries=0)) as executor:
        return executor.rollout_batch([{**row, "ordinal": 0}], TaskRunner([taskset], tokenizer))["rewards"].tolist()


@pytest.mark.parametrize("workflow", ["simple_workflow", f"{__name__}:OwnRun"])
def test_a_class_of_rewards_is_named_by_a_taskset(workflow):
    row = {"question": "2+2=", "answer": "4"}
    assert rewards_of(workflow, f"{__name__}:Length", row) == [1.0, 1.0]
    assert rewards_of(workflow, "numeric_reward", row) == [1.0, 1.0]


def test_a_class_of_rewards_takes_arguments_and_columns():
    row = {"question": "2+2=", "answer": "4", "level": 2}
    assert rewards_of("simple_workflow", f"{__name__}:Length", row, reward_fn_args={"weight": 0.25}) == [1.5, 1.5]


async def test_a_class_of_rewards_that_gives_no_parts_is_told():
    with pytest.raises(RewardError, match=r"NoParts returned 1\.0; a RewardFn returns a dict of numbers"):
        await AsyncRewardWrapper(NoParts, max_retries=0)("p", "c", [], [], answer="4")


def test_the_package_calls_its_rewards_with_the_truth_second_and_more():
    parts = {"accuracy": 1.0, "format_score": 0.0}
    assert MathBoxedRewardFn(any_argument=1)(r"\boxed{4}", "4", response_token=[1], info={}) == parts
    assert MathRewardFn()(response="<think>a</think><answer>4</answer>", truth="4") == {"accuracy": 1.0, "format_score": 0.1}
    assert rollwright.verify_math_answer(r"\boxed{4}", "4")[0] == 1.0
    assert rollwright.verify_math_answer(r"\boxed{5}", "4")[0] == 0.0


class Bare(Workflow):
    def run(self):
        return []


def test_there_are_no_auxiliary_models_where_none_are_configured():
    task = Task(workflow=Bare)
    for given in (None, []):
        assert Bare(task=task, model=None, auxiliary_models=given).auxiliary_models is None
        assert task.to_workflow(None, given).auxiliary_models is None
    assert Bare(task=task, model=None).auxiliary_model_wrappers is None
    with_some = Bare(task=task, model=None, auxiliary_models=["client"])
    assert with_some.auxiliary_models == ["client"]
    with pytest.raises(WorkflowError, match="Teachers that score tokens are not supported"):
        _ = with_some.auxiliary_model_wrappers


def test_a_cut_response_is_called_so():
    made = Experience(tokens=[1, 2], prompt_length=1, truncated=True)
    assert (made.truncate_status, dataclasses.replace(made, truncated=False).truncate_status) == ("response_truncated", None)


def test_marks_change_nothing():
    assert rollwright.Deprecated(Bare) is rollwright.Experimental(Bare) is Bare


def test_a_message_with_images():
    image, text = {"type": "image", "image": "a"}, {"type": "text", "text": "what?"}
    assert build_mm_message("what?", [], []) == {"role": "user", "content": "what?"}
    assert build_mm_message("what?", ["a"])["content"] == [image, text]
    assert build_mm_message("what?<image>", ["b", "a"])["content"] == [{**image, "image": "b"}, text, image]
    with pytest.raises(DataError, match="places for 1 images and the task has 0"):
        build_mm_message("<image>", [])
    with pytest.raises(DataError, match="videos"):
        build_mm_message("a", [], ["b"])


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_a_name_that_is_missing_is_told_with_what_to_write(name):
    with pytest.raises(ImportError, match="which Trinity-RFT has: "):
        exec(f"from rollwright import {name}")


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("import gymnasium_of_theirs", r"pip install gymnasium_of_theirs \(if it is a file of yours"),
        ("import trinity.common", "import its names from rollwright"),
        ("from areal.api import x", "import its names from rollwright"),
        ("import rollwright.api", "names are imported from rollwright itself"),
        ("import json.nothing", "json is installed, but has no such module"),
    ],
)
def test_a_package_that_is_missing_is_to_be_installed(line, advice, tmp_path, monkeypatch):
    (tmp_path / "workflow_of_theirs.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=advice):
        import_path("workflow_of_theirs:Flow", "workflow")
