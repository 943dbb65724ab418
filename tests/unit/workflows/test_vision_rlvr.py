"""VisionRLVRWorkflow: images go with the prompt into engine, trajectory, batch and actor, and mean the same in all."""

import asyncio

import pytest
import torch
from parts import write_vision_model
from PIL import Image
from worlds.counting import counting_squares

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import MicroBatchSpec, OptimizerConfig, PPOActorConfig, RolloutConfig
from rollwright.data.tokenizer import build_character_tokenizer, load_tokenizer
from rollwright.data.vision import VISION_PIECES, VisionProcessor, new_image_processor
from rollwright.errors import ConfigError, EngineError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.experience.trajectory import concat_padded_tensors
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.sglang import SGLangClient, SGLangFacts
from rollwright.inference.request import ModelResponse
from rollwright.inference.router import Server
from rollwright.trainers.loops.supervised import supervised_batch
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.model import load_model
from rollwright.workflows.vision_rlvr import VisionRLVRWorkflow

GCONFIG = GenerationHyperparameters(max_new_tokens=6, temperature=0.7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision-model"), max_position_embeddings=64)


class Recording:
    def __init__(self, engine):
        self.engine, self.recorder, self.requests = engine, Recorder(), []

    async def agenerate(self, request):
        self.requests.append(request)
        response = await self.engine.agenerate(request)
        self.recorder.record(request, response)
        return response


class Says:
    def __init__(self, tokens, stop_reason="stop"):
        self.tokens, self.stop_reason = tokens, stop_reason

    async def agenerate(self, request):
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=list(self.tokens),
            output_logprobs=[-1.0] * len(self.tokens),
            output_versions=[0] * len(self.tokens),
            stop_reason=self.stop_reason,
            temperature=0.7,
        )


async def right(prompt, completion, prompt_ids, completion_ids, answer, images, **data):
    assert isinstance(images[0], Image.Image)
    return float(completion == answer)


def sampled_batch(model, tokenizer, tasks, **engine_arguments):
    """Rows as the executor's normaliser makes them."""
    workflow = VisionRLVRWorkflow(right, GCONFIG, tokenizer)
    rows = []
    with BuiltinEngine(model, tokenizer, seed=1, **engine_arguments) as engine:
        for task in tasks:
            recording = Recording(engine)
            row = normalise(asyncio.run(workflow.arun_episode(recording, task)), recording.recorder)
            check_trajectory(row)
            rows.append(row)
    return concat_padded_tensors(rows)


@pytest.mark.parametrize("max_tokens", [40, 8192])
def test_training_sees_what_sampling_saw(directory, max_tokens):
    tokenizer = load_tokenizer(directory)
    tasks = counting_squares("test", size=6)
    tasks[2] = {**tasks[2], "images": [tasks[2]["images"][0].resize((32, 48))]}  # another number of tokens
    tasks[4] = {"messages": [{"role": "user", "content": "squares?"}], "answer": "0", "images": [tasks[0]["images"][0]] * 2}
    config = PPOActorConfig(
        path=str(directory), device="cpu", mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens), optimizer=OptimizerConfig()
    )
    model = load_model(config)
    batch = sampled_batch(model, tokenizer, tasks)
    assert [entry["pixel_values"].shape[0] for entry in batch["multi_modal_inputs"]] == [36, 36, 24, 36, 72, 36]
    actor = FSDPPPOActor(config, model=model)
    actor.initialize()
    mask = batch["loss_mask"].bool()
    logp = actor.compute_logp(batch)
    torch.testing.assert_close(logp[mask], batch["logprobs"][mask], atol=1e-4, rtol=0)
    blank = [{**entry, "pixel_values": torch.zeros_like(entry["pixel_values"])} for entry in batch["multi_modal_inputs"]]
    other = actor.compute_logp({**batch, "multi_modal_inputs": blank})
    assert (other - batch["logprobs"])[mask].abs().max() > 1e-2  # the images matter
    batch["advantages"] = torch.ones_like(batch["logprobs"])
    seen = model.model.visual.patch_embed.proj.weight.clone()
    metrics = actor.ppo_update(batch)
    assert metrics["logprob_difference/max"] < 1e-4
    assert not torch.equal(seen, model.model.visual.patch_embed.proj.weight)  # the part that sees is trained, too


def test_the_prompt_holds_one_token_for_each_feature(directory):
    tokenizer = load_tokenizer(directory)
    (task,) = counting_squares("train", size=1)
    engine = Recording(Says(tokenizer.encode("3", add_special_tokens=False)))
    row = asyncio.run(VisionRLVRWorkflow("exact_match_reward", GCONFIG, tokenizer).arun_episode(engine, task))
    (request,) = engine.requests
    text = tokenizer.decode(request.input_ids)
    assert text == "<|user|><|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>squares?<|end|><|assistant|>"
    assert request.multi_modal["image_grid_thw"].tolist() == [[1, 6, 6]]
    assert request.image_data == task["images"]
    assert row["rewards"].tolist() == [float(task["answer"] == "3")]
    assert row["multi_modal_inputs"][0]["pixel_values"].shape == (36, 3 * 2 * 8 * 8)


def test_messages_may_be_rendered_text(directory):
    tokenizer = load_tokenizer(directory)
    (task,) = counting_squares("train", size=1)
    engine = Recording(Says([9]))
    task = {**task, "messages": "<|user|><image>squares?<|end|><|assistant|>"}
    asyncio.run(VisionRLVRWorkflow("exact_match_reward", GCONFIG, tokenizer).arun_episode(engine, task))
    text = tokenizer.decode(engine.requests[0].input_ids)
    assert text == "<|user|><|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>squares?<|end|><|assistant|>"


def test_a_sampled_image_token_ends_the_row_and_stands_for_nothing(directory):
    tokenizer = load_tokenizer(directory)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    workflow = VisionRLVRWorkflow("exact_match_reward", GCONFIG, tokenizer)
    assert {image, tokenizer.convert_tokens_to_ids("<|video_pad|>")} <= set(workflow.gconfig.stop_token_ids)
    tasks = counting_squares("train", size=2)
    rows = [asyncio.run(workflow.arun_episode(Says([9, image]), task)) for task in tasks]
    actor = FSDPPPOActor(PPOActorConfig(path=str(directory), device="cpu"))
    actor.initialize()
    logp = actor.compute_logp(concat_padded_tensors(rows))
    assert torch.isfinite(logp).all()
    assert (logp[:, -1] < 0).all()  # the label is still the image token


def test_a_group_is_made_whole_or_rejected(directory):
    tokenizer = load_tokenizer(directory)
    (task,) = counting_squares("train", size=1)
    workflow = VisionRLVRWorkflow(right, GCONFIG.new(n_samples=3), tokenizer)
    batch = asyncio.run(workflow.arun_episode(Says([9]), task))
    assert batch["input_ids"].shape[0] == len(batch["multi_modal_inputs"]) == 3
    assert asyncio.run(workflow.arun_episode(Says([9], stop_reason="abort"), task)) is None


def test_supervised_rows_see_the_same_prompt_as_episodes(directory):
    tokenizer = load_tokenizer(directory)
    (task,) = counting_squares("train", size=1)
    engine = Recording(Says([9]))
    workflow = VisionRLVRWorkflow("exact_match_reward", GCONFIG, tokenizer, processor=str(directory))
    asyncio.run(workflow.arun_episode(engine, task))
    batch = supervised_batch([task], tokenizer, workflow.processor)
    prompt = engine.requests[0].input_ids
    assert batch["input_ids"][0, : len(prompt)].tolist() == prompt
    assert batch["loss_mask"][0].tolist() == [0] * len(prompt) + [1, 1]  # the number and the end
    torch.testing.assert_close(batch["multi_modal_inputs"][0]["pixel_values"], engine.requests[0].multi_modal["pixel_values"])


def test_checkpoints_see_too(directory, tmp_path):
    actor = FSDPPPOActor(PPOActorConfig(path=str(directory), device="cpu"))
    actor.initialize()
    tokenizer = load_tokenizer(directory)
    actor.save(tmp_path / "saved", tokenizer)
    again = VisionRLVRWorkflow("exact_match_reward", GCONFIG, str(tmp_path / "saved"))
    assert again.processor.image_processor.patch_size == 8


def test_servers_get_encoded_images_and_tokenizers_without_images_are_refused(directory):
    tokenizer = load_tokenizer(directory)
    (task,) = counting_squares("train", size=1)
    engine = Recording(Says([9]))
    asyncio.run(VisionRLVRWorkflow("exact_match_reward", GCONFIG, tokenizer).arun_episode(engine, task))
    (request,) = engine.requests
    client = SGLangClient(RolloutConfig(), addresses=["127.0.0.1:1"])
    client.backend.facts["127.0.0.1:1"] = SGLangFacts()
    client.backend.check(request, "127.0.0.1:1")
    (encoded,) = client.backend.payload(request, "id", Server("127.0.0.1:1"))["image_data"]
    assert encoded.startswith("data:image/png;base64,iVBOR")
    request.image_data = None
    with pytest.raises(EngineError, match="for images give image_data"):
        client.backend.check(request, "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no token '<.image_pad.>'"):
        VisionProcessor(build_character_tokenizer(), new_image_processor())
    with pytest.raises(ConfigError, match="came from no directory"):
        VisionRLVRWorkflow("exact_match_reward", GCONFIG, build_character_tokenizer(pieces=VISION_PIECES))
