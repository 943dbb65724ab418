import json

import pytest

from rollwright.environments.bm25 import open_index
from rollwright.environments.corpus import Corpus
from rollwright.errors import DataError


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return path


def test_rows_are_served_byte_for_byte(tmp_path):
    raw = b'{"id": 7, "wikipedia_title":"A",  "contents": "caf\xc3\xa9"}'
    corpus = Corpus.from_file(write(tmp_path / "c.jsonl", raw))
    assert corpus.document_json(0) == raw
    assert corpus.document(0) == json.loads(raw)


def test_a_corpus_with_only_titles_serves_both_names(tmp_path):
    corpus = Corpus.from_file(write(tmp_path / "c.jsonl", {"title": "Röntgen", "contents": "x"}))
    expected = {"title": "Röntgen", "contents": "x", "wikipedia_title": "Röntgen"}
    assert corpus.document(0) == expected
    assert json.loads(corpus.document_json(0)) == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{not json", "not valid JSON"),
        (b'{"contents": NaN}', "NaN is not JSON"),
        (b'["a"]', "a list, not an object"),
        (b'{"title": "no contents"}', "'contents'"),
        (b'{"contents": "x", "url": 3}', "'url'"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_an_unusable_row_is_named_by_file_and_line(tmp_path, bad, message):
    path = write(tmp_path / "c.jsonl", {"contents": "fine"}, b"", bad)
    with pytest.raises(DataError, match=message) as error:
        Corpus.from_file(path)
    assert f"{path}, line 3" in str(error.value)


def test_missing_and_empty_files_say_so(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        open_index(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(DataError, match="has no rows"):
        open_index(tmp_path / "empty.jsonl")


def test_byte_order_mark_crlf_and_a_missing_last_newline(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"contents": "one"}\r\n{"contents": "two"}')
    corpus = Corpus.from_file(path)
    assert [corpus.document(i)["contents"] for i in range(len(corpus))] == ["one", "two"]
    assert corpus.document_json(0) == b'{"contents": "one"}'


def test_pages_join_the_passages_of_one_address():
    corpus = Corpus.from_rows(
        [
            {"contents": "first", "url": "u"},
            {"contents": "other", "url": "v"},
            {"contents": "second", "url": "u"},
            {"contents": "x"},
        ]
    )
    assert corpus.page("u") == {"url": "u", "contents": "first\n\nsecond"}
    assert corpus.page("absent") is None
