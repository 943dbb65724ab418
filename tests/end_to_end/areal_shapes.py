"""Workflows, agents and reward functions in the shape of AReaL's own files, with the names that those import."""

from __future__ import annotations

import ast
import uuid
from collections.abc import Callable
from typing import Any

import torch

from rollwright import (
    ArealOpenAI,
    AsyncRewardWrapper,
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    apply_chat_template,
    atrace_session_phase,
    get_math_verify_worker,
    image2base64,
    import_from_string,
    load_hf_tokenizer,
    logging,
    session_context,
    stats_tracker,
    trace_session,
    workflow_context,
)

logger = logging.getLogger("AReaLShapes")


def digits_reward(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:
    """Digits in the completion."""
    return float(sum(character.isdigit() for character in completions))


def equal_reward(completions: str, answer: str) -> float:
    """By math-verify; called by keyword, or with two positional arguments."""
    return get_math_verify_worker().verify(completions, answer)


def input_ids_of(data: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    return apply_chat_template(tokenizer, data, tokenize=True, add_generation_prompt=True, enable_thinking=enable_thinking)


def one_row(resp: ModelResponse, reward: float, **more: Any) -> dict[str, Any]:
    """A response as the tensors that a trajectory has, with a batch dimension of one."""
    row = {
        "input_ids": torch.tensor(resp.input_tokens + resp.output_tokens, dtype=torch.int32),
        "loss_mask": torch.tensor([0] * resp.input_len + [1] * resp.output_len, dtype=torch.int32),
        "logprobs": torch.tensor([0.0] * resp.input_len + resp.output_logprobs, dtype=torch.float32),
        "versions": torch.tensor([-1] * resp.input_len + resp.output_versions, dtype=torch.int32),
        "attention_mask": torch.ones(resp.input_len + resp.output_len, dtype=torch.bool),
        "rewards": torch.tensor(reward, dtype=torch.float32),
    }
    return {**{key: value.unsqueeze(0) for key, value in row.items()}, **more}


class OneTurn(RolloutWorkflow):
    """A question, an answer, a reward; functions by import path, phases traced."""

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[..., list[int]] | str = input_ids_of,
    ):
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.reward_fn = reward_fn
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer)
        self.enable_thinking = enable_thinking
        self.get_input_ids_fn = import_from_string(get_input_ids_fn) if isinstance(get_input_ids_fn, str) else get_input_ids_fn
        if not isinstance(reward_fn, str):
            self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    @trace_session("reward")
    async def _reward(self, resp: ModelResponse, prompt: str, task: dict[str, Any]) -> float:
        completion = self.tokenizer.decode(resp.output_tokens)
        return await self.async_reward_fn(prompt, completion, resp.input_tokens, resp.output_tokens, **task)

    @session_context()
    async def _sample(
        self, engine: InferenceEngine, req: ModelRequest, prompt: str, task: dict[str, Any]
    ) -> tuple[ModelResponse, float]:
        async with atrace_session_phase("generate"):
            resp = await engine.agenerate(req)
        reward = await self._reward(resp, prompt, task)
        stats_tracker.get(workflow_context.stat_scope()).scalar(own_reward=reward)
        return resp, reward

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        if isinstance(self.reward_fn, str):
            self.reward_fn = import_from_string(self.reward_fn)
            self.async_reward_fn = AsyncRewardWrapper(self.reward_fn)
        input_ids = self.get_input_ids_fn(data["messages"], self.tokenizer, self.enable_thinking)
        req = ModelRequest(
            rid=uuid.uuid4().hex, input_ids=input_ids, gconfig=self.gconfig.new(n_samples=1), tokenizer=self.tokenizer
        )
        return one_row(*await self._sample(engine, req, self.tokenizer.decode(input_ids), data))


class UntilRight(RolloutWorkflow):
    """Asks again, with the hint's tokens found once by the template, until the reward is above 0."""

    def __init__(self, reward_fn, gconfig, tokenizer, max_turns: int, turn_discount: float):
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)
        messages = [{"role": "assistant", "content": "any"}]
        before = apply_chat_template(tokenizer, messages, tokenize=True)
        messages += [{"role": "user", "content": "wrong: again"}]
        self.hint = apply_chat_template(tokenizer, messages, tokenize=True, add_generation_prompt=True)[len(before) :]

    async def arun_episode(self, engine, data):
        seq, logprobs, loss_mask, versions = [], [], [], []
        input_ids = apply_chat_template(self.tokenizer, data["messages"], tokenize=True, add_generation_prompt=True)
        turns, reward, discount = 0, 0.0, 1.0
        while reward == 0.0 and turns < self.max_turns:
            req = ModelRequest(rid=uuid.uuid4().hex, input_ids=input_ids, gconfig=self.gconfig.new(n_samples=1))
            resp = await engine.agenerate(req)
            completion = self.tokenizer.decode(resp.output_tokens)
            prompt = self.tokenizer.decode(input_ids)
            reward = await self.async_reward_fn(prompt, completion, resp.input_tokens, resp.output_tokens, **data)
            new = len(resp.input_tokens) - len(seq)
            seq += resp.input_tokens[-new:] + resp.output_tokens
            logprobs += [0.0] * new + resp.output_logprobs
            loss_mask += [0] * new + [1] * resp.output_len
            versions += [-1] * new + resp.output_versions
            turns += 1
            if reward == 0.0 and turns < self.max_turns:
                input_ids = input_ids + resp.output_tokens
                if resp.output_tokens and resp.output_tokens[-1] != self.tokenizer.eos_token_id:
                    input_ids += [self.tokenizer.eos_token_id]
                input_ids += self.hint
                discount *= self.turn_discount
        stats_tracker.get(workflow_context.stat_scope()).scalar(discounted=reward * discount, num_turns=turns)
        row = {
            "input_ids": torch.tensor(seq, dtype=torch.int32),
            "logprobs": torch.tensor(logprobs, dtype=torch.float32),
            "loss_mask": torch.tensor(loss_mask, dtype=torch.int32),
            "versions": torch.tensor(versions, dtype=torch.int32),
            "rewards": torch.tensor(float(reward * discount), dtype=torch.float32),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool),
        }
        return {key: value.unsqueeze(0) for key, value in row.items()}


class Seeing(OneTurn):
    """One turn about images: the processor makes ids and pixels, the request carries the images in base64."""

    def __init__(self, reward_fn, gconfig, tokenizer, processor, enable_thinking=False):
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking)
        self.processor = processor

    @trace_session("reward")
    async def _reward(self, resp, prompt, task):
        return await self.async_reward_fn(
            prompt=prompt,
            completions=self.tokenizer.decode(resp.output_tokens),
            prompt_ids=resp.input_tokens,
            completion_ids=resp.output_tokens,
            **{key: value for key, value in task.items() if key != "images"},
        )

    async def arun_episode(self, engine, data):
        seen = self.processor(images=data["images"], text=data["messages"], padding=False, return_tensors="pt")
        input_ids, kinds = seen["input_ids"].tolist()[0], seen["mm_token_type_ids"].tolist()[0]
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            image_data=image2base64(data["images"]),
            vision_msg_vllm=[data["messages_chat"]] if "messages_chat" in data else None,
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
            processor=self.processor,
        )
        resp, reward = await self._sample(engine, req, self.tokenizer.decode(input_ids), data)
        pixels = {key: seen[key] for key in ("pixel_values", "image_grid_thw") if key in seen}
        kinds += [0] * resp.output_len
        return one_row(resp, reward, multi_modal_input=[pixels], mm_token_type_ids=torch.tensor([kinds]))


class Calculator(RolloutWorkflow):
    """A customised workflow of mathematics: the model's text up to ``=`` is worked out by a tool, whose text is not trained on."""

    def __init__(self, reward_fn, gconfig: GenerationHyperparameters, tokenizer: Any, max_turns: int = 2):
        super().__init__()
        if isinstance(tokenizer, str):
            tokenizer = load_hf_tokenizer(tokenizer)
        if isinstance(reward_fn, str):
            reward_fn = import_from_string(reward_fn)
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer, self.max_turns = tokenizer, max_turns
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        prompt_ids = apply_chat_template(self.tokenizer, data["messages"], tokenize=True, add_generation_prompt=True)
        seq, output_ids = list(prompt_ids), []
        logprobs, loss_mask, versions = [0.0] * len(seq), [0] * len(seq), [-1] * len(seq)
        text, calls, failures = "", 0, 0
        for _ in range(self.max_turns):
            req = ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=list(seq),
                gconfig=self.gconfig.new(n_samples=1, stop=["="]),
                tokenizer=self.tokenizer,
            )
            resp = await engine.agenerate(req)
            seq.extend(resp.output_tokens)
            output_ids.extend(resp.output_tokens)
            logprobs.extend(resp.output_logprobs)
            loss_mask.extend([1] * resp.output_len)
            versions.extend(resp.output_versions)
            said = self.tokenizer.decode(resp.output_tokens)
            text += said
            if not said.endswith("="):
                break
            calls += 1
            try:
                told = str(ast.literal_eval(said[:-1].strip()))
            except (SyntaxError, ValueError):
                told, failures = "?", failures + 1
            told_ids = self.tokenizer.encode(told, add_special_tokens=False)
            seq.extend(told_ids)
            logprobs.extend([0.0] * len(told_ids))
            loss_mask.extend([0] * len(told_ids))
            versions.extend([-1] * len(told_ids))
            text += told
        reward = await self.async_reward_fn(
            self.tokenizer.decode(prompt_ids), text, prompt_ids, output_ids, tool_using=calls > 0, tool_status=calls, **data
        )
        stats_tracker.get(workflow_context.stat_scope()).scalar(tool_call_count=calls, tool_failure_count=failures)
        return {
            "input_ids": torch.tensor(seq).unsqueeze(0),
            "logprobs": torch.tensor(logprobs).unsqueeze(0),
            "loss_mask": torch.tensor(loss_mask).unsqueeze(0),
            "versions": torch.tensor(versions).unsqueeze(0),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool).unsqueeze(0),
            "rewards": torch.tensor([float(reward)]),
        }


class ChatAgent:
    """One call by the openai package, rewarded with a number; the HTTP client is the one that episodes share."""

    def __init__(self, **kwargs):
        self.kwargs = {key: value for key, value in kwargs.items() if key not in ("max_tokens", "max_turns")}

    async def run(self, data: dict, **extra_kwargs):
        from openai import AsyncOpenAI

        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs.get("http_client") or await workflow_context.get_httpx_client(),
            max_retries=0,
        )
        completion = await client.chat.completions.create(messages=data["messages"], model="default", **self.kwargs)
        reward_fn = AsyncRewardWrapper(equal_reward)
        return await reward_fn(completions=completion.choices[0].message.content, answer=data["answer"])


class PersistentAgent:
    """Calls until the answer is right; each call has a reward of its own."""

    def __init__(self, max_turns: int = 8, **kwargs):
        self.max_turns, self.kwargs = max_turns, kwargs

    async def run(self, data: dict, **extra_kwargs):
        from openai import AsyncOpenAI

        messages, rewards = data["messages"].copy(), {}
        client = AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"], max_retries=0)
        for _ in range(self.max_turns):
            response = await client.chat.completions.create(messages=messages, model="default", **self.kwargs)
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            reward_fn = AsyncRewardWrapper(equal_reward)
            rewards[response.id] = await reward_fn(completions=message.content, answer=data["answer"])
            if rewards[response.id] == 1:
                break
            messages.append({"role": "user", "content": "wrong: again"})
        return rewards


class MessagesAgent:
    """One call by the anthropic package; the reward function is called with two positional arguments."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    async def run(self, data: dict, **extra_kwargs) -> float:
        import anthropic

        client = anthropic.AsyncAnthropic(
            api_key=extra_kwargs["api_key"],
            base_url=extra_kwargs["base_url"],
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        system = next((message["content"] for message in data["messages"] if message["role"] == "system"), None)
        messages = [message for message in data["messages"] if message["role"] != "system"]
        response = await client.messages.create(
            model="default", messages=messages, system=system or anthropic.NOT_GIVEN, **self.kwargs
        )
        text = "".join(block.text for block in response.content if isinstance(block, anthropic.types.TextBlock))
        reward_fn = AsyncRewardWrapper(equal_reward)
        return await reward_fn(text, data["answer"])


class LangChainAgent:
    """One call by langchain's chat model."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    async def run(self, data: dict, **extra_kwargs) -> float:
        from langchain_openai import ChatOpenAI

        llm = ChatOpenAI(
            model="default",
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            temperature=self.kwargs.get("temperature", 1.0),
            max_tokens=self.kwargs.get("max_completion_tokens", 16),
            http_async_client=extra_kwargs.get("http_client"),
        )
        response = await llm.ainvoke(data["messages"])
        reward_fn = AsyncRewardWrapper(equal_reward)
        return await reward_fn(completions=response.content or "", answer=data["answer"])


class LangChainToolAgent:
    """langchain's agent with a tool, which it may call."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    async def run(self, data: dict, **extra_kwargs) -> float:
        from langchain.agents import create_agent
        from langchain.tools import tool
        from langchain_openai import ChatOpenAI

        @tool
        def add(a: float, b: float) -> float:
            """Add two numbers."""
            return a + b

        llm = ChatOpenAI(
            model="default",
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            max_tokens=self.kwargs.get("max_completion_tokens", 16),
        )
        agent = create_agent(model=llm, tools=[add], system_prompt="Use the tools.")
        result = await agent.ainvoke({"messages": [{"role": "user", "content": data["messages"][-1]["content"]}]})
        reward_fn = AsyncRewardWrapper(equal_reward)
        return await reward_fn(completions=result["messages"][-1].content, answer=data["answer"])


class AgentsSDKAgent:
    """The openai-agents package with a tool and a provider of its own, as it comes: by the Responses protocol."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    async def run(self, data: dict, **extra_kwargs) -> float:
        from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, SQLiteSession, function_tool
        from openai import AsyncOpenAI

        @function_tool
        def add(a: float, b: float) -> float:
            """Add two numbers."""
            return a + b

        client = AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"], max_retries=0)
        run_config = RunConfig(
            model_provider=OpenAIProvider(openai_client=client),
            model="default",
            tracing_disabled=True,
            model_settings=ModelSettings(**self.kwargs),
        )
        agent = Agent(name="Calculator", instructions="Use the tools.", tools=[add])
        content = data["messages"][-1]["content"]
        result = await Runner.run(agent, input=content, session=SQLiteSession("sums"), run_config=run_config)
        reward_fn = AsyncRewardWrapper(equal_reward)
        return await reward_fn(completions=str(result.final_output), answer=data["answer"])


class PersistentByClient:
    """An agent that is given AReaL's client: it rewards each of its calls there."""

    def __init__(self, gconfig: GenerationHyperparameters, max_turns: int):
        self.gconfig, self.max_turns = gconfig, max_turns
        self.async_reward_fn = AsyncRewardWrapper(result_reward)

    async def run_agent(self, data, client: ArealOpenAI):
        messages = data["messages"].copy()
        for _ in range(self.max_turns):
            response = await client.chat.completions.create(messages=messages, **self.gconfig.to_openai_args_dict())
            message = response.choices[0].message
            messages.append(message)  # the package's own object
            reward = await self.async_reward_fn(result=message.content, answer=data["answer"])
            client.set_reward(response.id, reward)
            if reward == 1:
                break
            messages.append({"role": "user", "content": "wrong: again"})
        return reward


class SDKByClient:
    """openai-agents over AReaL's client, with the SDK's own name of a model."""

    def __init__(self, gconfig: GenerationHyperparameters):
        self.gconfig = gconfig

    async def run_agent(self, data, client: ArealOpenAI):
        from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner

        settings = ModelSettings(temperature=self.gconfig.temperature, max_tokens=self.gconfig.max_tokens)
        run_config = RunConfig(
            model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True, model_settings=settings
        )
        agent = Agent(name="Calculator", instructions="Add.")
        result = await Runner.run(agent, input=data["messages"][-1]["content"], run_config=run_config)
        reward = await AsyncRewardWrapper(result_reward)(result=result.final_output, answer=data["answer"])
        client.set_last_reward(reward + 1.0)
        return reward


def result_reward(result, answer):
    return get_math_verify_worker().verify(str(result), str(answer))


class ByClient(RolloutWorkflow):
    """Makes a client over the engine, lets an agent use it, discounts and exports."""

    def __init__(self, agent: Any, tokenizer: Any, export_style: str = "concat"):
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.agent, self.export_style = agent, export_style

    async def arun_episode(self, engine, data):
        client = ArealOpenAI(
            engine=engine,
            tokenizer=self.tokenizer,
            tool_call_parser="qwen25",
            chat_template_type="concat" if self.export_style == "concat" else "hf",
        )
        reward = await self.agent.run_agent(data=data, client=client)
        stats_tracker.get(workflow_context.stat_scope()).scalar(agents_reward=reward)
        client.apply_reward_discount(turn_discount=0.9)
        return client.export_interactions(style=self.export_style)


class UntilRightByClient(RolloutWorkflow):
    """Turns of its own over AReaL's client; the tokens of a call come from its interaction."""

    def __init__(self, reward_fn, gconfig, tokenizer, max_turns: int, turn_discount: float):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer, self.max_turns, self.turn_discount = tokenizer, max_turns, turn_discount
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine, data):
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
        messages = list(data["messages"])
        turns, reward, discount = 0, 0.0, 1.0
        while reward == 0 and turns < self.max_turns:
            answer = await client.chat.completions.create(
                messages=messages,
                frequency_penalty=self.gconfig.frequency_penalty,
                max_completion_tokens=self.gconfig.max_new_tokens,
                stop=self.gconfig.stop,
                store=True,
                temperature=self.gconfig.temperature,
                top_p=self.gconfig.top_p,
            )
            tokens = client.get_interaction(answer.id).model_response
            reward = await self.async_reward_fn(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
                answer.choices[0].message.content,
                tokens.input_tokens,
                tokens.output_tokens,
                **data,
            )
            turns += 1
            if reward == 0 and turns < self.max_turns:
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
                messages += [{"role": "user", "content": "wrong: again"}]
                discount *= self.turn_discount
        stats_tracker.get(workflow_context.stat_scope()).scalar(num_turns=turns)
        client.set_reward(answer.id, float(reward * discount))
        return client.export_interactions()
