"""Request bodies of SGLang's native protocol and of the OpenAI protocol, validated by pydantic.

A parameter is *honoured* (a field of the model), *ignored* (it cannot affect what is sampled), *left out* with a warning (it requests
something that only the vendor's servers offer) or *neutral* (the server lacks the feature, and accepts only values that do not request
it). Any other parameter is rejected by name. JSON null means that a parameter is not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

from fastapi import Request, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.parameters import limits_top_k
from rollwright.inference.server.exchange import RequestError, beside_the_loop, error_response, read_object
from rollwright.inference.server.response_format import format_structure, outputs_structure


class Body(BaseModel):
    """Parameters of a request.

    Attributes:
        noun: word for a parameter in messages.
        ignored: parameters that cannot affect what is sampled.
        left_out: parameter -> why it is left out with a warning.
        neutral: parameter -> its accepted values, and why others are rejected. A request may also give a list of accepted values.
        of_chat: parameters of the chat request that are accepted as well; requires ``extra="allow"``.
        renamed: parameter of the chat request -> its name in this API.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    noun: ClassVar[str] = "parameter"
    ignored: ClassVar[frozenset[str]] = frozenset()
    left_out: ClassVar[dict[str, str]] = {}
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    of_chat: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[dict[str, str]] = {}

    #: Builds the response that reports an exception, in the API's own form.
    error_response: ClassVar[Callable[[Exception], Response]] = staticmethod(error_response)

    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """One sentence for each parameter that was left out."""
        return self._warnings

    @classmethod
    async def read(cls, request: Request) -> Self:
        """Read and validate a request's body.

        Raises:
            RequestError: the body is not a JSON object, or a parameter is wrong.
        """
        body, size = await read_object(request)
        return await beside_the_loop(request, size, cls.of, body)

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """Validate a parsed body.

        Raises:
            RequestError: a parameter is unknown, of a wrong type, out of range or cannot be honoured.
        """
        given = {name: value for name, value in body.items() if value is not None and name not in cls.ignored}
        for name in cls.neutral.keys() & given.keys():
            value, (neutral, why) = given.pop(name), cls.neutral[name]
            for_each = value if isinstance(value, list) else [value]
            if value not in neutral and any(item is not None and item not in neutral for item in for_each):
                raise RequestError(f"{name}={value!r:.100} cannot be honoured: {why}. Leave it out.", param=name)
        warnings = [f"{name} is left out: {cls.left_out[name]}." for name in sorted(cls.left_out.keys() & given.keys())]
        given = {name: value for name, value in given.items() if name not in cls.left_out}
        known = cls.model_fields.keys() | cls.of_chat
        if cls.model_config.get("extra") != "ignore" and (unknown := next((name for name in given if name not in known), None)):
            raise cls._unknown(unknown)
        try:
            made = cls.model_validate(given)
        except ValidationError as error:
            raise cls._refusal(error.errors(include_url=False)[0], given) from None
        made._warnings = warnings
        return made

    @classmethod
    def described(cls) -> dict[str, Any]:
        """JSON Schema of the body, including neutral and ignored parameters."""
        schema = cls.model_json_schema()
        schema["properties"] |= {name: {"enum": [*values, None]} for name, (values, _) in cls.neutral.items()}
        schema["properties"] |= {name: {} for name in sorted({*cls.ignored, *cls.left_out})}
        return schema

    @classmethod
    def _unknown(cls, name: str) -> RequestError:
        if name in cls.renamed:
            return RequestError(f"Unknown {cls.noun} {name!r}: it is {cls.renamed[name]} here.", param=name)
        known = {*cls.model_fields, *cls.neutral, *cls.left_out}
        of_chat = f"; and of a chat request {', '.join(sorted(cls.of_chat - known))}" if cls.of_chat else ""
        return RequestError(f"Unknown {cls.noun} {name!r}; known are {', '.join(sorted(known))}{of_chat}.", param=name)

    @classmethod
    def _refusal(cls, error: ErrorDetails, given: dict[str, Any]) -> RequestError:
        name, kind = str(error["loc"][0]), error["type"]
        field = cls.model_fields[name]
        said = f"{name}={given[name]!r:.100}" if name in given else f"{name} is missing"
        wanted = field.description or ("given" if kind == "missing" else error["msg"].removeprefix("Input should be "))
        if kind in ("greater_than_equal", "less_than_equal"):
            bounds = {side: getattr(limit, side) for limit in field.metadata for side in ("ge", "le") if hasattr(limit, side)}
            limits = error.get("ctx", {}) | bounds
            both = "between {ge} and {le}" if len(limits) == 2 else "at least {ge}" if "ge" in limits else "at most {le}"
            wanted = both.format(**limits)
        return RequestError(f"{said}; it has to be {wanted}.", param=name)


def _by_token_id(bias: Any) -> Any:
    """Convert the keys to token ids; in JSON they are strings."""
    if not isinstance(bias, dict):
        return bias
    if wrong := next((token for token in bias if not str(token).isdecimal()), None):
        raise RequestError(f"logit_bias names {wrong!r:.100}; its keys are token ids, as text.", param="logit_bias")
    return {int(token): value for token, value in bias.items()}


def _leaves_a_token(top_p: float) -> float:
    if top_p == 0:
        raise RequestError("top_p=0 leaves no token; use temperature=0 for greedy sampling.", param="top_p")
    return top_p


TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
NotEmpty = Annotated[str, Field(min_length=1)]
#: Maximum number of alternative tokens whose log-probabilities are returned, as in OpenAI's protocol.
_MOST = 20
Alternatives = Annotated[int, Field(ge=0, le=_MOST)]
Flag = Annotated[bool, Field(strict=False)]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]


class SamplingBody(Body):
    """Sampling parameters with the same name in both protocols."""

    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: Annotated[float, AfterValidator(_leaves_a_token)] = Field(1.0, ge=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]], BeforeValidator(_by_token_id)] = Field(
        {}, description="an object of numbers between -100 and 100 by token id"
    )
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True


# ------------------------------------------------------------------ SGLang's native protocol


def _none(*names: str, value: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    return {name: ((value,), "this server has no such thing") for name in names}


class NativeSampling(SamplingBody):
    """``sampling_params`` of ``/generate``."""

    noun = "sampling parameter"
    neutral = {
        **_none("beam_width", "stream_interval", value=1),
        **_none("custom_params", value={}),
        **_none("ebnf", "structural_tag", value=""),
        "stop_regex": (("", []), "this server has no such thing"),
        "watermark": ((), "this server has no such thing"),
    }

    max_new_tokens: int = Field(128, ge=0)
    min_new_tokens: int = Field(0, ge=0)
    stop: str | list[str] | None = Field(None, description="text or a list of texts")
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    no_stop_trim: bool = False
    sampling_seed: Seed | None = None
    spaces_between_special_tokens: bool = True

    def gconfig(self) -> GenerationHyperparameters:
        """Convert to generation arguments; ``n_samples`` is ``n``."""
        same = self.model_dump(exclude={"n", "no_stop_trim", "sampling_seed", "spaces_between_special_tokens"})
        same |= {name: same[name] or None for name in ("json_schema", "regex", "grammar")}
        gconfig = GenerationHyperparameters(**same, n_samples=self.n, seed=self.sampling_seed)
        return gconfig if limits_top_k(gconfig) else gconfig.new(top_k=0)


class Generate(Body):
    """``/generate``. The ignored fields are for SGLang's routers, queues, caches and logs."""

    noun = "field of /generate"
    ignored = frozenset(
        [
            "session_id",
            "conversation_id",
            "routing_key",
            "routed_dp_rank",
            "data_parallel_rank",
            "priority",
            "extra_key",
            "cache_salt",
            "kv_hints",
            "log_metrics",
            "no_logs",
            "custom_labels",
            "external_trace_header",
            "received_time",
            "http_worker_ipc",
        ]
    )
    neutral = {
        "image_data": (
            ([],),
            "the model behind this server reads token ids only; pixel values travel only to the built-in engine in process",
        ),
        **_none("token_ids_logprob", "video_data", "audio_data", "modalities", "input_embeds", value=[]),
        **_none("use_audio_in_video", "return_hidden_states", "return_indexer_topk", value=False),
        **_none("return_sampling_mask", "return_entropy", "return_bytes", "background", "require_reasoning", value=False),
        **_none("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", value=False),
        **_none("return_flat_raw_top_logprobs_b64", value=False),
        **_none("routed_experts_start_len", value=0),
        **_none("session_params", value={}),
        **_none("custom_logit_processor", value=""),
    }

    rid: str | list[str] | None = None
    text: NotEmpty | Annotated[list[NotEmpty], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="text, or a list of texts; where text is empty, there is no token to continue from"
    )
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="a list of token ids that is not empty, or a list of such lists"
    )
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = Field(
        None, description="an object, or a list with one for each prompt"
    )
    return_logprob: Flag | list[Flag | None] = Field(False, description="true or false, or a list with one for each prompt")
    top_logprobs_num: Alternatives | list[Alternatives | None] = Field(0, description=f"0 to {_MOST}, or a list of such")
    logprob_start_len: int | list[int | None] = Field(-1, description="an index into the prompt, or a list with one for each")
    lora_path: str | list[str | None] = Field("", description="the name of an adapter, or a list with one for each prompt")
    stream: Flag = False
    position_ids: list[int] | None = None
    branch_ids: list[int] | None = None
    return_text_in_logprobs: Flag = False
    return_routed_experts: Flag = False
    return_prompt_token_ids: Flag = False

    @model_validator(mode="after")
    def _scores_are_returned(self) -> Self:
        for name, nothing in (("top_logprobs_num", 0), ("logprob_start_len", -1)):
            if not self.return_logprob and getattr(self, name) not in (nothing, None):
                raise RequestError(f"{name} needs return_logprob=true.", param=name)
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.input_ids is None) == (self.text is None):
            raise RequestError("Give either input_ids or text.", param="input_ids")
        return self


# ------------------------------------------------------------------ the OpenAI protocol

#: Arguments of ``apply_chat_template`` that are not variables of the template. They are rejected, because a prompt from another template,
#: or a truncated one, would be trained on as if the model's own template had rendered it.
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
#: Former names of the parts of vLLM's ``structured_outputs``.
_GUIDED: dict[str, tuple[tuple[Any, ...], str]] = {
    f"guided_{name}": ((), f"it is now called structured_outputs.{name}") for name in ("json", "regex", "choice", "grammar")
}


class OpenAIBody(SamplingBody):
    """Parameters that chat and completions share."""

    ignored = frozenset(
        [
            "user",
            "metadata",
            "store",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "verbosity",  # length of the answers of OpenAI's own models
            "prediction",  # speeds up sampling
            "priority",
            "request_id",
            "cache_salt",
        ]
    )
    model: str | None = None
    max_tokens: int = Field(16, ge=0)
    min_tokens: int = Field(0, ge=0)
    seed: Seed | None = None
    stop: NotEmpty | list[NotEmpty] | None = Field(None, description="text or a list of texts that are not empty")
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | Alternatives = Field(False, description=f"true, false, or a number of alternatives from 0 to {_MOST}")
    return_token_ids: bool = False
    rid: str | None = None
    structured_outputs: Annotated[dict[str, Any], AfterValidator(outputs_structure)] | None = Field(
        None, description="an object with one of json, regex, choice, grammar and json_object"
    )

    def given(self) -> dict[str, Any]:
        """Return the honoured parameters that the request sets, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    @field_validator("stream_options", "chat_template_kwargs", check_fields=False)
    @classmethod
    def _may_be_set(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        refused, takes = set(value) & _TEMPLATE_METHOD, "the variables of the model's own template"
        if info.field_name == "stream_options":
            refused, takes = set(value) - {"include_usage", "include_obfuscation"}, "include_usage"
        if refused:
            raise RequestError(f"{info.field_name} cannot set {min(refused)!r}; it takes {takes}.", param=info.field_name)
        return value


class Chat(OpenAIBody):
    """``/v1/chat/completions``."""

    ignored = OpenAIBody.ignored | {"audio"}  # only the format of audio, which ``modalities`` would request
    left_out = {
        "moderation": "this server does not moderate",
        "web_search_options": "this server does not search the web",
    }
    neutral = {
        **_GUIDED,
        "functions": (([],), "use tools"),
        "function_call": (("auto", "none"), "use tool_choice"),
        "modalities": ((["text"],), "the server gives text"),
    }

    messages: list[Any] = Field(min_length=1, description="a list with at least one message")
    max_completion_tokens: int = Field(16, ge=1)
    max_tokens: int = Field(16, ge=1)
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] = Field(False, description="true or false; top_logprobs says how many")
    top_logprobs: Alternatives = 0
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[dict[str, Any], AfterValidator(format_structure)] | None = Field(
        None, description="an object with the type text, json_object or json_schema"
    )
    chat_template_kwargs: dict[str, Any] = {}
    separate_reasoning: bool = Field(True, description="true or false: false leaves the reasoning in the text")
    reasoning_effort: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Completion(OpenAIBody):
    """``/v1/completions``."""

    neutral = {**_GUIDED, "suffix": (("",), "insertion is not supported")}

    prompt: NotEmpty | TokenIds | Annotated[list[NotEmpty | TokenIds], Field(min_length=1, fail_fast=True)] = Field(
        description="text, token ids, or a list of either, and not empty"
    )
    best_of: int | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens=0 samples nothing: it only scores a prompt, with echo=true.", param="max_tokens")
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of={self.best_of} cannot be honoured: only best_of = n can be served.", param="best_of")
        return self


#: Parameters that every dialect of chat accepts besides its API's own fields: sampling and output options.
SAMPLING_OF_CHAT = (frozenset([*Chat.model_fields, *Chat.neutral]) | Chat.ignored) - {
    *("messages", "stream", "stream_options", "n", "tools", "tool_choice", "response_format", "max_tokens"),
    *("max_completion_tokens", "logprobs", "top_logprobs", "return_token_ids", "functions", "function_call", "modalities"),
}
