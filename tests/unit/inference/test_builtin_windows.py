"""Rows longer than a window: branches, blocks of fixed shape, and a proof at the start that reaches as far as the configuration."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers as hf
from builtin_models import VOCABULARY, reference_logprobs, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError, EngineError, PromptTooLongError
from rollwright.inference.backends.builtin import proof
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.general_model import attends_both_ways
from rollwright.inference.request import ModelRequest

WINDOW = 40
OPTIONS = GenerationHyperparameters(max_new_tokens=6, temperature=0.7, ignore_eos=True)


def row(length: int, seed: int = 0) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=drawn).tolist()


def sliding(dtype: torch.dtype = torch.float32, **changes):
    return tiny_model("mistral", dtype, sliding_window=WINDOW, **changes)


def expect_equal(model, prompt: list[int], response) -> None:
    expected = reference_logprobs(model, prompt, response.output_tokens, 0.7)
    torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
@pytest.mark.parametrize("branch", [1, 2])
def test_a_branch_has_the_window_of_a_row_of_the_trunk_and_itself(architecture, branch):
    model = tiny_model(architecture, sliding_window=WINDOW)
    trunk, first, second = row(50), row(30, 1), row(12, 2)
    tokens, own = trunk + first + (second if branch == 2 else []), (first, second)[branch - 1]
    branches = [0] * 50 + [1] * 30 + [2] * (len(tokens) - 80)
    positions = [*range(80), *range(50, len(tokens) - 30)]
    plain = ModelRequest(row(90, 3), OPTIONS, seed=1)
    with BuiltinEngine(model, prefill_tokens=33, threads=1) as engine:
        for _ in range(2):  # the second time the trunk of a row without branches is in the cache
            request = ModelRequest(tokens, OPTIONS, seed=4, position_ids=positions, branch_ids=branches)
            response, _, other = engine.generate([request, ModelRequest(trunk + own, OPTIONS, seed=2), plain])
            expect_equal(model, trunk + own, response)
            expect_equal(model, plain.input_ids, other)


def test_blocks_of_fixed_shape_keep_windows_and_bits():
    model = sliding()
    requests = [ModelRequest(row(length, length), OPTIONS, seed=length) for length in (90, 36, 7, 61)]
    with BuiltinEngine(model, batch_invariant=True, threads=1) as engine:
        together = engine.generate(requests)
        for request, response in zip(requests, together, strict=True):
            expect_equal(model, request.input_ids, response)
            (alone,) = engine.generate([request])
            assert (alone.output_tokens, alone.output_logprobs) == (response.output_tokens, response.output_logprobs)


class ForgetfulMistral(hf.MistralForCausalLM):
    """Forgets what is more than a window back in a plain forward, in a way that no mask shows."""

    def forward(self, input_ids, past_key_values=None, **arguments):
        if past_key_values is None and input_ids.shape[1] > self.config.sliding_window:
            input_ids = input_ids.clone()
            input_ids[:, : -self.config.sliding_window] = 3
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **arguments)


def forgetful(dtype: torch.dtype = torch.float32):
    made = sliding(dtype)
    model = ForgetfulMistral(made.config).to(dtype).eval()
    model.load_state_dict(made.state_dict())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_differs_beyond_its_window_only_is_refused(dtype):
    with pytest.raises(EngineError, match=r"beyond sliding_window=40.*context_length of 40 or less"):
        BuiltinEngine(forgetful(dtype), threads=1)
    with BuiltinEngine(forgetful(dtype), context_length=WINDOW, threads=1) as engine:  # it is not asked for such rows
        assert engine.generate([ModelRequest(row(30), OPTIONS)])[0].output_len == 6


def test_rounding_in_half_precision_is_no_difference():
    for architecture in ("mistral", "gemma2"):
        with BuiltinEngine(tiny_model(architecture, torch.bfloat16, sliding_window=WINDOW), threads=1) as engine:
            assert engine.context_length == 256


def test_what_takes_too_long_to_prove_is_refused(monkeypatch):
    monkeypatch.setattr(proof, "_OPERATIONS", 1e6)
    with pytest.raises(EngineError, match=r"beyond sliding_window=40, cannot be compared.*context_length of 40 or less"):
        BuiltinEngine(sliding(), threads=1)
    BuiltinEngine(sliding(), threads=1, context_length=WINDOW).destroy()


def test_a_model_is_proved_once(monkeypatch):
    model, lengths = sliding(), []
    monkeypatch.setattr(
        proof, "_plain", lambda m, ids, count, plain=proof._plain: lengths.append(ids.shape[1]) or plain(m, ids, count)
    )
    for _ in range(2):
        BuiltinEngine(model, threads=1).destroy()
    assert lengths == [11, 5, 80, 5, 11, 5]


def longrope():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 1e4}
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 48, "rope_parameters": rope}
    config = hf.Phi3Config(**sizes, **lengths, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def test_the_context_ends_where_positions_begin_to_go_by_the_length_of_the_row():
    with pytest.raises(ConfigError, match=r"context_length=200 is too much.*\(longrope\).*more than 48.*48 or less"):
        BuiltinEngine(longrope(), context_length=200, threads=1)
    with BuiltinEngine(model := longrope(), threads=1) as engine:
        assert engine.context_length == 48
        with pytest.raises(PromptTooLongError, match="context is 48"):
            engine.generate([ModelRequest(row(60), OPTIONS)])
        (response,) = engine.generate([ModelRequest(row(45), OPTIONS)])
        assert response.stop_reason == "length"
        assert response.output_len == 3
        expect_equal(model, response.input_tokens, response)


def test_a_model_without_sdpa_is_loaded_and_that_is_said(tmp_path, caplog):
    tiny_model("gemma2", sliding_window=WINDOW).save_pretrained(tmp_path)
    from builtin_models import byte_tokenizer

    with caplog.at_level(logging.INFO), BuiltinEngine(str(tmp_path), byte_tokenizer(), device="cpu", threads=1) as engine:
        assert "Gemma2ForCausalLM is computed with attn_implementation=eager: transformers has no sdpa for it" in caplog.text
        expect_equal(engine.model, prompt := row(90), engine.generate([ModelRequest(prompt, OPTIONS)])[0])


def test_pictures_seen_in_both_directions_are_refused():
    text = {**tiny_model("gemma2").config.to_dict(), "model_type": "gemma3_text", "layer_types": None, "sliding_window": WINDOW}
    for name in ("architectures", "rope_parameters", "rope_scaling"):
        text.pop(name, None)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    config = hf.Gemma3Config(text_config=text, vision_config=vision, image_token_index=90, mm_tokens_per_image=4)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    assert attends_both_ways(model)
    assert not attends_both_ways(sliding())
    with BuiltinEngine(model, threads=1) as engine:
        assert engine.generate([ModelRequest(row(60), OPTIONS)])[0].output_len == 6
        engine._runner.takes_multi_modal, engine._runner.sees_pictures_causally = True, False  # as where image_token_id is set
        with pytest.raises(EngineError, match="both directions within an image"):
            engine.generate(
                [ModelRequest([5, 90, 90, 90, 90, 6], OPTIONS, multi_modal={"pixel_values": torch.zeros(1, 3, 16, 16)})]
            )
