"""One rendering for sampling, training and filtering, and what ends a turn, by templates in the form of well-known models."""

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken

from rollwright import GenerationHyperparameters
from rollwright.config.tasksets import DatasetConfig, FormatConfig
from rollwright.data.chat_template import prompt_ids, stopping_at_turn_end, turn_end
from rollwright.data.conversation import ConversationTokens
from rollwright.data.datasets import get_dataset
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError, WorkflowError
from rollwright.sequence_processing.generation import GenerationConfig, encoded
from rollwright.trainers.loops.supervised import preference_batch, supervised_batch
from rollwright.workflows.rlvr import RLVRWorkflow

SOURCE = Path(__file__).parents[3] / "src" / "rollwright"
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Reasoning is dropped from all turns before the last question, and switched off by an empty block.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{{ ('<|begin_of_text|>' if loop.first else '') + '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' "
    "+ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
#: As gpt-oss: the last reply of a conversation ends otherwise than earlier ones.
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end_of_message|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% else %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

#: Model -> template, end token of the tokenizer (of base models: the end of a document), and what ends a turn.
MODELS = {
    "qwen2.5-base": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "qwen2.5-instruct": (CHATML, "<|im_end|>", "<|im_end|>"),
    "qwen3": (QWEN3, "<|endoftext|>", "<|im_end|>"),
    "llama3-base": (LLAMA3, "<|end_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<eos>", "<end_of_turn>"),
    "gpt-oss": (HARMONY, "<|return|>", "<|return|>"),
    "llama2": (LLAMA2, "</s>", " </s>"),
    "no marks": (PLAIN, "</s>", "</s>"),
}


def tokenizer_of(model):
    template, eos, _ = MODELS[model]
    tokenizer = build_character_tokenizer(chat_template=template)
    marks = dict.fromkeys([eos, *re.findall(r"<\|?[a-z_]+\|?>|<bos>", template.replace("<think>", ""))])
    tokenizer.add_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in marks]
    )  # as Llama-3's: added, not declared
    tokenizer.eos_token = eos
    return tokenizer


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    return request.param


def trained(batch, row=0):
    ids, mask = batch["input_ids"][row], batch["loss_mask"][row].bool()
    return ids[~mask & batch["attention_mask"][row]].tolist(), ids[mask].tolist()


async def sampled_prompt(tokenizer, enable_thinking):
    workflow = RLVRWorkflow("numeric_reward", {"max_new_tokens": 4}, tokenizer, enable_thinking=enable_thinking)
    return (await workflow.prompt({"messages": MESSAGES, "answer": "2"})).ids


@pytest.mark.parametrize("thinks", [False, True])
async def test_all_ask_in_the_same_words(model, thinks, tmp_path):
    tokenizer = tokenizer_of(model)
    wanted = await sampled_prompt(tokenizer, thinks)
    variables = FormatConfig(enable_thinking=thinks).template_variables
    assert wanted == prompt_ids(tokenizer, MESSAGES, **variables)
    assert trained(supervised_batch([{"messages": MESSAGES, "completion": "2"}], tokenizer, **variables))[0] == wanted
    pair = {"messages": MESSAGES, "chosen": "2", "rejected": "3"}
    assert [trained(preference_batch([pair], tokenizer, **variables), row)[0] for row in (0, 1)] == [wanted, wanted]
    assert encoded([MESSAGES], tokenizer, GenerationConfig(enable_thinking=thinks).enable_thinking) == [wanted]
    assert ConversationTokens(tokenizer, **variables).encode(MESSAGES) == wanted
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}], "answer": "2"}\n'
    )

    def kept(length, **settings):
        section = DatasetConfig(path=str(file), max_length=length, type="sft", format=FormatConfig(enable_thinking=thinks))
        return get_dataset(section, tokenizer), get_dataset(DatasetConfig(path=str(file), max_length=length), tokenizer, thinks)

    assert [len(rows) for rows in kept(len(wanted))] == [1, 1]
    for section, thinking in (
        (DatasetConfig(path=str(file), type="sft", format=FormatConfig(enable_thinking=thinks)), None),
        (DatasetConfig(path=str(file)), thinks),
    ):
        section.max_length = len(wanted) - 1
        with pytest.raises(DataError, match="every prompt has more"):
            get_dataset(section, tokenizer, thinking)


async def test_a_template_that_knows_thinking_asks_otherwise_with_and_without():
    tokenizer = tokenizer_of("qwen3")
    with_, without = [tokenizer.decode(await sampled_prompt(tokenizer, thinks)) for thinks in (True, False)]
    assert without == with_ + "<think>\n\n</think>\n\n"


def test_the_end_that_is_learned_is_the_one_that_later_turns_show(model):
    tokenizer = tokenizer_of(model)
    wanted = tokenizer.encode(f"2{MODELS[model][2]}", add_special_tokens=False)
    row = {"messages": MESSAGES, "completion": "2"}
    assert trained(supervised_batch([row], tokenizer))[1] == wanted
    assert trained(supervised_batch([{**row, "completion": tokenizer.decode(wanted)}], tokenizer))[1] == wanted  # not twice
    pair = {"messages": MESSAGES, "chosen": "2", "rejected": "3"}
    assert trained(preference_batch([pair], tokenizer))[1] == wanted
    whole = [*MESSAGES, {"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}]
    if model != "gpt-oss":
        assert tokenizer.apply_chat_template(whole, tokenize=False).count(tokenizer.decode(wanted[1:])) or model == "no marks"


def test_what_is_sampled_stops_at_the_end_that_is_learned(model):
    tokenizer = tokenizer_of(model)
    end = turn_end(tokenizer)[-1]
    workflow = RLVRWorkflow("numeric_reward", {"max_new_tokens": 4, "stop_token_ids": [7]}, tokenizer)
    assert {end, tokenizer.eos_token_id, 7} <= set(workflow.gconfig.stop_token_ids)
    plain = stopping_at_turn_end(GenerationHyperparameters(), tokenizer)
    assert plain.stop_token_ids == ([] if end == tokenizer.eos_token_id else [end])
    assert stopping_at_turn_end(GenerationHyperparameters(ignore_eos=True), tokenizer).stop_token_ids == []


def test_a_sampled_end_is_not_rendered_again(model):
    """Llama-3 declares no special tokens, so its end of a turn is known only as an added one."""
    tokenizer = tokenizer_of(model)
    conversation, end = ConversationTokens(tokenizer), turn_end(tokenizer)
    prompt = conversation.encode(MESSAGES)
    output = [*tokenizer.encode("2", add_special_tokens=False), end[-1]]
    reply = {"role": "assistant", "content": "2"}
    conversation.remember(MESSAGES, reply, prompt, output)
    following = conversation.encode([*MESSAGES, reply, {"role": "user", "content": "why?"}])
    assert following[: len(prompt) + len(output)] == [*prompt, *output]
    assert end[-1] not in following[len(prompt) + len(output) :][:2] or model == "no marks"


@pytest.mark.parametrize("model", ["qwen2.5-base", "llama3-base", "gemma", "qwen3"])
def test_every_reply_of_a_conversation_is_learned_behind_the_prompt_that_sampling_gives_it(model):
    tokenizer = tokenizer_of(model)
    second = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    batch = supervised_batch([{"messages": MESSAGES, "completion": second}], tokenizer)
    end = turn_end(tokenizer)
    two, four = ([*tokenizer.encode(text, add_special_tokens=False), *end] for text in "24")
    if model == "qwen3":  # it drops the empty reasoning from earlier turns, so the second prompt does not go on from the first
        assert [trained(batch, row)[1] for row in (0, 1)] == [two, four]
        assert trained(batch, 1)[0] == prompt_ids(tokenizer, [*MESSAGES, *second[:2]])
    else:
        assert len(batch["input_ids"]) == 1
        assert trained(batch)[1] == [*two, *four]
        whole = tokenizer.apply_chat_template([*MESSAGES, *second], tokenize=False)
        assert tokenizer.decode(batch["input_ids"][0]) == whole.removesuffix("\n")


def test_reasoning_of_a_reply_needs_a_prompt_that_thinks():
    tokenizer = tokenizer_of("qwen3")
    row = {"messages": MESSAGES, "completion": "<think>\none\n</think>\n\n2"}
    assert tokenizer.decode(trained(supervised_batch([row], tokenizer, enable_thinking=True))[1]).startswith("<think>\none")
    replies = [{"role": "assistant", "content": "2", "reasoning_content": "one"}]
    written = trained(supervised_batch([{**row, "completion": replies}], tokenizer, enable_thinking=True))[1]
    assert written == trained(supervised_batch([row], tokenizer, enable_thinking=True))[1]
    for refused in (row["completion"], replies):
        with pytest.raises(DataError, match=r"set format\.enable_thinking: true"):
            supervised_batch([{**row, "completion": refused}], tokenizer)


def test_a_tokenizer_without_a_template_is_told_with_what_to_do():
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = None
    assert turn_end(tokenizer) == [tokenizer.eos_token_id]
    with pytest.raises(DataError, match=r"has no chat template, so messages cannot be rendered"):
        supervised_batch([{"messages": MESSAGES, "completion": "2"}], tokenizer)


async def test_a_task_that_ends_with_a_reply_is_not_asked():
    workflow = RLVRWorkflow("numeric_reward", {"max_new_tokens": 4}, tokenizer_of("qwen3"))
    with pytest.raises(WorkflowError, match="end with the assistant's reply"):
        await workflow.prompt({"messages": [*MESSAGES, {"role": "assistant", "content": "2"}]})


#: The one file that renders, the wrapper that makes tokenizers return ids, and the text that `rollwright new` writes for users.
RENDERING = {"data/chat_template.py", "config/generation.py", "cli/new.py"}


def test_only_one_file_renders():
    call = re.compile(r"\.apply_chat_template\(")
    calling = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if call.search(path.read_text(encoding="utf-8"))}
    assert calling == RENDERING
