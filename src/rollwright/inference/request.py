"""Requests to inference engines and their responses: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.experience.recorder import LARGEST_TOKEN, TokenPrefix, conversation_tokens

if TYPE_CHECKING:
    from rollwright.experience.journal.episodes import RecordedCall


def token_ids(ids: Any, what: str = "input_ids") -> list[int]:
    """Return a new list of plain ints for a list, tuple, 1-D array or 1-D tensor of token ids.

    Raises:
        EngineError: ``ids`` is text, a BatchEncoding or its key names, nested, or contains something that is not a token id.
    """
    return _checked(list(_as_list(ids, what)), 0, what)


def _as_list(ids: Any, what: str) -> list[Any]:
    """Return the ids as a list; a list is returned unchanged."""
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
    """Convert the ids to plain ints, in place; error messages count positions from ``first``."""
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
    """Return a new list of the values, which must be 31-bit integers of at least 0.

    Raises:
        EngineError: ``values`` is something else.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or any(type(value) is not int or not 0 <= value < 1 << 31 for value in values):
        raise EngineError(f"{what} has to be a list of whole numbers of at least 0, one for each token; it is {values!r:.100}.")
    return list(values)


class TokenField:
    """A field of token ids that is set to a list or a ``TokenPrefix`` and reads as a list.

    A conversation's prompt grows to many thousands of tokens, and most of its requests never need it as a list: the recorder and the
    journal read ``tokens``. So the list is made on first access; ``vars(instance)`` holds the ids in their current form.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # the default of the dataclass field, which stands for no ids
        ids = vars(instance)[self._name]
        if isinstance(ids, TokenPrefix):
            ids = vars(instance)[self._name] = ids.tolist()
        return ids

    def __set__(self, instance: Any, ids: Any) -> None:
        vars(instance)[self._name] = [] if ids is None else ids


#: The most likely tokens at one position, most likely first: ids and log-probabilities.
TopTokens = list[tuple[int, float]]


@dataclass
class ModelRequest:
    """One request: a prompt in token ids and how to sample from it.

    ``rid`` names the conversation. All turns of one conversation carry the same rid, so that one server sees them all. The token ids
    are copied on construction, so later changes to the caller's list have no effect. ``tokens`` shares them with the conversation's
    other requests; ``input_ids`` is a separate list, made on first access.
    """

    input_ids: Any = TokenField()
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    seed: int | None = None  # set by the sample's engine; gconfig.seed takes precedence
    position_ids: Any = None  # [len(input_ids)], for isolated branches
    branch_ids: Any = None  # [len(input_ids)]: see experience.trajectory
    multi_modal: dict[str, Any] | None = None  # processor outputs, e.g. pixel_values
    image_data: list[Any] | None = None  # PIL images, or encoded images as strings, for servers
    lora_name: str | None = None  # adapter; "" is the base alone, and None what the engine published last
    top_logprobs: int | None = None  # number of most likely tokens to return with log-probabilities beside each sampled token
    prompt_logprobs_from: int | None = None  # prompt tokens from this index on get log-probabilities, too
    processor: Any = None  # makes multi_modal from image_data if only the latter is given
    vision_msg_vllm: Any = None  # ported programs pass messages with the same images here; engines use image_data

    def __post_init__(self) -> None:
        if not isinstance(self.gconfig, GenerationHyperparameters):
            raise EngineError(
                f"gconfig is {self.gconfig!r:.100}, not generation arguments: give GenerationHyperparameters(max_new_tokens=…, …)."
            )
        self.input_ids = self._tokens = self._conversation_tokens(self.input_ids)
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

    def _conversation_tokens(self, ids: Any) -> TokenPrefix:
        ids = _as_list(ids, "input_ids")
        if not ids:
            raise EngineError("input_ids is empty: a request needs at least one prompt token.")
        return conversation_tokens(self.rid, ids, _checked)

    @property
    def tokens(self) -> TokenPrefix:
        """The prompt in its shared form, including changes made to ``input_ids``."""
        ids = vars(self)["input_ids"]
        if ids is not self._tokens and not (type(ids) is list and self._tokens.equals(ids)):
            self._tokens = self._conversation_tokens(ids)
        return self._tokens

    @property
    def effective_seed(self) -> int | None:
        """``gconfig.seed`` if set, else ``seed``."""
        return self.seed if self.gconfig.seed is None else self.gconfig.seed

    def copy(self) -> ModelRequest:
        """Return a copy that has its own ids, generation arguments and metadata."""
        return replace(self, gconfig=self.gconfig.new(), metadata=dict(self.metadata))

    def __copy__(self) -> ModelRequest:
        """Return a shallow copy in a sixth of the time that ``copy.copy`` takes by default; every sample's request is copied."""
        request = object.__new__(type(self))
        request.__dict__ = vars(self).copy()
        return request

    def seeded(self, seed: int | None) -> ModelRequest:
        """Return a shallow copy with another seed; the ids are not checked again."""
        request = copy.copy(self)
        request.seed = seed
        return request


@dataclass
class ModelResponse:
    """What an engine sampled.

    ``output_tokens`` includes the stop token or the tokens of the stop string. ``output_logprobs`` are natural
    log-probabilities of the temperature-scaled softmax before top-p, top-k and penalties. ``output_versions`` is the weight
    version that sampled each token, as reported by the engine.

    An engine may pass ``request.tokens`` as ``input_tokens``.
    """

    input_tokens: list[int] = TokenField()  # type: ignore[assignment]
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"  # "stop" | "length" | "abort"
    stop_match: str | int | None = None  # the stop string or stop token id that ended the response
    latency: float = 0.0  # seconds from request to response
    ttft: float = 0.0  # seconds to the first token
    temperature: float = 1.0  # temperature of the log-probabilities (1.0 if greedy)
    rid: str = ""
    seed: int | None = None  # of the request, if a sample made it
    output_top_logprobs: list[TopTokens] | None = None  # for each output token, if the request asks for ``top_logprobs``
    input_logprobs: list[float | None] | None = None  # of the prompt from ``prompt_logprobs_from`` on; the first token has none
    input_top_logprobs: list[TopTokens | None] | None = None  # if the request sets both options
    logprobs_shifted: bool = False  # taken after top-p, top-k or penalties: the trainer has to recompute them
    server: str = ""  # address of the server that sampled the response; empty for an engine in this process
    routed_experts: np.ndarray | None = None  # [P + N - 1, W]: the record of the experts, see inference/routed_experts.py

    @classmethod
    def recorded(cls, request: ModelRequest, kept: RecordedCall) -> ModelResponse:
        """Build the response of a call in the journal."""
        call = kept.call
        return cls(
            input_tokens=request.tokens,  # type: ignore[arg-type]
            output_tokens=kept.output.tolist(),
            output_logprobs=kept.logprobs.tolist(),
            output_versions=kept.versions.tolist(),
            stop_reason=call.stop_reason,
            stop_match=call.stop_match,
            latency=call.latency,
            ttft=call.ttft,
            temperature=call.temperature,
            rid=request.rid,
            seed=call.seed,
            logprobs_shifted=call.logprobs_shifted,
            server=call.server,
            routed_experts=kept.routed_experts,
        )

    def prompt(self, request: ModelRequest) -> TokenPrefix:
        """Return the prompt that was answered: the request's tokens, unless the engine reports others."""
        ids = vars(self)["input_tokens"]
        if isinstance(ids, TokenPrefix):
            return ids
        tokens = request.tokens
        return tokens if not ids or tokens.equals(ids) else TokenPrefix.of(list(ids))

    def of_the_prompt(self) -> ModelResponse:
        """Return the response without the sampled tokens, for a caller that asked only for the prompt's log-probabilities."""
        nothing: dict[str, Any] = {name: [] for name in ("output_tokens", "output_logprobs", "output_versions")}
        top = None if self.output_top_logprobs is None else []
        return replace(self, **nothing, output_top_logprobs=top, stop_reason="length", stop_match=None)

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(vars(self)["input_tokens"])

    @property
    def output_len(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_tokens)

    @property
    def truncated(self) -> bool:
        """True if a length limit ended the response."""
        return self.stop_reason == "length"


def version_spans(versions: list[int]) -> list[dict[str, Any]]:
    """Group output tokens into ``weight_versions`` spans: one for each stretch of tokens with the same version, given as a string."""
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans


def versions_of_spans(spans: Sequence[dict[str, Any]], count: int, number: Callable[[Any], int]) -> list[int]:
    """Convert ``weight_versions`` spans to one version for each output token.

    Args:
        spans: ``{"version", "start", "end"}`` over the output tokens, in order.
        count: number of output tokens.
        number: converts a server's version label to a number.

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
