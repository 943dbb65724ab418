"""Rows read by a format: one conversation, whether a dataset or a task-style workflow reads it."""

import pytest

from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.formats import FORMATS, Example, to_task
from rollwright.data.selectors import taskset_rows
from rollwright.errors import DataError
from rollwright.workflows.task import Task

USER = {"role": "user", "content": "1+1="}
OWN = {"role": "system", "content": "Add."}


def both_ways(row, layout):
    """The conversation of a dataset's row and that of a task, which have to be the same."""
    task = Task.from_row(row, TasksetConfig(format=layout))
    messages = to_task(row, layout, "row 0")["messages"]
    assert task.messages() == messages
    return messages


@pytest.mark.parametrize(
    ("row", "keys", "system"),
    [
        ({"prompt": "1+1="}, {"system_prompt": "Sum."}, "Sum."),
        ({"prompt": "1+1=", "s": "Own."}, {"system_prompt": "Sum.", "system_prompt_key": "s"}, "Own."),
        ({"prompt": "1+1=", "s": None}, {"system_prompt": "Sum.", "system_prompt_key": "s"}, "Sum."),
        ({"message": [OWN, USER]}, {"system_prompt": "Sum.", "prompt_type": "messages"}, "Add."),
        ({"message": [USER]}, {"system_prompt": "Sum.", "prompt_type": "messages"}, "Sum."),
        ({"q": "1+1="}, {"prompt_key": "q"}, None),
    ],
)
def test_there_is_one_system_message_at_most(row, keys, system):
    expected = [USER] if system is None else [{"role": "system", "content": system}, USER]
    assert both_ways(row, FormatConfig(**keys)) == expected


@pytest.mark.parametrize(
    "row", [{"question": "1+1=", "answer": "2"}, {"messages": [USER]}, {"prompt": "1+1=", "response": "2"}]
)
def test_columns_are_known_by_their_names_where_no_format_names_them(row):
    assert both_ways(row, None) == both_ways(row, FormatConfig()) == [USER]


def test_the_reference_answer_is_known_by_its_name_too():
    assert Task.from_row({"question": "1+1=", "answer": "2"}, TasksetConfig()).truth == "2"
    assert Task.from_row({"prompt": "1+1=", "response": "2"}, TasksetConfig()).truth == "2"


def test_reading_a_row_leaves_it_as_it_was():
    row = {"message": [USER]}
    both_ways(row, FormatConfig(prompt_type="messages", system_prompt="Sum."))
    assert row == {"message": [USER]}


@pytest.mark.parametrize("messages", [[], "1+1=", [{"role": "user"}]])
def test_a_column_that_holds_no_conversation_is_told(messages):
    with pytest.raises(DataError, match="row 0: "):
        to_task({"message": messages}, FormatConfig(prompt_type="messages"), "row 0")


@pytest.fixture
def riddles(tmp_path):
    """Formats of a user's, by what they return, and a file that they read."""
    FORMATS.register("test_example")(lambda row: Example(prompt=row["riddle"], answer=row["solution"]))
    FORMATS.register("test_messages")(lambda row: [{"role": "user", "content": row["riddle"]}])
    FORMATS.register("test_row")(lambda row: {"messages": [{"role": "user", "content": row["riddle"]}], "answer": "2"})
    FORMATS.register("test_wrong")(lambda row: row["riddle"])
    FORMATS.register("test_failing")(lambda row: row["ridle"])
    file = tmp_path / "riddles.jsonl"
    file.write_text('{"riddle": "1+1=", "solution": "2"}\n')
    yield str(file)
    for name in ("example", "messages", "row", "wrong", "failing"):
        del FORMATS[f"test_{name}"]


@pytest.mark.parametrize("name", ["test_example", "test_messages", "test_row"])
def test_a_format_may_be_a_function_of_the_users(riddles, name):
    config = TasksetConfig(path=riddles, format=name)
    (task,) = get_dataset(config)
    assert (task["messages"], task["solution"]) == ([USER], "2")
    assert name == "test_messages" or task["answer"] == "2"
    (row,) = taskset_rows(config)
    assert Task.from_row(row, config).messages() == [USER]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_wrong", "riddles.jsonl:1: format 'test_wrong' gave '1\\+1='; return messages"),
        ("test_failing", "riddles.jsonl:1: format 'test_failing' failed: KeyError: 'ridle'"),
        ("test_exampel", "format 'test_exampel' was not found. Did you mean 'test_example'"),
    ],
)
def test_a_format_that_cannot_be_used_is_told_with_its_row(riddles, name, message):
    with pytest.raises(DataError, match=message):
        get_dataset(TasksetConfig(path=riddles, format=name))
