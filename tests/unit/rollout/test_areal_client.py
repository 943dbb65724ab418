"""``ArealOpenAI``: calls over an engine, rewards as AReaL gives them, rows from the one recorder."""

from __future__ import annotations

import asyncio

import pytest
from parts import TOOL_TEMPLATE
from test_openai_front import TOOL_CALL, TOOLS, Script, sample_engine

from rollwright import ArealOpenAI, GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.normaliser import normalise

ASK = [{"role": "user", "content": "1+2?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer(chat_template=TOOL_TEMPLATE)


async def three_turns(client):
    messages, ids = list(ASK), []
    for _ in range(3):
        answer = await client.chat.completions.create(messages=messages, temperature=0.7, max_completion_tokens=20)
        ids.append(answer.id)
        messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
    return ids


async def test_a_conversation_is_one_row_or_one_for_each_call(tokenizer):
    sample = sample_engine(Script(tokenizer, "3", "4", "5"))
    client = ArealOpenAI(engine=sample, tokenizer=tokenizer, base_url="none", api_key="none")
    first, second, third = await three_turns(client)
    with pytest.raises(WorkflowError, match="no call of this client was rewarded"):
        client.export_interactions()
    client.set_reward(first, 1.0)
    client.set_last_reward(4.0)
    client.apply_reward_discount(turn_discount=0.5)
    with pytest.raises(WorkflowError, match="discounted already"):
        client.apply_reward_discount()
    rewards = {first: 2.0, second: 2.0, third: 4.0}
    assert {call: client.get_interaction(call).reward for call in rewards} == rewards
    rows = client.export_interactions(style="individual")
    assert {call: row.reward for call, row in rows.items()} == rewards
    record = sample.recorder.records[1]
    tokens = client.get_interaction(second).model_response
    assert (tokens.input_tokens, tokens.output_tokens) == (record.prompt_ids, record.output_ids)
    assert rows[second].response_tokens.tolist() == record.output_ids
    whole = client.export_interactions(style="concat")
    assert {call: row.reward for call, row in whole.items()} == {third: 4.0}
    assert int(whole[third].action_mask.sum()) == sum(len(record.output_ids) for record in sample.recorder.records)
    for exported, count in ((rows, 3), (whole, 1)):
        assert len(normalise(exported, sample.recorder)["rewards"]) == count
    assert client.get_interaction("other") is None
    with pytest.raises(WorkflowError, match="no finished call"):
        client.set_reward("other", 1.0)
    with pytest.raises(WorkflowError, match="concat or individual"):
        client.export_interactions(style="tree")


async def test_calls_of_one_client_may_run_at_once_and_others_use_its_address(tokenizer):
    import openai

    client = ArealOpenAI(engine=sample_engine(Script(tokenizer, "3")), tokenizer=tokenizer)
    other = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
    answers = await asyncio.gather(
        client.chat.completions.create(model="gpt-5", messages=ASK),
        client.responses.create(input="1+2?"),
        other.chat.completions.create(model="default", messages=ASK),
    )
    for answer in answers:
        client.set_reward(answer.id, 1.0)
    assert set(client.export_interactions("individual")) == {answer.id for answer in answers}


async def test_the_context_and_the_parser_are_the_given_ones(tokenizer):
    import openai

    from rollwright.inference.server.tool_calls import HERMES, QWEN_CODER

    engine = Script(tokenizer, TOOL_CALL)
    client = ArealOpenAI(engine, tokenizer, engine_max_tokens=120, tool_call_parser="qwen3_coder")
    assert client.episode.convention is HERMES  # the template says so
    answer = await client.chat.completions.create(messages=ASK, tools=TOOLS)
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert engine.requests[0].gconfig.max_new_tokens <= 120 - len(engine.requests[0].input_ids)
    with pytest.raises(openai.BadRequestError, match="the limit of 120 tokens"):
        await client.chat.completions.create(messages=[{"role": "user", "content": "x" * 200}])
    plain = build_character_tokenizer()
    assert ArealOpenAI(engine, plain, tool_call_parser="qwen3_coder").episode.convention is QWEN_CODER
    with pytest.raises(ConfigError, match="tool_call_parser='other'"):
        ArealOpenAI(engine, plain, tool_call_parser="other")
    with pytest.raises(ConfigError, match="reasoning_parser='gpt-oss'"):
        ArealOpenAI(engine, plain, reasoning_parser="gpt-oss")


async def test_generation_arguments_reach_the_engine(tokenizer):
    engine = Script(tokenizer, "3")
    client = ArealOpenAI(engine, tokenizer)
    gconfig = GenerationHyperparameters(
        max_new_tokens=7, temperature=0.6, top_p=0.9, top_k=5, stop=["x"], min_p=0.1, stop_token_ids=[9], frequency_penalty=0.5
    )
    await client.chat.completions.create(messages=ASK, **gconfig.to_openai_args_dict())
    await client.responses.create(input="1+2?", **gconfig.to_openai_args_dict(api_format="responses"))
    for request in engine.requests:
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "min_p", "stop_token_ids", "frequency_penalty"):
            assert getattr(request.gconfig, name) == getattr(gconfig, name), name
    greedy = GenerationHyperparameters(greedy=True).to_openai_args_dict(["top_p"], api_format="openai-agents")
    assert greedy == {"max_tokens": 512, "temperature": 0.0}
    with pytest.raises(ConfigError, match="api_format='x'"):
        gconfig.to_openai_args_dict(api_format="x")
