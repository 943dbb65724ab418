"""The plan of memory against models that are there: parameters, what a backward pass keeps, and the sizes of adapters."""

from __future__ import annotations

import pytest
import torch
import transformers

from rollwright.config.experiment import PPOConfig
from rollwright.config.loading import build_config
from rollwright.config.source import Document
from rollwright.errors import ConfigError
from rollwright.placement.memory_plan import (
    adapter_parameters,
    described,
    plan_of,
    rank_memory,
    resident_memory,
    shape_of,
    splits,
    trainable_tokens,
)

GB = 1e9
SMALL = "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,head_dim=32,intermediate_size=384,vocab_size=512"
QWEN_7B = "qwen2:hidden_size=3584,num_hidden_layers=28,num_attention_heads=28,num_key_value_heads=4,intermediate_size=18944,vocab_size=152064"


def config_of(*overrides: str) -> PPOConfig:
    return build_config(Document({}), ["rollout.backend=sglang", *overrides], PPOConfig)


@pytest.fixture(scope="module")
def qwen_7b():
    return shape_of(QWEN_7B)


def made(kind: str):
    settings = {name: int(value) for name, _, value in (each.partition("=") for each in SMALL.split(","))}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_shape_is_that_of_the_model(kind):
    model, shape = made(kind), shape_of(f"{kind}:{SMALL}")
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    assert shape.root + shape.layers * shape.layer == shape.parameters
    cache = model(torch.arange(10)[None], use_cache=True).past_key_values
    of_token = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) / 10
    assert shape.cache == 2 * of_token


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_what_a_layer_keeps_is_near_the_formula(kind):
    model, tokens, saved = made(kind).to(torch.bfloat16), 256, {}
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model.model(torch.randint(512, (1, tokens))).last_hidden_state
    measured = sum(size for size, _ in saved.values()) / tokens / model.config.num_hidden_layers
    assert hidden.requires_grad
    assert shape_of(f"{kind}:{SMALL}").kept == pytest.approx(measured, rel=0.15)


def test_an_adapter_has_pefts_parameters():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(made("qwen3"), peft.LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert adapter_parameters(shape_of(f"qwen3:{SMALL}"), 8) == trained


def test_a_rank_shares_the_state_with_the_others(qwen_7b):
    state = "weights, gradients and optimizer state"
    one = rank_memory(config_of("actor.gradient_checkpointing=true"), qwen_7b)[state]
    assert one == 16 * qwen_7b.parameters
    assert rank_memory(config_of("cluster.processes=4"), qwen_7b)[state] == one / 4
    assert rank_memory(config_of("cluster.processes=4", "rollout.backend=builtin"), qwen_7b)[state] == one
    adapted = rank_memory(config_of("actor.lora.rank=16"), qwen_7b)
    assert adapted["base, frozen"] == 2 * qwen_7b.parameters
    assert adapted[state] == 16 * adapter_parameters(qwen_7b, 16) < one / 100


def test_a_node_is_divided(qwen_7b):
    plans = list(splits(config_of("actor.gradient_checkpointing=true"), qwen_7b, 8, 80 * GB))
    assert [(each.config.cluster.processes, each.config.rollout.servers) for each in plans] == [(8 - n, n) for n in range(1, 8)]
    assert not plans[0].faults
    assert "a rank takes" in plans[-1].faults[0]
    held = [[name for name, _ in gpu] for gpu in plans[0].gpus]
    assert held == [*([f"rank {rank}"] for rank in range(7)), ["server 0"]]


def test_what_does_not_fit_is_said(qwen_7b):
    both = ("actor.lora.rank=16", "actor.gradient_checkpointing=true", "rollout.first_gpu=0")
    assert "together" in plan_of(config_of(*both), qwen_7b, 1, 80 * GB).faults[0]
    shared = plan_of(config_of(*both, "sglang.mem_fraction_static=0.5"), qwen_7b, 1, 80 * GB)
    assert not shared.faults
    assert [name for name, _ in shared.gpus[0]] == ["rank 0", "server 0"]
    by_turns = plan_of(config_of(*both[:2], "rollout.colocate=true"), qwen_7b, 1, 80 * GB)
    assert by_turns.gpus[0][0][1] == resident_memory(config_of(*both[:2]), qwen_7b) < shared.gpus[0][0][1]
    assert [name for name, _ in by_turns.gpus[0]] == ["rank 0", "server 0"]
    assert "2 GPUs are needed, and there are 1" in plan_of(config_of(), qwen_7b, 1, 80 * GB).faults[0]
    assert "rollout.tensor_parallel" in plan_of(config_of("rollout.servers=1"), qwen_7b, 2, 16 * GB).faults[0]


def test_a_row_that_no_rank_can_train_is_refused_with_the_tokens_that_fit(qwen_7b):
    long = config_of("rollout.context_length=1000000", "cluster.processes=7", "actor.gradient_checkpointing=true")
    plan = plan_of(long, qwen_7b, 8, 80 * GB)
    fitting = trainable_tokens(long, qwen_7b, 80 * GB)
    assert 100_000 < fitting < 1_000_000
    (of_rank, of_server) = sorted(plan.faults)
    assert f"a row may have 1,000,000 tokens, and a rank has memory for {fitting:,} beside its weights" in of_rank
    assert "there is no context parallelism" in of_rank
    assert "the cache of a server holds" in of_server
    assert f"rows of up to {fitting:,} tokens" in " ".join(described(plan, qwen_7b, 80 * GB))
    short = config_of(f"rollout.context_length={fitting}", "cluster.processes=7", "actor.gradient_checkpointing=true")
    assert sum(rank_memory(short, qwen_7b).values()) <= 80 * GB
    assert not plan_of(short, qwen_7b, 8, 80 * GB).faults


@pytest.mark.parametrize("model", ["nowhere/no-model", "llama:hidden_size=big", "no_such_type:hidden_size=8"])
def test_a_model_that_is_not_there(model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="--model"):
        shape_of(model)
