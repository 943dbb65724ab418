"""The registry of reward functions."""

from __future__ import annotations

import functools

import pytest

from rollwright.errors import RewardError
from rollwright.rewards.registry import REWARD_FUNCTIONS, RewardRegistry


def empty_registry():
    return RewardRegistry("reward function", RewardError, variable="REWARD_FUNCTIONS")


def make(qualname="one"):
    def function(prompt, completion, prompt_ids, completion_ids, **data):
        return 1.0

    function.__qualname__ = qualname
    return function


def test_the_same_function_replaces_itself_and_another_is_refused():
    registry = empty_registry()
    first, again = make(), make()
    registry.register_module("mine")(first)
    registry.register_module("mine")(again)
    assert registry.get("mine") is again
    with pytest.raises(RewardError, match=r"'mine' is taken by .*\.one, so .*\.two cannot have it"):
        registry.register_module("mine")(make("two"))


def test_a_decorator_without_a_name_is_told():
    with pytest.raises(RewardError, match="give the name"):
        empty_registry().register_module(make())


def test_the_names_that_files_use_are_there():
    expected = {
        "math_reward", "math_boxed_reward", "format_reward", "countdown_reward", "accuracy_reward", "math_dapo_reward",
        "numeric_reward", "exact_match_reward", "f1_reward", "arithmetic_reward", "gsm8k_reward",
    }  # fmt: skip
    assert expected <= set(REWARD_FUNCTIONS)
    assert "math_reward" in REWARD_FUNCTIONS


def test_only_bounded_functions_run_inline():
    inline = {name for name in REWARD_FUNCTIONS if getattr(REWARD_FUNCTIONS.get(name), "runs_inline", False)}
    assert not inline & {"math_reward", "math_boxed_reward", "accuracy_reward", "math_dapo_reward"}
    assert {"numeric_reward", "f1_reward", "format_reward"} <= inline


def test_import_paths_are_followed():
    from rollwright.rewards.text import f1_reward

    assert REWARD_FUNCTIONS.get("rollwright.rewards.text.f1_reward") is f1_reward
    assert REWARD_FUNCTIONS.get("rollwright.rewards.text:f1_reward") is f1_reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math_rewrd", r"Did you mean 'math_reward'\? Tried: registered names \(.*math_reward"),
        ("nowhere.at.all", r"Tried: module 'nowhere.at' \(there is no module 'nowhere'\)\. It is an import path"),
        ("rollwright.rewards.text.nothing", "'nothing' in module 'rollwright.rewards.text'"),
        ("rollwright.rewards.text._ARTICLES", "is frozenset, which is no reward function"),
    ],
)
def test_what_is_not_found_lists_what_was_tried(name, message):
    with pytest.raises(RewardError, match=message):
        REWARD_FUNCTIONS.get(name)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("1/0", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_broken_module_is_not_called_missing(tmp_path, monkeypatch, body, message):
    (tmp_path / "broken_rewards.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=message):
        REWARD_FUNCTIONS.get("broken_rewards.score")


def test_arguments_are_bound_and_classes_made():
    registry = empty_registry()

    @registry.register_module("scaled")
    class Scaled:
        def __init__(self, scale=1.0):
            self.scale = scale

        def __call__(self, prompt, completion, prompt_ids, completion_ids):
            return self.scale

    registry.register_module("plain")(make())
    assert registry.build("scaled", scale=3.0)("p", "c", [], []) == 3.0
    assert isinstance(registry.build("plain", weight=1), functools.partial)
    assert registry.build("plain") is registry.get("plain")
