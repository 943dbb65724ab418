"""Weights are published under the names, and in the pieces, in which ``save_pretrained`` writes them: every causal family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.builtin.loading import paired
from rollwright.inference.weights.names import as_own, as_published
from rollwright.inference.weights.stream import WeightStream
from rollwright.training.fsdp import whole_weights
from rollwright.training.hf_checkpoint import load_weights

#: What sizes are called in configurations, and what they are here.
SIZES = {
    "vocab_size": 96,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim_model", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "index_n_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "global_head_dim", "dim_head", "swa_head_dim", "d_kv"), 8),
    **dict.fromkeys(
        ("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "q_lora_rank", "kv_lora_rank", "o_lora_rank"), 8
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "d_ff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dff", "intermediate_size_mlp", "moe_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("dense_intermediate_size", "shared_expert_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "zero_expert_num"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "decoder_start_token_id"), 1),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# fmt: off
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [48] * 4,
    },
    "gemma4_text": {"enable_moe_block": True, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
# fmt: on
LARGE = "its smallest form has tens of millions of parameters; its text model is a family of its own"
#: Families that are not compared, and why.
NOT_BUILT = {
    **dict.fromkeys(("blt", "fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "moss_transcribe_diarize"), LARGE),
    "cohere_compass_text": "its default configuration has rotary parameters for none of its layers",
    "dots3_note": "its configuration names 42 layers one by one",
    "dots3_note_text": "its smallest form has 95 million parameters",
    "gemma3n": "its vision tower is a package of its own (timm)",
    "gemma4_assistant": "its default configuration is refused by its own checks",
    "gemma4_unified_assistant": "its default configuration is refused by its own checks",
    **dict.fromkeys(("moshi", "musicgen", "musicgen_melody"), "it speaks or plays music: it is built of three models"),
    "qwen4_exp": "its default configuration has no indexer; its text model is a family of its own",
    "zamba": "transformers cannot tie the weights of four of its layers",
}


def sizes(config_class: Any) -> dict[str, Any]:
    """The sizes that a configuration and its parts know."""
    default, nicknames = config_class(), getattr(config_class, "attribute_map", {})
    names = set(default.to_dict()) - nicknames.keys() | {name for name in nicknames if nicknames[name] not in SIZES}
    values = default.to_dict()
    known = {name: SIZES[name] for name in names & SIZES.keys() if not isinstance(values.get(name), (list, dict))}
    known = {name: size for name, size in known.items() if name not in (getattr(default, "per_layer_attributes", None) or ())}
    parts = getattr(config_class, "sub_configs", None) or {}
    return known | {name: sizes(part) for name, part in parts.items() if name in names and part.__name__ != "AutoConfig"}


def tiny(family: str) -> Any:
    """A model with few parameters, whose values are all its own."""
    config_class = CONFIG_MAPPING[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_class(**sizes(config_class) | SPECIAL.get(family, {})))
    return model


def written(directory: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a directory."""
    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def shapes(weights: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in weights]


def test_every_family_is_compared_or_listed():
    assert NOT_BUILT.keys() <= FAMILIES.keys()
    assert len(FAMILIES) - len(NOT_BUILT) >= 160


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_BUILT])
@torch.no_grad()
def test_a_family_is_published_as_save_pretrained_writes_it(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    own = whole_weights(model)
    published = as_published(model, own)
    assert dict(shapes(published.described)) == written(tmp_path)
    assert shapes(published) == shapes(published.described)
    received = WeightStream.of([(name, tensor.clone()) for name, tensor in published])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.zero_()
    for target, tensor in paired(model, received):  # by the built-in engine
        target.copy_(tensor)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.fixture
def experts():
    return tiny("qwen3_moe")


def test_a_layers_experts_are_converted_when_they_have_come(experts):
    own, read = whole_weights(experts), []

    def reading():
        for name, tensor in own:
            read.append(name)
            yield name, tensor

    published = as_published(experts, WeightStream(own.described, reading))
    first = next(name for name, _ in published if ".experts." in name)
    assert first.startswith("model.layers.0.")
    assert read[-1].startswith("model.layers.0.")
    assert len(published.described) > len(own.described)
    assert published.nbytes == own.nbytes


def test_weights_of_another_type_are_published_alike(experts):
    half = as_published(experts, whole_weights(experts, torch.bfloat16))
    assert {tensor.dtype for _, tensor in half} == {tensor.dtype for _, tensor in half.described} == {torch.bfloat16}
    assert shapes(half) == shapes(as_published(experts, whole_weights(experts)))


def test_a_model_loaded_by_ranks_is_published_as_one_that_from_pretrained_loaded(tmp_path):
    """A checkpoint under older names is written and published under them by both."""
    tiny("qwen3_moe").save_pretrained(tmp_path)
    model = tiny("qwen3_moe")
    load_weights(model, str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shapes(as_published(model, whole_weights(model))) == shapes(as_published(loaded, whole_weights(loaded)))
    assert [*map(str, model._weight_conversions)] == [*map(str, loaded._weight_conversions)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sent: sent.pop("model.layers.0.mlp.experts.2.up_proj.weight"), "some are missing|has shape|another model"),
        (lambda sent: sent.update({"model.layers.0.mlp.experts.9.nothing": torch.zeros(2)}), "is not in the model"),
        (
            lambda sent: sent.update({"model.norm.weight": torch.zeros(2)}),
            r"model.norm.weight of shape \(2,\) has shape \(32,\)",
        ),
    ],
)
def test_experts_that_are_not_whole_are_refused_before_anything_changes(experts, change, said):
    sent = dict(as_published(experts, whole_weights(experts)))
    change(sent)
    with pytest.raises(WeightUpdateError, match=said):
        paired(experts, WeightStream.of(sent))


def test_a_model_that_is_not_transformers_own_is_published_as_it_is():
    model = torch.nn.Linear(2, 2)
    weights = whole_weights(model)
    assert as_published(model, weights) is weights
    assert as_own(model, weights) is weights
