"""Every row of the tables in docs/datasets.md: what is asked and answered or learned, and what is refused; from files, too."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rollwright.config.tasksets import DatasetConfig, FormatConfig, TasksetConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.formats import to_tasks
from rollwright.errors import DataError
from rollwright.workflows.task import Task

PAGE = Path(__file__).parents[3] / "docs" / "datasets.md"
USER, REPLY = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}


def table(heading):
    """The cells of the table below a heading line, without marks of code; the first is a row of a dataset."""
    lines = PAGE.read_text(encoding="utf-8").split(heading)[1].split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code(cell):
    """The first piece of code in a cell."""
    found = re.search("`(.*?)`", cell)
    return found[1] if found else ""


def section_of(cell):
    """``DatasetConfig``'s arguments."""
    given = yaml.safe_load(code(cell) or "{}")
    return {**given, "format": FormatConfig(**given["format"])} if "format" in given else given


KNOWN = table("| your columns | keys of the section | asked")
REFUSED = table("| your columns | keys of the section | what to do")


def read(row, file, **section):
    file.write_text(json.dumps(row) + "\n")
    (task,) = get_dataset(DatasetConfig(path=str(file), **section))
    return task


def learned(task):
    if "chosen" in task:
        return f"`{task['chosen']}` over `{task['rejected']}`"
    if "completion" not in task or ("answer" in task and not task.get("is_sft")):
        return f"`{task['answer']}`"
    said = task["completion"]
    texts = [said] if isinstance(said, str) else [each["content"] for each in said if each["role"] == "assistant"]
    return " and ".join(f"`{text}`" for text in texts)


@pytest.mark.parametrize("cells", KNOWN, ids=lambda cells: f"{code(cells[0])[:50]} {cells[1]}")
def test_the_columns_that_are_known(cells, tmp_path):
    row, section = json.loads(code(cells[0])), section_of(cells[1])
    task = read(row, tmp_path / "rows.jsonl", **section)
    assert [message["content"] for message in task["messages"]] == [code(cells[2]).replace("\\n", "\n")]
    assert learned({**task, "is_sft": section.get("type") == "sft"}) == cells[3]
    assert {
        key: task[key] for key in row if key not in ("messages", "completion", "chosen", "rejected", "answer")
    }.items() <= row.items()
    if section.get("type", "rl") == "rl":  # a task-style workflow reads the same
        as_task = Task.from_row(row, TasksetConfig(format=section.get("format")))
        assert as_task.messages() == task["messages"]
        assert "####" in str(as_task.truth) or as_task.truth == task["answer"]


@pytest.mark.parametrize("cells", REFUSED, ids=lambda cells: f"{code(cells[0])[:50]} {cells[1]}")
def test_the_columns_that_are_refused_and_what_helps(cells, tmp_path):
    row, section = json.loads(code(cells[0])), section_of(cells[1])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: ") as told:
        read(row, tmp_path / "rows.jsonl", **section)
    advice = code(cells[2])
    if advice.startswith("format:"):
        task = read(row, tmp_path / "rows.jsonl", **section_of(cells[2]))
        assert task["messages"][-1]["content"] == row["prompt"]
        assert task["answer"] == row["answer"]
        assert "prompt_key" in str(told.value)
    elif "segments" in advice:
        assert read(json.loads(advice), tmp_path / "rows.jsonl", **section)["segments"]
        assert "segments" in str(told.value)
    else:
        assert re.search("format function|type: sft|drop the column|not the user's text", str(told.value))


def test_the_tables_were_read():
    assert len(KNOWN) >= 20
    assert len(REFUSED) >= 10


def test_parquet_gives_every_message_the_keys_of_all(tmp_path):
    """A file of columns fills with None what a message does not have; templates would take that for a value."""
    import pyarrow
    from pyarrow import parquet

    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    rows = [
        {"prompt": [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2", "name": "add"}, USER]}
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (task,) = get_dataset(DatasetConfig(path=str(tmp_path / "train.parquet")))
    user, calling, tool, _ = task["messages"]
    assert (user, tool) == (USER, {"role": "tool", "content": "2", "name": "add"})
    assert calling == {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"prompt": [USER, REPLY], "answer": "2"}, "rl", "ends with the assistant's reply"),
        ({"prompt": None, "answer": "2"}, "rl", "column 'prompt' is empty"),
        ({"prompt": ["1+1="], "answer": "2"}, "rl", "needs role and content"),
        ({"prompt": [USER], "answer": "2", "reward_model": {"ground_truth": "3"}}, "rl", "keep one of the two columns"),
        ({"messages": [REPLY]}, "sft", "begins with the assistant"),
        ({"prompt": [USER], "completion": [REPLY, USER]}, "sft", "must begin and end with the assistant's"),
        ({"prompt": "1+1="}, "sft", "in a column completion"),
        (
            {"prompt": "2+2=", "chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "3"}]},
            "preference",
            "'prompt' is not the conv",
        ),
        ({"prompt": [USER], "chosen": [{**REPLY, "tool_calls": [{}]}], "rejected": [REPLY]}, "preference", "calls tools"),
        ({"prompt": [USER, REPLY], "chosen": "2", "rejected": "3"}, "preference", "ends with the assistant's reply"),
    ],
)
def test_what_could_be_read_wrongly_is_refused_with_its_place(row, kind, message):
    with pytest.raises(DataError, match=f"rows: row 0: .*{message}"):
        to_tasks([row], None, "rows", kind)


def test_thinking_is_set_where_it_is_read():
    layout = FormatConfig(enable_thinking=True)
    (task,) = to_tasks(
        [{"question": "1+1=", "response": "2"}], layout, "rows", "sft"
    )  # the columns are still known by their names
    assert (task["messages"], task["completion"]) == ([USER], "2")
    with pytest.raises(DataError, match=r"format\.enable_thinking means nothing for a dataset of rl rows; .*workflow_kwargs"):
        to_tasks([{"question": "1+1="}], layout, "rows", "rl")
