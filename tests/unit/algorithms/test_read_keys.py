"""A key of the algorithm changes what is computed, or is refused: every key beside every loss.

What is expected is not written down: it is measured, as the difference that the key makes to the loss and its gradient.
"""

import dataclasses

import pytest
import torch

from rollwright.algorithms.advantages import find_estimator
from rollwright.algorithms.losses import find_policy_loss, unread_keys
from rollwright.config.experiment import GRPOConfig
from rollwright.config.loading import build_config, load_stages
from rollwright.config.recipes import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, RECIPES
from rollwright.config.rules import faults_of
from rollwright.config.sections import NormConfig, OptimizerConfig, PPOActorConfig
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError
from rollwright.trainers.checks.unknown_names import refuse_unknown_names
from rollwright.training.policy_update import ROW, PolicyUpdate, recomputes_logprobs

#: A value other than the default for each key of the loss.
OF_THE_LOSS = {
    "eps_clip": 0.05,
    "eps_clip_higher": 0.6,
    "c_clip": 1.2,
    "importance_level": "sequence",
    "kl_estimator": "k2",
    "behav_imp_weight_cap": 1.1,
    "behav_imp_weight_mode": "clamp",
    "behav_imp_weight_level": "sequence",
    "prox_logp_method": "interpolate",
    "recompute_logprob": True,
}
#: What else is set.
BESIDE = [
    {},
    {"kl_ctl": 0.1},
    {"use_decoupled_loss": True},
    {"use_decoupled_loss": True, "behav_imp_weight_cap": None},
    {"use_decoupled_loss": True, "prox_logp_method": "interpolate"},
]


def measured(config: PPOActorConfig) -> torch.Tensor:
    """The loss of a batch and its gradient, before the first optimizer step and, if a batch has several, after it."""
    generator = torch.Generator().manual_seed(3)
    shape = (6, 5)
    behaviour, prox, current, reference = (torch.randn(shape, generator=generator) * 0.7 - 1.0 for _ in range(4))
    part = {
        "loss_weights": torch.full(shape, 0.1),
        "update_mask": torch.ones(shape),
        "loss_mask": torch.ones(shape),
        ROW: torch.arange(6),
        "logprobs": behaviour,
        "advantages": torch.randn(6, 1, generator=generator).expand(shape) * 2.0,
        "versions": torch.arange(5).expand(shape),
        "ref_logp": reference,
    }
    found = []
    several = config.ppo_n_minibatches > 1
    extra = {"prox_logp": prox} if several and recomputes_logprobs(config) else {}
    for first in (True, False) if several else (True,):
        logp = (prox if first else current).clone().requires_grad_()
        update = PolicyUpdate(config, find_policy_loss(config), 5, part)
        update.before_first_step = first
        value = update.loss({**part, **extra}, logp, torch.ones(shape))
        found += [value.detach()[None], torch.autograd.grad(value, logp)[0].flatten()]
    return torch.cat(found)


def refusals(config: PPOActorConfig) -> list[str]:
    return [".".join(map(str, path)) for path, _ in faults_of(config)] + [key for key, _ in unread_keys(config)]


@pytest.mark.parametrize("beside", BESIDE, ids=str)
@pytest.mark.parametrize("key", OF_THE_LOSS)
@pytest.mark.parametrize("loss", POLICY_LOSSES.built_in)
def test_a_key_beside_a_loss_is_read_or_refused(loss, key, beside):
    if key in beside:
        return
    plain = PPOActorConfig(policy_loss=loss, ppo_n_minibatches=2, **beside)
    changed = dataclasses.replace(plain, **{key: OF_THE_LOSS[key]})
    try:
        makes_a_difference = not torch.equal(measured(plain), measured(changed))
    except ConfigError:
        return  # the loss is refused beside these
    assert refusals(plain) == []
    if key == "recompute_logprob" and "use_decoupled_loss" in beside:  # says the same, which files of other systems do
        assert makes_a_difference is ("prox_logp_method" in beside)
        assert refusals(changed) == (["prox_logp_method"] if "prox_logp_method" in beside else [])
        return
    assert (key in refusals(changed)) is not makes_a_difference


@pytest.mark.parametrize("key", ["recompute_logprob", "prox_logp_method"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("loss", POLICY_LOSSES.built_in)
def test_what_is_recomputed_before_the_only_step_of_a_batch_is_read_or_refused(loss, key, decoupled):
    plain = PPOActorConfig(policy_loss=loss, use_decoupled_loss=decoupled)
    changed = dataclasses.replace(plain, **{key: OF_THE_LOSS[key]})
    try:
        makes_a_difference = not torch.equal(measured(plain), measured(changed))
    except ConfigError:
        return
    if (key, decoupled) != ("recompute_logprob", True):
        assert (key in refusals(changed)) is not makes_a_difference


def test_shifted_log_probabilities_are_recomputed_whatever_the_loss_compares_with():
    config = PPOActorConfig(policy_loss="topr", recompute_logprob=True)
    assert [key for key, _ in unread_keys(config)] == ["recompute_logprob"]
    assert unread_keys(config, shifted=True) == []


@pytest.mark.parametrize("key", [each.name for each in dataclasses.fields(NormConfig)])
@pytest.mark.parametrize(
    "norm", [{}, {"std_level": "none"}, {"mean_level": "batch"}, {"std_level": "batch"}, {"leave_one_out": True}], ids=str
)
@pytest.mark.parametrize("estimator", ["normalised", "test_ranks"])
def test_a_key_of_the_advantage_is_read_or_refused(estimator, norm, key):
    if key in norm:
        return
    values = {"mean_level": "none", "std_level": "batch", "leave_one_out": True, "eps": 0.5}
    ADVANTAGE_ESTIMATORS["test_ranks"] = lambda rewards_B, group_ids_B, sample_ids_B: rewards_B.argsort()
    try:
        plain = PPOActorConfig(adv_estimator=estimator, adv_norm=NormConfig(**norm if estimator == "normalised" else {}))
        changed = dataclasses.replace(plain, adv_norm=dataclasses.replace(plain.adv_norm, **{key: values.get(key, True)}))
        batch = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6)
        before, after = (find_estimator(config)(*batch, {}) for config in (plain, changed))
        makes_a_difference = any(not torch.allclose(*pair) for pair in zip(before, after, strict=True))
        assert (f"adv_norm.{key}" in refusals(changed)) is not makes_a_difference
    finally:
        del ADVANTAGE_ESTIMATORS["test_ranks"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (PPOActorConfig(loss_constant=7.0), "loss_constant"),
        (PPOActorConfig(loss_aggregation="row", loss_constant=7.0), "loss_constant"),
        (PPOActorConfig(adv_estimator_kwargs={"eps": 1.0}), "adv_estimator_kwargs"),
        (PPOActorConfig(optimizer=OptimizerConfig(min_lr_ratio=0.1)), "optimizer.min_lr_ratio"),
        (PPOActorConfig(use_decoupled_loss=True, recompute_logprob=True, prox_logp_method="interpolate"), "prox_logp_method"),
    ],
)
def test_other_keys_that_nothing_reads(config, key):
    assert refusals(config) == [key]


@pytest.mark.parametrize(
    "config",
    [
        PPOActorConfig(loss_aggregation="constant", loss_constant=7.0),
        PPOActorConfig(optimizer=OptimizerConfig(lr_scheduler_type="linear", min_lr_ratio=0.1)),
        PPOActorConfig(optimizer=None),
        PPOActorConfig(adv_norm=None),
    ],
)
def test_keys_that_are_read(config):
    assert refusals(config) == []


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ("backend: builtin, weight_update: shared", "weight_update"),
        ("backend: builtin, weight_update_path: w", "weight_update_path"),
        ("backend: builtin, weight_dtype: bfloat16", "weight_dtype"),
        ("backend: builtin, request_retries: 1", "request_retries"),
        ("backend: sglang, weight_update_path: w", "weight_update_path"),
        ("backend: sglang, device: cpu", "device"),
        ("backend: vllm, max_running_requests: 4", "max_running_requests"),
        ("backend: vllm, kv_cache_bytes: 100000", "kv_cache_bytes"),
        ("backend: builtin_process, kv_cache_bytes: 100000, device: cpu, max_running_requests: 4, request_retries: 1", None),
        ("backend: builtin, kv_cache_bytes: 100000, device: cpu, max_running_requests: 4", None),
        ("backend: vllm, weight_update: disk, weight_update_path: w, request_retries: 1", None),
    ],
)
def test_keys_of_an_engine_that_is_not_used(rollout, key):
    document = parse_yaml(f"rollout: {{{rollout}}}", file="f.yaml")
    if key is None:
        build_config(document, [], GRPOConfig)
    else:
        with pytest.raises(ConfigError, match=rf"f\.yaml:1: rollout\.{key}: is "):
            build_config(document, [], GRPOConfig)


TEXT = """
actor: {{path: m, recipe: {recipe}}}
train_dataset: {{path: arithmetic}}
workflow: rlvr
reward_fn: numeric_reward
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_sets_is_never_refused(tmp_path, recipe):
    file = tmp_path / "f.yaml"
    teachers = "teachers: [{path: m}]\n" if recipe == "distill" else ""
    file.write_text(TEXT.format(recipe=recipe) + teachers)
    refuse_unknown_names(load_stages(file))
    refuse_unknown_names(load_stages(file, ["actor.policy_loss=sapo"] if recipe == "gspo" else []))


def test_the_refusal_names_the_file_and_what_is_read(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(TEXT.format(recipe="cispo"))
    with pytest.raises(
        ConfigError, match=r"override 'actor\.eps_clip=0\.3': actor\.eps_clip: is set, but the loss 'cispo' does not"
    ):
        refuse_unknown_names(load_stages(file, ["actor.eps_clip=0.3"]))
    with pytest.raises(
        ConfigError, match=r"override 'actor\.kl_estimator=k1': actor\.kl_estimator: is set, but not read: kl_ctl is 0"
    ):
        load_stages(file, ["actor.kl_estimator=k1"])
    refuse_unknown_names(load_stages(file, ["actor.eps_clip=0.2", "actor.kl_estimator=k3"]))  # the defaults say nothing


def test_a_config_made_in_python_is_warned_about(caplog):
    find_policy_loss(PPOActorConfig(policy_loss="sapo", eps_clip=0.3))
    assert "actor.eps_clip is set, but the loss 'sapo' does not read it: it reads importance_level" in caplog.text
