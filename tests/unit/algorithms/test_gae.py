"""Generalised advantage estimation against sums written out token by token, in float64."""

import math

import numpy as np
import pytest
import torch

from rollwright.algorithms.gae import (
    explained_variance,
    gae,
    gae_advantages,
    length_adaptive_lambda,
    rewards_of_actions,
    turn_gae,
    value_loss,
    whitened,
)


def alone(value):
    return value


def ragged(seed, rows=7, width=23, share=0.5):
    """Rows of different lengths whose trained tokens have gaps; the first row trains nothing, the second only one token."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < share).double()
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = mask * (torch.arange(width) < lengths)
    mask[0] = 0
    mask[1], mask[1, 3] = 0, 1
    rewards, values = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64) * (torch.arange(rows) % 2)
    return rewards, values, mask, bootstrap


def written_out(rewards, values, mask, bootstrap, gamma, lam):
    """A_t as the explicit sum over k of (γλ)^k δ, over the list of the row's trained tokens."""
    advantages = np.zeros(mask.shape)
    for row in range(len(mask)):
        trained = [t for t in range(mask.shape[1]) if mask[row, t]]
        after = [float(values[row, t]) for t in trained[1:]] + [float(bootstrap[row])]
        deltas = [float(rewards[row, t]) + gamma * nxt - float(values[row, t]) for t, nxt in zip(trained, after, strict=False)]
        factor = gamma * (lam[row] if isinstance(lam, list) else lam)
        for index, t in enumerate(trained):
            advantages[row, t] = sum(factor**k * delta for k, delta in enumerate(deltas[index:]))
    return torch.from_numpy(advantages)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.8), (1.0, 0.0), (0.9, 1.0)])
def test_advantages_are_the_discounted_sums_over_trained_tokens(seed, gamma, lam):
    rewards, values, mask, bootstrap = ragged(seed, share=[0.1, 0.5, 0.95][seed % 3])
    advantages, returns = gae(rewards, values, mask, bootstrap, gamma=gamma, lam=lam)
    expected = written_out(rewards, values, mask, bootstrap, gamma, lam)
    torch.testing.assert_close(advantages, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(returns, (expected + values) * mask, atol=1e-10, rtol=1e-10)


def test_what_stands_at_tool_tokens_changes_nothing():
    rewards, values, mask, bootstrap = ragged(3)
    before = gae(rewards, values, mask, bootstrap, gamma=0.9, lam=0.7)
    other = torch.where(mask > 0, 0.0, 100.0)
    after = gae(rewards + other, values - other, mask, bootstrap, gamma=0.9, lam=0.7)
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two)


def test_a_longer_answer_of_a_tool_does_not_discount():
    values = torch.tensor([[0.0, 0.3, 0.0, 0.6]], dtype=torch.float64)
    rewards, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).double(), torch.tensor([[0.0, 1, 0, 1]])
    short, _ = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    gap = torch.zeros(1, 9)
    long, _ = gae(*(torch.cat([each[:, :2], gap, each[:, 2:]], 1) for each in (rewards, values, mask)), gamma=0.5, lam=0.5)
    assert short[0, 1].item() == pytest.approx(0.5 * 0.6 - 0.3 + 0.25 * (1 - 0.6))
    assert long[0, 1].item() == pytest.approx(short[0, 1].item())


def test_zero_values_make_the_advantage_the_return():
    rewards = torch.tensor([[0.0, 0.0, 2.0, 0.0]])
    advantages, returns = gae(rewards, torch.zeros(1, 4), torch.tensor([[0, 1, 1, 0]]))
    assert advantages.tolist() == returns.tolist() == [[0.0, 2.0, 2.0, 0.0]]


def test_a_truncated_row_continues_in_its_last_value_and_a_finished_row_does_not():
    rewards, mask = torch.zeros(2, 3).double(), torch.ones(2, 3)
    values = torch.tensor([[0.2, 0.4, 0.6]] * 2).double()
    advantages, returns = gae(rewards, values, mask, torch.tensor([0.5, 0.0]), gamma=0.9, lam=1.0)
    assert returns[0].tolist() == pytest.approx([0.5 * 0.9**3, 0.5 * 0.9**2, 0.5 * 0.9])
    assert returns[1].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)
    assert advantages[1].tolist() == pytest.approx([-0.2, -0.4, -0.6])


@pytest.mark.parametrize("seed", range(6))
def test_a_turn_is_one_action(seed):
    rewards, values, mask, bootstrap = ragged(seed)
    advantages, returns = turn_gae(rewards, values, mask, bootstrap, gamma=0.9, lam=0.6)
    for row in range(len(mask)):
        turns, t = [], 0
        while t < mask.shape[1]:
            if mask[row, t]:
                end = next((k for k in range(t, mask.shape[1]) if not mask[row, k]), mask.shape[1])
                turns.append((t, end))
                t = end
            t += 1
        following, carried = float(bootstrap[row]), 0.0
        for start, end in reversed(turns):
            value = float(values[row, start])
            carried = float(rewards[row, start:end].sum()) + 0.9 * following - value + 0.9 * 0.6 * carried
            following = value
            assert advantages[row, start:end].tolist() == pytest.approx([carried] * (end - start))
            assert returns[row, start:end].tolist() == pytest.approx([carried + value] * (end - start))
    assert advantages[mask == 0].abs().max() == returns[mask == 0].abs().max() == 0


def test_vapo_gives_policy_and_critic_their_own_lambda():
    rewards, values, mask, bootstrap = ragged(5)
    advantages, returns = gae_advantages(
        rewards, values, mask, bootstrap, alone, lam=0.5, lam_critic=1.0, length_alpha=0.2, whiten=False
    )
    lengths = mask.sum(1).tolist()
    lam = [max(0.0, 1 - 1 / (0.2 * length)) if length else 0.0 for length in lengths]
    torch.testing.assert_close(advantages, written_out(rewards, values, mask, bootstrap, 1.0, lam), atol=1e-10, rtol=1e-10)
    plain = written_out(rewards, values, mask, bootstrap, 1.0, 1.0)
    torch.testing.assert_close(returns, (plain + values) * mask, atol=1e-10, rtol=1e-10)
    assert length_adaptive_lambda(torch.ones(1, 3), 0.05).tolist() == [0.0]


def test_the_rewards_of_a_row_stand_on_its_trained_tokens():
    mask = torch.tensor([[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    token_rewards = torch.tensor([[9.0, 0.5, 0.25, 0.0, 0.125, 0.0], [1.0] * 6])
    found = rewards_of_actions(torch.tensor([1.0, 1.0]), token_rewards, mask)
    assert found.tolist() == [[0, 0.75, 0, 1.125, 0, 0], [0.0] * 6]
    assert rewards_of_actions(torch.tensor([2.0, 3.0]), None, mask).tolist() == [[0, 0, 0, 2, 0, 0], [0.0] * 6]


def test_whitening_has_mean_zero_and_variance_one_over_trained_tokens():
    _, values, mask, _ = ragged(1)
    own = values[mask > 0].numpy()
    expected = (own - own.mean()) / math.sqrt(own.var(ddof=1) + 1e-8)
    found = whitened(values + 50.0 * (1 - mask), mask, alone)
    np.testing.assert_allclose(found[mask > 0].numpy(), expected, atol=1e-10)
    assert found[mask == 0].abs().max() == 0
    assert whitened(torch.full((2, 3), 0.1), torch.ones(2, 3), alone).abs().max() < 1e-6
    assert bool(whitened(torch.ones(1, 2), torch.tensor([[1, 0]]), alone).isfinite().all())


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_plain_error():
    values = torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.0, 0.9, 1.0, 1.0]).double(), torch.tensor([1.0, 1.0, 3.0, -3.0]).double()
    loss, clipped = value_loss(values, old, returns, 0.5)
    assert loss.tolist() == pytest.approx([0.5, 0.0, 0.5 * 1.5**2, 0.5 * 3.5**2])
    assert clipped.tolist() == [False, False, True, True]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0, 0.0])
    assert value_loss(values, old, returns)[0].tolist() == pytest.approx([0.5, 0.0, 0.0, 0.5])


def test_explained_variance():
    returns, mask = torch.tensor([[1.0, 2.0, 4.0, 99.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns - 5.0, returns, mask, alone) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 4), returns, mask, alone) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask, alone) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(1, 4), mask, alone))
