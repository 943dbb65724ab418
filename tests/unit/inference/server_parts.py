"""A tiny engine with a tokenizer, and applications served over real HTTP from a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import torch
import uvicorn
from builtin_models import tiny_model

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.weights.adapter import AdapterSpec
from rollwright.inference.weights.stream import WeightStream

TOOL_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' -}}{%- for tool in tools -%}{{- tool.function.name + ' ' -}}{%- endfor -%}"
    "{{- '<tool_call>{}</tool_call><|end|>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + (message['role'] if message['role'] in ['system', 'assistant'] else 'user') + '|>' "
    "+ (message['content'] or '') -}}"
    "{%- for call in message.tool_calls or [] -%}{{- call.function.name + (call.function.arguments | tojson) -}}{%- endfor -%}"
    "{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def tiny_engine(**settings) -> BuiltinEngine:
    """A random Qwen3 with an untied head over a character tokenizer."""
    tokenizer = build_character_tokenizer(chat_template=TOOL_TEMPLATE)
    model = tiny_model("qwen3", vocab_size=len(tokenizer), tie_word_embeddings=False)
    settings = {"max_running_requests": 16, "kv_cache_bytes": 8 << 20, **settings}
    return BuiltinEngine(model, tokenizer, **settings)


def small_adapter(fill: float = 0.5) -> WeightStream:
    """An adapter of one linear layer of 8 × 4."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.full((2, 8), fill), f"{module}.lora_B.weight": torch.full((4, 2), fill)}
    return WeightStream.of(tensors, AdapterSpec(rank=2, alpha=4.0, targets=("q_proj",)))


@contextlib.contextmanager
def served(app, port: int = 0) -> Iterator[str]:
    """``host:port`` of ``app``, served by uvicorn until the block ends."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()
