"""The registry, formats, GSM8K, and what a dataset section becomes."""

from pathlib import Path

import pytest

from rollwright import DATASET_REGISTRY, Example
from rollwright.config.tasksets import DatasetConfig, FormatConfig
from rollwright.data.datasets import DatasetRegistry, get_dataset
from rollwright.data.gsm8k import final_answer, gsm8k
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
GSM8K = SHARED / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not beside the repository")
WORKED = {"question": "How many?", "answer": "Half of 48 is <<48/2=24>>24.\n48+24 = <<48+24=72>>72.\n#### 1,072"}


def write(tmp_path, text):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    return str(file)


def one(path, **settings):
    return get_dataset(DatasetConfig(path=path, **settings))[0]


def test_known_columns_become_tasks_and_stay(tmp_path):
    task = one(write(tmp_path, '{"question": "1+1=", "answer": "2", "level": 3}\n'))
    assert task == {"question": "1+1=", "answer": "2", "level": 3, "messages": [{"role": "user", "content": "1+1="}]}
    task = one(write(tmp_path, '{"question": "who", "answer": ["a", "b"]}\n'))
    assert task["answer"] == ["a", "b"]
    row = '{"messages": [{"role": "user", "content": "x"}], "answer": 1}\n'
    assert one(write(tmp_path, row))["answer"] == 1


def test_a_format_names_the_columns(tmp_path):
    file = write(tmp_path, '{"q": "1+1=", "a": "2", "s": "Be brief.", "img": "x.png"}\n')
    task = one(file, format=FormatConfig(prompt_key="q", response_key="a", system_prompt_key="s", image_key="img"))
    assert [m["role"] for m in task["messages"]] == ["system", "user"]
    assert (task["messages"][0]["content"], task["answer"], task["images"]) == ("Be brief.", "2", ["x.png"])
    chat = write(tmp_path, '{"chat": [{"role": "user", "content": "x"}]}\n')
    task = one(chat, format=FormatConfig(prompt_type="messages", messages_key="chat", system_prompt="S"))
    assert [m["content"] for m in task["messages"]] == ["S", "x"]


@pytest.mark.parametrize(
    ("row", "layout", "message"),
    [
        (
            '{"q": 1}',
            None,
            r"rows\.jsonl:1: which column is the prompt\? It has q\. .*: prompt_key, or .* \(and response_key if there is a ref",
        ),
        ('{"q": "x"}', FormatConfig(prompt_key="question"), r"rows\.jsonl:1 has no column 'question' .*format\.prompt_key"),
        ('{"q": 1}', FormatConfig(prompt_key="q"), "is a int, not the user's text"),
        ('{"q": "x"}', FormatConfig(prompt_key="q", response_key="a"), r"format\.response_key"),
        ('{"messages": []}', None, "at least one message"),
        ('{"messages": [{"role": "user"}]}', None, "role and content"),
        ('{"q": "x"}', FormatConfig(prompt_key="q", workflow_key="w"), r"format\.workflow_key means nothing for a dataset"),
    ],
)
def test_rows_that_are_no_tasks(tmp_path, row, layout, message):
    with pytest.raises(DataError, match=message):
        one(write(tmp_path, row + "\n"), format=layout)


def test_a_prompt_without_an_answer_is_a_task(tmp_path):
    """A reward may need none, so no key of the format is asked for."""
    task = one(write(tmp_path, '{"prompt": "Write a poem.", "style": "short"}\n'))
    assert task["messages"] == [{"role": "user", "content": "Write a poem."}]
    assert "answer" not in task
    assert task["style"] == "short"
    assert one(write(tmp_path, '{"prompt": "x"}\n'), format=FormatConfig(prompt_key="prompt"))["messages"][0]["content"] == "x"


def test_supervised_rows_need_a_completion(tmp_path):
    assert one(write(tmp_path, '{"prompt": "x", "response": "y"}\n'), type="sft")["completion"] == "y"
    with pytest.raises(DataError, match="needs the text to train on"):
        one(write(tmp_path, '{"question": "x", "answer": ["y"]}\n'), type="sft")
    assert one("arithmetic", type="sft", kwargs={"size": 1})["completion"].endswith("</answer>")


def test_gsm8k_answers():
    assert final_answer(WORKED["answer"]) == "1072"
    assert final_answer("#### -5") == "-5"
    assert final_answer("#### $3.50 ") == "3.50"
    with pytest.raises(DataError, match="no result after"):
        final_answer("42")


def test_gsm8k_is_known_by_its_answers_in_any_file(tmp_path):
    import json

    file = write(tmp_path, json.dumps(WORKED) + "\n")
    for task in (one(file), gsm8k(path=file)[0]):
        assert task["answer"] == "1072"
        assert task["completion"] == "Half of 48 is 24.\n48+24 = 72.\n#### 1,072"
    example = DATASET_REGISTRY.examples("gsm8k_r1_template", path=file)[0]
    assert example.question == "How many?"
    assert example.prompt.endswith("User: How many?\nAssistant: <think>")
    assert example.answer == "1072"


@needs_gsm8k
def test_all_of_gsm8k():
    assert len(gsm8k("train", str(GSM8K))) == 7473
    tasks = gsm8k("test", str(GSM8K / "test.jsonl"))
    assert all(float(task["answer"]) is not None for task in tasks)


def test_users_register_their_own():
    registry = DatasetRegistry("dataset", DataError, variable="DATASETS")

    @registry.register("riddles")
    def riddles(split="train", size=2):
        return [Example(f"{split} {i}", str(i), extras={"level": i}) for i in range(size)]

    assert registry.rows("riddles", "test")[1] == {
        "level": 1,
        "messages": [{"role": "user", "content": "test 1"}],
        "answer": "1",
    }
    assert [example.prompt for example in registry.examples("riddles", size=1)] == ["train 0"]
    registry["riddles"] = riddles  # the same again
    assert list(registry) == ["riddles"]
    with pytest.raises(DataError, match="is taken by"):
        registry["riddles"] = lambda split: []
    with pytest.raises(DataError, match="it takes"):
        registry.build("riddles", sise=3)
    with pytest.raises(DataError, match="gave no rows"):
        registry.build("riddles", size=0)
    with pytest.raises(DataError, match="Did you mean 'riddles'"):
        registry["ridles"]


def test_examples_and_rows_are_each_others():
    example = Example("q", "a", question="bare", completion="worked", extras={"level": 1})
    assert Example.from_row(example.to_row()) == example


def test_a_kind_reads_the_path():
    config = DatasetConfig(kind="rollwright.data.gsm8k:gsm8k", path="rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        get_dataset(config)
    with pytest.raises(DataError, match="was given split='train', path='x'"):
        one("x", kind="arithmetic")


def test_builders_by_import_path_and_wrong_ones():
    assert len(get_dataset(DatasetConfig(path="rollwright.data.arithmetic:arithmetic", kwargs={"size": 3}))) == 3
    with pytest.raises(DataError, match="was not found"):
        one("no.such.module:rows")
    with pytest.raises(DataError, match="take no kwargs"):
        one("rows.jsonl", kwargs={"size": 3})
    with pytest.raises(DataError, match="has no path"):
        one("")


def test_limit_and_prompts_that_are_too_long(caplog):
    assert len(get_dataset(DatasetConfig(path="arithmetic", limit=5))) == 5
    tokenizer = build_character_tokenizer()
    config = DatasetConfig(path="arithmetic", kwargs={"digits": 2, "min_digits": 1, "size": 200}, max_length=8)
    kept = get_dataset(config, tokenizer)
    assert 0 < len(kept) < 200
    assert all(len(tokenizer.apply_chat_template(task["messages"], add_generation_prompt=True)) <= 8 for task in kept)
    with pytest.raises(DataError, match="every prompt has more"):
        get_dataset(DatasetConfig(path="arithmetic", max_length=2), tokenizer)
    with pytest.raises(DataError, match="needs the tokenizer"):
        get_dataset(DatasetConfig(path="arithmetic", max_length=2))


def test_reasoning_gym_by_name():
    pytest.importorskip("reasoning_gym")
    from rollwright.data.reasoning_gym import score

    settings = {"size": 10, "min_terms": 2, "max_terms": 2}
    tasks = {
        split: get_dataset(DatasetConfig(path="reasoning_gym:chain_sum", split=split, kwargs=settings))
        for split in ("train", "test")
    }
    assert all(len(rows) == 10 for rows in tasks.values())
    questions = [{row["messages"][0]["content"] for row in rows} for rows in tasks.values()]
    assert not questions[0] & questions[1]
    row = tasks["train"][0]
    assert score("", f"so <answer> {row['answer']} </answer>", [], [], **row) == 1.0
    assert score("", "<answer>x</answer>", [], [], **row) < 0.5
    with pytest.raises(DataError, match="did you mean 'chain_sum'"):
        one("reasoning_gym:chain_sums")
    with pytest.raises(DataError, match="min_term"):
        one("reasoning_gym:chain_sum", kwargs={"min_term": 2})
