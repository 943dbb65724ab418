"""Updates towards a teacher: gradients of the whole model against those of the divergence of whole distributions."""

import pytest
import torch
from tiny_policy import VOCABULARY, gradients, grouped_batch, tiny_actor, tiny_batch, tiny_model

from rollwright.config.teachers import DistillationConfig
from rollwright.errors import TrainingError
from rollwright.training.engine import trained_tokens


def logps(model, batch):
    """Log-probabilities ``[B, L, V]`` of the next token at the place of each token, by the model's own forward pass."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
    return (shifted / batch["temperature"][:, None, None]).log_softmax(-1)


def scored(batch, k=VOCABULARY - 1):
    """The batch as a teacher with other weights scored it: all trained tokens but those of the last row."""
    teacher = tiny_model()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=parameter.dtype)
        teacher_BLV = logps(teacher, batch)
    top_BLK, ids_BLK = teacher_BLV.topk(k)
    taught_BL = trained_tokens(batch).float()
    taught_BL[-1] = 0.0
    taught_BL[0] *= 0.5
    own_BL = teacher_BLV.gather(-1, batch["input_ids"][..., None])[..., 0]
    return {
        **batch,
        "teacher_logprobs": (own_BL * (taught_BL > 0)).float(),
        "teacher_weights": taught_BL,
        "teacher_top_ids": ids_BLK,
        "teacher_top_logprobs": top_BLK,
    }, teacher_BLV


@pytest.mark.parametrize("batch", [tiny_batch, grouped_batch])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_forward_kl_is_that_of_whole_distributions(batch, tokens):
    actor = tiny_actor(max_tokens=tokens, distillation=DistillationConfig("forward_kl", weight=0.7, reward_weight=0.0))
    batch, teacher_BLV = scored(batch())
    model = tiny_model()
    policy_BLV = logps(model, batch)
    weights_BL = 0.7 * batch["teacher_weights"] / trained_tokens(batch).sum()
    exact = (weights_BL * (teacher_BLV.exp() * (teacher_BLV - policy_BLV)).sum(-1)).sum()
    exact.backward()
    caught = gradients(actor)
    actor.compute_advantages(batch)
    assert not batch["advantages"].any()
    metrics = actor.ppo_update(batch)
    assert metrics["loss"] == pytest.approx(exact.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(caught[name], parameter.grad, rtol=1e-4, atol=1e-8)
    taught = batch["teacher_weights"] > 0
    assert metrics["teacher/taught_share"] == pytest.approx(float(taught.sum() / trained_tokens(batch).sum()))
    own_BL = policy_BLV.gather(-1, batch["input_ids"][..., None])[..., 0] - batch["teacher_logprobs"]
    assert metrics["teacher/kl"] == pytest.approx(own_BL[taught].mean().item(), rel=1e-4)
    best = teacher_BLV.argmax(-1) == batch["input_ids"]
    assert metrics["teacher/agreement"] == pytest.approx(best[taught].double().mean().item())


def test_k1_has_the_gradient_of_its_log_ratio():
    actor = tiny_actor(distillation=DistillationConfig("k1", reward_weight=0.0))
    batch, _ = scored(tiny_batch(), k=2)
    model = tiny_model()
    policy_BL = logps(model, batch).gather(-1, batch["input_ids"][..., None])[..., 0]
    ratio_BL = (policy_BL - batch["teacher_logprobs"]).detach()
    weights_BL = batch["teacher_weights"] / trained_tokens(batch).sum()
    (weights_BL * ratio_BL * policy_BL).sum().backward()
    caught = gradients(actor)
    actor.ppo_update(actor.compute_advantages(batch))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(caught[name], parameter.grad, rtol=1e-4, atol=1e-8)


def test_the_teachers_advantage_is_added_to_that_of_the_rewards():
    batch, _ = scored(tiny_batch())
    rewards_alone = tiny_actor().compute_advantages(dict(batch))["advantages"]
    mixed = tiny_actor(distillation=DistillationConfig("advantage", weight=0.3, reward_weight=0.5))
    got = mixed.compute_advantages(dict(batch))["advantages"]
    taught_BL = batch["teacher_weights"] * trained_tokens(batch)
    expected = 0.5 * rewards_alone - 0.3 * taught_BL * (batch["logprobs"] - batch["teacher_logprobs"])
    torch.testing.assert_close(got, expected)


def test_rewards_of_weight_0_need_no_group():
    actor = tiny_actor(distillation=DistillationConfig("advantage", reward_weight=0.0))
    batch, _ = scored(tiny_batch())
    del batch["group_ids"]
    got = actor.compute_advantages(batch)["advantages"]
    torch.testing.assert_close(got, batch["teacher_weights"] * (batch["teacher_logprobs"] - batch["logprobs"]))


@pytest.mark.parametrize(("loss", "missing"), [("advantage", "teacher_logprobs"), ("jsd", "teacher_top_ids")])
def test_a_batch_that_no_teacher_scored_is_refused(loss, missing):
    actor = tiny_actor(distillation=DistillationConfig(loss))
    batch, _ = scored(tiny_batch())
    del batch[missing]
    with pytest.raises(TrainingError, match=f"has no {missing}"):
        actor.compute_advantages(batch)


def test_rows_of_a_file_learn_likelihood_and_teacher():
    actor = tiny_actor()
    batch, teacher_BLV = scored(tiny_batch())
    batch["temperature"] = torch.ones_like(batch["temperature"])
    batch, teacher_BLV = scored({key: value for key, value in batch.items() if not key.startswith("teacher")})
    model = tiny_model()
    policy_BLV = logps(model, batch)
    own_BL = policy_BLV.gather(-1, batch["input_ids"][..., None])[..., 0]
    kl_BL = (teacher_BLV.exp() * (teacher_BLV - policy_BLV)).sum(-1)
    trained_BL = trained_tokens(batch).float()
    exact = ((0.7 * batch["teacher_weights"] * kl_BL - 0.5 * own_BL) * trained_BL).sum() / trained_BL.sum()
    exact.backward()
    caught = gradients(actor)
    stats = actor.sft_update(batch, {"loss": "forward_kl", "weight": 0.7, "reward_weight": 0.5})
    assert stats["loss"] == pytest.approx(exact.item(), rel=1e-5)
    assert stats["teacher/agreement"] < 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(caught[name], parameter.grad, rtol=1e-4, atol=1e-8)
