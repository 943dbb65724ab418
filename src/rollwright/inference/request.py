"""What goes to an inference engine and what comes back: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.experience.recorder import LARGEST_TOKEN, TokenPrefix, conversation_tokens


def token_ids(ids: Any, what: str = "input_ids") -> list[int]:
    """A fresh list of plain ints from a list, tuple, 1-D array or 1-D tensor of token ids.

    Raises:
        EngineError: it is text, a BatchEncoding or its key names, nested, or holds what is no id.
    """
    return _checked(list(_as_list(ids, what)), 0, what)


def _as_list(ids: Any, what: str) -> list[Any]:
    """The ids as a list: the very one, where they are one."""
    if type(ids) is list:
        return ids
    if hasattr(ids, "keys"):
        raise EngineError(
            f"{what} is a mapping with keys {sorted(ids.keys())}, not token ids: transformers 5 returns a BatchEncoding from "
            "apply_chat_template(tokenize=True). Write apply_chat_template(…, return_dict=False), or `tokenizer = rollwright.load_tokenizer(tokenizer)` before it."
        )
    if isinstance(ids, str):
        raise EngineError(
            f"{what} is text, not token ids: encode it first with tokenizer.encode(text, add_special_tokens=False)."
        )
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Iterable):
        raise EngineError(f"{what} is {ids!r}, not token ids; give one flat sequence of ints.")
    return list(ids)


def _checked(ids: list[Any], first: int, what: str = "input_ids") -> list[int]:
    """The ids, a list that may be changed here, as plain ints; ``first`` is the place of the first, for messages."""
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= LARGEST_TOKEN:
        return ids
    if ids and all(isinstance(i, str) for i in ids):
        raise EngineError(
            f"{what} holds the names {ids[:3]} instead of token ids: list() of a BatchEncoding gives its keys. Write "
            "apply_chat_template(…, return_dict=False), or `tokenizer = rollwright.load_tokenizer(tokenizer)` before it."
        )
    for index, value in enumerate(ids):
        if type(value) is not int:
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise EngineError(f"{what}[{first + index}] is {value!r}, not a token id; give one flat sequence of ints.")
            ids[index] = value.__index__()
        if ids[index] < 0:
            raise EngineError(f"{what}[{first + index}] is {ids[index]}: token ids are not negative.")
        if ids[index] > LARGEST_TOKEN:
            raise EngineError(f"{what}[{first + index}] is {ids[index]}: token ids are at most {LARGEST_TOKEN}.")
    return ids


def _counts(values: Any, what: str) -> list[int]:
    """A fresh list of one number for each token, of those that fit an array.

    Raises:
        EngineError: it is something else.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or any(type(value) is not int or not 0 <= value < 1 << 31 for value in values):
        raise EngineError(f"{what} has to be a list of whole numbers of at least 0, one for each token; it is {values!r:.100}.")
    return list(values)


#: The most likely tokens at one place, most likely first: ids and log-probabilities.
TopTokens = list[tuple[int, float]]


@dataclass
class ModelRequest:
    """One request: a prompt in token ids and how to sample from it.

    ``rid`` names the conversation: all turns of one conversation carry the same rid, so that one server sees them all. The ids are
    taken on construction; what the caller does to its list later does not matter. They are kept as ``tokens`` of the conversation;
    ``input_ids`` becomes a list of its own when it is asked for.
    """

    input_ids: Any = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    seed: int | None = None  # set by the sample's engine; gconfig.seed, where given, wins
    position_ids: Any = None  # [len(input_ids)], for isolated branches
    branch_ids: Any = None  # [len(input_ids)]: see experience.trajectory
    multi_modal: dict[str, Any] | None = None  # processor outputs, e.g. pixel_values
    image_data: list[Any] | None = None  # PIL images, or encoded ones in text, for servers
    lora_name: str | None = None
    top_logprobs: int | None = None  # so many of the most likely tokens, with log-probabilities, beside each sampled one
    prompt_logprobs_from: int | None = None  # the prompt's tokens from this index on get log-probabilities, too
    processor: Any = None  # makes multi_modal of image_data, where only that is given
    vision_msg_vllm: Any = None  # messages with the same images, in AReaL's files; engines are sent image_data

    def __post_init__(self) -> None:
        if not isinstance(self.gconfig, GenerationHyperparameters):
            raise EngineError(
                f"gconfig is {self.gconfig!r:.100}, not generation arguments: give GenerationHyperparameters(max_new_tokens=…, …)."
            )
        self._tokens = self._taken(self.input_ids)
        del self.input_ids
        if self.multi_modal is None and self.image_data and self.processor is not None:
            from rollwright.data.vision import image_inputs

            self.multi_modal = image_inputs(self.processor, self.image_data)
        if self.position_ids is not None:
            self.position_ids = _counts(self.position_ids, "position_ids")
        if self.branch_ids is not None:
            self.branch_ids = _counts(self.branch_ids, "branch_ids")
        for name in ("top_logprobs", "prompt_logprobs_from"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise EngineError(f"{name} is {value!r}; it has to be a whole number of at least 0, or None.")
        self.top_logprobs = self.top_logprobs or None

    def _taken(self, ids: Any) -> TokenPrefix:
        ids = _as_list(ids, "input_ids")
        if not ids:
            raise EngineError("input_ids is empty: a request needs at least one prompt token.")
        return conversation_tokens(self.rid, ids, _checked)

    def __getattr__(self, name: str) -> Any:
        if name == "input_ids" and "_tokens" in self.__dict__:
            self.input_ids = self._tokens.tolist()
            return self.input_ids
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def tokens(self) -> TokenPrefix:
        """The prompt as tokens of its conversation, without a list; what was changed in ``input_ids`` since is in it."""
        held = self.__dict__.get("input_ids")
        if held is not None and not (type(held) is list and self._tokens.equals(held)):
            self._tokens = self._taken(held)
        return self._tokens

    @property
    def effective_seed(self) -> int | None:
        """``gconfig.seed`` where given, else ``seed``."""
        return self.seed if self.gconfig.seed is None else self.gconfig.seed

    def copy(self) -> ModelRequest:
        """A copy whose ids and generation arguments are its own."""
        return replace(self, gconfig=self.gconfig.new(), metadata=dict(self.metadata))


@dataclass
class ModelResponse:
    """What an engine sampled.

    ``output_tokens`` includes the stop token or the tokens of the stop string. ``output_logprobs`` are natural
    log-probabilities of the temperature-scaled softmax before top-p, top-k and penalties. ``output_versions`` is the weight
    version that sampled each token, as the engine says.

    An engine may give ``request.tokens`` as ``input_tokens``; they become a list when it is asked for.
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"  # "stop" | "length" | "abort"
    stop_match: str | int | None = None  # the stop string or stop id that ended it
    latency: float = 0.0  # seconds from request to response
    ttft: float = 0.0  # seconds to the first token
    temperature: float = 1.0  # that the log-probabilities are at (1.0 where greedy)
    rid: str = ""
    seed: int | None = None
    output_top_logprobs: list[TopTokens] | None = None  # for each output token, where the request asks for ``top_logprobs``
    input_logprobs: list[float | None] | None = None  # of the prompt from ``prompt_logprobs_from`` on; the first token has none
    input_top_logprobs: list[TopTokens | None] | None = None  # where both are asked for
    logprobs_shifted: bool = False  # taken after top-p, top-k or penalties: the trainer has to recompute them
    server: str = ""  # that sampled it; empty: the engine of this process

    def __post_init__(self) -> None:
        if isinstance(self.input_tokens, TokenPrefix):
            self._prompt = self.input_tokens
            del self.input_tokens

    def __getattr__(self, name: str) -> Any:
        if name == "input_tokens" and "_prompt" in self.__dict__:
            self.input_tokens = self._prompt.tolist()
            return self.input_tokens
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def prompt(self, request: ModelRequest) -> TokenPrefix:
        """The tokens that were answered: the request's, unless the engine says others."""
        held = self.__dict__.get("input_tokens")
        if held is None:
            return self._prompt
        tokens = request.tokens
        return tokens if not held or tokens.equals(held) else TokenPrefix.of(list(held))

    def of_the_prompt(self) -> ModelResponse:
        """The same without what was sampled, for a caller that asked for the prompt's log-probabilities alone."""
        nothing: dict[str, Any] = {name: [] for name in ("output_tokens", "output_logprobs", "output_versions")}
        top = None if self.output_top_logprobs is None else []
        return replace(self, **nothing, output_top_logprobs=top, stop_reason="length", stop_match=None)

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        held = self.__dict__.get("input_tokens")
        return len(self._prompt if held is None else held)

    @property
    def output_len(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_tokens)

    @property
    def truncated(self) -> bool:
        """True where a length limit ended the response."""
        return self.stop_reason == "length"


def version_spans(versions: list[int]) -> list[dict[str, Any]]:
    """``weight_versions`` spans over output tokens: each run of one version, labels as text."""
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans


def versions_of_spans(spans: Sequence[dict[str, Any]], count: int, number: Callable[[Any], int]) -> list[int]:
    """One version for each of ``count`` output tokens from ``weight_versions`` spans.

    Args:
        spans: ``{"version", "start", "end"}`` over the output tokens, in order.
        count: output tokens.
        number: turns a server's version label into a number.

    Raises:
        EngineError: the spans do not cover the tokens exactly once.
    """
    versions: list[int] = []
    for span in spans:
        start, end = int(span["start"]), min(int(span["end"]), count)
        if start != len(versions) or (end < start):
            raise EngineError(f"weight_versions {list(spans)} do not cover {count} output tokens exactly once.")
        versions.extend([number(span["version"])] * (end - start))
    if len(versions) != count:
        raise EngineError(f"weight_versions {list(spans)} cover {len(versions)} of {count} output tokens.")
    return versions
