"""Builders that many test files share: tiny models, tokenizers, scripted engines and configs.

What is built from the same arguments is built once per process where tests only read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.experience.durable import EPISODE
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse

#: Sizes of a model that is built in milliseconds, for any configuration class of transformers.
TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}

#: A chat template that lists tools and writes their calls as JSON.
TOOL_TEMPLATE = (
    "{%- if tools -%}<|system|>{%- for tool in tools -%}{{- tool.function.name + ' ' -}}{%- endfor -%}"
    "{{- '<tool_call></tool_call><|end|>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + (message['role'] if message['role'] in ['system', 'assistant'] else 'user') + '|>' "
    "+ (message['content'] or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def tool_tokenizer(pieces: Sequence[str] = ()) -> Any:
    """A character tokenizer with ``TOOL_TEMPLATE``."""
    return build_character_tokenizer(chat_template=TOOL_TEMPLATE, pieces=pieces)


# -- models ----------------------------------------------------------------------------------------------------------


def qwen3_config(tokenizer: Any, **changes: Any) -> Any:
    """The configuration of a Qwen3 of two layers over a tokenizer."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return transformers.Qwen3Config(vocab_size=len(tokenizer), **{**sizes, **changes})


def random_model(config: Any, *, seed: int = 0, scale: float = 1.0) -> Any:
    """A model with random float32 weights, whose matrices are multiplied by ``scale``: 3 or more makes distributions far from uniform."""
    import torch
    import transformers

    torch.manual_seed(seed)
    return scaled(transformers.AutoModelForCausalLM.from_config(config).float().eval(), scale)


def scaled(model: Any, scale: float) -> Any:
    """Multiply the matrices of a model, in place."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


def write_vision_model(path: Path, max_position_embeddings: int) -> Path:
    """Write a model of architecture qwen2_vl over a few characters, in which images decide about replies."""
    from rollwright.config.experiment import NewVisionConfig
    from rollwright.data.vision import VISION_PIECES
    from rollwright.training.model import new_vision_model

    model = new_vision_model(
        path,
        tokenizer=build_character_tokenizer("0123456789?aeqrsu", pieces=VISION_PIECES),
        vision=NewVisionConfig(patch_size=8, layers=1, hidden_size=16, heads=2, max_tokens=16),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=max_position_embeddings,
    )
    scaled(model, 3.0).save_pretrained(path)
    return path


# -- engines ---------------------------------------------------------------------------------------------------------


class FixedEngine(InferenceEngine):
    """An engine whose weights never change; a subclass defines ``agenerate``."""

    version = 0

    def get_version(self):
        return self.version

    def set_version(self, version): ...
    def pause(self): ...
    def resume(self): ...
    def abort(self, rid=None): ...


class Script(FixedEngine):
    """Answers with the given texts in turn, from the first again after the last.

    Attributes:
        requests: what it was asked.
    """

    def __init__(self, tokenizer: Any, *texts: str, version: int = 2, seconds: float = 0.0, **attributes: Any) -> None:
        self.tokenizer, self.texts, self.version, self.seconds = tokenizer, texts, version, seconds
        self.requests: list[ModelRequest] = []
        vars(self).update(attributes)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        await asyncio.sleep(self.seconds)
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return ModelResponse(
            request.input_ids,
            tokens,
            self.logprobs(tokens),
            [self.version] * len(tokens),
            stop_match=tokens[-1],
            temperature=request.gconfig.effective_temperature,
        )

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of an answer."""
        return [-0.25] * len(tokens)


def sampled(engine: Any, episode: Any = None) -> Any:
    """The engine bound to a sample on this loop, and to what writes or replays its journal."""
    from rollwright.rollout.sample_engine import SampleEngine
    from rollwright.rollout.seeds import SampleName

    return SampleEngine(engine, SampleName(0, 0), run_seed=1, loop=asyncio.get_running_loop(), episode=episode)


async def played(taskset: Any, row: dict[str, Any], engine: Any, tokenizer: Any, runner: Any = None) -> tuple[Any, Any]:
    """The experiences of one episode of a task, and their rows, checked against what was sampled."""
    from rollwright.experience.normaliser import normalise
    from rollwright.workflows.task_runner import TaskRunner

    sample = sampled(engine)
    experiences = await (runner or TaskRunner([taskset], tokenizer)).arun_episode(sample, row)
    return experiences, normalise(experiences, sample.recorder, tokenizer=tokenizer)


class JournalledEpisodes:
    """Runs a function as an episode, and again from its journal."""

    def __init__(self, directory) -> None:
        self.directory = directory

    async def first(self, run):
        journal = Journal(self.directory)
        episode = EpisodeWriter(journal)
        facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
        episode.begin(ordinal=0, index=0, task=b"\x80", task_error="", **facts)
        result = await self._as(episode, run)
        episode.end("accepted")
        journal.close()
        return result

    async def again(self, run):
        (past,) = read_episodes(self.directory)
        return await self._as(EpisodeWriter(None, past), run)

    async def _as(self, episode, run):
        async def within():
            EPISODE.set(episode)
            return await run()

        return await asyncio.create_task(within())
