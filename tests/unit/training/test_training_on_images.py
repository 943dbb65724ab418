"""Rows with images are scored like one row alone by the model's own forward pass."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollwright.config.sections import LoraConfig, MicroBatchSpec, PPOActorConfig
from rollwright.training.actor import FSDPPPOActor

IMAGE = 60


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 16,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


@pytest.mark.parametrize("max_tokens", [13, 8192])
def test_rows_with_and_without_images(model, max_tokens):
    grid = torch.tensor([[1, 4, 4]])
    images = [torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    rows = [
        [1, 2, 62] + [IMAGE] * 4 + [63, 3, 4, 5, 6],
        [7, 8, 9, 10, 11, 12],
        [9, 62] + [IMAGE] * 4 + [63, 30, 31, 32, 33, 34, 35],
    ]
    ids = torch.zeros(3, 13).long()
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    batch = {
        "input_ids": ids,
        "attention_mask": ids != 0,
        "multi_modal_inputs": [
            {"pixel_values": images[0], "image_grid_thw": grid},
            None,
            {"pixel_values": images[1], "image_grid_thw": grid},
        ],
    }
    actor = FSDPPPOActor(PPOActorConfig(device="cpu", mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens)), model=model)
    actor.initialize()
    scores = actor.compute_logp(batch)
    for number, row in enumerate(rows):
        one = torch.tensor([row])
        picture = batch["multi_modal_inputs"][number] or {}
        extra = {**picture, "mm_token_type_ids": (one == IMAGE).long()} if picture else {}
        with torch.no_grad():
            logits = model(input_ids=one, attention_mask=torch.ones_like(one), **extra).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, one[0, 1:, None])[:, 0]
        torch.testing.assert_close(scores[number, 1 : len(row)], expected, atol=2e-6, rtol=0)


def test_samples_of_one_picture_compute_it_once(model, monkeypatch):
    grid = torch.tensor([[1, 4, 4]])
    one, other = (torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    prompt = [1, 2, 62] + [IMAGE] * 4 + [63, 3]
    rows = torch.tensor([[*prompt, 10 + sample, 20, 30 + sample] for sample in range(6)])
    batch = {
        "input_ids": rows,
        "attention_mask": torch.ones_like(rows),
        "group_ids": torch.arange(6) // 3,
        "multi_modal_inputs": [{"pixel_values": one if row < 3 else other, "image_grid_thw": grid} for row in range(6)],
    }
    seen = []
    features = model.model.visual.forward
    monkeypatch.setattr(
        model.model.visual, "forward", lambda pixels, *a, **k: (seen.append(len(pixels)), features(pixels, *a, **k))[1]
    )
    scores = {}
    for share in (True, False):
        actor = FSDPPPOActor(PPOActorConfig(device="cpu", share_prefixes=share), model=model)
        actor.initialize()
        if share:
            actor.compute_logp(batch)  # proves itself
            assert actor.division.shares_prefixes
        seen.clear()
        scores[share] = actor.compute_logp(batch)
        assert seen == [32 if share else 96]  # rows of pixels, 16 a picture
    torch.testing.assert_close(scores[True], scores[False], atol=2e-6, rtol=0)


def test_an_adapter_is_on_the_text_model_alone(model, tmp_path):
    """The vision tower has layers of the same names."""
    peft = pytest.importorskip("peft")
    actor = FSDPPPOActor(PPOActorConfig(device="cpu", lora=LoraConfig(rank=2)), model=copy.deepcopy(model))
    actor.initialize()
    assert len(actor.full_weights()) == 2 * 7 * 2
    assert all(".language_model.layers." in name for name in actor.full_weights())
    actor.save(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    assert peft.get_peft_model_state_dict(theirs).keys() == load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
