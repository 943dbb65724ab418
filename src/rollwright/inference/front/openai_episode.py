"""One run of an agent at the OpenAI front: its calls, the tokens of its conversations, and its rewards.

Invariants:

* a call whose messages continue an earlier reply is sent as the reply's tokens followed by the encoding of the added messages: sampled
  tokens are never encoded again;
* every finished call is in the recorder before its answer is sent, with its id and the user's turn that it answers;
* the agent's requests are not changed; arguments that they omit come from the run's generation arguments;
* a client's retry of an answered call gets the same answer, and is not recorded again;
* side conversations are answered and recorded, but are in no experience.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from pydantic import Field

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.conversation import ConversationTokens
from rollwright.errors import EngineError, ReplayError, WorkflowError
from rollwright.experience.experience import Experience, experience_of, sequences_of
from rollwright.experience.journal.episodes import RecordedCall, RecordedEpisode
from rollwright.experience.journal.records import pack_value, unpack_value
from rollwright.experience.journal.writing import EpisodeWriter
from rollwright.experience.recorder import Recorder, RequestRecord
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.front.retries import Retries
from rollwright.inference.front.side_conversations import ROUTE_OF_PREFIX, SIDE_CONVERSATION, SUB_AGENT, SideConversation
from rollwright.inference.request import ModelResponse
from rollwright.inference.server.bodies import Body, Chat, Completion
from rollwright.inference.server.exchange import CONTEXT_LENGTH_EXCEEDED, RequestError, as_request_error
from rollwright.inference.server.images import ImageReader
from rollwright.inference.server.openai import OpenAIProtocol
from rollwright.inference.server.openai_answer import CHAT, OpenAICall
from rollwright.inference.server.prompts import template_messages, tools_of

#: Names of the journal's records of a run, in addition to the records of its tokens.
_CALL, _REWARD = "front.call", "front.reward"


class Reward(Body):
    """Body of ``/v1/rewards``: the reward of the run, or of a call or a turn."""

    reward: float = Field(description="a finite number")
    call: str | None = Field(None, description="the id of a response")
    turn: int | None = Field(None, description="a whole number")


class OpenAIEpisode(OpenAIProtocol):
    """One run of an agent: the calls made with one API key.

    Created by ``OpenAIFront.episode``; ``base_url, api_key = front.episode(engine)`` is enough for an agent that takes these two.
    When the agent has ended, leave the ``with`` block or call ``close``; the key is rejected from then on.

    Attributes:
        base_url: base URL for OpenAI clients.
        api_key: identifies the calls of this run.
        recorder: records every request and response token for token.
        retries: recognises repeated requests, and counts them.
        side_calls: number of finished calls of side conversations.
        refusals: messages of the calls that were refused, in order.
        opponents: runs of other models in the same sample, by name. Each has a key of its own, and nothing of it is trained.
    """

    other_names = ("default", "policy")  # Claude Code treats ``default`` as one of its own models

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        model_name: str,
        base_url: str,
        api_key: str,
        *,
        gconfig: GenerationHyperparameters | None = None,
        template_kwargs: dict[str, Any] | None = None,
        context_length: int | None = None,
        images: ImageReader | None = None,
        journal: EpisodeWriter | None = None,
        side_conversations: Sequence[SideConversation] = (),
        resamples_equal: bool = True,
    ) -> None:
        """Args:
        engine: answers the calls; an engine that is bound to a sample records them itself.
        tokenizer: the policy's tokenizer.
        model_name: name of the policy in requests; ``default`` and ``policy`` are accepted too.
        base_url, api_key: address of the front and key of this run.
        gconfig: defaults of the generation arguments.
        template_kwargs: passed to the chat template.
        context_length: maximum tokens of a prompt and its answer. None uses the engine's limit.
        images: image reader, shared by all runs of a front. None creates one.
        journal: records calls and rewards if the engine does not. None disables this.
        side_conversations: recognise conversations beside the main one: those that are not trained, and sub-agents.
        resamples_equal: sample an answered request anew if a client sends it again without marking it as a retry. False answers it
            again with the same answer.
        """
        super().__init__(engine, tokenizer, model_name, on_call=self._keep, defaults=gconfig, context_length=context_length)
        self.images = images or self.images
        self.base_url = base_url
        self.api_key = api_key
        self._records_itself = engine.recorder is None
        self.recorder = Recorder() if engine.recorder is None else engine.recorder
        self._template_kwargs = dict(template_kwargs or {})
        self._conversations: dict[str, ConversationTokens] = {}
        self._open_ends: list[tuple[list[int], str]] = []  # tokens of each conversation so far, and its id
        self._turn_of_call: dict[str, int] = {}  # in the order of the answers
        self._run_reward: float | None = None
        self._turn_rewards: dict[int, float] = {}
        self._call_rewards: dict[str, float] = {}
        self.retries = Retries(resamples_equal)
        self.side_calls = 0
        self.refusals: list[str] = []
        self.opponents: dict[str, OpenAIEpisode] = {}
        self._side_conversations = tuple(side_conversations)
        self.other_names = (*self.other_names, *(rule.model for rule in side_conversations if rule.model))
        self._said: dict[str, list[dict[str, Any]]] = {}  # conversation -> its messages so far
        self._was_closed = False
        self._journal = journal
        self._last_messages: list[Any] = []  # messages of the latest body in the journal; the next one is a delta of them

    @property
    def is_open(self) -> bool:
        """True while the key is accepted: until ``close``, or the end of the sample that the engine is bound to."""
        return not self._was_closed and self.engine.closed_because is None

    def __iter__(self) -> Iterator[str]:
        return iter((self.base_url, self.api_key))

    def __enter__(self) -> OpenAIEpisode:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Reject the key from now on; records are kept. Idempotent."""
        self._was_closed = True

    # -- for agents ----------------------------------------------------------------------------------------------------

    def client(self) -> Any:
        """Make an ``openai.OpenAI`` client of this run. Use it in threads, not on the rollout's event loop.

        The client also has the attribute ``model_path``.
        """
        from rollwright.inference.front.openai_clients import RunClient

        return RunClient(self.base_url, self.api_key, self.model_name, forbidden_loop=self.engine.loop)

    def async_client(self) -> Any:
        """Make an ``openai.AsyncOpenAI`` client of this run; it works on any event loop.

        The client also has the attribute ``model_path``.
        """
        from rollwright.inference.front.openai_clients import AsyncRunClient

        return AsyncRunClient(self.base_url, self.api_key, self.model_name)

    # -- rewards -------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[str]:
        """Ids of the finished calls, as the agent saw them in ``response.id``."""
        return list(self._turn_of_call)

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """The messages of each conversation without side conversations, in order of appearance, as the chat template gets them.

        Sub-agents, and branches of a conversation, are conversations of their own.
        """
        return [list(messages) for messages in self._said.values()]

    @property
    def records(self) -> list[RequestRecord]:
        """The records of the finished calls, without those of side conversations."""
        return [record for record in self.recorder.records if record.metadata.get("call") in self._turn_of_call]

    @property
    def sub_agents(self) -> int:
        """Number of conversations of sub-agents."""
        return len({record.rid for record in self.records if SUB_AGENT in record.metadata})

    def set_reward(self, reward: float, *, call: str | None = None, turn: int | None = None) -> None:
        """Reward the run, or one of its calls or turns; a later value replaces an earlier one.

        The run's reward is the reward of every experience. A call's reward is the token reward of its last token, so it credits the call
        and earlier calls of the same sequence. A turn consists of the calls between one message of the user and the next; its reward goes
        to its last call.

        Args:
            reward: a finite number.
            call: id of a call.
            turn: index of a turn; negative indices count from the end.

        Raises:
            WorkflowError: the reward is not a finite number, or there is no such call or turn.
        """
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise WorkflowError(f"the reward is {reward!r}; it has to be a finite number.")
        if call is not None and turn is not None:
            raise WorkflowError("a reward is for a call or for a turn: give one of call and turn, or neither for the run.")
        if call is not None:
            if call not in self._turn_of_call:
                raise WorkflowError(
                    f"no finished call of this run has the id {call!r} (it made {len(self.calls)}); give the id of a response."
                )
            self._call_rewards[call] = float(reward)
        elif turn is not None:
            turns = sorted(set(self._turn_of_call.values()))
            place = turns[turn] if turn < 0 and -turn <= len(turns) else turn
            if place not in turns:
                raise WorkflowError(f"this run has no turn {turn}; its calls answered the turns {turns or 'of nobody yet'}.")
            self._turn_rewards[place] = float(reward)
        else:
            self._run_reward = float(reward)
        if self._journal is not None:
            given = {"reward": float(reward), "call": call, "turn": turn}
            self._journal.result(_REWARD, 0, "recorded", time.time(), value=pack_value(given))

    def reward_of(self, call: str) -> float | None:
        """Return the reward of a call, or None if it has none."""
        return self._call_rewards.get(call)

    async def take_reward(self, request: Request) -> dict[str, Any]:
        """Answer ``POST /v1/rewards``."""
        body = await Reward.read(request)
        try:
            self.set_reward(body.reward, call=body.call, turn=body.turn)
        except WorkflowError as error:
            raise RequestError(str(error)) from error
        return {"object": "reward", **body.model_dump(exclude_unset=True)}

    @property
    def run_reward(self) -> float | None:
        """The reward of the run: 0 if only calls or turns were rewarded, None if nothing was."""
        if self._run_reward is None and (self._call_rewards or self._turn_rewards):
            return 0.0
        return self._run_reward

    def call_rewards(self) -> dict[int, float]:
        """Return the rewards of calls and turns by the index of the call's record."""
        records = self.records
        last_of_turn = {record.metadata["user_turn"]: record for record in records}
        rewards = {record.index: self._call_rewards.get(record.metadata["call"], 0.0) for record in records}
        for turn, reward in self._turn_rewards.items():
            rewards[last_of_turn[turn].index] += reward
        return {index: reward for index, reward in rewards.items() if reward}

    def experiences(self, reward: float | None = None) -> list[Experience]:
        """Convert the run to experiences: calls that extend one another form one sequence, and each branch forms a sequence of its own.

        Args:
            reward: reward of the run. None uses the value of ``set_reward``.
        """
        reward = self.run_reward if reward is None else reward
        rewards = self.call_rewards()
        experiences = []
        for calls in sequences_of(self.records):
            experience = experience_of(calls, reward, rewards)
            experience.truncated = experience.truncated or self.recorder.outgrew_context
            if SUB_AGENT in calls[0].metadata:
                experience.info[SUB_AGENT] = calls[0].metadata[SUB_AGENT]
            experiences.append(experience)
        return experiences

    # -- what differs from the plain protocol --------------------------------------------------------------------------

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, fields: dict[str, Any], variables: dict[str, Any]
    ) -> list[int]:
        """Return the tokens of the conversation so far, followed by the encoding of the added messages."""
        if fields.get("continue_final_message") or fields.get("add_generation_prompt") is False:
            return super()._render(messages, tools, fields, variables)
        return self._conversation(variables).encode(messages, tools)

    def _conversation(self, variables: dict[str, Any]) -> ConversationTokens:
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._conversations:
            self._conversations[key] = ConversationTokens(self.tokenizer, self._encode, **variables)
        return self._conversations[key]

    async def open_call(
        self, request: Request, endpoint: str, body: dict[str, Any], size: int, prefix: str, warnings: Sequence[str] = ()
    ) -> OpenAICall:
        """See ``OpenAIProtocol.open_call``. A retry of an answered call returns that call."""
        with self._noting_refusal():
            if (earlier := await self.retries.answered_before(request, endpoint, body, prefix)) is not None:
                return earlier
            call = await super().open_call(request, endpoint, body, size, prefix, warnings)
        self._place(call, self._beside(call, request.headers))
        self.retries.opened(call)
        return call

    async def complete(self, request: Request, call: OpenAICall) -> None:
        """See ``OpenAIProtocol.complete``."""
        with self._noting_refusal(), self.retries.running(call):
            await super().complete(request, call)

    async def chunks(self, call: OpenAICall) -> AsyncGenerator[dict[str, Any], None]:
        """See ``OpenAIProtocol.chunks``."""
        with self._noting_refusal(), self.retries.running(call):
            async with contextlib.aclosing(super().chunks(call)) as chunks:
                async for chunk in chunks:
                    yield chunk

    @contextlib.contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        try:
            yield
        except (RequestError, EngineError) as error:
            self.refusals.append(str(error))
            self.recorder.outgrew_context |= as_request_error(error).code == CONTEXT_LENGTH_EXCEEDED
            raise

    def _gconfig(
        self, fields: dict[str, Any], endpoint: str, prompt_length: int, begins_reasoning: bool = False
    ) -> GenerationHyperparameters:
        if "max_tokens" not in fields and "max_completion_tokens" not in fields:
            fields = {**fields, "max_tokens": self._defaults.max_new_tokens}
        return super()._gconfig(fields, endpoint, prompt_length, begins_reasoning)

    def _place(self, call: OpenAICall, belongs_to: dict[str, Any]) -> None:
        """Give a new call the id of the conversation that it continues, and note in its metadata what it belongs to.

        Args:
            call: the call.
            belongs_to: the side conversation or the sub-agent that it belongs to, as metadata.
        """
        if len(call.requests) == 1 and call.body.get("rid") is None and SIDE_CONVERSATION not in belongs_to:
            call.requests[0].rid = self._conversation_of(call.requests[0].input_ids) or call.requests[0].rid
        turn = sum(message["role"] == "user" for message in call.body.get("messages") or ())
        for request in call.requests:
            request.metadata |= {"call": call.answer_id, "user_turn": max(0, turn - 1), **belongs_to}

    def _beside(self, call: OpenAICall, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the name of the side conversation or sub-agent that a call belongs to, under its key; empty if it belongs to none."""
        model, route = call.body.get("model") or "", ROUTE_OF_PREFIX[call.prefix]
        matching = (rule for rule in self._side_conversations if rule.matches(call.messages, model, route, headers))
        return next(({rule.key: rule.name} for rule in matching), {})

    def _conversation_of(self, prompt: list[int]) -> str | None:
        """Return the id of the conversation that a prompt continues, or None if it starts a new one.

        No second prompt can continue the conversation from the same tokens.
        """
        found = [end for end in self._open_ends if prompt[: len(end[0])] == end[0]]
        if not found:
            return None
        end = max(found, key=lambda end: len(end[0]))
        self._open_ends.remove(end)
        return end[1]

    def _keep(self, call: OpenAICall) -> None:
        given = {name: value for name, value in call.body.items() if value is not None}
        records = zip(call.requests, call.responses, strict=True)
        if self._records_itself:
            made = [self.recorder.record(request, response) for request, response in records]
            self._note(call, made)
        self.retries.finished(call)
        is_side = SIDE_CONVERSATION in call.requests[0].metadata
        if is_side:
            self.side_calls += 1
        else:
            self._turn_of_call[call.answer_id] = call.requests[0].metadata["user_turn"]  # from here on the call counts
        for request, response, choice in zip(call.requests, call.responses, call.choices, strict=True):
            if not is_side:
                self._open_ends.append(([*request.input_ids, *response.output_tokens], request.rid))
            has_false_image = self.images.token_id in response.output_tokens  # no prompt may continue it
            if call.is_chat and not has_false_image:
                conversation = self._conversation(self._variables(given))
                (reply,) = template_messages([choice["message"]])
                if not is_side:
                    self._said[request.rid] = [*call.messages, reply]
                conversation.remember(call.messages, reply, request.input_ids, response.output_tokens, tools_of(given))

    # -- runs that outlive their process -------------------------------------------------------------------------------

    def _note(self, call: OpenAICall, records: list[RequestRecord]) -> None:
        """Write a finished call to the journal: its tokens, request and answer."""
        if self._journal is None:
            return
        for record in records:
            self._journal.call(record)
        body, messages = dict(call.body), list(call.body.get("messages") or [])
        pairs = zip(messages, self._last_messages, strict=False)
        kept = next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(len(messages), len(self._last_messages)))
        body.pop("messages", None)
        said = [choice["message"] for choice in call.choices] if call.is_chat else []
        facts = {"id": call.id, "prefix": call.prefix, "endpoint": call.endpoint, "body": body, "kept": kept}
        value = pack_value({**facts, "messages": messages[kept:], "said": said})
        self._journal.result(_CALL, 0, "recorded", call.started, value=value)
        self._last_messages = messages

    def restore(self, past: Sequence[RecordedEpisode]) -> None:
        """Restore the calls and rewards of a run from the journal.

        Args:
            past: recorded episodes of the run, one for each process that served it, in order.

        Raises:
            ReplayError: the messages encode to other tokens now, because the tokenizer or chat template has changed.
        """
        journal, self._journal = self._journal, None
        for episode in past:
            messages: list[Any] = []
            for result in episode.results:
                facts = {} if result.value is None else unpack_value(result.value)
                if result.name == _REWARD:
                    self.set_reward(**facts)
                elif result.name == _CALL:
                    messages = [*messages[: facts["kept"]], *facts["messages"]]
                    self._restore_call(facts, messages, episode)
        self._journal = journal

    def _restore_call(self, facts: dict[str, Any], messages: list[Any], episode: RecordedEpisode) -> None:
        endpoint, body = facts["endpoint"], dict(facts["body"])
        if endpoint == CHAT:
            body["messages"] = messages
        fields = (Chat if endpoint == CHAT else Completion).of(body).given()
        call = self._call(endpoint, body, fields, self._prompts(endpoint, fields), facts["prefix"])
        call.id = facts["id"]
        answers = [each for each in episode.calls if _metadata(each).get("call") == call.answer_id]
        self._place(call, _metadata(answers[0]) if answers else {})
        for request, answer in zip(call.requests, answers, strict=True):
            if request.input_ids != answer.prompt.tolist():
                raise ReplayError(
                    f"the messages of call {call.answer_id} have other tokens than when it was made: the tokenizer or its chat template "
                    "has changed. Serve with the model that the run began with."
                )
            request.metadata |= {**_metadata(answer), "call": call.answer_id}
            call.responses.append(ModelResponse.recorded(request, answer))
        call.choices = [{"message": message} for message in facts["said"]] or [{}] * len(answers)
        self.retries.opened(call)
        self._keep(call)


def _metadata(kept: RecordedCall) -> dict[str, Any]:
    return unpack_value(kept.call.metadata) if kept.call.metadata else {}
