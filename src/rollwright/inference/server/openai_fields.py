"""Which parameters of the OpenAI protocol are honoured, ignored or refused: one table for both endpoints.

A parameter that could change what the model samples is never ignored; one that is not in the table is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollwright.inference.server.errors import RequestError, refuse_outside

CHAT, COMPLETION = "chat", "completion"
_BOTH = (CHAT, COMPLETION)


@dataclass(frozen=True)
class Field:
    """One parameter.

    Attributes:
        name: as it stands in the request.
        kinds: accepted Python types; None is always accepted and means "not given".
        endpoints: which of chat and completion have it.
        use: ``honoured``; ``ignored`` (it cannot change what is sampled); ``neutral`` (only ``neutral`` values are taken).
        note: for the documentation, or why another value is refused.
        neutral: the values that ask for nothing.
        low, high: inclusive limits of a number.
        keys: that an object may have; None: any but ``reserved``.
        reserved: keys of an object that are the server's to set.
    """

    name: str
    kinds: tuple[type, ...]
    endpoints: tuple[str, ...] = _BOTH
    use: str = "honoured"
    note: str = ""
    neutral: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    keys: frozenset[str] | None = None
    reserved: frozenset[str] = frozenset()


#: What the tokenizer's method takes besides the variables of its template: another template, or a shortened prompt, would be
#: trained on as if the model's own had made it.
_TEMPLATE_METHOD = frozenset(
    [
        "chat_template",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
_NUMBER = (int, float)
_TEXT_OR_LIST = (str, list)

FIELDS: tuple[Field, ...] = (
    Field("model", (str,), note="the served name; another is a 404"),
    Field("messages", (list,), (CHAT,), note="content as text, or as a list of text blocks; `name` is kept for the template"),
    Field("prompt", _TEXT_OR_LIST, (COMPLETION,), note="text, token ids, or a list of either"),
    Field("max_tokens", (int,), note="default: 16 for completions, what the context holds for chat", low=1),
    Field("max_completion_tokens", (int,), (CHAT,), note="newer name of max_tokens; wins where both are given", low=1),
    Field("min_tokens", (int,), note="extension: no end before so many tokens", low=0),
    Field("temperature", _NUMBER, note="0 is greedy; default 1", low=0.0, high=100.0),
    Field("top_p", _NUMBER, note="log-probabilities are those before top-p", low=0.0, high=1.0),
    Field("top_k", (int,), note="extension; 0 or -1: all", low=-1),
    Field("frequency_penalty", _NUMBER, low=-2.0, high=2.0),
    Field("n", (int,), note="samples of one prompt", low=1),
    Field("best_of", (int,), (COMPLETION,), "neutral", "only best_of = n can be served", ()),
    Field("seed", (int,), note="the i-th of n samples is drawn with a seed of its own derived from it"),
    Field("stop", _TEXT_OR_LIST, note="left out of the text, kept in token_ids"),
    Field("stop_token_ids", (list,), note="extension"),
    Field("include_stop_str_in_output", (bool,), note="extension: keep the stop string in the text"),
    Field("ignore_eos", (bool,), note="extension"),
    Field("skip_special_tokens", (bool,), note="extension; default true"),
    Field("stream", (bool,)),
    Field("stream_options", (dict,), note="include_usage", keys=frozenset({"include_usage"})),
    Field("logprobs", (bool, int), note="of the sampled tokens, at the request's temperature"),
    Field("top_logprobs", (int,), (CHAT,), "neutral", "only the sampled token's log-probability is known", (0,)),
    Field("return_token_ids", (bool,), note="extension: token_ids, prompt_token_ids and weight_versions"),
    Field("tools", (list,), (CHAT,), note="rendered by the model's chat template"),
    Field(
        "tool_choice", (str, dict), (CHAT,), note="required or a function: the reply is begun with the call; its JSON is free"
    ),
    Field("parallel_tool_calls", (bool,), (CHAT,), "neutral", "the number of calls cannot be limited", (True,)),
    Field(
        "chat_template_kwargs",
        (dict,),
        (CHAT,),
        note="extension: further variables of the model's chat template",
        reserved=_TEMPLATE_METHOD,
    ),
    Field("add_generation_prompt", (bool,), (CHAT,), note="extension; default true"),
    Field("continue_final_message", (bool,), (CHAT,), note="extension: go on with the last message"),
    Field("rid", (str,), note="extension: the conversation's id"),
    Field("echo", (bool,), (COMPLETION,), "neutral", "the prompt is not scored", (False,)),
    Field("suffix", (str,), (COMPLETION,), "neutral", "there is no insertion mode", ("",)),
    Field("presence_penalty", _NUMBER, use="neutral", note="the engine has no presence penalty", neutral=(0, 0.0)),
    Field("repetition_penalty", _NUMBER, use="neutral", note="the engine has no repetition penalty", neutral=(1, 1.0)),
    Field("min_p", _NUMBER, use="neutral", note="the engine has no min-p", neutral=(0, 0.0)),
    Field("logit_bias", (dict,), use="neutral", note="logits are not biased", neutral=({},)),
    Field("response_format", (dict,), (CHAT,), "neutral", "decoding is not constrained", ({"type": "text"},)),
    Field("functions", (list,), (CHAT,), "neutral", "use tools", ([],)),
    Field("function_call", (str, dict), (CHAT,), "neutral", "use tool_choice", ("auto", "none")),
    Field("modalities", (list,), (CHAT,), "neutral", "the server gives text", (["text"],)),
    Field("user", (str,), use="ignored"),
    Field("metadata", (dict,), use="ignored"),
    Field("store", (bool,), use="ignored"),
    Field("service_tier", (str,), use="ignored"),
    Field("prompt_cache_key", (str,), use="ignored"),
    Field("safety_identifier", (str,), use="ignored"),
)


def check_fields(body: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """The honoured parameters of a request.

    Args:
        body: the request.
        endpoint: ``CHAT`` or ``COMPLETION``.

    Returns:
        Name to value, without those that are not given or ignored.

    Raises:
        RequestError: a parameter is unknown, of a wrong type, out of range or cannot be honoured.
    """
    known = {field.name: field for field in FIELDS if endpoint in field.endpoints}
    if unknown := sorted(set(body) - set(known)):
        raise RequestError(f"Unknown parameter {unknown[0]!r}. This server knows {', '.join(sorted(known))}.", param=unknown[0])
    honoured: dict[str, Any] = {}
    for name, value in body.items():
        field = known[name]
        if value is None or field.use == "ignored":
            continue
        if field.use == "neutral":
            allowed = (body.get("n") or 1,) if name == "best_of" else field.neutral
            if value not in allowed:
                raise RequestError(f"{name}={value!r} cannot be honoured: {field.note}. Leave it out.", param=name)
            continue
        _check_value(field, value)
        honoured[name] = value
    return honoured


def _check_value(field: Field, value: Any) -> None:
    wrong_bool = isinstance(value, bool) and bool not in field.kinds
    if not isinstance(value, field.kinds) or wrong_bool:
        kinds = " or ".join(kind.__name__ for kind in field.kinds)
        raise RequestError(f"{field.name} is {value!r}, a {type(value).__name__}; it has to be {kinds}.", param=field.name)
    if isinstance(value, int | float):
        refuse_outside(field.name, value, field.low, field.high)
    if isinstance(value, dict):
        _check_keys(field, value)
    if field.name == "top_p" and value == 0:
        raise RequestError("top_p=0 leaves no token; use temperature=0 for greedy sampling.", param="top_p")


def _check_keys(field: Field, value: dict[str, Any]) -> None:
    unknown = sorted(set(value) - field.keys) if field.keys is not None else sorted(set(value) & field.reserved)
    if not unknown:
        return
    known = "the variables of the model's own template" if field.keys is None else ", ".join(sorted(field.keys))
    raise RequestError(f"{field.name} cannot set {unknown[0]!r}; it takes {known}.", param=field.name)
