"""A model computes with its own attention, untouched, wherever no tree is attended over; and over a tree with nothing left out."""

import inspect

import pytest
import torch
import transformers
from parts import TINY
from tiny_policy import grouped_batch, tiny_actor, tiny_model
from transformers import AttentionInterface
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from rollwright.config.sections import TrainEngineConfig
from rollwright.errors import TrainingError
from rollwright.training import tree_attention
from rollwright.training.engine import TrainEngine
from rollwright.training.logprobs import TokenScorer
from rollwright.training.prefix_tree import build
from rollwright.training.tree_attention import over_tree

HEADS = {**TINY, "head_dim": 8}


def gpt_oss(window: int = 64) -> transformers.GptOssForCausalLM:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **HEADS,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=window,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "sinks" in name else 0.0, 1.0 if "sinks" in name else 0.3)
    return model


def rows() -> dict[str, torch.Tensor]:
    batch = grouped_batch()
    return {name: batch[name] for name in ("input_ids", "attention_mask", "group_ids", "temperature")}


def wanted(batch) -> torch.Tensor:
    found = batch["attention_mask"].bool().clone()
    found[:, 0] = False
    return found


def scored_alone(model, batch) -> torch.Tensor:
    """Every row by the model's own forward, without padding."""
    scores_BL = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][row, :length]
        logits = model(ids[None], use_cache=False).logits[0, :-1] / batch["temperature"][row]
        scores_BL = scores_BL.index_put(
            (torch.full((length - 1,), row), torch.arange(1, length)),
            logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].double(),
        )
    return scores_BL


def test_sinks_count_in_the_tree_and_have_their_gradient():
    model, batch = gpt_oss(), rows()
    expected = scored_alone(model, batch)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * wanted(batch)
    gradients = []
    for tree in (None, build(batch)):
        model.zero_grad()
        scores, _ = TokenScorer(model)({**batch, "prefix_tree": tree}, wanted(batch)) if tree else (expected, None)
        torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-6)
        (scores * weights).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert float(gradients[0]["model.layers.0.self_attn.sinks"].norm()) > 1e-3
    for name, mine in gradients[1].items():
        torch.testing.assert_close(mine, gradients[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", [True, False])
def test_a_model_with_sinks_is_trained_as_it_is(share):
    model, batch = gpt_oss(), rows()
    expected = scored_alone(model, batch).detach()
    engine = TrainEngine(TrainEngineConfig(device="cpu", optimizer=None, share_prefixes=share), model=model)
    engine.initialize()
    torch.testing.assert_close(engine.compute_logp(batch), expected.float(), rtol=1e-4, atol=1e-5)
    assert engine.division.shares_prefixes == share
    assert model.config._attn_implementation == "eager"  # as an engine that shares the model finds it


def test_a_window_shorter_than_the_rows_is_not_shared_and_says_why(caplog):
    model, batch = gpt_oss(window=4), rows()
    expected = scored_alone(model, batch).detach()
    engine = TrainEngine(TrainEngineConfig(device="cpu", optimizer=None), model=model)
    engine.initialize()
    for _ in range(2):
        torch.testing.assert_close(engine.compute_logp(batch), expected.float(), rtol=1e-4, atol=1e-5)
    assert caplog.text.count("GptOssForCausalLM attends to sliding_window=4 tokens, and rows have 14") == 1


@pytest.mark.parametrize("name", ["position_bias", "indices"])
def test_an_argument_that_is_not_understood_stops_sharing(caplog, name):
    model, given = tiny_model(dtype=torch.float32), {name: torch.ones(1, 1, 1, 1)}
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, **given)  # which hands it on to its attention
    expected = scored_alone(model, rows()).detach().float()
    engine = TrainEngine(TrainEngineConfig(device="cpu", optimizer=None), model=model)
    engine.initialize()
    for _ in range(2):
        torch.testing.assert_close(engine.compute_logp(rows()), expected, rtol=1e-4, atol=1e-5)
    assert not engine.division.shares_prefixes
    assert (
        caplog.text.count(
            f"Qwen3ForCausalLM cannot share them, because its attention takes {name}, which attention over a tree"
        )
        == 1
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sliding_window": 3}, "slides over 3 tokens, and rows have 14"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "takes dropout"),
        ({"block_indices": torch.ones(1)}, "takes block_indices"),
        (
            {"sliding_window": 14, "is_causal": True, "dropout": 0.0, "position_ids": torch.ones(1), "output_attentions": True},
            None,
        ),
    ],
)
def test_what_a_layer_asks_for_is_looked_at(arguments, said):
    found = tree_attention._not_understood((), arguments, build(rows()), None)
    assert found is None if said is None else said in found


def test_an_argument_that_comes_after_the_proof_is_an_error(monkeypatch):
    actor = tiny_actor()
    actor.compute_logp(grouped_batch())
    monkeypatch.setattr(tree_attention, "_not_understood", lambda *_: "its attention takes position_bias")
    with pytest.raises(TrainingError, match="cannot share prefixes in this batch: its attention takes position_bias"):
        actor.compute_logp(grouped_batch())


BLOCK_MASK = object()


@pytest.mark.parametrize(
    ("own", "mask", "arguments"),
    [
        ("flash_attention_2", None, {"sliding_window": 4, "softcap": 30.0}),
        ("flash_attention_2", torch.tensor([[1, 1, 0]]), {"sliding_window": 4, "s_aux": torch.ones(4)}),
        ("flex_attention", BLOCK_MASK, {"softcap": 30.0, "s_aux": torch.ones(4)}),
        ("sdpa", torch.zeros(1, 1, 3, 3), {"is_causal": False, "position_bias": torch.ones(1)}),
        ("eager", torch.zeros(1, 1, 3, 3), {"softcap": 30.0, "sliding_window": 4}),
    ],
)
def test_without_a_tree_the_own_function_gets_what_the_layer_gave(monkeypatch, own, mask, arguments):
    seen = []

    def catch(*args, **named):
        seen.append((args, named))
        return "output", None

    if own == "eager":
        monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", catch)
    else:
        monkeypatch.setitem(AttentionInterface._global_mapping, own, catch)
    layer = modeling_gemma2.Gemma2Attention(transformers.Gemma2Config(**HEADS), 0)
    query, key, value = (torch.zeros(1, heads, 3, 8) for heads in (4, 2, 2))
    registered = AttentionInterface()[tree_attention._registered(own)]
    given = {"dropout": 0.0, "scaling": 0.5, **arguments}
    assert registered(layer, query, key, value, mask, **given) == ("output", None)
    ((args, named),) = seen
    assert all(mine is theirs for mine, theirs in zip(args, (layer, query, key, value, mask), strict=True))
    assert named.keys() == given.keys()
    assert all(named[name] is given[name] for name in given)


def test_every_implementation_has_its_own_mask_function():
    from transformers import AttentionMaskInterface

    masks = AttentionMaskInterface()
    for own in ("eager", "sdpa", "flash_attention_2", "flex_attention"):
        assert inspect.unwrap(masks[tree_attention._registered(own)]) is inspect.unwrap(masks[own])


def test_only_the_forward_over_a_tree_has_another_attention():
    model = gpt_oss()
    with over_tree(model):
        assert model.config._attn_implementation == "prefix_tree|eager"
    assert model.config._attn_implementation == "eager"
    assert modeling_gpt_oss.eager_attention_forward is tree_attention._own_attention(model.model.layers[0].self_attn, "eager")


def test_layers_that_are_computed_again_attend_over_the_tree_again(monkeypatch):
    actors = [tiny_actor(gradient_checkpointing=checkpointing) for checkpointing in (True, False)]
    over, counts = tree_attention.attend, []
    monkeypatch.setattr(tree_attention, "attend", lambda *args: (counts.append(1), over(*args))[1])
    metrics, calls = [], []
    for actor in actors:
        batch = actor.compute_advantages(grouped_batch())
        actor.compute_logp(batch)
        counts.clear()
        metrics.append(actor.ppo_update(batch))
        calls.append(len(counts))
    assert calls[0] > calls[1] > 0
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6, abs=1e-7)
