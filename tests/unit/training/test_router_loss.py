"""The routers' auxiliary loss: added as the untouched model's own loss adds it, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import MicroBatchSpec, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from rollwright.errors import ConfigError, TrainingError
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.engine import TrainEngine
from rollwright.training.router_loss import RouterLoss

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def mixture(kind="Qwen3Moe", **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def rows():
    torch.manual_seed(1)
    ids = torch.randint(0, 31, (4, 12))
    mask = torch.arange(12)[None] < torch.tensor([12, 7, 9, 12])[:, None]
    loss_mask = mask & (torch.arange(12)[None] >= 3)
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask.long()}


def gradients(step, model):
    """The gradient that an optimizer step sees, by name."""
    seen = {}
    model_step = step.__self__._step
    step.__self__._step = lambda loss: (
        seen.update({n: p.grad.clone() for n, p in model.named_parameters()}),
        model_step(loss),
    )[1]
    return seen, step(rows())


def trained(model, engine=TrainEngine, config=TrainEngineConfig, max_tokens=4096, **settings):
    keys = {"optimizer": OptimizerConfig(lr=1e-3), "mb_spec": MicroBatchSpec(max_tokens_per_mb=max_tokens), **settings}
    made = engine(config(device="cpu", **keys), model=model)
    made.initialize(None, FinetuneSpec(1, 100, 10))
    return made


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_the_gradient_is_that_of_the_untouched_models_own_loss(kind, is_on, caplog):
    model = mixture(kind, output_router_logits=is_on, router_aux_loss_coef=0.5)
    untouched = copy.deepcopy(model)
    batch = rows()
    labels = batch["input_ids"].masked_fill(batch["loss_mask"] == 0, -100)
    loss = untouched(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long(), labels=labels).loss
    loss.backward()
    expected = {name: parameter.grad for name, parameter in untouched.named_parameters()}
    engine = trained(model)
    seen, stats = gradients(engine.sft_update, engine.model)
    assert stats["loss"] == pytest.approx(float(loss), abs=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    assert ("is added with weight 0.5" if is_on else "is not added") in caplog.text


def test_it_matters():
    """What the test above compares would differ by much without it."""
    plain, added = (mixture(output_router_logits=is_on, router_aux_loss_coef=0.5) for is_on in (False, True))
    without, with_it = (gradients(trained(model).sft_update, model)[0] for model in (plain, added))
    name = "model.layers.0.mlp.gate.weight"
    assert (with_it[name] - without[name]).abs().max() > 0.1 * without[name].abs().max()


def test_a_policys_and_a_preferences_gradient_have_it_too():
    for is_on in (True, False):
        actor = trained(mixture(output_router_logits=is_on, router_aux_loss_coef=0.5), FSDPPPOActor, PPOActorConfig)
        pairs = {**rows(), "ref_logprobs": torch.zeros(4, 12)}
        stats = actor.optimise(
            {**pairs, "loss_weights": torch.zeros(4, 12)},
            lambda part, logprobs, *_: (logprobs * part["loss_weights"]).sum(),
        )
        assert (stats["loss"] > 0.4) == is_on  # nothing else has a loss
        assert (stats["grad_norm"] > 0) == is_on


def test_a_step_of_several_micro_batches_is_refused_with_the_number_that_is_enough():
    engine = trained(mixture(output_router_logits=True), max_tokens=24)
    with pytest.raises(TrainingError, match=r"4 rows of up to 12 tokens, 48 padded, above mb_spec\.max_tokens_per_mb=24"):
        engine.sft_update(rows())
    trained(mixture(), max_tokens=24).sft_update(rows())


def test_branches_are_refused():
    engine = trained(mixture(output_router_logits=True))
    with pytest.raises(TrainingError, match="branch_ids"):
        engine.sft_update({**rows(), "branch_ids": torch.zeros(4, 12, dtype=torch.long)})


def test_ranks_are_refused(monkeypatch):
    engine = trained(mixture())
    monkeypatch.setattr(parallel, "world_size", lambda: 2)
    assert RouterLoss(engine.model, 4096).coefficient == 0
    with pytest.raises(ConfigError, match="several ranks"):
        RouterLoss(mixture(output_router_logits=True), 4096)


def test_a_sharded_model_is_refused(tmp_path):
    mixture(output_router_logits=True).save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path), device="cpu", shard="always", optimizer=OptimizerConfig(lr=1e-3))
    try:
        with pytest.raises(ConfigError, match="shard: never"):
            TrainEngine(config).initialize(None, FinetuneSpec(1, 100, 10))
    finally:
        torch.distributed.destroy_process_group()
