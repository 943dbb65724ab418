"""The OpenAI protocol in front of any inference engine: models, completions, chat with tools, streams.

Invariants:

* A prompt is rendered once, by the model's own chat template. Sampled tokens are never encoded again: ``token_ids`` come from the engine.
* ``on_call`` sees every finished call before its answer is complete, whether streamed or not.
* If a client disconnects, its requests are cancelled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import MethodType
from typing import Any

from fastapi import Request, Response

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.chat_template import render, stopping_at_turn_end
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server.adapter_routes import AdapterRoutes
from rollwright.inference.server.bodies import Chat, Completion
from rollwright.inference.server.dialects import AnswerStore
from rollwright.inference.server.exchange import (
    LARGE,
    RequestError,
    Routes,
    beside_the_loop,
    event_line,
    event_stream,
    read_object,
    while_connected,
)
from rollwright.inference.server.images import Gallery, ImageReader
from rollwright.inference.server.messages import MESSAGES_ROUTES
from rollwright.inference.server.openai_answer import (
    CHAT,
    COMPLETION,
    ChoiceStream,
    OpenAICall,
    answer_choice,
    partial_responses,
    usage_of,
)
from rollwright.inference.server.prompts import (
    PromptReader,
    Prompts,
    beginning_of_reply,
    has_images,
    template_messages,
    tools_of,
)
from rollwright.inference.server.response_format import reply_grammar
from rollwright.inference.server.responses import RESPONSES_ROUTES
from rollwright.inference.server.text_stream import ReasoningSplit
from rollwright.inference.server.tokens import TOKENS_ROUTES
from rollwright.inference.server.tool_calls import tool_convention
from rollwright.tracking.logging import getLogger

#: Sampling parameters that have the same name in ``GenerationHyperparameters``.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("stop_token_ids", "ignore_eos"),
)


logger = getLogger("OpenAI")


@functools.lru_cache(maxsize=256)
def _warn(warning: str) -> None:
    """Log a warning about a request, once."""
    logger.warning("%s", warning)


class OpenAIProtocol:
    """Serves the OpenAI protocol and its dialects over an engine.

    Include ``router`` in a FastAPI application. The engine may be any ``InferenceEngine``: the built-in one, a client of
    servers, or an engine bound to a sample.

    Args:
        engine: answers every call.
        tokenizer: the model's tokenizer, with its chat template.
        model_name: name of the model in requests.
        on_call: called with each finished call, plain or async. If it raises, the call fails.
        defaults: values of generation arguments that a request omits. None uses the protocol's defaults.
        context_length: maximum length of prompt and new tokens together. None uses the engine's.
        max_prompt_tokens: maximum length of a prompt. None sets no limit besides the context.
        max_samples: maximum number of completions for one request.
        processor: image processor of the model, or its directory. None uses the one in the tokenizer's directory, if any.
        image_hosts: hosts that images may be fetched from. Other images must be ``data:`` URLs.
        adapters: LoRA adapters that requests can name as their model. If None, requests can name only the model itself.
    """

    #: Other names that requests may use for the model.
    other_names: tuple[str, ...] = ()

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        model_name: str,
        *,
        on_call: Callable[[OpenAICall], Any] | None = None,
        defaults: GenerationHyperparameters | None = None,
        context_length: int | None = None,
        max_prompt_tokens: int | None = None,
        max_samples: int = 256,
        processor: Any = None,
        image_hosts: Iterable[str] = (),
        adapters: AdapterRoutes | None = None,
    ) -> None:
        self._adapters = adapters
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._on_call = on_call
        self._defaults = defaults or GenerationHyperparameters()
        self._context_length = context_length or engine.context_length
        self._reader = PromptReader(tokenizer, self._context_length, max_prompt_tokens, max_samples)
        self.images = ImageReader(tokenizer, processor, image_hosts)
        self._template_kwargs: dict[str, Any] = {}
        self.answers = AnswerStore()
        self.malformed_tool_calls = 0  # in all replies so far
        self.convention = tool_convention(getattr(tokenizer, "chat_template", None) or "")

    @property
    def router(self) -> Routes:
        """The routes."""
        return Routes((method, path, MethodType(handler, self), body) for method, path, handler, body in ROUTES)

    # -- routes --------------------------------------------------------------------------------------------------------

    def _card(self, name: str = "", **about: Any) -> dict[str, Any]:
        """Describe the model, or an adapter of that name, in the fields of both OpenAI's and Anthropic's API."""
        length, name = self._context_length, name or self.model_name
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "rollwright",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
            **({"max_model_len": length, "max_input_tokens": length} if length else {}),
            **about,
        }

    def _cards(self) -> list[dict[str, Any]]:
        """Describe the model, and the adapters that the request may name, as vLLM does."""
        visible = self._adapters.visible() if self._adapters is not None else []
        about = [{"root": adapter.path, "parent": self.model_name} for adapter in visible]
        return [self._card(), *(self._card(adapter.name, **each) for adapter, each in zip(visible, about, strict=True))]

    async def models(self, request: Request) -> dict[str, Any]:
        """``GET /v1/models``."""
        cards = self._cards()
        return {
            "object": "list",
            "data": cards,
            "first_id": cards[0]["id"],
            "last_id": cards[-1]["id"],
            "has_more": False,
        }

    async def model(self, request: Request) -> dict[str, Any]:
        """``GET /v1/models/NAME``."""
        name = request.path_params["name"]
        self._check_model({"model": name})
        return next((card for card in self._cards() if card["id"] == name), self._card())

    async def completions(self, request: Request) -> Response | dict[str, Any]:
        """``POST /v1/completions``."""
        return await self._serve(request, COMPLETION)

    async def chat(self, request: Request) -> Response | dict[str, Any]:
        """``POST /v1/chat/completions``."""
        return await self._serve(request, CHAT)

    async def _serve(self, request: Request, endpoint: str) -> Response | dict[str, Any]:
        body, size = await read_object(request)
        call = await self.open_call(request, endpoint, body, size, "chatcmpl-" if endpoint == CHAT else "cmpl-")
        if body.get("stream"):
            include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return await event_stream(request, self._events(call, include_usage))
        await self.complete(request, call)
        answer = self._head(call, "chat.completion") | {"choices": call.choices, "usage": usage_of(call)}
        return answer | ({"prompt_token_ids": call.requests[0].input_ids} if call.return_token_ids and call.is_chat else {})

    async def open_call(
        self, request: Request, endpoint: str, body: dict[str, Any], size: int, prefix: str, warnings: Sequence[str] = ()
    ) -> OpenAICall:
        """Validate a request, read its prompts, and create the call.

        Args:
            request: the HTTP request.
            endpoint: ``CHAT`` or ``COMPLETION``.
            body: the body, translated to the endpoint's form if the request is in a dialect.
            size: bytes of the request's body.
            prefix: prefix of the answer's id.
            warnings: descriptions of the parts that the dialect left out.

        Raises:
            RequestError: the request cannot be served.
        """
        asked = (Chat if endpoint == CHAT else Completion).of(body)
        fields = asked.given()
        self._check_model(fields)
        call = self._call(endpoint, body, fields, await self.read_prompts(request, endpoint, fields, size), prefix)
        if said := [*warnings, *asked.warnings]:
            for each in call.requests:
                each.metadata["warnings"] = said
            for warning in said:
                _warn(warning)
        return call

    async def read_prompts(self, request: Request, endpoint: str, fields: dict[str, Any], size: int) -> Prompts:
        """Read the prompts of a request, in a thread if that takes long.

        Args:
            request: the HTTP request.
            endpoint: ``CHAT`` or ``COMPLETION``.
            fields: parameters of the request.
            size: bytes of the request's body.
        """
        if endpoint == CHAT and has_images(fields["messages"]):
            size = max(size, LARGE)
        return await beside_the_loop(request, size, self._prompts, endpoint, fields)

    async def complete(self, request: Request, call: OpenAICall) -> None:
        """Let the engine answer a call, and pass it to ``on_call``."""
        if not call.responses:  # otherwise the call is answered again
            await self._finish(call, await while_connected(request, self.engine.agenerate_batch(call.requests)))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _check_model(self, fields: dict[str, Any]) -> None:
        if (name := self._adapter_of(fields)) and self._adapters is not None:
            self._adapters.check(name, "model")
        elif name:
            also = f", also as {' and '.join(self.other_names)}" if self.other_names else ""
            raise RequestError(
                f"There is no model {name!r}; this server serves {self.model_name!r}{also}.", status=404, param="model"
            )

    def _adapter_of(self, fields: dict[str, Any]) -> str:
        """Return the model that a request names, if it is not this one."""
        name = fields.get("model") or ""
        return "" if name in (self.model_name, *self.other_names) else name

    def _prompts(self, endpoint: str, fields: dict[str, Any]) -> Prompts:
        if endpoint == CHAT:
            return self.chat_prompts(fields)
        given: Any = fields["prompt"]
        items: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        encode, check = self._reader.encode, self._reader.checked
        return Prompts([encode(item, "prompt") if isinstance(item, str) else check(item, "prompt") for item in items])

    def _variables(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the variables of the chat template, including ``reasoning_effort`` if the template uses it."""
        given = {**self._template_kwargs, **(fields.get("chat_template_kwargs") or {})}
        if (effort := fields.get("reasoning_effort")) and "reasoning_effort" in str(
            getattr(self.tokenizer, "chat_template", "")
        ):
            given.setdefault("reasoning_effort", effort)
        return given

    def chat_prompts(self, fields: dict[str, Any]) -> Prompts:
        """Render the prompt of a chat request with the model's chat template, including its images.

        Raises:
            RequestError: a message is malformed, or the template rejects the conversation.
        """
        variables = self._variables(fields)
        if getattr(self.tokenizer, "chat_template", None) is None and "chat_template" not in variables:
            raise RequestError("The model has no chat template; use /v1/completions.", param="messages")
        gallery = Gallery(self.images, self._reader.limit)
        try:
            messages = template_messages(fields["messages"], gallery.add)
            for message in messages if self.images.sees else ():
                if message["role"] == "assistant":  # a sampled image token has no image
                    message["content"] = message["content"].replace(self.images.token, "")
            ids = self._render(messages, tools_of(fields), fields, variables)
        except RequestError:
            raise
        except Exception as error:  # jinja raises its own errors for conversations that a template does not allow
            raise RequestError(f"The chat template refuses the conversation: {error}", param="messages") from error
        if begun := beginning_of_reply(fields, self.convention):
            ids = [*ids, *self.tokenizer.encode(begun, add_special_tokens=False)]
        ids = self._reader.checked(ids, "messages")
        return Prompts([ids], messages, gallery.inputs(ids))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, fields: dict[str, Any], variables: dict[str, Any]
    ) -> list[int]:
        continues = bool(fields.get("continue_final_message"))
        return self._encode(
            render(
                self.tokenizer,
                messages,
                tools,
                add_generation_prompt=fields.get("add_generation_prompt", not continues),
                continue_final_message=continues,
                **variables,
            )
        )

    def _encode(self, text: str) -> list[int]:
        return self._reader.encode(text, "messages", add_special_tokens=False)

    def _call(self, endpoint: str, body: dict[str, Any], fields: dict[str, Any], prompts: Prompts, prefix: str) -> OpenAICall:
        samples = fields.get("n", 1)
        self._reader.check_number(samples * len(prompts.ids), "n")
        requests: list[ModelRequest] = []
        given = fields.get("logprobs", False)
        returns_logprobs = given is not False  # 0 requests the sampled tokens' log-probabilities without alternatives
        top = fields.get("top_logprobs", 0) if endpoint == CHAT else int(given) if given is not True else 0
        if top and not returns_logprobs:
            raise RequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        end = self.tokenizer.decode(prompts.ids[0][-8:]) if endpoint == CHAT else ""
        begins_reasoning = end.rstrip().endswith(ReasoningSplit.OPENING)
        begun = beginning_of_reply(fields, self.convention)
        template_reasons = ReasoningSplit.OPENING in str(getattr(self.tokenizer, "chat_template", None))
        for prompt in prompts.ids:
            gconfig = self._gconfig(fields, endpoint, len(prompt), begins_reasoning)
            requests += [
                ModelRequest(
                    input_ids=prompt,
                    gconfig=gconfig.new(seed=fields["seed"] + index if "seed" in fields else None),
                    rid=fields.get("rid") or uuid.uuid4().hex,
                    tokenizer=self.tokenizer,
                    top_logprobs=top,
                    prompt_logprobs_from=0 if fields.get("echo") and returns_logprobs else None,
                    **prompts.inputs,
                )
                for index in range(samples)
            ]
        if self._adapters is not None:
            requests = [self._adapters.assign(request, self._adapter_of(fields), "model") for request in requests]
        return OpenAICall(
            endpoint,
            body,
            requests,
            messages=prompts.messages,
            prefix=prefix,
            samples=samples,
            tools=bool(tools_of(fields)),
            begun=begun,
            logprobs=returns_logprobs,
            echo=bool(fields.get("echo")),
            samples_nothing=fields.get("max_tokens") == 0,
            return_token_ids=bool(fields.get("return_token_ids")),
            keep_stop=bool(fields.get("include_stop_str_in_output")),
            separates_reasoning=endpoint == CHAT and template_reasons and fields.get("separate_reasoning", True) and not begun,
            begins_reasoning=begins_reasoning,
        )

    def _gconfig(
        self, fields: dict[str, Any], endpoint: str, prompt_length: int, begins_reasoning: bool = False
    ) -> GenerationHyperparameters:
        defaults, stop = self._defaults, fields.get("stop", self._defaults.stop)
        sampling = {name: fields[name] for name in _SAMPLING if name in fields}
        if self.images.token_id is not None:  # there is no image for a sampled image token
            sampling["stop_token_ids"] = [*sampling.get("stop_token_ids", defaults.stop_token_ids), self.images.token_id]
        given = fields.get("max_completion_tokens", fields.get("max_tokens"))
        room = max(1, (self._context_length or math.inf) - prompt_length)
        if given is None:
            given = room if endpoint == CHAT and self._context_length else defaults.max_new_tokens if endpoint == CHAT else 16
        gconfig = defaults.new(
            n_samples=1,
            max_new_tokens=max(1, int(min(given, room))),  # clients often ask for more than the context has left
            min_new_tokens=fields.get("min_tokens", defaults.min_new_tokens),
            greedy=defaults.greedy and "temperature" not in fields,
            stop=[*([stop] if isinstance(stop, str) else stop or []), *self._end_of_calls(fields)] or None,
            **self._grammar(fields, begins_reasoning),
            skip_special_tokens=fields.get("skip_special_tokens", True),
            **sampling,
        )
        return stopping_at_turn_end(gconfig, self.tokenizer, **self._variables(fields)) if endpoint == CHAT else gconfig

    def _end_of_calls(self, fields: dict[str, Any]) -> list[str]:
        """Return the stop string that ends a reply after its first tool call, if the request allows only one call."""
        if fields.get("parallel_tool_calls", True) or not tools_of(fields):
            return []
        if self.convention.closing is None:
            raise RequestError(
                "parallel_tool_calls=false cannot be honoured: the calls of this model's template have no mark at their end.",
                param="parallel_tool_calls",
            )
        return [self.convention.closing]

    def _grammar(self, fields: dict[str, Any], begins_reasoning: bool) -> dict[str, str]:
        """Return the generation argument that enforces ``response_format`` or ``structured_outputs``, if either is given."""
        first, second = fields.get("response_format"), fields.get("structured_outputs")
        if first is not None and second is not None:
            raise RequestError("structured_outputs cannot be combined with response_format.", param="structured_outputs")
        structure = second if first is None else first
        if structure is None:
            return {}
        if beginning_of_reply(fields, self.convention):
            raise RequestError(f"{structure.param} cannot be honoured if tool_choice forces a call.", param=structure.param)
        convention = self.convention if tools_of(fields) else None
        return reply_grammar(structure, self.tokenizer, convention=convention, begins_reasoning=begins_reasoning)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _finish(self, call: OpenAICall, responses: list[ModelResponse]) -> None:
        """Set the responses and choices of a finished call, and pass it to ``on_call``."""
        for request, response in zip(call.requests, responses, strict=True):
            if request.top_logprobs and response.output_top_logprobs is None:
                raise RequestError("The engine behind this server gives no alternatives.", param="top_logprobs")
            if request.prompt_logprobs_from is not None and response.input_logprobs is None:
                raise RequestError("The engine behind this server scores no prompts.", param="echo")
        call.responses = [response.of_the_prompt() for response in responses] if call.samples_nothing else responses
        call.choices = [
            answer_choice(call, index, response, self.tokenizer, self.convention)
            for index, response in enumerate(call.responses)
        ]
        self.malformed_tool_calls += call.malformed_tool_calls
        if self._on_call is not None:
            result = self._on_call(call)
            if inspect.isawaitable(result):
                await result

    def _head(self, call: OpenAICall, kind: str) -> dict[str, Any]:
        return {
            "id": call.answer_id,
            "object": kind if call.is_chat else "text_completion",
            "created": int(call.started),
            "model": self._adapter_of(call.body) or self.model_name,
        }

    async def chunks(self, call: OpenAICall) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the choices of a call in chunks. The first chunk comes after the engine has accepted every request."""
        streams = [ChoiceStream(call, index, self.tokenizer, self.convention) for index in range(len(call.requests))]
        latest: dict[int, ModelResponse] = {}
        async with contextlib.aclosing(self._partial_responses(call)) as partials:
            async for index, partial in partials:
                if not latest and call.is_chat:  # every choice begins with its role
                    ids = {"prompt_token_ids": call.requests[0].input_ids} if call.return_token_ids else {}
                    role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield {"choices": [{"index": at, **role} for at in range(len(streams))]} | ids
                latest[index] = partial = partial.of_the_prompt() if call.samples_nothing else partial
                chunk = streams[index].advance(partial)
                if chunk is not None:
                    yield {"choices": [chunk]}
            if not call.responses:
                await self._finish(call, [latest[index] for index in range(len(streams))])
        for index, stream in enumerate(streams):
            for chunk in stream.last(latest[index], call.choices[index]):
                yield {"choices": [chunk]}

    async def _partial_responses(self, call: OpenAICall) -> AsyncGenerator[tuple[int, ModelResponse], None]:
        """Yield the engine's partial responses, or the complete ones of a call that is answered again."""
        if call.responses:
            for number, response in enumerate(call.responses):
                yield number, response
            return
        async with contextlib.aclosing(partial_responses(self.engine, call.requests)) as partials:
            async for index, partial in partials:
                yield index, partial

    async def _events(self, call: OpenAICall, include_usage: bool) -> AsyncGenerator[str, None]:
        """Yield the server-sent events of a streamed call."""
        head = self._head(call, "chat.completion.chunk")
        async with contextlib.aclosing(self.chunks(call)) as chunks:
            async for chunk in chunks:
                yield event_line({**head, **chunk})
        if include_usage:
            yield event_line({**head, "choices": [], "usage": usage_of(call)})
        yield "data: [DONE]\n\n"


#: Method, path, handler and body of each route. FastAPI tries the routes in this order.
ROUTES = (
    ("POST", "/v1/chat/completions", OpenAIProtocol.chat, Chat),
    *RESPONSES_ROUTES,
    *MESSAGES_ROUTES,
    *TOKENS_ROUTES,
    ("POST", "/v1/completions", OpenAIProtocol.completions, Completion),
    ("GET", "/v1/models", OpenAIProtocol.models, None),
    ("GET", "/v1/models/{name:path}", OpenAIProtocol.model, None),
)
