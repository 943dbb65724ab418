"""Losses against formulas written out token by token in plain Python, and gradients against those of the formula."""

import math

import pytest
import torch

from rollwright.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    aggregation_weights,
    cispo_loss,
    clip_loss,
    dpo_loss,
    find_policy_loss,
    kl_estimate,
    kl_loss,
    opmd_loss,
    reinforce_loss,
    sapo_loss,
    topr_loss,
)
from rollwright.config.sections import PPOActorConfig
from rollwright.errors import ConfigError

ROWS, LENGTH = 3, 7


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(3)

    def draw():
        return torch.randn(ROWS, LENGTH, dtype=torch.float64, generator=generator)

    logp = (draw() * 0.6 - 2).requires_grad_()
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]], dtype=torch.float64)
    return logp, draw() * 0.6 - 2, draw(), mask


def each(mask):
    return [(row, column) for row in range(ROWS) for column in range(LENGTH) if mask[row, column]]


def test_clip_loss_is_ppos(numbers):
    logp, old, advantages, mask = numbers
    got = clip_loss(logp, old, advantages, mask, eps_clip=0.2, eps_clip_higher=0.3)
    seen = set()
    for at in each(mask):
        ratio, advantage = math.exp((logp - old)[at].item()), float(advantages[at])
        expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        assert got.values[at].item() == pytest.approx(expected)
        clipped = (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8)
        assert bool(got.clipped[at]) == clipped
        seen.add(clipped)
    assert seen == {True, False}
    assert not got.clipped[mask == 0].any()


def test_a_clipped_token_has_no_gradient(numbers):
    logp, old, advantages, mask = numbers
    got = clip_loss(logp, old, advantages, mask)
    (got.values * mask).sum().backward()
    for at in each(mask):
        ratio, advantage = math.exp((logp - old)[at].item()), float(advantages[at])
        expected = 0.0 if bool(got.clipped[at]) else -advantage * ratio
        assert logp.grad[at].item() == pytest.approx(expected)


def test_dual_clip_bounds_negative_advantages():
    logp = torch.tensor([[math.log(9.0), math.log(9.0), 0.0]])
    advantages = torch.tensor([[-1.0, 1.0, -1.0]])
    got = clip_loss(logp, torch.zeros(1, 3), advantages, torch.ones(1, 3), c_clip=3.0)
    assert got.values[0].tolist() == pytest.approx([3.0, -1.2, 1.0])
    assert got.clipped[0].tolist() == [True, True, False]


def test_sequence_level_is_gspo(numbers):
    logp, old, advantages, mask = numbers
    row_advantage = advantages[:, :1].expand_as(advantages)
    got = clip_loss(logp, old, row_advantage, mask, level="sequence", eps_clip=0.1, eps_clip_higher=0.2)
    weights = aggregation_weights(mask, "row")
    loss = (weights * got.values).sum()
    expected = 0.0
    for row in range(ROWS):
        tokens = [at for at in each(mask) if at[0] == row]
        ratio = math.exp(sum(float(logp[at] - old[at]) for at in tokens) / len(tokens))
        advantage = float(advantages[row, 0])
        expected -= min(ratio * advantage, min(max(ratio, 0.9), 1.2) * advantage) / ROWS
    assert loss.item() == pytest.approx(expected)


def reference_gspo_token(logp, old, advantages, mask, low, high):
    """GSPO-token (arXiv 2507.18071, section 4.3) row by row: the ratio's value is the row's, its gradient the token's own."""
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[row, t]]
        ratio = math.exp(sum(float((logp - old)[row, t].detach()) for t in tokens) / len(tokens))
        for t in tokens:
            own = ratio * logp[row, t].exp() / logp[row, t].exp().detach()
            surrogate = torch.minimum(own * advantages[row, t], own.clamp(1 - low, 1 + high) * advantages[row, t])
            loss = loss - surrogate / len(tokens) / len(mask)
    return loss


def test_sequence_level_keeps_the_advantages_of_tokens(numbers):
    """GSPO over advantages that differ within a row: each token is moved by its own, not by the row's mean."""
    logp, old, advantages, mask = numbers
    expected = reference_gspo_token(logp, old, advantages, mask, 0.1, 0.2)
    (wanted,) = torch.autograd.grad(expected, logp)
    got = clip_loss(logp, old, advantages, mask, level="sequence", eps_clip=0.1, eps_clip_higher=0.2)
    loss = (aggregation_weights(mask, "row") * got.values).sum()
    (found,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(found, wanted)
    assert {float(value) > 0 for value in found[1][found[1] != 0]} == {True, False}


def test_one_advantage_a_row_has_the_gradient_of_gspo_itself(numbers):
    """The paper's statement: with equal advantages GSPO-token's gradient is that of the length-normalised ratio (eq. 5)."""
    logp, old, advantages, mask = numbers
    row_advantage = advantages[:, :1].expand_as(advantages)
    ratio_B = (((logp - old) * mask).sum(-1) / mask.sum(-1)).exp()
    surrogate_B = torch.minimum(ratio_B * row_advantage[:, 0], ratio_B.clamp(0.9, 1.2) * row_advantage[:, 0])
    (wanted,) = torch.autograd.grad(-surrogate_B.mean(), logp)
    got = clip_loss(logp, old, row_advantage, mask, level="sequence", eps_clip=0.1, eps_clip_higher=0.2)
    (found,) = torch.autograd.grad((aggregation_weights(mask, "row") * got.values).sum(), logp)
    torch.testing.assert_close(found, wanted)


def test_leave_one_out_with_a_clipped_product_is_trls_rloo(numbers):
    """TRL's RLOOTrainer (arXiv 2402.14740 with a ratio): min over whole sequences of r A and clip(r) A, with r a product."""
    logp, _, advantages, mask = numbers
    old = logp.detach() + torch.tensor([[0.1], [-0.02], [0.05]], dtype=torch.float64)  # near enough that not all is clipped
    row_advantage = advantages[:, :1].expand_as(advantages)
    ratio_B = ((logp - old) * mask).sum(-1).exp()
    advantage_B = row_advantage[:, 0]
    surrogate_B = torch.minimum(ratio_B * advantage_B, ratio_B.clamp(0.8, 1.2) * advantage_B)
    (wanted,) = torch.autograd.grad(-surrogate_B.mean(), logp)
    got = clip_loss(logp, old, row_advantage, mask, level="sequence_product")
    torch.testing.assert_close(got.ratio[mask > 0], ratio_B.detach()[:, None].expand_as(mask)[mask > 0])
    (found,) = torch.autograd.grad((aggregation_weights(mask, "constant", constant=1.0) * got.values).sum(), logp)
    torch.testing.assert_close(found, wanted)
    assert found.abs().sum() > 0


def test_turn_level_takes_the_mean_of_each_run(numbers):
    logp, old, advantages, mask = numbers
    got = clip_loss(logp, old, advantages, mask, level="turn").ratio
    difference = (logp - old).detach()
    assert got[0, 2].item() == pytest.approx(math.exp(difference[0, 2:4].mean()))
    assert got[0, 3] == got[0, 2]
    assert got[0, 5].item() == pytest.approx(math.exp(difference[0, 5:7].mean()))


def test_cispo_weighs_the_gradient_of_log_p(numbers):
    logp, old, advantages, mask = numbers
    (cispo_loss(logp, old, advantages, mask, weight_high=1.5).values * mask).sum().backward()
    for at in each(mask):
        weight = min(math.exp((logp - old)[at].item()), 1.5)
        assert logp.grad[at].item() == pytest.approx(-weight * float(advantages[at]))


def test_sapo_gates_by_the_sign_of_the_advantage(numbers):
    logp, old, advantages, mask = numbers
    got = sapo_loss(logp, old, advantages, mask, tau_positive=1.0, tau_negative=2.0)
    for at in each(mask):
        ratio, advantage = math.exp((logp - old)[at].item()), float(advantages[at])
        tau = 1.0 if advantage > 0 else 2.0
        assert got.values[at].item() == pytest.approx(-4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage)


def test_sapo_on_policy_has_the_policy_gradient():
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[0.7, -0.4]], dtype=torch.float64)
    sapo_loss(logp, logp.detach(), advantages, torch.ones(1, 2), tau_negative=3.0).values.sum().backward()
    torch.testing.assert_close(logp.grad, -advantages)


def test_reinforce_and_opmd_weigh_by_the_truncated_ratio_to_who_sampled(numbers):
    logp, behaviour, advantages, mask = numbers
    anchor = logp.detach()  # recomputed before the step: says nothing of who sampled
    got = reinforce_loss(logp, anchor, advantages, mask, behaviour_logp_BL=behaviour, weight_high=1.5)
    (got.values * mask).sum().backward()
    for at in each(mask):
        ratio = math.exp((logp - behaviour)[at].item())
        assert logp.grad[at].item() == pytest.approx(-min(ratio, 1.5) * float(advantages[at]))
        assert bool(got.clipped[at]) == (ratio > 1.5)
    assert got.clipped.any()
    opmd = opmd_loss(logp, anchor, advantages, mask, behaviour_logp_BL=behaviour, weight_high=1.5, tau=1.5)
    torch.testing.assert_close(opmd.values, got.values / 2.5)
    assert torch.equal(opmd.clipped, got.clipped)


def test_reinforce_without_weights_is_williams(numbers):
    logp, old, advantages, mask = numbers
    plain = reinforce_loss(logp, old, advantages, mask, weight_high=None)
    torch.testing.assert_close(plain.values, -advantages * logp)
    assert not plain.clipped.any()
    torch.testing.assert_close(opmd_loss(logp, old, advantages, mask, weight_high=None, tau=1.5).values, plain.values / 2.5)


def test_topr_tapers_what_was_bad(numbers):
    logp, old, _, mask = numbers
    rows = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)[:, None].expand_as(mask)
    (topr_loss(logp, logp.detach(), rows, mask, behaviour_logp_BL=old).values * mask).sum().backward()
    for at in each(mask):
        whole = math.exp(sum(float((logp - old)[other]) for other in each(mask) if other[0] == at[0]))
        expected = -1.0 if at[0] == 0 else min(whole, 1.0)
        assert logp.grad[at].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_has_the_policy_gradient_on_policy(name):
    logp = torch.tensor([[-1.0, -0.5, -2.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[0.5, 0.5, 0.5]], dtype=torch.float64)
    POLICY_LOSSES[name](logp, logp.detach(), advantages, torch.ones(1, 3, dtype=torch.float64)).values.sum().backward()
    scale = 0.5 if name == "opmd" else 1.0
    torch.testing.assert_close(logp.grad, -advantages * scale)


def test_extreme_ratios_stay_finite():
    logp = torch.tensor([[0.0, -1e4]], requires_grad=True)
    old = torch.tensor([[-1e4, 0.0]])
    for name in POLICY_LOSSES:
        loss = POLICY_LOSSES[name]
        value = loss(logp, old, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2)).values.sum()
        assert torch.isfinite(value), name


def loss_of(name, **arguments):
    return find_policy_loss(PPOActorConfig(policy_loss=name, policy_loss_kwargs=arguments))


def test_wrong_names_and_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"policy loss 'ppo2' was not found.*cispo, clip, opmd"):
        loss_of("ppo2")
    with pytest.raises(ConfigError, match=r"tau_positve.*tau_negative, tau_positive"):
        loss_of("sapo", tau_positve=1.0)
    with pytest.raises(ConfigError, match="takes none"):
        loss_of("clip", eps=1.0)
    loss_of("cispo", weight_high=3.0)


@pytest.mark.parametrize("name", ["reinforce", "opmd", "topr"])
def test_losses_that_correct_for_who_sampled_get_it_and_refuse_a_second_correction(name, numbers):
    logp, behaviour, advantages, mask = numbers
    anchor, behaviour = logp.detach(), behaviour + 2.0  # what was sampled has become less likely
    corrected = loss_of(name)(logp, anchor, advantages, mask, behaviour).values
    torch.testing.assert_close(corrected, POLICY_LOSSES[name](logp, behaviour, advantages, mask).values)
    assert not torch.allclose(corrected, POLICY_LOSSES[name](logp, anchor, advantages, mask).values)
    with pytest.raises(ConfigError, match=f"use_decoupled_loss.*{name}.*weighted twice"):
        find_policy_loss(PPOActorConfig(policy_loss=name, use_decoupled_loss=True))


def test_a_loss_gets_the_config_keys_that_it_has_parameters_for(numbers):
    config = PPOActorConfig(eps_clip=0.1, eps_clip_higher=0.3, c_clip=2.0, importance_level="sequence")
    mine, expected = (
        find_policy_loss(config)(*numbers, numbers[1]),
        clip_loss(*numbers, level="sequence", eps_clip=0.1, eps_clip_higher=0.3, c_clip=2.0),
    )
    assert torch.equal(mine.values, expected.values)
    assert torch.equal(mine.clipped, expected.clipped)


def test_a_loss_may_return_its_values_alone(numbers):
    POLICY_LOSSES["values alone"] = lambda logp, old, advantages, mask, **options: -advantages * logp * options["weight"]
    POLICY_LOSSES["summed"] = lambda logp, old, advantages, mask: -(advantages * logp).sum()
    try:
        result = loss_of("values alone", weight=2.0)(*numbers, numbers[1])
        assert isinstance(result, PolicyLoss)
        assert torch.equal(result.values, -2.0 * numbers[2] * numbers[0])
        assert not result.clipped.any()
        with pytest.raises(ConfigError, match=r"returned a tensor of \[\].*\[3, 7\], not summed"):
            loss_of("summed")(*numbers, numbers[1])
    finally:
        del POLICY_LOSSES["values alone"], POLICY_LOSSES["summed"]


def test_kl_estimators():
    logp, reference = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.5, -0.25], dtype=torch.float64)
    for at in range(2):
        difference = float(reference[at] - logp[at])
        assert kl_estimate(logp, reference, "k1")[at].item() == pytest.approx(-difference)
        assert kl_estimate(logp, reference, "k2")[at].item() == pytest.approx(difference**2 / 2)
        assert kl_estimate(logp, reference, "k3")[at].item() == pytest.approx(math.exp(difference) - 1 - difference)
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_estimate(logp, reference, "k4")


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_kl_loss_has_the_gradient_of_the_kl(estimator):
    """Summed over the whole distribution, the loss's gradient is that of KL(p || q) by autograd."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((logp.detach().exp() * kl_loss(logp, reference, estimator)).sum(), logits)
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("how", ["token", "row", "constant"])
def test_aggregation(how):
    mask = torch.tensor([[0.0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    losses = torch.tensor([[9.0, 1, 2, 6], [9, 10, 9, 9], [9, 9, 9, 9]])
    got = float((aggregation_weights(mask, how, constant=4.0) * losses).sum())
    assert got == pytest.approx({"token": 19 / 4, "row": (3 + 10) / 2, "constant": 19 / (4 * 3)}[how])


def test_aggregation_of_nothing_is_zero():
    for how in ("token", "row", "constant"):
        assert aggregation_weights(torch.zeros(2, 3), how).abs().sum() == 0
    with pytest.raises(ConfigError, match="loss_aggregation"):
        aggregation_weights(torch.zeros(2, 3), "mean")


def test_dpo_loss():
    chosen, rejected = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -2.0])
    loss, margin = dpo_loss(chosen, rejected, torch.tensor([-3.5, -4.0]), torch.tensor([-4.0, -4.0]), beta=0.5)
    expected = [0.5 * (0.5 - 0.0), 0.5 * (-1.0 - 2.0)]
    assert margin.tolist() == pytest.approx(expected)
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-value)) for value in expected])
    smoothed, _ = dpo_loss(chosen, rejected, torch.zeros(2), torch.zeros(2), beta=1.0, label_smoothing=0.25)
    assert smoothed[0].item() == pytest.approx(0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.exp(1)), rel=1e-5)
