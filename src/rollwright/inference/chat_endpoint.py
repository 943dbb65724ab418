"""Any endpoint of the OpenAI chat protocol as an inference engine, for evaluation: a provider's, ``rollwright serve-model``, SGLang, vLLM.

Such an endpoint takes messages and returns text. Workflows and the journal need tokens, so the engine has a tokenizer of its own with one
token for each byte of UTF-8. What a workflow renders with its chat template is turned back into the same messages, and the text of the
answer into tokens. These are not the model's tokens, and they have no probabilities (0.0 is recorded): they can be scored and read, but
not trained on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from rollwright.data.tokenizer import END, PAD, ROLES, UNKNOWN
from rollwright.errors import ConfigError, EngineError, RequestAborted, WeightUpdateError
from rollwright.inference.connections import ConnectionLostError, Connections, ServerRefusedError, refusal_of
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse

#: Maximum number of requests at once.
_REQUESTS = 64
#: Statuses after which a request is sent again, and the pauses in between, in seconds.
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Generation arguments that the protocol lacks or that name the model's own tokens -> the values that ask for nothing.
_NOT_IN_PROTOCOL = {
    "top_k": (0, -1),
    "min_p": (0.0,),
    "min_new_tokens": (0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "json_schema": (None,),
    "regex": (None,),
    "grammar": (None,),
    "ignore_eos": (False,),
}


class ChatEndpoint(InferenceEngine):
    """An endpoint of the OpenAI chat protocol.

    Args:
        url: the endpoint, with or without ``/v1``.
        tokenizer: from ``build_byte_tokenizer``.
        model: name of the model in the protocol. If empty, the only model that the endpoint lists.
        api_key: sent as a bearer token.
        timeout: seconds for one request.
    """

    def __init__(
        self, url: str, tokenizer: Any, *, model: str = "", api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        base = url.rstrip("/").removesuffix("/chat/completions")
        self.url = base if base.endswith("/v1") or "/v1/" in base else f"{base}/v1"
        self.model = model
        self._tokenizer = tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._special = {tokenizer.convert_tokens_to_ids(token) for token in (PAD, UNKNOWN, END, *ROLES)}
        self._role_of = {tokenizer.convert_tokens_to_ids(token): token.strip("<|>") for token in ROLES}
        self._connections = Connections(api_key=api_key, timeout=timeout)
        self._limit_key = "max_tokens"
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._running: dict[asyncio.Task[Any], str] = {}
        self._aborted: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Find the model's name, if none is given.

        Raises:
            ConfigError: the endpoint cannot be asked, or it lists several models or none.
        """
        if self.model:
            return
        try:
            listed = self._connections.request("GET", f"{self.url}/models", timeout=30.0)
            names = [str(entry["id"]) for entry in listed["data"]]
        except (EngineError, KeyError, TypeError) as error:
            raise ConfigError(
                f"The endpoint {self.url} does not list its models ({error}). Check the URL and the key (api_key, or --api-key), or "
                "name the model: served_model (--served-model)."
            ) from error
        if len(names) != 1:
            shown = ", ".join(names[:20]) or "none"
            raise ConfigError(
                f"The endpoint {self.url} lists {len(names)} models ({shown}). Name one: served_model (--served-model)."
            )
        self.model = names[0]

    def destroy(self) -> None:
        """See ``InferenceEngine``."""
        self._connections.close()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See ``InferenceEngine``.

        Raises:
            EngineError: an argument does not exist in the protocol, the prompt is not a chat, or the endpoint refuses the request.
        """
        body = self._body(request)
        task: Any = asyncio.current_task()
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_REQUESTS))
        started = time.perf_counter()
        with self._lock:
            self._running[task] = request.rid
        try:
            async with gate:
                answer = await self._ask(body, request.gconfig.max_new_tokens)
        except asyncio.CancelledError:
            if task in self._aborted:
                raise RequestAborted(f"The request of conversation {request.rid!r} to {self.url} was aborted.") from None
            raise
        finally:
            with self._lock:
                self._running.pop(task, None)
                self._aborted.discard(task)
        return self._response(request, answer, time.perf_counter() - started)

    async def _ask(self, body: dict[str, Any], limit: int) -> dict[str, Any]:
        """Send a request for at most ``limit`` tokens. If the endpoint is busy or the connection is lost, try again after a pause."""
        for pause in (*_PAUSES, None):
            try:
                return await self._connections.post(f"{self.url}/chat/completions", {**body, self._limit_key: limit})
            except ServerRefusedError as error:
                if error.status == 400 and "max_completion_tokens" in str(error) and self._limit_key == "max_tokens":
                    self._limit_key = "max_completion_tokens"  # its name for OpenAI's reasoning models
                    continue
                if error.status not in _TEMPORARY or pause is None:
                    raise refusal_of(error) from error
            except ConnectionLostError:
                if pause is None:
                    raise
            await asyncio.sleep(pause or 0.0)
        raise EngineError(f"{self.url} takes neither max_tokens nor max_completion_tokens.")

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        gconfig = request.gconfig
        unknown = [name for name, defaults in _NOT_IN_PROTOCOL.items() if getattr(gconfig, name) not in defaults]
        if set(gconfig.stop_token_ids) - self._special:  # workflows name those that end a turn, which ends the answer anyway
            unknown.append("stop_token_ids")
        if request.image_data or request.multi_modal:
            unknown.append("images")
        if request.top_logprobs or request.prompt_logprobs_from is not None:
            unknown.append("log-probabilities")
        if unknown:
            raise EngineError(
                f"An endpoint of the chat protocol does not take {', '.join(unknown)}: leave this out, or evaluate a directory."
            )
        body: dict[str, Any] = {"model": self.model, "messages": self._messages(request), "temperature": 0.0}
        if not gconfig.is_greedy:
            body["temperature"] = gconfig.effective_temperature
            body |= {"top_p": gconfig.top_p} if gconfig.top_p < 1.0 else {}
            body |= {"seed": request.effective_seed % (1 << 31)} if request.effective_seed is not None else {}
        optional = {
            "stop": gconfig.stop,
            "frequency_penalty": gconfig.frequency_penalty,
            "presence_penalty": gconfig.presence_penalty,
        }
        return body | {name: value for name, value in optional.items() if value}

    def _messages(self, request: ModelRequest) -> list[dict[str, str]]:
        """Turn a rendered prompt back into messages.

        Raises:
            EngineError: the prompt is not what the tokenizer's chat template makes of messages.
        """
        messages: list[dict[str, str]] = []
        role, content = None, []
        ids = request.input_ids
        for token in ids:
            if token in self._role_of and role is None:
                role, content = self._role_of[token], []
            elif token == self._end and role is not None:
                messages.append({"role": role, "content": self._tokenizer.decode(content)})
                role = None
            elif role is not None and token not in self._role_of:
                content.append(token)
            else:
                role = None
                break
        if role != "assistant" or content or not messages:  # it has to end where the assistant's turn begins
            raise EngineError(
                "A prompt for an endpoint of the chat protocol has to be messages that end with the user's turn, rendered by the chat "
                f"template. This one is {self._tokenizer.decode(ids)[:200]!r}. Evaluate a directory instead if the workflow writes its "
                "prompt itself or continues an answer."
            )
        return messages

    def _response(self, request: ModelRequest, answer: dict[str, Any], seconds: float) -> ModelResponse:
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EngineError(f"{self.url} answered without choices: {str(answer)[:300]}. Is it an OpenAI endpoint?") from None
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if reason != "length":
            tokens.append(self._end)
        return ModelResponse(
            input_tokens=request.tokens,  # type: ignore[arg-type]
            output_tokens=tokens or [self._end],
            output_logprobs=[0.0] * max(1, len(tokens)),
            output_versions=[0] * max(1, len(tokens)),
            stop_reason="length" if reason == "length" else "stop",
            latency=seconds,
            ttft=seconds,
            temperature=1.0 if request.gconfig.is_greedy else request.gconfig.effective_temperature,
            rid=request.rid,
            seed=request.effective_seed,
            server=self.url,
        )

    def get_version(self) -> int:
        """Return 0: the endpoint's weights do not change."""
        return 0

    def set_version(self, version: int) -> None:
        """See ``InferenceEngine``; only 0 is right."""
        if version != 0:
            raise WeightUpdateError(f"The endpoint {self.url} takes no weights, so it has no version {version}.")

    def pause(self) -> None:
        """Do nothing: weights do not change."""

    def resume(self) -> None:
        """Do nothing: see ``pause``."""

    def abort(self, rid: str | None = None) -> None:
        """See ``InferenceEngine``. No token has arrived yet, so aborted requests raise ``RequestAborted``."""
        with self._lock:
            chosen = [task for task, own in self._running.items() if rid in (None, own)]
            self._aborted.update(chosen)
        for task in chosen:
            task.get_loop().call_soon_threadsafe(task.cancel)
