"""The scorer against the whole softmax in float64."""

import pytest
import torch
from tiny_policy import VOCABULARY, tiny_batch, tiny_model

from rollwright.errors import TrainingError
from rollwright.inference.attention_masks import branch_attention, last_visible
from rollwright.training.layers import output_logprobs, selected_logprobs
from rollwright.training.logprobs import TokenScorer


def exact(model, ids, temperature=1.0):
    """Log-probability of each token of one row without padding, by the whole softmax."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return [0.0] + [float(torch.log_softmax(row, -1)[token]) for row, token in zip(logits, ids[1:], strict=True)]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("chunk", [16, 4096])
def test_scores_are_those_of_each_row_alone(architecture, chunk):
    model, batch = tiny_model(architecture), tiny_batch()
    wanted = batch["attention_mask"].clone()
    wanted[:, 0] = False
    with torch.no_grad():
        scores, entropy = TokenScorer(model, chunk_bytes=4 * VOCABULARY * chunk)(batch, wanted, with_entropy=True)
        for row in range(len(scores)):
            ids = batch["input_ids"][row][batch["attention_mask"][row]].tolist()
            expected = exact(model, ids, float(batch["temperature"][row]))
            torch.testing.assert_close(scores[row, : len(ids)], torch.tensor(expected, dtype=scores.dtype), atol=1e-6, rtol=0)
            assert scores[row, len(ids) :].abs().sum() == 0
    logits = model(batch["input_ids"]).logits[:, :-1] / batch["temperature"][:, None, None]
    logp = logits.log_softmax(-1)
    torch.testing.assert_close(entropy[:, 1:], -(logp.exp() * logp).sum(-1) * wanted[:, 1:], atol=1e-6, rtol=0)


def test_gradients_are_those_of_autograd():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 9, dtype=torch.float64, generator=generator).requires_grad_()
    labels, temperature = torch.tensor([0, 3, 8, 3, 1]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    entropies = selected_logprobs(logits, labels, temperature, with_entropy=True, entropy_gradient=False)[1]
    assert not entropies.requires_grad
    for with_entropy in (False, True):
        torch.autograd.gradcheck(
            lambda logits, flag=with_entropy: selected_logprobs(logits, labels, temperature, with_entropy=flag)[: 1 + flag],
            logits,
        )


@pytest.mark.parametrize("kept", [0, 1 << 24])
def test_gradients_through_an_output_layer_are_those_of_autograd(monkeypatch, kept):
    monkeypatch.setattr("rollwright.training.layers._KEPT_LOGITS", kept)
    monkeypatch.setattr("rollwright.training.layers._CACHED_LOGITS", 18)  # two rows at a time
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    head = torch.nn.Linear(4, 9, bias=False).double()
    labels, temperature = torch.tensor([0, 3, 8, 3, 1]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    logp = ((hidden @ head.weight.T) / temperature[:, None]).log_softmax(-1)
    exact = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    coefficients = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    for used in ([0], [1], [0, 1]):
        found = output_logprobs(head, hidden, labels, temperature, with_entropy=True, chunk_bytes=3 * 9 * 4)
        torch.testing.assert_close(found, exact)
        mine, theirs = (
            torch.autograd.grad(
                sum((outputs[n] * coefficients[n]).sum() for n in used), (hidden, head.weight), retain_graph=kept
            )
            for outputs, kept in ((found, False), (exact, True))
        )
        torch.testing.assert_close(mine, theirs)


def test_chunks_do_not_change_gradients(monkeypatch):
    monkeypatch.setattr("rollwright.training.layers._KEPT_LOGITS", 0)
    batch, found = tiny_batch(), []
    wanted = batch["loss_mask"].bool()
    for chunk in (7, 16, 10_000):
        model = tiny_model()
        scores, entropy = TokenScorer(model, chunk_bytes=4 * VOCABULARY * chunk)(batch, wanted, with_entropy=True)
        (scores.sum() + 0.3 * entropy.sum()).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(found[0], found[2], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found[1], found[2], atol=1e-12, rtol=1e-9)


def test_logits_that_are_scaled_after_the_head_are_seen():
    model, batch = tiny_model(), tiny_batch()
    wanted = batch["loss_mask"].bool()
    plain, _ = TokenScorer(model)(batch, wanted)
    inner = model.forward

    def capped(*args, **kwargs):
        outputs = inner(*args, **kwargs)
        outputs.logits = outputs.logits * 0.5
        return outputs

    model.forward = capped
    scaled, _ = TokenScorer(model)(batch, wanted)
    logp = (inner(batch["input_ids"]).logits[:, :-1] * 0.5 / batch["temperature"][:, None, None]).log_softmax(-1)
    expected = logp.gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * wanted[:, 1:]
    torch.testing.assert_close(scaled[:, 1:], expected, atol=1e-9, rtol=0)
    assert (scaled - plain).abs().max() > 1e-3


def test_left_padding_is_refused():
    batch = {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[0, 1, 1]])}
    with pytest.raises(TrainingError, match="right-padded"):
        TokenScorer(tiny_model())(batch, torch.tensor([[False, False, True]]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_branches_are_scored_as_if_their_siblings_were_not_there(attention):
    """Trunk, two branches, then trunk again: each branch alone must score the same, with the same positions."""
    model = tiny_model()
    model.set_attn_implementation(attention)
    trunk, left, right, tail = [5, 6, 7], [8, 9], [10, 11, 12], [13, 14]
    branches = [0] * 3 + [1] * 2 + [2] * 3 + [0] * 2
    positions = [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    batch = {
        "input_ids": torch.tensor([trunk + left + right + tail]),
        "branch_ids": torch.tensor([branches]),
        "position_ids": torch.tensor([positions]),
    }
    wanted = torch.ones(1, 10, dtype=torch.bool)
    wanted[:, 0] = False
    with torch.no_grad():
        scores = TokenScorer(model)(batch, wanted)[0][0]
        alone_left, alone_right = exact(model, trunk + left), exact(model, trunk + right)
        # The first token of a branch is predicted by the trunk, not by the sibling that stands before it in the row.
        assert scores[3:5].tolist() == pytest.approx(alone_left[3:5], abs=1e-6)
        assert scores[5:8].tolist() == pytest.approx(alone_right[3:6], abs=1e-6)
        assert scores[1:3].tolist() == pytest.approx(alone_left[1:3], abs=1e-6)


def test_branch_rule_token_by_token():
    branches = [0, 1, 1, 2, 0, 2]
    allowed = branch_attention(torch.tensor([branches]))[0]
    for i, mine in enumerate(branches):
        for j, theirs in enumerate(branches):
            assert bool(allowed[i, j]) == (j <= i and (theirs == 0 or theirs == mine or mine == 0))


def test_large_vocabularies_are_scored_in_chunks():
    logits = torch.randn(3, VOCABULARY, dtype=torch.bfloat16)
    scores, _ = selected_logprobs(logits, torch.tensor([0, 1, 2]), torch.ones(3))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, logits.float().log_softmax(-1)[torch.arange(3), torch.arange(3)])


def test_the_predictor_of_a_token_is_the_last_that_it_sees():
    assert last_visible(torch.tensor([[0, 0, 0, 0]])).tolist() == [[0, 0, 1, 2]]
    assert last_visible(torch.tensor([[0, 1, 1, 2, 2, 0, 1]])).tolist() == [[0, 0, 1, 0, 3, 4, 5]]
