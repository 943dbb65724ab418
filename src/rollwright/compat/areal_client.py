"""``ArealOpenAI``: AReaL's OpenAI client over a workflow's engine, implemented as a client of an ``OpenAIFront``.

Every call is in the episode's recorder; the client stores nothing. Rewards are set by ``OpenAIEpisode.set_reward``.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.experience import Experience, experience_of, sequences_of
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.front.openai_clients import AsyncRunClient
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.request import ModelResponse

try:
    from openai.resources.chat import AsyncChat
    from openai.resources.chat.completions import AsyncCompletions
    from openai.resources.responses import AsyncResponses

    from rollwright.inference.server.tool_calls import PARSERS
except ModuleNotFoundError as error:
    raise ConfigError(f"ArealOpenAI needs the package {error.name}: pip install 'rollwright[openai]'.") from error

#: Names of parsers of reasoning between ``<think>`` and ``</think>``; reasoning is separated whenever the template supports it.
_REASONING_PARSERS = ("qwen3", "qwen3-thinking", "deepseek-r1", "deepseek-v3", "glm45", "kimi", "kimi_k2")


@dataclass(frozen=True)
class InteractionWithTokenLogpReward:
    """One call: its tokens and log-probabilities, and its reward.

    Attributes:
        interaction_id: id of the completion or response.
        model_response: what the engine sampled, and the prompt.
        reward: reward of the call, or None if it was not rewarded.
    """

    interaction_id: str
    model_response: ModelResponse
    reward: float | None


class ArealOpenAI(AsyncRunClient):
    """An ``openai.AsyncOpenAI`` whose calls are answered by ``engine``, with methods to reward and export the calls.

    ::

        client = ArealOpenAI(engine=engine, tokenizer=tokenizer)
        answer = await client.chat.completions.create(messages=messages)
        client.set_reward(answer.id, 1.0)
        return client.export_interactions(style="individual")

    ``chat.completions`` and ``responses`` always ask the policy and ignore ``model``. Other clients may use ``base_url`` and
    ``api_key`` as well.

    Attributes:
        engine: the engine that answers.
        episode: the episode at the front, with its recorder.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        tool_call_parser: str = "qwen",
        reasoning_parser: str = "qwen3",
        engine_max_tokens: int | None = None,
        chat_template_type: Literal["hf", "concat"] = "hf",
        **client_arguments: Any,
    ) -> None:
        """Args:
        engine: engine that answers, usually the workflow's.
        tokenizer: the policy's tokenizer, or its path.
        tool_call_parser: how the model writes tool calls. Used only if its chat template does not show a form.
        reasoning_parser: name of a parser of ``<think>``; other names are an error.
        engine_max_tokens: maximum number of tokens of a prompt and its answer. Default: the engine's limit.
        chat_template_type: ``hf`` or ``concat``; both continue a conversation from the sampled tokens.
        client_arguments: arguments of ``AsyncOpenAI``; ``base_url`` and ``api_key`` are replaced.

        Raises:
            ConfigError: a parser or type of template is unknown.
        """
        for name, value, known in (
            ("tool_call_parser", tool_call_parser, tuple(PARSERS)),
            ("reasoning_parser", reasoning_parser, _REASONING_PARSERS),
            ("chat_template_type", chat_template_type, ("hf", "concat")),
        ):
            if value not in known:
                raise ConfigError(f"ArealOpenAI({name}={value!r}): known are {', '.join(known)}.")
        self.engine = engine
        self._front = _front_of(tokenizer)
        self.episode = self._front.episode(engine, context_length=engine_max_tokens)
        if not self.episode.convention.is_known:
            self.episode.convention = PARSERS[tool_call_parser]
        own = {name: value for name, value in client_arguments.items() if name not in ("base_url", "api_key")}
        super().__init__(self.episode.base_url, self.episode.api_key, self.episode.model_name, **own)
        weakref.finalize(self, self.episode.close)
        self._is_discounted = False

    @cached_property
    def chat(self) -> AsyncChat:
        """Chat completions of the policy."""
        return _Chat(self)

    @cached_property
    def responses(self) -> AsyncResponses:
        """Responses of the policy."""
        return _Responses(self)

    # -- rewards -------------------------------------------------------------------------------------------------------

    def get_interaction(self, id: str) -> InteractionWithTokenLogpReward | None:
        """Return a finished call by its id, with its tokens, or None if there is no such call."""
        record = next((record for record in self.episode.records if record.metadata["call"] == id), None)
        if record is None:
            return None
        response = ModelResponse(
            record.prompt_ids,
            record.output_ids,
            record.logprobs,
            record.versions,
            record.stop_reason,
            record.stop_match,
            record.latency,
            record.ttft,
            record.temperature,
            record.rid,
            record.seed,
        )
        return InteractionWithTokenLogpReward(id, response, self.episode.reward_of(id))

    def set_reward(self, id: str, reward: float) -> None:
        """Reward a call by its id.

        Raises:
            WorkflowError: there is no such call, or the reward is no finite number.
        """
        self.episode.set_reward(reward, call=id)

    def set_last_reward(self, reward: float) -> None:
        """Reward the newest call.

        Raises:
            WorkflowError: no call was made.
        """
        if not self.episode.calls:
            raise WorkflowError("the client made no call that could be rewarded: await chat.completions.create(…) first.")
        self.set_reward(self.episode.calls[-1], reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Add the next call's discounted reward to each call's own (0 if it has none), from the newest call to the first.

        Raises:
            WorkflowError: the rewards are already discounted.
        """
        if self._is_discounted:
            raise WorkflowError("the rewards of this client are discounted already: call apply_reward_discount once.")
        self._is_discounted, later = True, 0.0
        for call in reversed(self.episode.calls):
            later = later * turn_discount + (self.episode.reward_of(call) or 0.0)
            self.set_reward(call, later)

    def export_interactions(self, style: Literal["concat", "individual"] = "concat") -> dict[str, Experience]:
        """Export the calls as experiences by id, to be returned from ``arun_episode``.

        Args:
            style: ``individual`` makes one experience for each call, with the call's reward, and trains only the call's answer.
                ``concat`` joins calls that extend one another; the experience has the id and reward of the last call.

        Raises:
            WorkflowError: no call was rewarded. If only some calls were, the others have reward 0.
        """
        if style not in ("concat", "individual"):
            raise WorkflowError(f"export_interactions(style={style!r}): it is concat or individual.")
        records = [record for record in self.episode.records if record.output_ids]
        rewards = {call: self.episode.reward_of(call) for call in self.episode.calls}
        if records and all(reward is None for reward in rewards.values()):
            raise WorkflowError("no call of this client was rewarded: set_reward(completion.id, reward) before the export.")
        sequences = sequences_of(records) if style == "concat" else [[record] for record in records]
        exported: dict[str, Experience] = {}
        for sequence in sequences:
            call = sequence[-1].metadata["call"]
            experience = experience_of(sequence, reward=rewards[call] or 0.0)
            experience.truncated = experience.truncated or self.episode.recorder.outgrew_context
            exported[_free(call, exported)] = experience
        return exported

    # -- AReaL's older names -------------------------------------------------------------------------------------------

    get_completions = get_interaction
    set_final_reward = set_last_reward
    export_completions = export_interactions


def _free(call: str, taken: dict[str, Any]) -> str:
    """Return the call's id, followed by a number if the call had several samples."""
    others = sum(name.partition("#")[0] == call for name in taken)
    return f"{call}#{others}" if others else call


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **arguments: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return await super().create(**{**arguments, "model": self._client.model_path})  # type: ignore[attr-defined]


class _Responses(AsyncResponses):
    async def create(self, **arguments: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return await super().create(**{**arguments, "model": self._client.model_path})  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4)
def _front_of(tokenizer: Any) -> OpenAIFront:
    """Return the front of a tokenizer. Clients hold a reference, so a front that leaves this cache lives as long as its clients."""
    return OpenAIFront(load_tokenizer(tokenizer))
