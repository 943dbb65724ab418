"""Agents trained through the OpenAI front, from a config file to new weights; models that help and are not trained."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "workflows"))
from parts import Script, sampled, tool_tokenizer

from rollwright.config.experiment import PPOConfig
from rollwright.config.modes import AuxiliaryModelConfig
from rollwright.config.tasksets import FormatConfig, TasksetConfig

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
RIGHT, WRONG = r"\boxed{3}", r"\boxed{4}"
ROW = {"question": "1+2?", "answer": "3"}

FILE = """
mode: both
project: agents
name: agentscope
checkpoint_root_dir: {root}
model: {{model_path: {model}, max_response_tokens: 8}}
algorithm: {{algorithm_type: grpo, repeat_times: 6, optimizer: {{lr: 1.0e-3}}}}
buffer:
  batch_size: 1
  total_steps: 2
  explorer_input:
    taskset:
      path: {tasks}
      default_workflow_type: agentscope_react_math_workflow
      format: {{prompt_key: question, response_key: answer}}
      workflow_args: {{tools: [tool_scripts.add], structured: false, max_iters: 3, system_prompt: Solve.}}
      rollout_args: {{temperature: 1.0}}
explorer: {{rollout_model: {{enable_openai_api: true}}}}
"""


def agent_dialog(tokenizer, reply: str) -> list[tuple[list[int], list[int]]]:
    """Prompt and reply of each call that AgentScope makes where the model calls the tool and then gives ``reply``."""
    from rollwright.inference.front.openai_front import OpenAIFront
    from rollwright.workflows.task_runner import TaskRunner

    taskset = TasksetConfig(
        format=FormatConfig(prompt_key="question", response_key="answer"),
        workflow="agentscope_react_math_workflow",
        workflow_args={"tools": ["tool_scripts.add"], "structured": False, "max_iters": 3, "system_prompt": "Solve."},
        group_size=1,
    )

    async def run():
        sample = sampled(Script(tokenizer, CALL, reply))
        with OpenAIFront(tokenizer) as front:
            services = SimpleNamespace(openai_front=front, auxiliary_models=[])
            await TaskRunner([taskset], tokenizer, services=services).arun_episode(sample, ROW)
        return [(record.prompt_ids, record.output_ids) for record in sample.recorder.records]

    return asyncio.run(run())


def taught_model(path: Path) -> None:
    """A tiny model that has learned the two dialogs, in one of which the result is wrong."""
    from rollwright.training.model import new_model

    tokenizer = tool_tokenizer(pieces=[CALL, RIGHT, WRONG])
    model = new_model(
        path,
        tokenizer=tokenizer,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    calls = [call for reply in (RIGHT, WRONG) for call in agent_dialog(tokenizer, reply)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = torch.zeros(())
        for prompt, output in calls:
            ids = torch.tensor([[*prompt, *output]])
            labels = torch.tensor([[-100] * len(prompt) + output])
            loss = loss + model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)


def test_agentscope_s_agent_is_trained_on_the_tokens_of_the_engine(tmp_path, monkeypatch):
    pytest.importorskip("agentscope", reason="the extra 'agentscope' is not installed")
    from rollwright.cli.main import main
    from rollwright.inference.backends.builtin.engine import BuiltinEngine
    from rollwright.training.actor import FSDPPPOActor

    model = tmp_path / "model"
    taught_model(model)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(ROW) + "\n")
    file = tmp_path / "agent.yaml"
    file.write_text(FILE.format(root=tmp_path / "runs", model=model, tasks=tasks))

    answers, batches = [], []
    generate, update = BuiltinEngine.agenerate, FSDPPPOActor.ppo_update

    async def watched_generate(self, request):
        response = await generate(self, request)
        answers.append(response)
        return response

    def watched_update(self, batch):
        batches.append({key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)})
        return update(self, batch)

    monkeypatch.setattr(BuiltinEngine, "agenerate", watched_generate)
    monkeypatch.setattr(FSDPPPOActor, "ppo_update", watched_update)
    monkeypatch.setenv("ROLLWRIGHT_PLUGIN_PATH", "")
    assert main(["run", "--config", str(file), "stats_logger.display=none"]) == 0

    run = tmp_path / "runs" / "agents" / "agentscope"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(step["step"] for step in steps) == 2
    assert len(batches) == 2
    trained, called_tool = Counter(), 0
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            runs, previous = [], 0
            for token, mask in zip(batch["input_ids"][row].tolist(), batch["loss_mask"][row].tolist(), strict=True):
                if mask:
                    runs = [*runs[:-1], [*runs[-1], token]] if previous else [*runs, [token]]
                previous = mask
            trained.update(map(tuple, runs))
            called_tool += len(runs) > 1
    sampled_by_engine = Counter(tuple(answer.output_tokens) for answer in answers)
    assert trained == sampled_by_engine
    assert called_tool >= 6  # most episodes called the tool and went on with what it said, in one sequence
    final, first = _weights(run / "checkpoints" / "final"), _weights(model)
    assert any(not torch.equal(first[name], final[name]) for name in first)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


async def chatting_agent(data, base_url, api_key):
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": data["question"]}]
    for follow in ("and?", "so?"):
        reply = await client.chat.completions.create(model="default", messages=messages)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": follow},
        ]
    await client.close()
    return 1.0


def test_the_front_stands_before_servers_too(tiny_model, tmp_path):
    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.config.sections import RolloutConfig
    from rollwright.data.tokenizer import load_tokenizer
    from rollwright.placement.local_servers import LocalServers
    from rollwright.rollout.engines import RemoteSGLangEngine
    from rollwright.workflows.openai_agent import OpenAIAgentWorkflow

    config = RolloutConfig(backend="builtin_process", device="cpu", kv_cache_bytes=8 << 20, max_running_requests=8)
    with LocalServers(config, model_path=str(tiny_model), logs=tmp_path, threads=1) as servers:
        config.addresses = servers.addresses
        gconfig = GenerationHyperparameters(temperature=0.7, max_new_tokens=6)
        workflow = OpenAIAgentWorkflow(chatting_agent, load_tokenizer(tiny_model), gconfig)
        with workflow.front, RemoteSGLangEngine(config) as rollout:
            batch = rollout.rollout_batch([{"question": f"{index}?"} for index in range(2)], workflow, group_size=2)
    assert batch["rewards"].tolist() == [1.0] * len(batch["rewards"])
    trained = batch["loss_mask"].bool()
    assert 4 * 2 <= int(trained.sum()) <= 4 * 12  # four samples of two replies
    assert (batch["versions"][trained] == 0).all()
    assert (batch["logprobs"][trained] < 0).all()
    assert batch["temperature"].tolist() == pytest.approx([0.7] * len(trained))


def test_an_auxiliary_model_is_served_beside_the_run_restarted_and_ends_with_it(tiny_model, tmp_path):
    import openai
    import psutil

    from rollwright.placement.task_services import TaskServices

    config = PPOConfig(
        auxiliary_models=[AuxiliaryModelConfig(model_path=str(tiny_model), device="cpu", threads=1, kv_cache_bytes=4 << 20)]
    )
    with TaskServices(config, None, tmp_path) as services:
        (client,) = services.auxiliary_models
        assert services.openai_front is None
        assert client.model_path == str(tiny_model) == client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=client.model_path, messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
        assert answer.usage.completion_tokens <= 2
        port = str(client.base_url).partition("/v1")[0].rpartition(":")[2]
        (server,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.cmdline()[1:3] == ["-m", "rollwright"] and port in child.cmdline()
        ]
        server.kill()
        assert client.models.list().data[0].id == str(tiny_model)  # waits for the restarted server, at another port
        assert not str(client.base_url).endswith(f":{port}/v1/")
        other = TaskServices(
            PPOConfig(auxiliary_models=[AuxiliaryModelConfig(base_url=str(client.base_url), api_key=client.api_key)]), None
        )
        assert other.auxiliary_models[0].model_path == str(tiny_model)
    with pytest.raises(openai.APIConnectionError):
        client.with_options(max_retries=0).models.list()
