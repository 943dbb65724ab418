"""What configurations and probes say of models."""

import logging

import pytest
import torch
import transformers
from parts import TINY

from rollwright.errors import ConfigError
from rollwright.inference import model_facts
from rollwright.inference.model_facts import Proofs, frequency_groups, refuse_unless_causal, regime_lengths

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [4.0] * 2, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(), {}),
        (transformers.MistralConfig(sliding_window=40), {"sliding_window": 40}),
        (transformers.Llama4TextConfig(), {"attention_chunk_size": 8192, "floor_scale": 8192}),
        (transformers.GPTNeoConfig(), {"window_size": 256}),
        (transformers.GptOssConfig(), {"sliding_window": 128, "rope_parameters.original_max_position_embeddings": 4096}),
        (
            transformers.LlamaConfig(rope_parameters=LONGROPE | {"original_max_position_embeddings": 48}),
            {"rope_parameters.original_max_position_embeddings": 48},
        ),
        (
            transformers.LlamaConfig(
                max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            {"max_position_embeddings": 64},
        ),
        (transformers.Gemma3Config(text_config={"sliding_window": 512}), {"sliding_window": 512}),
    ],
)
def test_every_length_that_changes_the_computation_is_named(config, expected):
    assert regime_lengths(config) == expected


def test_a_proof_is_due_again_where_a_row_reaches_the_next_regime():
    proofs = Proofs(transformers.MistralConfig(sliding_window=40))
    assert proofs.is_due(3)
    proofs.passed(30)
    assert [proofs.is_due(length) for length in (30, 40, 41)] == [False, False, True]
    proofs.passed(41)  # the first token past a window shows in the log-probability of the next
    assert [proofs.is_due(length) for length in (41, 42, 49)] == [False, True, True]
    proofs.passed(200)
    assert not proofs.is_due(10_000)


def test_rows_of_one_set_of_frequencies_are_grouped():
    config = transformers.LlamaConfig(rope_parameters=LONGROPE | {"original_max_position_embeddings": 48})
    assert frequency_groups(config, [100, 48, 49, 3]) == [1, 0, 1, 0]
    assert frequency_groups(transformers.LlamaConfig(), [1, 10_000]) == [0, 0]


def test_frequencies_that_follow_the_length_of_a_batch_are_refused_where_they_do():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    assert frequency_groups(config, [64, 3]) == [0, 0]
    with pytest.raises(ConfigError, match=r"rope_type=dynamic .* a row of 65 tokens, more than its max_position_embeddings=64"):
        frequency_groups(config, [65, 3])


def test_a_model_that_sees_later_tokens_is_refused():
    torch.manual_seed(0)
    encoder = transformers.BertConfig(**{key: value for key, value in TINY.items() if key != "num_key_value_heads"})
    with pytest.raises(ConfigError, match="BertLMHeadModel is not a causal language model: other tokens at the end change"):
        refuse_unless_causal(transformers.BertLMHeadModel(encoder).eval())
    encoder.is_decoder = True
    refuse_unless_causal(transformers.BertLMHeadModel(encoder).eval())


def test_a_decoder_that_is_told_to_see_both_ways_is_refused():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    refuse_unless_causal(model)
    refuse_unless_causal(model.bfloat16())
    model.config.is_causal = False
    with pytest.raises(ConfigError, match="is_causal is false in its configuration"):
        refuse_unless_causal(model)


def test_a_model_without_sdpa_is_computed_eagerly_and_says_so_once(caplog):
    caplog.set_level(logging.INFO)
    config = transformers.Gemma2Config(**TINY, head_dim=4)
    model_facts._note_once.cache_clear()
    for _ in range(2):
        model = transformers.AutoModelForCausalLM.from_config(config, **model_facts.attention_arguments("sdpa"))
        model_facts.note_attention(model, "sdpa")
    assert model.config._attn_implementation == "eager"
    assert (
        caplog.text.count("Gemma2ForCausalLM is computed with attn_implementation=eager: transformers has no sdpa for it") == 1
    )
