"""AReaL's PPOConfig: a file with a critic and no recipe runs PPO, with the KL in the reward as there."""

import pytest

from rollwright import PPOConfig, PPOCriticConfig, load_expr_config, load_stages
from rollwright.config.plan import in_words
from rollwright.errors import ConfigError

FILE = """\
experiment_name: x
workflow: rlvr
reward_fn: numeric_reward
gconfig: {n_samples: 1}
train_dataset: {path: arithmetic}
actor:
  path: m
  kl_ctl: 0.1
  discount: 0.99
  gae_lambda: 0.95
  adv_norm: {mean_level: batch, std_level: batch}
critic: {is_critic: true, path: "${actor.path}", eps_clip: 0.4}
"""


@pytest.fixture
def file(tmp_path):
    def write(text=FILE):
        (tmp_path / "areal.yaml").write_text(text)
        return tmp_path / "areal.yaml"

    return write


def built(path, *overrides):
    (stage,) = load_stages(path, overrides)
    return stage.config


def test_a_critic_switches_ppo_on_and_takes_the_kl_from_the_reward(file, caplog):
    with caplog.at_level("INFO", "rollwright.config"):
        (stage,) = load_stages(file())
    actor, critic = stage.config.actor, stage.config.critic
    assert (actor.recipe, actor.adv_estimator, actor.kl_in, actor.kl_estimator) == ("ppo", "gae", "reward", "k1")
    assert actor.adv_estimator_kwargs == {"gamma": 0.99, "lam": 0.95, "whiten": True}
    assert (critic.path, critic.eps_clip) == ("m", 0.4)
    assert "KL to the reference: taken from the reward of each token, 0.1 × k1" in in_words(stage)
    assert "has AReaL's shape" in caplog.text
    assert "actor.kl_ctl -> actor.kl_in: reward" in caplog.text


def test_a_training_script_loads_it(file):
    config, path = load_expr_config(["--config", str(file())], PPOConfig)
    assert path == str(file())
    assert config.actor.kl_in == "reward"
    assert isinstance(config.critic, PPOCriticConfig)


def test_what_the_file_does_not_say_is_not_said_for_it(file):
    plain = built(file(FILE.replace("  kl_ctl: 0.1\n", "").replace("  adv_norm: {mean_level: batch, std_level: batch}\n", "")))
    assert (plain.actor.kl_ctl, plain.actor.kl_in) == (0.0, "loss")
    assert plain.actor.adv_estimator_kwargs["whiten"] is False
    own = built(file(FILE.replace("kl_ctl: 0.1", "kl_ctl: 0.1\n  kl_in: loss\n  kl_estimator: k3")))
    assert (own.actor.kl_in, own.actor.kl_estimator) == ("loss", "k3")


def test_an_estimator_whose_gradient_vanishes_in_the_reward_is_named(file):
    (stage,) = load_stages(file(FILE.replace("kl_ctl: 0.1", "kl_ctl: 0.1\n  kl_estimator: k3")))
    assert stage.config.actor.kl_in == "reward"
    assert "0.1 × k3, whose gradient vanishes near the reference (k1 has that of the KL)" in in_words(stage)


def test_overrides_are_in_either_form(file):
    config = built(file(), "actor.gae_lambda=0.5", "actor.adv_norm=null", "actor.optimizer.lr=0.5")
    assert config.actor.adv_estimator_kwargs == {"gamma": 0.99, "lam": 0.5, "whiten": False}
    assert config.actor.optimizer.lr == 0.5
    assert built(file(FILE.replace("kl_ctl: 0.1", "kl_ctl: 0.0")), "actor.kl_ctl=0.2").actor.kl_in == "reward"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("std_level: batch", "std_level: group", r"areal\.yaml:11: actor\.adv_norm is .* over the tokens of the batch"),
        ("gae_lambda: 0.95", "gae_lambda: 1.5", r"areal\.yaml:6: .*adv_estimator_kwargs\.lam: must be at most 1\.0, got 1\.5"),
    ],
)
def test_a_fault_names_the_line(file, before, after, message):
    with pytest.raises(ConfigError, match=message):
        load_expr_config([str(file(FILE.replace(before, after)))], PPOConfig)


def test_a_file_that_names_a_recipe_is_this_projects_own(file):
    own = FILE.replace("  discount: 0.99\n  gae_lambda: 0.95\n", "  recipe: ppo\n")
    own = own.replace("  adv_norm: {mean_level: batch, std_level: batch}\n", "").replace("is_critic: true, ", "")
    assert built(file(own)).actor.kl_in == "loss"
    assert built(file(own.replace("  recipe: ppo\n", "")), "actor.recipe=ppo").actor.kl_in == "loss"
