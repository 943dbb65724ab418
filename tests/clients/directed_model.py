"""What the clients talk to: a real tiny model behind the front, made to say what a case needs, and the checks of what was recorded.

The model samples every token, with its own log-probabilities; a grammar leaves it no other text than the case's.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rollwright.config.generation import GenerationHyperparameters, returning_ids
from rollwright.experience.experience import Experience
from rollwright.inference.backends.builtin import adjustments
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.front.openai_episode import OpenAIEpisode
from rollwright.inference.request import ModelRequest, ModelResponse

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT = 49152  # programs with all their tools begin with 30,000 tokens of this tokenizer
#: Weights in use; another than 0, so that a version that was never filled in shows.
VERSION = 3

#: As Qwen3's: tools and results in tags, reasoning before the answer.
TEMPLATE = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- if system or tools -%}{{- '<|im_start|>system\\n' + system -}}"
    "{%- if tools -%}{{- '\\n# Tools\\n' -}}"
    "{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}"
    '{{- \'Call as <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>\' -}}'
    "{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- message.content or '' -}}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson)'
    " + '}\\n</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>\\n' -}}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- elif not loop.first or message.role == 'user' -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def small_tokenizer(path: Path) -> Any:
    """A byte-level tokenizer of 1500 tokens, learned from the documentation, with that template; written to ``path``."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train([str(page) for page in sorted((REPOSITORY / "docs").glob("[m-t]*.md"))], trainer)
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return returning_ids(tokenizer)


def small_engine(path: Path) -> BuiltinEngine:
    """A random Qwen3 of two layers over that tokenizer, which is written to ``path``."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    tokenizer = small_tokenizer(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(path)
    engine = BuiltinEngine(model, tokenizer, context_length=CONTEXT, kv_cache_bytes=64 << 20, max_running_requests=16)
    engine.publish(VERSION)
    return engine


@dataclasses.dataclass(frozen=True)
class Free:
    """A reply that nothing but the request's own grammar binds."""


FREE = Free()


def _literal(text: str, tokenizer: Any) -> str:
    """The grammar of one text, in which marks are the tokens that a model would take for them."""
    parts = [part for part in re.split(r"(</?(?:think|tool_call)>)", text) if part]
    ids = tokenizer.get_added_vocab()
    return "start: " + " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts)


#: What the model says; a function makes it of the prompt.
Reply = str | Free | Callable[[str], str]


class Directed(InferenceEngine):
    """The engine, made to answer the requests of one episode with the given replies in turn; more requests than replies fail.

    A prompt that contains the first text of ``aside`` is answered with the second one, and does not count. One that contains the first part of
    ``beside`` gets the next of its replies: those of a sub-agent that runs at the same time.
    A reply is checked against the grammar that a request has of its own, as the model could not have said it otherwise.
    """

    def __init__(
        self,
        engine: BuiltinEngine,
        replies: Sequence[Reply],
        aside: tuple[str, str] | None = None,
        beside: tuple[str, Sequence[Reply]] | None = None,
    ) -> None:
        self.engine, self.aside = engine, aside
        self.mark, of_sub_agent = beside or ("", ())
        self.left, self.left_beside = list(replies), list(of_sub_agent)
        self.requests: list[ModelRequest] = []
        self.said: list[str | Free] = []  #: the replies that were asked for
        self.context_length = engine.context_length

    def _directed(self, request: ModelRequest) -> ModelRequest:
        prompt = request.tokenizer.decode(request.input_ids)
        if self.aside is not None and self.aside[0] in prompt:
            bound = request.gconfig.new(json_schema=None, regex=None, grammar=_literal(self.aside[1], request.tokenizer))
            return dataclasses.replace(request, gconfig=bound, seed=0)
        place = len(self.requests)
        self.requests.append(request)
        left = self.left_beside if self.mark and self.mark in prompt else self.left
        assert left, f"a request more than the case has replies: {prompt[-300:]}"
        reply = left.pop(0)
        text = reply(prompt) if callable(reply) else reply
        self.said.append(text)
        if isinstance(text, Free):
            return dataclasses.replace(request, seed=place)
        own = [name for name in adjustments.GRAMMARS if getattr(request.gconfig, name) is not None]
        if own:
            matcher = adjustments.grammar_of(
                request.gconfig, request.tokenizer, len(request.tokenizer), {request.tokenizer.eos_token_id}
            )
            tokens = request.tokenizer.encode(text, add_special_tokens=False)
            assert matcher._matcher.consume_tokens(tokens), f"{text!r} does not follow the request's {own[0]}"
        bound = request.gconfig.new(json_schema=None, regex=None, grammar=_literal(text, request.tokenizer))
        return dataclasses.replace(request, gconfig=bound, seed=place)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self.engine.agenerate(self._directed(request))

    async def astream(self, request: ModelRequest):
        """Token by token; a busy machine may be late to look, and is given several at once."""
        shown = 0
        async for partial in self.engine.astream(self._directed(request)):
            for count in range(shown + 1, partial.output_len):
                yield _begun(partial, count)
            shown = partial.output_len
            yield partial

    def get_version(self) -> int:
        return self.engine.get_version()

    def set_version(self, version: int) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self, rid: str | None = None) -> None: ...


def _begun(response: ModelResponse, count: int) -> ModelResponse:
    """The response when it had so many tokens."""
    names = ("output_tokens", "output_logprobs", "output_versions", "output_top_logprobs")
    cut = {name: value[:count] for name in names if (value := getattr(response, name)) is not None}
    return dataclasses.replace(response, **cut, stop_reason="stop", stop_match=None)


#: What the model says in many cases: reasoning, and a call whose JSON no template would write so.
THOUGHT = "<think>\nAdd them.\n</think>\n\n"
CALL = '<tool_call>\n{"arguments":  {"b": 25, "a": 17}, "name": "add"}\n</tool_call>'


def call_of(name: str, arguments: str) -> str:
    """A call of a tool, as the template shows it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# ------------------------------------------------------------------ what was recorded

#: Where an answer's id begins so, it was asked for in this dialect.
DIALECTS = {
    "chatcmpl": "/v1/chat/completions",
    "cmpl": "/v1/completions",
    "resp": "/v1/responses",
    "msg": "/v1/messages",
    "gen": "/inference/v1/generate",
}


def dialects_of(episode: OpenAIEpisode) -> list[str]:
    """The paths that the episode's finished calls came by, each once."""
    return list(dict.fromkeys(DIALECTS[call.partition("_")[0].partition("-")[0]] for call in episode.calls))


@torch.no_grad()
def check_record(episode: OpenAIEpisode, engine: BuiltinEngine, texts: list[str | Free]) -> list[Experience]:
    """Everything that holds for any client; returns the rows.

    Each reply is in the record, once, as it was sampled; its log-probabilities are those that the model gives by another way, at
    the temperature of the request; and each sampled token is trained in exactly one row.
    """
    tokenizer, records = engine.tokenizer, episode.records
    assert len(records) == len(texts), f"{len(records)} calls were recorded, and the case has {len(texts)} replies"
    left = sorted(texts, key=lambda text: isinstance(text, Free))  # conversations at the same time have no common order
    for record in records:
        assert set(record.versions) == {VERSION}
        said = tokenizer.decode(record.output_ids, skip_special_tokens=True)
        # parallel_tool_calls=False ends a reply at its first call, whose mark the tokens keep
        fits = [text for text in left if isinstance(text, Free) or text.startswith(said)]
        assert fits, (said, left)
        left.remove(fits[0])
        if isinstance(fits[0], str):
            assert record.stop_reason == "stop", record.stop_reason
    rows = episode.experiences(reward=1.0)
    trained = sum(int(row.action_mask.sum()) for row in rows)
    assert trained == sum(len(record.output_ids) for record in records)
    for row in rows:
        logits = engine.model(row.tokens[None]).logits[0].double() / row.temperature
        expected = logits.log_softmax(-1)[:-1].gather(-1, row.tokens[1:, None])[row.prompt_length - 1 :, 0]
        mask = row.action_mask
        torch.testing.assert_close(row.logprobs[mask].double(), expected[mask], atol=2e-3, rtol=0)
        assert (row.logprobs[~mask] == 0).all()
        assert row.reward == 1.0
    return rows


def defaults() -> GenerationHyperparameters:
    """What a case's requests leave out: another temperature than 1, so that one that got lost shows."""
    return GenerationHyperparameters(temperature=0.8, max_new_tokens=1500)
