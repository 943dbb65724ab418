"""Which overrides are sweeps, and the runs that they stand for."""

import pytest

from rollwright.config.sweeps import members_of
from rollwright.errors import ConfigError


def overrides_of(*words, seeds=None):
    return [list(member.overrides) for member in members_of(words, seeds)]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("actor.optimizer.lr=1e-4,3e-4", ["1e-4", "3e-4"]),
        ("actor.recipe=grpo,gspo", ["grpo", "gspo"]),
        ("stages.grpo.actor.kl_ctl=0,0.1", ["0", "0.1"]),
        ("stages.0.model.dtype=float32,bfloat16", ["float32", "bfloat16"]),
        ("deterministic=true,false", ["true", "false"]),
        ("workflow_kwargs.turns=1,2", ["1", "2"]),
        ("tasksets.0.weight=1,2", ["1", "2"]),
    ],
)
def test_commas_in_the_value_of_a_single_key_are_a_run_each(word, values):
    key = word.partition("=")[0]
    assert overrides_of("trial_name=t", word) == [["trial_name=t", f"{key}={value}"] for value in values]


@pytest.mark.parametrize(
    "word",
    [
        "actor.optimizer.lr=1e-4",
        "gconfig.stop=[a,b]",
        "gconfig.stop=a,b",
        "rollout.addresses=a:1,b:2",
        "plugins=a.py,b.py",
        "actor={path: m, dtype: float32}",
        'workflow_kwargs.prompt="Yes,no"',
        "workflow_kwargs.prompt=First think, then answer",
        "actor.path=${oc.env:HOME,/tmp}",
        "rollout.api_key=one,two",
        "tasksets=a,b",
    ],
)
def test_other_values_stay_one_run(word):
    assert members_of([word]) == []


def test_every_combination_runs_and_the_seed_changes_fastest():
    members = members_of(["seed=1,2", "actor.optimizer.lr=1e-4,3e-4", "actor.path=org/a-7b,org/b"])
    assert [(member.setting, member.seed) for member in members] == [
        (f"lr={lr} path={path}", seed) for lr in ("1e-4", "3e-4") for path in ("org/a-7b", "org/b") for seed in ("1", "2")
    ]
    assert members[0].label == "lr=1e-4-path=a-7b-seed=1"
    assert members[0].overrides == ("seed=1", "actor.optimizer.lr=1e-4", "actor.path=org/a-7b")
    assert len({member.label for member in members}) == 8


def test_seeds_are_a_sweep_even_one():
    assert overrides_of("trial_name=t", seeds="1, 2") == [["trial_name=t", "seed=1"], ["trial_name=t", "seed=2"]]
    assert [member.label for member in members_of([], "7")] == ["seed=7"]


def test_keys_with_the_same_end_keep_what_tells_them_apart():
    (member, *_) = members_of(["stages.a.model.optimizer.lr=1,2", "stages.b.actor.optimizer.lr=3,4"])
    assert member.setting == "model.optimizer.lr=1 actor.optimizer.lr=3"


def test_values_that_look_alike_in_file_names_have_trials_of_their_own():
    labels = [member.label for member in members_of(["actor.path=a/m,b/m"])]
    assert labels == ["path=m", "path=m-2"]


def test_a_secret_that_every_run_needs_is_passed_on_as_it_is():
    assert overrides_of("rollout.api_key=hidden", seeds="1") == [["rollout.api_key=hidden", "seed=1"]]


@pytest.mark.parametrize(
    ("words", "seeds", "message"),
    [
        (["seed=4"], "1,2", "both set the seed"),
        ([], "1,x", "give whole numbers"),
        ([], "1,1", "--seeds 1,1: 1 is listed twice"),
        (["actor.kl_ctl=0,0.1,0"], None, "0 is listed twice"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused(words, seeds, message):
    with pytest.raises(ConfigError, match=message):
        members_of(words, seeds)
