"""Images in prompts: Qwen2-VL's own forward over the slot cache, with three-axis positions, among text requests."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from builtin_models import step, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

IMAGE, START, END = 90, 91, 92
GCONFIG = GenerationHyperparameters(max_new_tokens=8, temperature=0.7, ignore_eos=True)


def vision_model():
    config = hf.Qwen2VLConfig(
        text_config={
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=IMAGE,
        video_token_id=93,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model = hf.Qwen2VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def image_request(seed: int, height: int, width: int) -> ModelRequest:
    """A prompt with one image of ``height x width`` patches, which the model merges two by two."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "pixel_values": torch.randn(height * width, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    tokens = [5, START, *[IMAGE] * (height * width // 4), END, 6, 7 + seed]
    return ModelRequest(tokens, GCONFIG, seed=seed, multi_modal=inputs)


@torch.no_grad()
def reference(model, request, output):
    tokens = torch.tensor([request.input_ids + output])
    inputs = dict(request.multi_modal or {})
    if inputs:
        inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
    model.model.rope_deltas = None
    logits = model(tokens, **inputs).logits[0].double() / 0.7
    first = len(request.input_ids) - 1
    return logits.log_softmax(-1)[torch.arange(first, first + len(output)), output]


def test_images_and_text_in_one_batch_equal_the_models_forward():
    model = vision_model()
    requests = [
        image_request(0, 4, 8),
        ModelRequest([5, 6, 7], GCONFIG, seed=1),
        image_request(2, 2, 2),
        image_request(3, 4, 8),
        ModelRequest([8] * 20, GCONFIG, seed=4),
    ]
    requests.append(image_request(0, 4, 8))
    requests[-1].multi_modal["pixel_values"] = requests[3].multi_modal["pixel_values"]  # the same ids, another image
    with BuiltinEngine(model, max_running_requests=4) as engine:
        responses = engine.generate(requests)
        engine.pause()  # and again, with keys and values computed anew half-way
        futures = engine.submit(requests)
        step(engine, 4)
        engine.publish(1)
        engine.resume()
        again = [future.result(60) for future in futures]
    for request, response in zip(requests * 2, responses + again, strict=True):
        expected = reference(model, request, response.output_tokens)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)
    assert responses[0].output_logprobs[0] != responses[-1].output_logprobs[0]


def test_models_that_read_text_refuse_images():
    with BuiltinEngine(tiny_model("qwen3")) as engine, pytest.raises(EngineError, match="text only"):
        engine.generate([image_request(0, 2, 2)])


def test_models_that_the_engine_would_compute_wrongly_are_refused_at_the_start():
    common = dict(vocab_size=96, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    bert = hf.BertLMHeadModel(hf.BertConfig(**common, **sizes))  # sees what comes later
    mamba = hf.MambaForCausalLM(hf.MambaConfig(**common, num_hidden_layers=2, state_size=4))
    for model in (bert, mamba):
        with pytest.raises(EngineError, match="cannot serve"):
            BuiltinEngine(model.eval())
