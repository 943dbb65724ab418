"""What ``rollwright new workflow`` writes; ``<name>`` and ``<Class>`` are replaced."""

WORKFLOW = '''"""<Class>: say here, in one sentence, what an episode is."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from rollwright import WORKFLOWS, AsyncRewardWrapper, GenerationHyperparameters, ModelRequest, RolloutWorkflow, get_tracker


@WORKFLOWS.register_module("<name>")
class <Class>(RolloutWorkflow):
    """Asks once and scores the answer. Constructor arguments are the keys of `workflow_kwargs` in the config.

    Args:
        reward_fn: function, registered name or import path; filled in from the config where left out.
        gconfig: how tokens are sampled; filled in.
        tokenizer: the policy's tokenizer; filled in.
        instruction: what the system message says.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        instruction: str = "",
    ) -> None:
        self.reward_fn = AsyncRewardWrapper(reward_fn)  # runs apart, under a time limit
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.instruction = instruction

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode on the task `data`. Await everything that takes time; all episodes share one event loop."""
        messages = list(data["messages"])
        if self.instruction:
            messages.insert(0, {"role": "system", "content": self.instruction})
        prompt_ids = self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)

        # Turns of one conversation share one rid. To go on, append response.output_tokens and the ids of what you
        # say next to prompt_ids, and ask again: sampled tokens are never decoded and encoded again.
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=prompt_ids,
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            return None  # rejects the sample on purpose; an exception counts as a failure and is tried again

        prompt = self.tokenizer.decode(prompt_ids)
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self.reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)
        get_tracker("rollout").scalar(reward=reward, response_tokens=response.output_len)
        # Log-probabilities, versions and masks are filled in from the record of what the engine sampled.
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": reward}
'''

CONFIG = """# `rollwright run <name>.yaml`, from the directory of <name>.py.
experiment_name: <name>
trial_name: first
seed: 1

workflow: <name>.<Class>
workflow_kwargs: {instruction: ""}
reward_fn: numeric_reward    # 1 where the last number of the completion is the answer
gconfig: {n_samples: 4, max_new_tokens: 16, temperature: 1.0}

stages:
  # A small model with random weights, to see that everything runs. Put your own at actor.path and take this stage out.
  - name: model
    kind: model
    path: ${run_dir}/model
    hidden_size: 32
    layers: 2
    max_position_embeddings: 256

  - name: grpo
    kind: rl
    actor: {path: "${run_dir}/model", optimizer: {lr: 1.0e-4}}
    train_dataset: {path: arithmetic, split: train, batch_size: 4, kwargs: {digits: 1}}
    valid_dataset: {path: arithmetic, split: valid, kwargs: {digits: 1}}
    evaluator: {every_steps: 2, limit: 4, gconfig: {greedy: true, max_new_tokens: 16}}
    total_train_steps: 2
"""

TEST = '''"""<Class>: what it asks, what it returns, and that it trains."""

import asyncio
from pathlib import Path

from rollwright import GenerationHyperparameters, ModelResponse, build_character_tokenizer, load_stages

from <name> import <Class>

TASK = {"messages": [{"role": "user", "content": "6*7="}], "answer": "42"}


class Says:
    """An engine that says what it is told to."""

    def __init__(self, tokenizer, text):
        self.tokens, self.requests = [*tokenizer.encode(text), tokenizer.eos_token_id], []

    async def agenerate(self, request):
        self.requests.append(request)
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=self.tokens,
            output_logprobs=[-0.5] * len(self.tokens),
            output_versions=[0] * len(self.tokens),
        )


def test_an_episode():
    tokenizer = build_character_tokenizer()
    engine = Says(tokenizer, "42")
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    workflow = <Class>("exact_match_reward", gconfig, tokenizer, instruction="Reckon.")
    row = asyncio.run(workflow.arun_episode(engine, TASK))
    assert "Reckon." in tokenizer.decode(engine.requests[0].input_ids)
    assert row["output_ids"] == engine.tokens
    assert row["reward"] == 1.0


def test_the_config_trains_it(tmp_path):
    from rollwright.trainers.stages import run_config

    file = Path(__file__).with_name("<name>.yaml")
    assert run_config(load_stages(file, [f"cluster.fileroot={tmp_path}", "stats_logger.display=none"])) == 0
    assert list(tmp_path.glob("<name>/first/grpo/checkpoints/final/*.safetensors"))
'''
