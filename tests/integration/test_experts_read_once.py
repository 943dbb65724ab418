"""Two and four ranks that load a mixture of experts read every byte of its checkpoint once, and hold what one process holds."""

from __future__ import annotations

import pytest
import torch
from rank_scripts import run_ranks
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

WORKER = """
import os, sys
from collections import Counter
import safetensors
import torch

read = Counter()
whole_open = safetensors.safe_open

class Counted:
    # A file of the checkpoint; adds the bytes that are read of each tensor.
    def __init__(self, *arguments, **keywords):
        self.file = whole_open(*arguments, **keywords)
    def __enter__(self):
        self.file.__enter__()
        return self
    def __exit__(self, *error):
        return self.file.__exit__(*error)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def get_tensor(self, key):
        tensor = self.file.get_tensor(key)
        read[key] += tensor.nbytes
        return tensor
    def get_slice(self, key):
        part = self.file.get_slice(key)
        class Part:
            def __getitem__(_, slices):
                tensor = part[slices]
                read[key] += tensor.nbytes
                return tensor
            def __getattr__(_, name):
                return getattr(part, name)
        return Part()

safetensors.safe_open = Counted
from rollwright.config.sections import TrainEngineConfig
from rollwright.training import hf_checkpoint, parallel
from rollwright.training.engine import TrainEngine

hf_checkpoint.safe_open = Counted
model, out, copies = sys.argv[1:4]
shard_size = parallel.environment_ranks() // int(copies)
engine = TrainEngine(TrainEngineConfig(path=model, device="cpu", optimizer=None, shard_size=shard_size))
engine.initialize()
torch.save({"read": dict(read), "weights": engine.full_weights()}, f"{out}/rank{parallel.rank()}.pt")
parallel.wait_for_all()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (4, 2)])
def test_every_byte_is_read_once_for_each_copy_of_the_model(model, tmp_path, ranks, copies):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    run_ranks(script, model, tmp_path, copies, count=ranks)
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for each in found:
        for name, tensor in whole.named_parameters():
            assert torch.equal(each["weights"][name], tensor), name
    sizes = {}
    from safetensors import safe_open

    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes |= {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118
    experts = {key for key in sizes if ".experts." in key}
    assert len(experts) == 2 * 6 * 3
    read = {key: sum(each["read"].get(key, 0) for each in found) for key in sizes}
    assert {key: read[key] for key in experts} == {key: sizes[key] for key in experts}  # once, however many copies there are
    assert all(read[key] == copies * sizes[key] for key in sizes.keys() - experts)  # by each copy, in parts
    of_rank = [sum(each["read"].get(key, 0) for key in experts) for each in found]
    if copies == 1:  # each rank its half
        assert of_rank == [sum(sizes[key] for key in experts) // ranks] * ranks
