"""Adjusts the logits of one sequence before a token is drawn: logit bias, penalties, and a grammar that the output follows.

Log-probabilities are computed from the logits before the adjustment. Sequences without an adjustment have no extra cost. Grammars are
JSON schemas, regular expressions and Lark grammars. llguidance computes their masks in well under a millisecond, without a compiled
automaton over the vocabulary.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError

#: Generation arguments that define a grammar; a request may have at most one of them.
GRAMMARS = ("json_schema", "regex", "grammar")


class Adjustment:
    """Bias, penalties and grammar of one sequence, in vLLM's order: bias, repetition, frequency, presence; the grammar last.

    Args:
        gconfig: generation arguments of the request.
        prompt: prompt tokens. They count for the repetition penalty (as in Transformers and vLLM), but not for the other two
            penalties (as in OpenAI's API).
        grammar: grammar of the output, if any.
    """

    def __init__(self, gconfig: GenerationHyperparameters, prompt: list[int], grammar: Grammar | None) -> None:
        self._gconfig = gconfig
        self._grammar = grammar
        self._prompt = prompt
        # created at the first token, because many requests wait in the queue
        self._state: tuple[Tensor, Tensor, Tensor] | None = None

    def take(self, token: int) -> None:
        """Record the newest output token."""
        if self._state is not None:
            counts_V, seen_V, _ = self._state
            counts_V[token] += 1
            seen_V[token] = True
        if self._grammar is not None:
            self._grammar.take(token)

    @property
    def error(self) -> EngineError | None:
        """The reason why the sequence cannot continue, or None if it can."""
        if self._grammar is None or not self._grammar.error:
            return None
        return EngineError(f"The grammar of the request cannot be followed further: {self._grammar.error:.500}")

    def apply(self, scores_V: Tensor) -> None:
        """Adjust, in place, logits that have already been divided by the temperature."""
        gconfig, temperature = self._gconfig, self._gconfig.effective_temperature
        if self._state is None:
            seen_V = torch.zeros_like(scores_V, dtype=torch.bool)
            seen_V[self._prompt] = True
            bias_V = torch.zeros_like(scores_V)
            bias_V[list(gconfig.logit_bias)] = scores_V.new_tensor(list(gconfig.logit_bias.values()))
            self._state = torch.zeros_like(scores_V), seen_V, bias_V
        counts_V, seen_V, bias_V = self._state
        scores_V.add_(bias_V, alpha=1 / temperature)
        if (penalty := gconfig.repetition_penalty) != 1.0:
            penalised = torch.where(scores_V > 0, scores_V / penalty, scores_V * penalty)
            scores_V.copy_(torch.where(seen_V, penalised, scores_V))
        if gconfig.frequency_penalty or gconfig.presence_penalty:
            penalty_V = gconfig.frequency_penalty * counts_V + gconfig.presence_penalty * (counts_V > 0)
            scores_V.sub_(penalty_V / temperature)
        if self._grammar is not None:
            self._grammar.mask(scores_V)


class Grammar:
    """The grammar of one output and its current state.

    Args:
        matcher: a matcher of llguidance in its initial state.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """The reason why the output can no longer follow the grammar (it became too complex), or an empty string."""
        return self._matcher.get_error()

    def mask(self, scores_V: Tensor) -> None:
        """Mask, in place, all tokens that cannot come next; at the end of the grammar only end tokens remain."""
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if not self.error:
            allowed_V = torch.from_numpy(allowed[: len(scores_V)]).to(scores_V.device, torch.bool)
            scores_V.masked_fill_(~allowed_V, float("-inf"))

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        self._matcher.consume_token(token)


def grammar_of(gconfig: GenerationHyperparameters, tokenizer: Any, vocabulary: int, end_ids: set[int]) -> Grammar | None:
    """Return the grammar that a request asks for, if any.

    Args:
        gconfig: generation arguments of the request.
        tokenizer: the model's tokenizer, if any.
        vocabulary: size of the model's vocabulary.
        end_ids: tokens that end the output when the grammar allows its end.

    Raises:
        EngineError: the grammar is invalid or conflicts with another argument.
    """
    asked = [name for name in GRAMMARS if getattr(gconfig, name) is not None]
    if not asked:
        return None
    name, text = asked[0], getattr(gconfig, asked[0])
    refusals = {
        f"with {asked[-1]}: give one of them": len(asked) > 1,
        "without a tokenizer: give one to the engine": tokenizer is None,
        "with ignore_eos: an output that follows a grammar ends with the end token": gconfig.ignore_eos,
        "with min_new_tokens: where the grammar is at its end, only the end token is left": gconfig.min_new_tokens > 0,
        "with a model that has no end token": not end_ids,
    }
    if refusal := next((words for words, applies in refusals.items() if applies), None):
        raise EngineError(f"{name} cannot be honoured {refusal}.")
    return Grammar(_matcher(name, text, tokenizer, vocabulary, tuple(sorted(end_ids))).deep_copy())


@functools.lru_cache(maxsize=128)
def _matcher(name: str, text: str, tokenizer: Any, vocabulary: int, end_ids: tuple[int, ...]) -> Any:
    """Build a matcher in its initial state. This takes milliseconds; copying a matcher takes microseconds."""
    tokens = _tokens(tokenizer, vocabulary, end_ids)
    from llguidance import LLMatcher

    make = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    try:
        matcher = LLMatcher(tokens, make[name](text), log_level=0)
        error = matcher.get_error()
    except ValueError as wrong:  # not JSON
        error = str(wrong)
    if error:
        raise EngineError(f"{name}={text!r:.200} cannot be honoured: {error:.500}")
    return matcher


@functools.lru_cache(maxsize=4)
def _tokens(tokenizer: Any, vocabulary: int, end_ids: tuple[int, ...]) -> Any:
    """Return the strings of all tokens in llguidance's form. This takes about a second for a large vocabulary."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ModuleNotFoundError as error:
        raise EngineError(
            f"{', '.join(GRAMMARS)} need the package llguidance, which is not installed: pip install 'rollwright[grammar]'."
        ) from error
    size = max(vocabulary, len(tokenizer))
    try:
        return LLTokenizer(json.dumps(_backend(tokenizer)), n_vocab=size, eos_token=list(end_ids))
    except (AttributeError, ValueError):  # not a fast tokenizer, or its tokens are not bytes: use the strings that it decodes
        return LLTokenizer(TokenizerWrapper(_DecodedTokens(tokenizer, size, end_ids)), n_vocab=size, eos_token=list(end_ids))


def _backend(tokenizer: Any) -> dict[str, Any]:
    """Return the content of the tokenizer's file, without padding and truncation.

    llguidance treats every added token in angle brackets as special, and grammars never match special tokens. Added tokens that are
    ordinary text, such as Qwen's ``<think>`` and ``<tool_call>``, are therefore moved into the vocabulary.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    vocabulary, added = backend["model"]["vocab"], backend["added_tokens"]
    if isinstance(vocabulary, dict):
        texts = [
            token for token in added if not token["special"] and token["content"].isascii() and " " not in token["content"]
        ]
        vocabulary.update({token["content"]: token["id"] for token in texts})
        backend["added_tokens"] = [token for token in added if token not in texts]
    return backend


class _DecodedTokens:
    """The tokens of a tokenizer that decodes by concatenating its tokens' strings, such as a character tokenizer."""

    def __init__(self, tokenizer: Any, size: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *end_ids})
        texts = [self._text([token]) for token in range(len(tokenizer))]
        ordinary = [token for token in range(len(tokenizer)) if token not in self.special_token_ids][:64]
        if self._text(ordinary) != "".join(texts[token] for token in ordinary):
            raise EngineError(
                f"{', '.join(GRAMMARS)} cannot be honoured with this tokenizer: the text of several tokens is not that of each, "
                "joined. Byte-level tokenizers can be used."
            )
        self.tokens = [text.encode() for text in texts] + [b""] * (size - len(texts))

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)
