"""Teacher losses against whole distributions in float64, and gradients against those of the exact divergence."""

import numpy as np
import pytest
import torch

from rollwright.algorithms.losses import POLICY_LOSSES
from rollwright.algorithms.teachers import TEACHER_LOSSES, find_teacher_loss, with_tail
from rollwright.config.teachers import DistillationConfig
from rollwright.errors import ConfigError

VOCABULARY = 11


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(5)
    policy, teacher = (torch.randn(3, 4, VOCABULARY, dtype=torch.float64, generator=generator) * 2 for _ in range(2))
    return policy.requires_grad_(), teacher


def binned(probabilities, top):
    """Probabilities of the ``top`` ids and of all others together, by plain NumPy."""
    kept = [float(probabilities[token]) for token in top]
    others = [float(value) for token, value in enumerate(probabilities) if token not in top]
    return np.array([*kept, sum(others)])


def kl(p, q):
    return float(np.sum(p * np.log(p / q)))


def top_scores(logits, k):
    policy, teacher = logits[0].log_softmax(-1), logits[1].log_softmax(-1)
    teacher_top, ids = teacher.topk(k)
    return policy.gather(-1, ids), teacher_top, ids


@pytest.mark.parametrize("k", [1, 3, VOCABULARY - 1])
@pytest.mark.parametrize(("name", "alpha"), [("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2)])
def test_divergences_are_those_of_the_bins(logits, k, name, alpha):
    policy_top, teacher_top, ids = top_scores(logits, k)
    got = find_teacher_loss(name)(policy_top, teacher_top, DistillationConfig(jsd_alpha=alpha))
    probabilities = [each.detach().softmax(-1).numpy() for each in logits]
    for row in range(3):
        for token in range(4):
            q, p = (binned(each[row, token], ids[row, token].tolist()) for each in probabilities)
            mixed = alpha * p + (1 - alpha) * q
            expected = kl(p, q) if name == "forward_kl" else alpha * kl(p, mixed) + (1 - alpha) * kl(q, mixed)
            assert got[row, token].item() == pytest.approx(expected, rel=1e-9)
            assert 0 <= got[row, token].item() <= kl(probabilities[1][row, token], probabilities[0][row, token]) + 1e-12


def test_all_tokens_but_one_make_the_whole_kl(logits):
    policy_top, teacher_top, _ = top_scores(logits, VOCABULARY - 1)
    value = find_teacher_loss("forward_kl")(policy_top, teacher_top, DistillationConfig()).sum()
    (gradient,) = torch.autograd.grad(value, logits[0])
    exact = torch.nn.functional.kl_div(logits[0].log_softmax(-1), logits[1].log_softmax(-1), log_target=True, reduction="sum")
    (expected,) = torch.autograd.grad(exact, logits[0])
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", ["forward_kl", "jsd"])
def test_a_policy_like_its_teacher_has_no_loss_and_no_gradient(logits, name):
    same = logits[0], logits[0].detach()
    policy_top, teacher_top, _ = top_scores(same, 3)
    value = find_teacher_loss(name)(policy_top, teacher_top, DistillationConfig()).sum()
    (gradient,) = torch.autograd.grad(value, logits[0])
    assert abs(value.item()) < 1e-12
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize(("name", "divergence"), [("k1", "reverse"), ("k2", "reverse"), ("k3", "forward")])
def test_expected_gradients_of_sampled_losses(logits, name, divergence):
    policy, teacher = logits[0].log_softmax(-1), logits[1].log_softmax(-1)
    losses = find_teacher_loss(name)(policy, teacher, DistillationConfig())
    (gradient,) = torch.autograd.grad((policy.detach().exp() * losses).sum(), logits[0])
    q, p = logits[0].log_softmax(-1), logits[1].log_softmax(-1)
    exact = (q.exp() * (q - p)).sum() if divergence == "reverse" else (p.exp() * (p - q)).sum()
    (expected,) = torch.autograd.grad(exact, logits[0])
    torch.testing.assert_close(gradient, expected)


def test_the_advantage_has_the_gradient_of_the_reverse_kl(logits):
    policy, teacher = logits[0].log_softmax(-1), logits[1].log_softmax(-1)
    advantages = find_teacher_loss("advantage")(policy.detach(), teacher, DistillationConfig())
    loss = POLICY_LOSSES.get("clip")(
        policy.flatten(1), policy.detach().flatten(1), advantages.flatten(1), torch.ones(3, 4 * VOCABULARY)
    )
    weights = policy.detach().exp().flatten(1)  # the expectation over samples of the policy
    (gradient,) = torch.autograd.grad((weights * loss.values).sum(), logits[0])
    q = logits[0].log_softmax(-1)
    (expected,) = torch.autograd.grad((q.exp() * (q - teacher)).sum(), logits[0])
    torch.testing.assert_close(gradient, expected)


def test_a_tail_without_probability_stays_finite():
    certain = torch.tensor([0.0], requires_grad=True)
    value = find_teacher_loss("forward_kl")(certain, torch.tensor([-1e-7]), DistillationConfig())
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(certain.grad).all()
    assert with_tail(torch.tensor([[-0.5, -1.5]])).exp().sum().item() == pytest.approx(1.0)


def test_a_reverse_kl_over_top_tokens_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="drives the policy away from the teacher"):
        find_teacher_loss("reverse_kl_top_k")
    with pytest.raises(ConfigError, match="teacher loss"):
        find_teacher_loss("forward")


def test_a_registered_function_compares_top_tokens():
    def gap(logp, teacher_logp, config):
        return (teacher_logp - logp).square().sum(-1)

    TEACHER_LOSSES["gap"] = gap
    try:
        loss = find_teacher_loss("gap")
        assert loss.kind == "top"
        assert loss(torch.zeros(1, 2), torch.ones(1, 2), DistillationConfig()).tolist() == [2.0]
    finally:
        TEACHER_LOSSES._entries.pop("gap")
