"""The model of a task-style workflow: takes text or messages, and returns experiences."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.chat_template import stopping_at_turn_end
from rollwright.data.conversation import ConversationTokens
from rollwright.errors import PromptTooLongError, WorkflowError
from rollwright.experience.experience import Experience, experiences_of
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.workflows.chat_images import ChatGallery, image_reader

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _from_thread(
    method: Callable[Concatenate[ModelWrapper, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[ModelWrapper, Arguments], Result]:
    """Make the synchronous form of an asynchronous method, for workflows in threads."""

    def call(self: ModelWrapper, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._wait(method(self, *args, **kwargs))

    call.__doc__ = method.__doc__
    return call


class ModelWrapper:
    """The policy, bound to one sample.

    Every call is recorded by the engine behind it; ``chat`` keeps the tokens of earlier replies, so a continued
    conversation is never encoded again. The synchronous methods are for workflows whose ``run`` is in a thread; on the event loop,
    use the ``_async`` forms.

    Args:
        engine: the engine bound to this sample.
        tokenizer: the policy's tokenizer.
        gconfig: default generation arguments of calls.
        recorder: the sample's recorder; needed for the history.
        loop: event loop for synchronous calls. If None, each call runs in a new loop.
        open_episode: opens this sample's run at the OpenAI front (``OpenAIFront.episode``), or None if there is no front.
        model_path: path of the policy's initial weights.
        template_kwargs: passed to the chat template.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        *,
        gconfig: GenerationHyperparameters | None = None,
        recorder: Recorder | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        open_episode: Callable[[], Any] | None = None,
        model_path: str = "",
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.gconfig = gconfig or GenerationHyperparameters()
        self.recorder = recorder
        self.model_path = model_path
        self._loop = loop
        self._open_episode = open_episode
        self._opened: Any = None
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()  # OpenAI clients that the workflow may hold
        self._conversation = ConversationTokens(tokenizer, **(template_kwargs or {}))
        self._conversation_id = uuid.uuid4().hex
        self._images = image_reader(tokenizer)
        self._history_start = 0

    @property
    def sees(self) -> bool:
        """True if the model reads images."""
        return self._images is not None

    # -- text and messages ---------------------------------------------------------------------------------------------

    async def generate_async(self, prompts: Sequence[str | Sequence[int]] | str, **generation: Any) -> list[Experience]:
        """Complete each text ``n`` times; answers of the same prompt are adjacent.

        Args:
            prompts: strings, which are encoded without a chat template, or token ids.
            generation: arguments that override the task's: ``n``, ``temperature``, ``top_p``, ``top_k``, ``max_tokens``, ``stop``, ….
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        gconfig = self._generation(generation)
        encode = self.tokenizer.encode
        ids = [encode(text, add_special_tokens=False) if isinstance(text, str) else list(text) for text in texts]
        calls = [self._sample(prompt, gconfig, uuid.uuid4().hex) for prompt in ids for _ in range(gconfig.n_samples)]
        return list(map(self._experience, await asyncio.gather(*calls)))

    async def chat_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        reply_prefix: str | None = None,
        **generation: Any,
    ) -> list[Experience]:
        """Answer a conversation ``n`` times.

        Args:
            messages: ``{"role", "content"}`` messages; the last one is answered. If it is the assistant's, the reply begins with it.
            tools: tools offered through the chat template.
            reply_prefix: text that the reply begins with; it is not sampled.
            generation: as in ``generate_async``.

        Raises:
            WorkflowError: ``messages`` is not a list of messages, or contains blocks that the model cannot read: it reads text and, if
                it ``sees``, images as ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}``.
        """
        if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
            raise WorkflowError(
                f'chat takes messages, a list of {{"role": …, "content": …}}, not {messages!r:.80}; for text as it is, there is '
                "generate."
            )
        blocks = [block for message in messages for block in message.get("content") or () if isinstance(block, Mapping)]
        known = ("text", "image_url") if self.sees else ("text",)
        if other := [str(block.get("type")) for block in blocks if block.get("type") not in known]:
            raise WorkflowError(
                f"chat accepts only {' and '.join(known)}, and a message has a block of type {other[0]!r}. For images use a model that "
                "reads them, an OpenAI client (get_openai_client) or VisionRLVRWorkflow."
            )
        gallery = None
        messages = [dict(message) for message in messages]
        if self._images is not None:
            gallery = ChatGallery(self._images)
            messages = await asyncio.to_thread(gallery.as_texts, messages)
        if messages and messages[-1].get("role") == "assistant":
            reply_prefix = (messages.pop()["content"] or "") + (reply_prefix or "")
        gconfig = stopping_at_turn_end(self._generation(generation), self.tokenizer, **self._conversation.template_kwargs)
        if self._images is not None:
            gconfig = gconfig.new(stop_token_ids=[*gconfig.stop_token_ids, self._images.token_id])
        prompt = self._conversation.encode(messages, tools)
        if reply_prefix:
            prompt = [*prompt, *self.tokenizer.encode(reply_prefix, add_special_tokens=False)]
        inputs = {} if gallery is None else gallery.inputs(prompt)
        rids = [self._conversation_id if gconfig.n_samples == 1 else uuid.uuid4().hex for _ in range(gconfig.n_samples)]
        responses = await asyncio.gather(*(self._sample(prompt, gconfig, rid, inputs) for rid in rids))
        experiences = [self._experience(response) for response in responses]
        for response, experience in zip(responses, experiences, strict=True):
            if self._images is not None and self._images.token_id in response.output_tokens:
                continue  # there is no image for a sampled image token, so no prompt may continue it
            reply = {"role": "assistant", "content": (reply_prefix or "") + (experience.response_text or "")}
            self._conversation.remember(messages, reply, response.input_tokens, response.output_tokens, tools)
        return experiences

    async def replies(
        self, messages: list[dict[str, Any]], most: int, tools: list[dict[str, Any]] | None = None
    ) -> AsyncIterator[Experience]:
        """Answer a conversation turn by turn; each reply is appended to ``messages``, and the caller appends the message after it.

        The conversation ends after ``most`` replies, or when it has filled the context.

        Raises:
            PromptTooLongError: there is no room even for the first reply.
        """
        for turn in range(most):
            try:
                [reply] = await self.chat_async(messages, tools=tools, n=1)
            except PromptTooLongError:
                if turn == 0:
                    raise
                return
            messages.append({"role": "assistant", "content": reply.response_text})
            yield reply

    generate = _from_thread(generate_async)
    chat = _from_thread(chat_async)

    # -- experiences ---------------------------------------------------------------------------------------------------

    def convert_messages_to_experience(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> Experience:
        """Convert a finished conversation to one experience, with the tokens that this model sampled.

        Raises:
            WorkflowError: no reply of the conversation was sampled by this model, so nothing in it can be trained.
        """
        records = self._records()
        ids = self._conversation.encode([*messages, {"role": "user", "content": ""}], tools)
        matching = [e for e in experiences_of(records) if e.tokens.tolist() == ids[: len(e.tokens)]]
        if not matching:
            raise WorkflowError(
                "convert_messages_to_experience: no reply in these messages was sampled through this model wrapper, so there "
                "are no log-probabilities for it; pass the messages that chat() answered, with its replies unchanged."
            )
        return max(matching, key=lambda experience: len(experience.tokens))

    async def convert_messages_to_experience_async(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> Experience:
        """Call ``convert_messages_to_experience``, for code that awaits it."""
        return self.convert_messages_to_experience(messages, tools)

    @property
    def enable_history(self) -> bool:
        """Whether calls are recorded for ``extract_experience_from_history``; always true in a run."""
        return self.recorder is not None

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Convert all calls since the last extraction to experiences. Calls that extend one another become one sequence.

        If OpenAI clients were used, the experiences have the rewards given by ``set_reward``.
        """
        records = self._records()
        rewards = (
            {} if self._opened is None else {"reward": self._opened.run_reward, "call_rewards": self._opened.call_rewards()}
        )
        experiences = experiences_of(records[self._history_start :], **rewards)
        if clear_history:
            self._history_start = len(records)
        return experiences

    def experiences_cut_short(self, reward: float) -> list[Experience]:
        """Return all calls as truncated experiences if the conversation has outgrown the context, else an empty list.

        Args:
            reward: reward of experiences that have none.
        """
        if self.recorder is None or not self.recorder.outgrew_context:
            return []
        self._history_start = 0
        experiences = self.extract_experience_from_history()
        for experience in experiences:
            experience.truncated = True
            experience.reward = reward if experience.reward is None else experience.reward
        return experiences

    # -- OpenAI --------------------------------------------------------------------------------------------------------

    def get_openai_client(self) -> Any:
        """Make an ``openai.OpenAI`` client, with ``model_path``, whose calls are recorded for this sample.

        A workflow that is reset for its next task may keep the client, whose calls then belong to the next sample.
        """
        return self._remember_client(self.openai_episode.client())

    def get_openai_async_client(self) -> Any:
        """Make an ``openai.AsyncOpenAI`` client; otherwise like ``get_openai_client``."""
        return self._remember_client(self.openai_episode.async_client())

    def _remember_client(self, client: Any) -> Any:
        self._clients.add(client)
        return client

    def take_over_clients(self, before: ModelWrapper) -> None:
        """Redirect the clients of an ended sample that still exist to this sample."""
        for client in list(before._clients):
            client.base_url, client.api_key = self.openai_episode.base_url, self.openai_episode.api_key
            self._clients.add(client)
        before._clients.clear()

    def set_reward(self, reward: float, *, call: str | None = None, turn: int | None = None) -> None:
        """Set the reward of the OpenAI clients' run, or of one call (by its response's id) or turn."""
        self.openai_episode.set_reward(reward, call=call, turn=turn)

    @property
    def openai_episode(self) -> Any:
        """This sample's run at the OpenAI front, with ``base_url`` and ``api_key`` for agents that make their own client.

        Raises:
            WorkflowError: the run has no OpenAI front.
        """
        if self._open_episode is None:
            raise WorkflowError(
                "this run has no OpenAI front: set rollout.openai_front (explorer.rollout_model.enable_openai_api in a ported file) "
                "to true, and install the 'openai' extra."
            )
        if self._opened is None:
            self._opened = self._open_episode()
        return self._opened

    def close(self) -> None:
        """End the run at the OpenAI front, if there is one; its key is then invalid."""
        if self._opened is not None:
            self._opened.close()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def model_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self.engine.get_version()

    def _records(self) -> list[Any]:
        if self.recorder is None:
            raise WorkflowError("this ModelWrapper has no recorder, so it has no history; build it with recorder=…")
        return list(self.recorder.records)

    def _generation(self, changes: dict[str, Any]) -> GenerationHyperparameters:
        changes.pop("logprobs", None)  # log-probabilities are always recorded
        if changes.get("top_k") == -1:
            changes["top_k"] = 0
        return self.gconfig.new(**{"n_samples": 1, **{k: v for k, v in changes.items() if v is not None}})

    async def _sample(
        self, prompt: list[int], gconfig: GenerationHyperparameters, rid: str, inputs: Mapping[str, Any] | None = None
    ) -> ModelResponse:
        own = gconfig.new(n_samples=1)
        request = ModelRequest(input_ids=prompt, gconfig=own, rid=rid, tokenizer=self.tokenizer, **(inputs or {}))
        return await self.engine.agenerate(request)

    def _experience(self, response: ModelResponse) -> Experience:
        return Experience(
            tokens=torch.tensor([*response.input_tokens, *response.output_tokens], dtype=torch.long),
            prompt_length=response.input_len,
            logprobs=torch.tensor(response.output_logprobs, dtype=torch.float32),
            versions=torch.tensor(response.output_versions, dtype=torch.int32),
            temperature=response.temperature,
            truncated=response.truncated,
            prompt_text=self.tokenizer.decode(response.input_tokens, skip_special_tokens=False),
            response_text=self.tokenizer.decode(response.output_tokens, skip_special_tokens=True),
        )

    def _wait(self, coroutine: Any) -> Any:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not None:
            coroutine.close()
            raise WorkflowError(
                "a synchronous model call was made on an event loop, which would block every other sample; await the _async "
                "form instead, or define run() rather than run_async()."
            )
        if self._loop is None:
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
