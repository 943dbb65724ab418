"""A program that reads pictures in its box: they come in tool results, over several turns, and are recorded and trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from client_cases import environment_of
from command_programs import CLAUDE, CODEX, SECONDS, CommandProgram
from directed_model import CONTEXT, Directed, call_of, defaults, small_tokenizer
from parts import sampled
from PIL import Image

from rollwright.config.experiment import NewVisionConfig
from rollwright.config.generation import returning_ids
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.data.vision import IMAGE, VISION_PIECES
from rollwright.experience.normaliser import normalise
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.model import load_model, new_vision_model
from rollwright.workflows.command_agent import CommandAgentWorkflow

COLORS = ("red", "blue")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A new model that reads images and calls tools."""
    path = tmp_path_factory.mktemp("seeing")
    tokenizer = small_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_PIECES)})
    vision = NewVisionConfig(patch_size=8, layers=1, hidden_size=16, heads=2, max_tokens=16)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": CONTEXT}
    new_vision_model(path, tokenizer=returning_ids(tokenizer), vision=vision, **sizes).save_pretrained(path)
    return path


async def seen(*_, **columns):
    return 1.0


@pytest.mark.parametrize(
    ("program", "tool", "argument", "is_long"),
    [(CLAUDE, "Read", "file_path", False), (CODEX, "view_image", "path", True)],
    ids=["messages", "responses"],
)
async def test_pictures_that_a_program_reads_are_trained(
    request, directory, tmp_path, program: CommandProgram, tool, argument, is_long
):
    if is_long and not request.config.getoption("--whole-programs"):
        pytest.skip("runs with --whole-programs")
    environment = environment_of(program.agent.program)
    for color in COLORS:
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{color}.png")
    config = PPOActorConfig(path=str(directory), device="cpu", optimizer=OptimizerConfig())
    model = load_model(config)
    tokenizer = load_tokenizer(str(directory))
    replies = [call_of(tool, json.dumps({argument: f"/app/{color}.png"})) for color in COLORS]
    workflow = CommandAgentWorkflow(
        program.preset,
        tokenizer,
        defaults(),
        reward_fn=seen,
        programs=[str(environment)],
        timeout=SECONDS,
        limits={"memory_bytes": 4 << 30},
    )
    try:
        with BuiltinEngine(model, tokenizer, context_length=CONTEXT, kv_cache_bytes=64 << 20) as engine:
            directed = Directed(engine, [*replies, "Red and blue."])
            task = {"messages": [{"role": "user", "content": "Look at red.png and blue.png."}], "workdir": str(tmp_path)}
            sample = sampled(directed)
            (row,) = await workflow.arun_episode(sample, task)
    finally:
        workflow.front.close()
    first, second, third = (each.input_ids.count(tokenizer.convert_tokens_to_ids(IMAGE)) for each in directed.requests)
    assert 0 == first < second < third, "a picture comes with each result"
    assert len(row.multi_modal_inputs["image_grid_thw"]) == 2
    colors = [image.getpixel((0, 0)) for image in directed.requests[-1].image_data]
    assert [max(range(3), key=color.__getitem__) for color in colors] == [0, 2]
    batch = normalise([row], sample.recorder)
    actor = FSDPPPOActor(config, model=model)
    actor.initialize()
    mask = batch["loss_mask"].bool()
    torch.testing.assert_close(actor.compute_logp(batch)[mask], batch["logprobs"][mask], atol=2e-3, rtol=0)
