"""Conversations go on from the tokens that were sampled."""

import pytest

from rollwright.data.conversation import ConversationTokens, plain_message


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)


def test_the_first_request_is_the_chat_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    conversation = ConversationTokens(tokenizer)
    assert conversation.encode(messages) == rendered(tokenizer, messages)
    assert (conversation.encoded, conversation.continued) == (1, 0)


@pytest.mark.parametrize("ended", [True, False], ids=["ended by the end token", "cut by its limit"])
def test_the_next_turn_begins_with_prompt_and_reply_as_sampled(tokenizer, ended):
    conversation = ConversationTokens(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    prompt = conversation.encode(messages)
    # the policy samples "yes" in another way than the tokenizer would: an unknown token in the middle
    output = [*tokenizer.encode("y", add_special_tokens=False), tokenizer.unk_token_id]
    output += tokenizer.encode("es", add_special_tokens=False) + ([tokenizer.eos_token_id] if ended else [])
    reply = {"role": "assistant", "content": tokenizer.decode(output, skip_special_tokens=True)}
    conversation.remember(messages, reply, prompt, output)
    following = conversation.encode([*messages, reply, {"role": "user", "content": "why?"}])
    assert following[: len(prompt) + len(output)] == prompt + output
    added = tokenizer.decode(following[len(prompt) + len(output) :], skip_special_tokens=False)
    plain = tokenizer.decode(rendered(tokenizer, [*messages, reply, {"role": "user", "content": "why?"}]))
    assert plain.endswith(added)
    assert added.startswith(tokenizer.eos_token) != ended
    assert conversation.continued == 1


def test_a_rewritten_history_is_encoded_as_a_whole(tokenizer):
    conversation = ConversationTokens(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    prompt = conversation.encode(messages)
    conversation.remember(messages, {"role": "assistant", "content": "yes"}, prompt, [10, 11])
    changed = [*messages, {"role": "assistant", "content": "no"}, {"role": "user", "content": "why?"}]
    assert conversation.encode(changed) == rendered(tokenizer, changed)
    assert conversation.continued == 0


def test_messages_are_compared_by_what_they_say():
    blocks = {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann", "refusal": None}
    assert plain_message(blocks) == {"role": "user", "content": "hi"}
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = plain_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
