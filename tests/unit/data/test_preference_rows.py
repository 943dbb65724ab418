"""Preference pairs from rows: texts or conversations, by known names or a format, and what is refused."""

import pytest

from rollwright.config.tasksets import DatasetConfig, FormatConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.formats import to_tasks
from rollwright.errors import DataError

USER = {"role": "user", "content": "1+1?"}


def reply(text):
    return {"role": "assistant", "content": text}


def pairs(row, layout=None):
    (task,) = to_tasks([row], layout, "pairs", "preference")
    return task["messages"], task["chosen"], task["rejected"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"question": "1+1?", "chosen": "2", "rejected": "3"},
        {"messages": [USER], "chosen": "2", "rejected": "3"},
        {"chosen": [USER, reply("2")], "rejected": [USER, reply("3")]},
        {"prompt": "1+1?", "chosen": [reply("2")], "rejected": [reply("3")]},
    ],
)
def test_pairs_in_the_usual_forms(row):
    assert pairs(row) == ([USER], "2", "3")


def test_a_format_names_the_columns(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"q": "1+1?", "good": "2", "bad": "3"}\n')
    layout = FormatConfig(prompt_key="q", chosen_key="good", rejected_key="bad", system_prompt="Add.")
    (task,) = get_dataset(DatasetConfig(path=str(file), type="preference", format=layout))
    assert task["messages"] == [{"role": "system", "content": "Add."}, USER]
    assert (task["chosen"], task["rejected"]) == ("2", "3")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "2"}, r"no column 'rejected' .*set format\.rejected_key"),
        ({"prompt": "a", "chosen": "2", "rejected": "2"}, "the same reply"),
        ({"prompt": "a", "chosen": 2, "rejected": "3"}, "neither a text nor"),
        ({"chosen": [USER, reply("2")], "rejected": [reply("x"), reply("3")]}, "differ before their last message"),
        ({"chosen": [USER], "rejected": [USER]}, "not the assistant's text"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(row, message):
    with pytest.raises(DataError, match=f"pairs: row 0.*{message}"):
        pairs(row)


def test_columns_of_replies_mean_nothing_elsewhere():
    with pytest.raises(
        DataError, match=r"chosen_key means nothing for a dataset of rl rows; it is for datasets of type preference"
    ):
        to_tasks([{"prompt": "a"}], FormatConfig(chosen_key="good"), "rows")


def test_only_the_column_that_is_missing_is_asked_for():
    with pytest.raises(DataError, match=r"has no column 'rejected' .*; set format\.rejected_key\.") as told:
        to_tasks([{"prompt": "x", "chosen": "a", "worse": "b"}], None, "rows", "preference")
    assert "chosen_key" not in str(told.value)
