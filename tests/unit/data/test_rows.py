"""Reading rows, and errors with file and line."""

import json
import socket
import time

import datasets
import huggingface_hub
import pytest

from rollwright.config.tasksets import DatasetConfig
from rollwright.data import rows as reading
from rollwright.data.datasets import get_dataset
from rollwright.data.rows import read_rows
from rollwright.errors import DataError

ROWS = [{"question": "1+1=", "answer": "2"}, {"question": "é", "answer": "3"}]


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def as_jsonl(items):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in items)


def test_files_of_each_kind(tmp_path):
    jsonl = write(tmp_path / "a.jsonl", "\ufeff" + as_jsonl(ROWS) + "\n")
    assert read_rows(jsonl) == ROWS
    assert read_rows(write(tmp_path / "a.json", json.dumps(ROWS))) == ROWS
    assert read_rows(write(tmp_path / "b.json", json.dumps({"version": 1, "data": ROWS}))) == ROWS
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == ROWS
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert read_rows(tmp_path / name, limit=1) == ROWS[:1]


def test_tables(tmp_path):
    text = 'question,answer,note\n1+1=,007,\n"é, ""quoted""\ntwice","1,234",x\n\n'
    rows = read_rows(write(tmp_path / "a.csv", "\ufeff" + text))
    assert rows == [
        {"question": "1+1=", "answer": "007", "note": None},
        {"question": 'é, "quoted"\ntwice', "answer": "1,234", "note": "x"},
    ]
    assert [place.rsplit("/", 1)[1] for place in rows.places] == ["a.csv:2", "a.csv:4"]
    assert read_rows(write(tmp_path / "t" / "train.tsv", "question\tanswer\n1+1=\t2\né\t3\n")) == ROWS
    assert read_rows(tmp_path / "t") == ROWS
    long = "x" * 200_000
    assert read_rows(write(tmp_path / "long.csv", f"text\n{long}\n")) == [{"text": long}]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_dataset_section_takes_tables(tmp_path, ending):
    table = datasets.Dataset.from_list([{"question": "1+1=", "answer": "2"}, {"question": None, "answer": "3"}])
    getattr(table.select([0]), f"to_{ending}")(tmp_path / f"train.{ending}")
    for path in (tmp_path, tmp_path / f"train.{ending}"):
        (task,) = get_dataset(DatasetConfig(path=str(path)))
        assert task["messages"] == [{"role": "user", "content": "1+1="}]
        assert task["answer"] == "2"
    getattr(table, f"to_{ending}")(tmp_path / f"train.{ending}")
    with pytest.raises(DataError, match=rf"train\.{ending}.*column 'question' is empty"):
        get_dataset(DatasetConfig(path=str(tmp_path)))


def test_rows_know_their_places(tmp_path):
    rows = read_rows(write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": 2}\n'))
    assert [place.rsplit("/", 1)[1] for place in rows.places] == ["a.jsonl:1", "a.jsonl:3"]
    assert read_rows(tmp_path / "a.jsonl", limit=1).places == rows.places[:1]


def test_directories_by_split(tmp_path):
    write(tmp_path / "train.jsonl", as_jsonl(ROWS))
    write(tmp_path / "validation-00000.jsonl", as_jsonl(ROWS[:1]))
    write(tmp_path / "validation-00001.jsonl", as_jsonl(ROWS[1:]))
    write(tmp_path / "sub" / "test" / "part.json", json.dumps(ROWS))
    assert read_rows(tmp_path) == ROWS
    assert read_rows(tmp_path, "valid") == ROWS
    assert read_rows(tmp_path, "valid", limit=1) == ROWS[:1]
    assert read_rows(tmp_path, "test", name="sub") == ROWS
    with pytest.raises(DataError, match=r"no file of split 'dev'.*train\.jsonl"):
        read_rows(tmp_path, "dev")


def test_what_the_datasets_library_saved(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "validation": dataset.select([0])}).save_to_disk(tmp_path / "two")
    assert read_rows(tmp_path / "one") == ROWS
    assert read_rows(tmp_path / "two", "valid") == ROWS[:1]
    with pytest.raises(DataError, match="has no split 'tests'"):
        read_rows(tmp_path / "two", "tests")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a"\n', r"a\.jsonl:2: this line is not JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: a row is an object"),
        ("a.jsonl", "\n", "holds no rows"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', r"a\.json:2: .*name it \.jsonl"),
        ("a.json", "3", "expected a list of rows"),
        ("a.json", '{"a": 1}', "an object with one list"),
        ("a.json", "[{}, 1]", r"row 1: a row is an object"),
        ("a.parquet", "x", "cannot be read as Parquet"),
        ("a.txt", "x", r"files ending in \.txt are not read"),
        ("a.csv", "question,answer\n1+1=,2,3\n", r"a\.csv:2: this row has 3 cells for 2 columns"),
        ("a.csv", 'question,answer\n"1+1=,2\n', r"a\.csv:2: this is not CSV \(unexpected end"),
        ("a.csv", "question;answer\n1+1=;2\n", r"a\.csv:1: the first line must name the columns.*separated by commas"),
        ("a.csv", "answer,answer\n1,2\n", r"a\.csv:1: the first line must name the columns, each once"),
        ("a.csv", "question,answer\n", "holds no rows"),
    ],
)
def test_broken_files(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(tmp_path / name, text))


def test_text_that_is_not_utf8(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        read_rows(file)


def test_nothing_there(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path / "none", "./none", "none.json"):
        with pytest.raises(DataError, match="no file or directory"):
            read_rows(path)


@pytest.mark.parametrize("answers", ["refuses", "is silent", "is offline"])
def test_a_hub_that_does_not_answer_is_told_soon_with_the_way_out(monkeypatch, answers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        if answers == "refuses":
            server.close()
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", answers == "is offline")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(reading, "HUB_WAIT", 0.5 if answers == "is silent" else 20.0)
        started = time.monotonic()
        reason = {"refuses": "cannot be reached", "is silent": "did not answer within 0.5 s", "is offline": "offline mode"}
        with pytest.raises(DataError, match=rf"{reason[answers]}.*give a local path: a file that ends in \.jsonl"):
            read_rows("nobody/nothing-at-all")
        assert time.monotonic() - started < 60  # the hub's client would try for minutes
    assert (answers == "is offline") == datasets.config.HF_HUB_OFFLINE
