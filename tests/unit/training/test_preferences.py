"""DPO: the loss and its gradient against an independent formula in float64; a preference is learned, the reference stays."""

import math

import pytest
import torch
from tiny_policy import VOCABULARY, gradients, tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from rollwright.errors import TrainingError
from rollwright.training.preferences import PreferenceEngine

BETA, SMOOTHING = 0.3, 0.1


def engine_of(max_tokens: int = 8192, lr: float = 1e-2) -> PreferenceEngine:
    config = TrainEngineConfig(
        device="cpu", optimizer=OptimizerConfig(lr=lr, weight_decay=0.0), mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens)
    )
    engine = PreferenceEngine(config, model=tiny_model(dtype=torch.float64))
    engine.initialize(None, FinetuneSpec(1, 100, 10))
    return engine


def pairs(count: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """Prompts of three tokens, with two replies of different lengths each."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(1, VOCABULARY, (count, 3), generator=generator).repeat_interleave(2, 0)
    replies = torch.randint(1, VOCABULARY, (2 * count, length - 3), generator=generator)
    lengths = torch.randint(5, length + 1, (2 * count,), generator=generator)
    columns = torch.arange(length)[None]
    attention = columns < lengths[:, None]
    ids = torch.cat([prompts, replies], 1) * attention
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": (attention & (columns >= 3)).long()}


def moved(engine: PreferenceEngine) -> None:
    """Away from the reference, so that margins are not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def reply_logp(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probability of each whole reply, row by row, without padding."""
    totals = []
    for row in range(len(batch["input_ids"])):
        ids = batch["input_ids"][row, : int(batch["attention_mask"][row].sum())][None]
        logprobs = torch.log_softmax(model(input_ids=ids).logits.double(), -1)[0, :-1]
        picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        totals.append(picked[batch["loss_mask"][row, 1 : ids.shape[1]].bool()].sum())
    return torch.stack(totals)


def dpo_by_hand(engine: PreferenceEngine, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        reference = reply_logp(engine.reference.model, batch)
    ratio = reply_logp(engine.model, batch) - reference
    margins = BETA * (ratio[0::2] - ratio[1::2])
    losses = -(1 - SMOOTHING) * torch.log(torch.sigmoid(margins)) - SMOOTHING * torch.log(torch.sigmoid(-margins))
    return losses.mean(), margins


@pytest.mark.parametrize("max_tokens", [8192, 13])  # one micro-batch, and one for each row
def test_loss_and_gradient_are_those_of_the_formula_however_rows_are_split(max_tokens):
    batch, engine = pairs(), engine_of(max_tokens)
    moved(engine)
    loss, margins = dpo_by_hand(engine, batch)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}
    engine.model.zero_grad()
    caught = gradients(engine)
    stats = engine.dpo_update(batch, beta=BETA, label_smoothing=SMOOTHING)
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert stats["margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert stats["accuracy"] == (margins > 0).double().mean().item()
    for name, gradient in expected.items():
        torch.testing.assert_close(caught[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_preference_is_learned_and_the_reference_stays_where_it_was():
    batch, engine = pairs(), engine_of()
    first = engine.dpo_update(batch, beta=BETA)
    assert first["loss"] == pytest.approx(math.log(2))  # policy and reference are equal
    before = {name: tensor.clone() for name, tensor in engine.reference.model.state_dict().items()}
    for _ in range(30):
        stats = engine.dpo_update(batch, beta=BETA)
    assert stats["accuracy"] == 1.0
    assert stats["loss"] < 0.2
    assert stats["chosen_logp"] - stats["rejected_logp"] > first["chosen_logp"] - first["rejected_logp"] + 1
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.reference.model.state_dict().items())


def test_log_probabilities_of_the_reference_may_come_with_the_batch():
    batch, engine = pairs(), engine_of()
    moved(engine)
    given = {**batch, "ref_logp": engine.reference.compute_logp(batch)}
    engine.reference = None
    engine.reference = engine.frozen_copy()  # another one, which is not asked
    caught = gradients(engine)
    assert engine.dpo_update(given, beta=BETA)["margin"] != 0
    assert caught


def test_rows_that_are_no_pairs_are_refused():
    batch, engine = pairs(), engine_of()
    with pytest.raises(TrainingError, match="two rows a pair"):
        engine.dpo_update({key: value[:3] for key, value in batch.items()})
    empty = {**batch, "loss_mask": batch["loss_mask"] * (torch.arange(8) != 2)[:, None]}
    with pytest.raises(TrainingError, match="1 of them have no token"):
        engine.dpo_update(empty)
