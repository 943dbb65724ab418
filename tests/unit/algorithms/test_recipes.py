"""Recipes are defaults: the user's keys win, names that do not exist are refused."""

import pytest

from rollwright.algorithms.losses import find_policy_loss
from rollwright.config.experiment import GRPOConfig
from rollwright.config.loading import load_expr_config
from rollwright.config.recipes import RECIPES, Recipe, apply_recipe, find_recipe
from rollwright.config.sections import PPOActorConfig
from rollwright.errors import ConfigError


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_sets_keys_that_exist_to_values_that_are_allowed(name):
    config = GRPOConfig()
    config.actor.recipe = name
    apply_recipe(config)
    find_policy_loss(config.actor)
    for section, keys in ((config.actor, RECIPES[name].actor), (config.rollout, RECIPES[name].rollout)):
        for dotted, value in keys.items():
            holder = section
            *parents, leaf = dotted.split(".")
            for parent in parents:
                holder = getattr(holder, parent)
            field = type(holder).__dataclass_fields__[leaf]
            assert getattr(holder, leaf) == value
            assert value in field.metadata.get("choices", [value])
            assert value in field.metadata.get("registry", [value])


def test_what_the_user_set_wins():
    config = GRPOConfig()
    config.actor.recipe = "dapo"
    config.actor.eps_clip_higher = 0.5
    apply_recipe(config, {"actor.eps_clip_higher", "rollout.dynamic_filter"})
    assert config.actor.eps_clip_higher == 0.5
    assert config.rollout.dynamic_filter is None
    assert config.actor.mask_truncated


def test_a_section_that_was_set_is_left_alone():
    config = PPOActorConfig(recipe="dr_grpo", adv_norm=None)
    apply_recipe(config, {"adv_norm"})
    assert config.adv_norm is None
    assert config.loss_aggregation == "constant"


def test_a_config_made_in_python_keeps_what_is_not_the_default():
    config = PPOActorConfig(recipe="gspo", eps_clip=0.1)
    apply_recipe(config)
    assert (config.eps_clip, config.eps_clip_higher, config.importance_level) == (0.1, 4e-4, "sequence")
    config.importance_level = "token"
    apply_recipe(config)
    assert config.importance_level == "token"  # once is enough


def test_a_file_sets_the_recipe_and_what_differs_from_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "actor: {path: m, recipe: dapo, eps_clip_higher: null, adv_norm: {std_level: batch}}\ntrain_dataset: {path: d}\n"
    )
    config, _ = load_expr_config([str(file), "actor.eps_clip=0.2"], GRPOConfig)
    assert config.actor.eps_clip_higher is None
    assert config.actor.mask_truncated
    assert config.rollout.dynamic_filter == "no_variance"
    file.write_text("actor: {path: m, recipe: dap}\n")
    with pytest.raises(ConfigError, match=r"actor.recipe.*Did you mean 'dapo'"):
        load_expr_config([str(file)], GRPOConfig)


@pytest.mark.parametrize(
    ("evaluator", "limit"),
    [
        ("", 4096),
        ("{gconfig: {temperature: 0.5, greedy: false}}", 4096),
        ("{gconfig: {max_new_tokens: 512}}", 512),
        ("{gconfig: {max_tokens: 512}}", 512),
    ],
)
def test_evaluation_generates_as_much_as_the_run_unless_it_says_otherwise(tmp_path, evaluator, limit):
    file = tmp_path / "config.yaml"
    file.write_text(
        "actor: {path: m}\ntrain_dataset: {path: d}\nvalid_dataset: {path: d}\ngconfig: {max_new_tokens: 4096}\n"
        + (f"evaluator: {evaluator}\n" if evaluator else "")
    )
    config, _ = load_expr_config([str(file)], GRPOConfig)
    assert config.evaluator.gconfig.max_new_tokens == limit
    assert apply_recipe(config).evaluator.gconfig.max_new_tokens == limit
    made = GRPOConfig()
    made.gconfig.max_new_tokens = 64
    assert apply_recipe(made).evaluator.gconfig.max_new_tokens == 64


def test_other_spellings():
    assert find_recipe("Dr-GRPO") is RECIPES["dr_grpo"]
    assert find_recipe("reinforce++") is RECIPES["reinforceplusplus"]
    assert find_recipe("reinforceplusplus++") is RECIPES["reinforceplusplus_baseline"]


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"Did you mean 'gspo'.*gspo, lite_ppo"):
        find_recipe("gspoo")
    with pytest.raises(ConfigError, match="stage of its own"):
        find_recipe("dpo")


def test_a_recipe_of_a_user():
    RECIPES["mine"] = Recipe("ours", {"eps_clip": 0.1, "adv_norm.std_level": "none"})
    try:
        config = PPOActorConfig(recipe="mine")
        apply_recipe(config)
        assert (config.eps_clip, config.adv_norm.std_level) == (0.1, "none")
    finally:
        del RECIPES["mine"]
