"""A scripted engine and a tokenizer whose chat template knows tools, for workflows that call them."""

from __future__ import annotations

import asyncio

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName

TEMPLATE = (
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


def tool_tokenizer(pieces=()):
    """A character tokenizer with that template."""
    return build_character_tokenizer(chat_template=TEMPLATE, pieces=pieces)


class Script(InferenceEngine):
    """Answers with the given texts in turn."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.requests = tokenizer, texts, []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        await asyncio.sleep(0)
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return ModelResponse(
            request.input_ids,
            tokens,
            [-0.25] * len(tokens),
            [2] * len(tokens),
            stop_match=tokens[-1],
            temperature=request.gconfig.effective_temperature,
        )

    def get_version(self):
        return 2

    def set_version(self, version): ...
    def pause(self): ...
    def resume(self): ...
    def abort(self, rid=None): ...


def sampled(engine) -> SampleEngine:
    """The engine bound to a sample on this loop."""
    return SampleEngine(engine, SampleName(0, 0), run_seed=1, loop=asyncio.get_running_loop())


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
