"""Files of AReaL's shape run with the names that they import: on the built-in engine, with tiny models, recorded and trained."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import areal_shapes as shapes

from rollwright import (
    GenerationHyperparameters,
    GRPOConfig,
    OpenAIAgentWorkflow,
    PPOTrainer,
    RolloutConfig,
    RolloutExecutor,
    get_custom_dataset,
    load_expr_config,
    load_hf_processor_and_tokenizer,
    load_hf_tokenizer,
    stats_tracker,
)
from rollwright.config.experiment import NewVisionConfig
from rollwright.config.sections import TrainEngineConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.data.vision import VISION_PIECES
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.training.model import load_model, new_vision_model

GCONFIG = GenerationHyperparameters(max_new_tokens=6, temperature=0.7, n_samples=2)
TASK = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}


@pytest.fixture
def sampled(tiny_model):
    """``sampled(workflow, task)``: the rows of two samples, and what was reported meanwhile."""

    def run(workflow, task=TASK, directory=tiny_model):
        stats_tracker.export_all()
        tokenizer = load_hf_tokenizer(str(directory))
        model = load_model(TrainEngineConfig(path=str(directory)))
        engine = BuiltinEngine(model, tokenizer=tokenizer)
        with engine, RolloutExecutor(engine, RolloutConfig(max_sample_retries=0)) as executor:
            rows = executor.rollout_batch([task], workflow=workflow, group_size=2)
        return rows, stats_tracker.export_all()

    return run


@pytest.fixture
def tokenizer(tiny_model):
    """As transformers loads it: a plain one, whose ids are in a BatchEncoding."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def test_a_training_script_with_one_turn(tiny_model, tmp_path):
    """The script of a run on GSM8K: config, datasets, trainer, workflows by import path."""
    rows = [{"question": f"{n}+1=", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(4)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(f"""
experiment_name: areal
trial_name: gsm8k
cluster: {{fileroot: {tmp_path / "runs"}, threads: 1}}
tokenizer_path: {tiny_model}
total_train_steps: 1
actor: {{path: {tiny_model}, optimizer: {{lr: 1.0e-3}}}}
gconfig: {{n_samples: 2, max_new_tokens: 6, temperature: 0.7}}
train_dataset: {{path: {tmp_path}, batch_size: 2, type: rl, max_length: 100}}
valid_dataset: {{path: {tmp_path}, batch_size: 2, type: rl}}
evaluator: {{every_steps: 1, limit: 2}}
stats_logger: {{display: none}}
""")
    config, _ = load_expr_config(["--config", str(tmp_path / "run.yaml")], GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    valid_dataset = get_custom_dataset(split="test", dataset_config=config.valid_dataset, tokenizer=tokenizer)
    kwargs = {
        "reward_fn": "areal_shapes.digits_reward",
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
        "enable_thinking": False,
        "get_input_ids_fn": "areal_shapes.input_ids_of",
    }
    eval_kwargs = {**kwargs, "gconfig": config.gconfig.new(temperature=0.6)}
    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=valid_dataset) as trainer:
        trainer.train(
            workflow="areal_shapes.OneTurn",
            workflow_kwargs=kwargs,
            eval_workflow="areal_shapes.OneTurn",
            eval_workflow_kwargs=eval_kwargs,
        )
        assert trainer.actor.version == 1
    (directory,) = (tmp_path / "runs").glob("**/metrics.jsonl")
    records = [json.loads(line) for line in directory.read_text().splitlines()]
    metrics = {name: value for record in records for name, value in record.items()}
    assert metrics["rollout/own_reward"] == pytest.approx(metrics["reward"])
    assert metrics["eval/rollout/own_reward"] == pytest.approx(metrics["eval/reward"])
    assert 0 < metrics["timeperf/generate"] < metrics["timeperf/session"]
    events = [
        event["name"]
        for path in directory.parent.glob("**/trace.json")
        for event in json.loads(path.read_text())["traceEvents"]
    ]
    assert events.count("generate") >= events.count("reward") >= 4
    assert {"generate", "reward", "session", "train"} <= set(events)


def test_a_workflow_of_several_turns(sampled, tokenizer):
    workflow = shapes.UntilRight(shapes.digits_reward, GCONFIG.new(logit_bias={}), tokenizer, max_turns=3, turn_discount=0.5)
    rows, metrics = sampled(workflow, {**TASK, "answer": "9"})
    assert len(rows["rewards"]) == 2
    assert 1 <= metrics["rollout/num_turns"] <= 3
    assert metrics["rollout/discounted"] == pytest.approx(rows["rewards"].mean().item())


def test_a_workflow_about_images(sampled, tmp_path):
    words = build_character_tokenizer("0123456789?aeqrsu", pieces=VISION_PIECES)
    vision = NewVisionConfig(patch_size=8, layers=1, hidden_size=16, heads=2, max_tokens=16)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    new_vision_model(tmp_path, tokenizer=words, vision=vision, **sizes)
    processor, tokenizer = load_hf_processor_and_tokenizer(str(tmp_path))
    workflow = shapes.Seeing(shapes.digits_reward, GCONFIG, tokenizer, processor)
    task = {
        "images": [Image.new("RGB", (32, 32), "red")],
        "messages": "<|vision_start|><|image_pad|><|vision_end|>sq?",
        "answer": "1",
    }
    rows, metrics = sampled(workflow, task, tmp_path)
    assert all(set(seen) == {"pixel_values", "image_grid_thw"} for seen in rows["multi_modal_inputs"])
    assert rows["mm_token_type_ids"].sum(-1).tolist() == [4, 4]
    assert metrics["rollout/own_reward"] == pytest.approx(rows["rewards"].mean().item())
    blind = {**task, "images": [Image.new("RGB", (32, 32), "blue")]}
    with torch.no_grad():  # what is seen reaches the model: other pixels, other log-probabilities of the same first token
        assert not torch.equal(sampled(workflow, blind, tmp_path)[0]["logprobs"], rows["logprobs"])


def test_a_customised_workflow_with_a_tool(sampled, tiny_model):
    gconfig = GCONFIG.new(logit_bias={load_hf_tokenizer(str(tiny_model)).convert_tokens_to_ids("="): 6.0})
    workflow = shapes.Calculator("areal_shapes.digits_reward", gconfig, str(tiny_model), max_turns=3)
    rows, metrics = sampled(workflow)
    assert metrics["rollout/tool_call_count"] >= 1
    inside = (rows["loss_mask"][:, 1:] > rows["loss_mask"][:, :-1]).sum(-1)
    assert inside.max() >= 2  # what the tool said stands between what was sampled


@pytest.mark.parametrize(
    ("agent", "package", "kwargs"),
    [
        (shapes.ChatAgent, "openai", {"max_completion_tokens": 6, "temperature": 0.7}),
        (shapes.PersistentAgent, "openai", {"max_turns": 2, "max_completion_tokens": 6}),
        (shapes.MessagesAgent, "anthropic", {"max_tokens": 6}),
        (shapes.LangChainAgent, "langchain_openai", {"max_completion_tokens": 6}),
        (shapes.LangChainToolAgent, "langchain", {"max_completion_tokens": 6}),
        (shapes.AgentsSDKAgent, "agents", {"max_tokens": 1500}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_agents(sampled, tokenizer, agent, package, kwargs):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    workflow = OpenAIAgentWorkflow(agent, tokenizer, agent_kwargs=kwargs)
    try:
        rows, metrics = sampled(workflow)
    finally:
        workflow.front.close()
    calls = metrics["rollout/agent_model_calls"]
    assert calls == (2 if agent is shapes.PersistentAgent else 1)
    assert (rows["loss_mask"].sum(-1) > 0).all()
    assert len(set(rows["sample_ids"].tolist())) == 2


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_agents_that_are_given_a_client(sampled, tokenizer, style):
    gconfig = GCONFIG.new(n_samples=1, top_k=20)
    workflow = shapes.ByClient(shapes.PersistentByClient(gconfig, max_turns=3), tokenizer, export_style=style)
    rows, metrics = sampled(workflow, {**TASK, "answer": "never"})
    assert metrics["rollout/agents_reward"] == 0.0
    turns = 1 if style == "concat" else 3
    assert len(rows["rewards"]) == 2 * turns
    starts = (rows["loss_mask"][:, 1:] > rows["loss_mask"][:, :-1]).sum(-1)
    assert starts.tolist() == [3 // turns] * len(starts)
    assert (rows["versions"] >= 0).sum() == rows["loss_mask"].sum()
    assert len(set(rows["sample_ids"].tolist())) == 2


def test_the_agents_sdk_over_a_client(sampled, tokenizer):
    pytest.importorskip("agents")
    rows, metrics = sampled(shapes.ByClient(shapes.SDKByClient(GCONFIG), tokenizer, export_style="individual"))
    assert rows["rewards"].tolist() == pytest.approx([1.0 + metrics["rollout/agents_reward"]] * 2, abs=1.0)
    assert (rows["loss_mask"].sum(-1) > 0).all()


def test_turns_over_a_client(sampled, tokenizer):
    workflow = shapes.UntilRightByClient(shapes.digits_reward, GCONFIG, tokenizer, max_turns=3, turn_discount=0.5)
    rows, metrics = sampled(workflow, {**TASK, "answer": "9"})
    assert len(rows["rewards"]) == 2
    assert 1 <= metrics["rollout/num_turns"] <= 3
