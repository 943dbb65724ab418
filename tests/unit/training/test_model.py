"""Models in Hugging Face form: new ones, loading, and saving what another part holds as views."""

import json

import pytest
import torch
from tiny_policy import tiny_actor, tiny_batch, tiny_model
from transformers import AutoModelForCausalLM

from rollwright.config.sections import PPOActorConfig, TrainEngineConfig
from rollwright.errors import ConfigError
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.hf_checkpoint import save_model
from rollwright.training.model import load_model, new_model, parameter_count


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_a_new_model_is_ordinary_hugging_face(tmp_path, architecture):
    before = torch.get_rng_state()
    made = new_model(tmp_path / "m", architecture, vocab_size=20, hidden_size=32, num_hidden_layers=1, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert loaded.config.model_type == architecture
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == [type(loaded).__name__]
    assert (tmp_path / "m" / "model.safetensors").exists()
    ids = torch.arange(6)[None]
    torch.testing.assert_close(loaded(ids).logits, made(ids).logits)
    again = new_model(tmp_path / "again", architecture, vocab_size=20, hidden_size=32, num_hidden_layers=1, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    assert parameter_count(made) == sum(p.numel() for p in loaded.parameters())


def test_new_models_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="qwen3, qwen2, llama"):
        new_model(tmp_path, "gpt9", vocab_size=8)
    with pytest.raises(ConfigError, match="tokenizer or a vocab_size"):
        new_model(tmp_path)
    with pytest.raises(ConfigError, match="not a multiple"):
        new_model(tmp_path, vocab_size=8, hidden_size=30, num_attention_heads=4)


def test_loading(tmp_path):
    save_model(tiny_model(dtype=torch.bfloat16), tmp_path / "m")
    path = str(tmp_path / "m")
    trained = load_model(TrainEngineConfig(path=path, device="cpu", dtype="bfloat16"))
    assert trained.dtype == torch.float32  # master weights
    assert not trained.training
    scored = load_model(TrainEngineConfig(path=path, device="cpu", dtype="bfloat16", optimizer=None))
    assert scored.dtype == torch.bfloat16
    fresh = load_model(TrainEngineConfig(path=path, device="cpu", init_from_scratch=True))
    assert not torch.equal(fresh.lm_head.weight, trained.lm_head.weight)
    with pytest.raises(ConfigError, match=r"No model could be loaded from '.*nowhere'"):
        load_model(TrainEngineConfig(path=str(tmp_path / "nowhere"), device="cpu"))


def test_parameters_that_are_views_of_one_tensor_are_saved_apart_and_tied_ones_once(tmp_path):
    actor = tiny_actor(dtype=torch.float32)
    attention = actor.model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    fused = torch.cat([part.data for part in parts])
    for part, view in zip(parts, fused.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    actor.save(tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, actor.model.state_dict()[name]), name
    from safetensors import safe_open

    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_bfloat16_compute_keeps_float32_weights():
    actor = FSDPPPOActor(PPOActorConfig(device="cpu", dtype="bfloat16"), model=tiny_model(dtype=torch.float32))
    actor.initialize()
    batch = tiny_batch()
    exact = tiny_actor().compute_logp(batch)
    rough = actor.compute_logp(batch)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.2
    actor.ppo_update(actor.compute_advantages(batch))
    assert all(parameter.dtype == torch.float32 for parameter in actor.model.parameters())
