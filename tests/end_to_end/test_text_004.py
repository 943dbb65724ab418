"""SequenceProcessor's own page: its code blocks, with only the imports changed, run; its signatures and dataclasses are ours."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any, Optional

import numpy as np
import pytest
import torch

import rollwright
from rollwright import DATASET_REGISTRY, SequenceProcessor
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.training.model import new_model

TEXT = "seeds/004_8cdfb69781c32467.txt"


def with_our_imports(code: str) -> str:
    """The rule of docs/coming-from.md: the whole module path becomes ``rollwright``."""
    return re.sub(r"from (sequence_processing|rlp_datasets) import", "from rollwright import", code)


@pytest.fixture(scope="module")
def blocks(shared) -> list[str]:
    text = shared(TEXT).read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(found) == 14
    return [with_our_imports(block) for block in found]


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, Any]:
    """What the text takes for granted."""
    tokenizer = build_character_tokenizer(pieces=["<answer>", "</answer>", "<think>", "</think>"])
    model = new_model(
        tmp_path_factory.mktemp("text-004"), tokenizer=tokenizer, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    with torch.no_grad():  # short responses: this is about the code, and the machine may be slow
        model.model.embed_tokens.weight[tokenizer.eos_token_id] *= 3
    imported = {"SequenceProcessor": SequenceProcessor, "GenerationConfig": rollwright.GenerationConfig}  # by earlier blocks
    prompts = {"prompts": ["1+1=", "2+2="], "training_prompts": ["3*3=", "7-2="]}
    return {"model": model, "tokenizer": tokenizer, "G": 2, **prompts, **imported}


@pytest.fixture
def gsm8k(shared, monkeypatch):
    """GSM8K from the local copy, where the text's name without a path would fetch it."""
    from rollwright.data import gsm8k

    shared("data/gsm8k/test.jsonl")
    directory = str(shared("data/gsm8k"))
    read = gsm8k.read_rows
    monkeypatch.setattr(gsm8k, "read_rows", lambda path, split, name: read(directory, split))


def containing(blocks: list[str], phrase: str) -> str:
    (found,) = [block for block in blocks if phrase in block]
    return found


def run(code: str, names: dict[str, Any], **changes: str) -> dict[str, Any]:
    """Execute a block; ``changes`` make numbers smaller."""
    for old, new in changes.items():
        code = re.sub(rf"\b{old}=\d+", f"{old}={new}", code)
    namespace = dict(names)
    exec(compile(code, "text 004", "exec"), namespace)
    return namespace


SMALL = {"max_new_tokens": "6", "num_prompts": "3", "G": "2"}


@pytest.mark.slow
@pytest.mark.usefixtures("gsm8k")
def test_the_quick_start(blocks, names):
    found = run(containing(blocks, "# Option 1"), names, **SMALL)
    assert found["sequences"].sequences.shape[:2] == (3, 2)
    assert found["config"].temperature == 0.8
    assert [len(row) for row in found["logprobs"].logprobs] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("gsm8k")
def test_the_usage_patterns_and_the_individual_methods(blocks, names):
    processor = SequenceProcessor(names["model"], names["tokenizer"], rollwright.GenerationConfig(max_new_tokens=6))
    names = {**names, "processor": processor}
    found = run(containing(blocks, "# With gradients (for training)"), names, **SMALL)
    found["logprobs"].logprobs[0][0].sum().backward()
    assert names["model"].model.embed_tokens.weight.grad is not None
    found = run(containing(blocks, "# Just teacher forcing"), names, G="2")
    assert len(found["prompts"]) == 64
    assert found["logprobs"].entropies[1][1].shape == (found["sequences"].gen_lens[1][1],)


@pytest.mark.slow
@pytest.mark.usefixtures("gsm8k")
def test_the_integration_examples(blocks, names):
    found = run(containing(blocks, "processor.generate_with_logprobs(prompts, G)"), names)
    assert found["sequences"].sequences.shape[:2] == (2, 2)
    found = run(containing(blocks, "def batched_generation"), names)
    gen_cfg = rollwright.GenerationConfig(temperature=0.5, max_new_tokens=4)
    assert found["batched_generation"](names["model"], names["tokenizer"], ["1+1="], 2, gen_cfg) is None
    run(containing(blocks, "# evals/utils_io.py replacement"), names, **SMALL)
    assert run(containing(blocks, "# Auto-detect optimal"), names)


def test_the_registry_is_ours(blocks, names):
    assert run(containing(blocks, "# Add custom datasets"), names)["DATASET_REGISTRY"] is DATASET_REGISTRY
    assert "gsm8k_r1_template" in DATASET_REGISTRY


@pytest.mark.parametrize("name", ["GenerationConfig", "BatchedSequences", "LogprobResults"])
def test_dataclasses_have_the_fields_and_defaults_of_the_text(blocks, name):
    namespace = {"dataclass": dataclasses.dataclass, "torch": torch, "np": np, "List": list}
    exec(containing(blocks, f"class {name}:"), namespace)
    theirs, ours = dataclasses.fields(namespace[name]), dataclasses.fields(getattr(rollwright, name))
    assert [field.name for field in ours][: len(theirs)] == [field.name for field in theirs]
    for their, our in zip(theirs, ours, strict=False):
        assert their.default == our.default, our.name
    assert all(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for field in ours[len(theirs) :]
    )


def test_the_main_method_has_the_signature_of_the_text(blocks):
    block = containing(blocks, "def generate_with_logprobs(")
    namespace: dict[str, Any] = {"Optional": Optional, "List": list, "Tuple": tuple, "BatchedSequences": 0, "LogprobResults": 0}
    code = "from __future__ import annotations\n" + textwrap.dedent(block) + "    ..."
    ast.parse(code)
    exec(code, namespace)
    theirs = inspect.signature(namespace["generate_with_logprobs"]).parameters
    ours = inspect.signature(SequenceProcessor.generate_with_logprobs).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [parameter.default for parameter in theirs.values()]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])
