"""A memory-mapped corpus of documents in JSON lines; a row is parsed when it is needed.

Rows are served byte for byte as they are in the file, with one exception: a row that has a ``title`` but no ``wikipedia_title``, the key
that search agents read, also gets the latter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.errors import DataError

#: Attributes of a corpus that locate its rows. Each is saved in a separate file.
_LAYOUT = ("spans", "titled", "url_keys", "url_rows")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(
            f"A corpus row is not UTF-8 text ({error.reason} at byte {error.start}): {where}. Save the file as UTF-8."
        ) from None
    except ValueError as error:
        raise DataError(f"A corpus row is not valid JSON ({error}): {where}. Write one JSON object a line.") from None
    if not isinstance(row, dict):
        raise DataError(
            f'A corpus row is a {type(row).__name__}, not an object: {where}. Write rows as {{"contents": ..., "title": ...}}.'
        )
    if not isinstance(row.get("contents"), str):
        raise DataError(f"A corpus row has no text under 'contents': {where}. Every document needs a string there.")
    for key in ("title", "wikipedia_title", "url"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise DataError(
                f"A corpus row has a {type(row[key]).__name__} under '{key}': {where}. Make it a string or leave it out."
            )
    return row


def _url_key(url: str) -> int:
    return int.from_bytes(hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1


def file_digest(path: Path) -> str:
    """Compute the content hash of a file (BLAKE2b, 128 bits, hexadecimal)."""
    with _opened(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@dataclass(frozen=True)
class SearchHits:
    """Rows that match a query, best first.

    Attributes:
        rows: row numbers in the corpus, ``[K]`` int.
        scores: ``[K]`` float; higher is better. The scale depends on the retriever.
    """

    rows: np.ndarray
    scores: np.ndarray

    def first(self, count: int) -> SearchHits:
        """Return the best ``count`` hits."""
        return SearchHits(self.rows[:count], self.scores[:count])


@dataclass(repr=False, eq=False)
class Corpus:
    """Documents, accessible by row number and by URL.

    Attributes:
        buffer: all rows, as JSON lines.
        spans: int64 ``[N, 2]``, start and end of each row in ``buffer``.
        titled: bool ``[N]``, True if ``wikipedia_title`` must be added from ``title``.
        url_keys: int64 ``[U]``, sorted hashes of the rows' URLs.
        url_rows: int64 ``[U]``, row number for each hash.
        name: name of the corpus in error messages and ``/health``.
    """

    buffer: bytes | mmap.mmap
    spans: np.ndarray
    titled: np.ndarray
    url_keys: np.ndarray
    url_rows: np.ndarray
    name: str = "corpus"

    @classmethod
    def from_rows(cls, rows: Iterable[dict[str, Any]], name: str = "corpus") -> Corpus:
        """Build a corpus in memory."""
        return cls._scan(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows), name)

    @classmethod
    def from_file(cls, path: str | Path) -> Corpus:
        """Map a JSON-lines file into memory and check every row once.

        Raises:
            DataError: the file cannot be read or has no rows, or a row is unusable (the message has file and line).
        """
        return cls._scan(_map_file(Path(path)), str(path))

    @classmethod
    def _scan(cls, buffer: bytes | mmap.mmap, name: str) -> Corpus:
        spans: list[tuple[int, int]] = []
        titled: list[bool] = []
        keys: list[int] = []
        key_rows: list[int] = []
        start, line_number, size = 3 if buffer[:3] == b"\xef\xbb\xbf" else 0, 0, len(buffer)
        while start < size:
            line_number += 1
            end = buffer.find(b"\n", start)
            end = size if end < 0 else end
            line = buffer[start:end]
            if line.strip():
                row = _parse_row(line, f"{name}, line {line_number}")
                if url := row.get("url"):
                    keys.append(_url_key(url))
                    key_rows.append(len(spans))
                titled.append(row.get("wikipedia_title") is None and row.get("title") is not None)
                spans.append((start + len(line) - len(line.lstrip()), start + len(line.rstrip())))
            start = end + 1
        if not spans:
            raise DataError(f"The corpus has no rows: {name}. Give a JSON-lines file with one document a line.")
        url_keys, url_rows = np.asarray(keys, np.int64), np.asarray(key_rows, np.int64)
        order = np.argsort(url_keys, kind="stable")
        return cls(buffer, np.asarray(spans, np.int64), np.asarray(titled, bool), url_keys[order], url_rows[order], name)

    def save_layout(self, folder: Path) -> None:
        """Write the positions of the rows, so that ``with_layout`` need not parse the file again."""
        for name in _LAYOUT:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def with_layout(cls, path: Path, folder: Path) -> Corpus:
        """Map the file ``path``, using the layout that ``save_layout`` has written to ``folder`` for the same content."""
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in _LAYOUT]
        return cls(_map_file(path), *arrays, name=str(path))

    def __len__(self) -> int:
        return len(self.spans)

    def document(self, index: int) -> dict[str, Any]:
        """Return row ``index``, with ``wikipedia_title`` if the row has a title."""
        start, end = self.spans[index]
        row = json.loads(self.buffer[start:end])
        if self.titled[index]:
            row["wikipedia_title"] = row["title"]
        return row

    def document_json(self, index: int) -> bytes:
        """Return row ``index`` as UTF-8 JSON: the bytes of the file, unless ``wikipedia_title`` has to be added."""
        if self.titled[index]:
            return json.dumps(self.document(index), ensure_ascii=False).encode()
        start, end = self.spans[index]
        return self.buffer[start:end]

    def page(self, url: str) -> dict[str, str] | None:
        """Return ``{"url", "contents"}`` of the document that has a URL, or None if there is none.

        If several rows share the URL (passages of one page), their contents are joined in order.
        """
        key = _url_key(url)
        first, last = np.searchsorted(self.url_keys, [key, key + 1])
        rows = [self.document(int(index)) for index in self.url_rows[first:last]]
        contents = [row["contents"] for row in rows if row["url"] == url]
        return {"url": url, "contents": "\n\n".join(contents)} if contents else None

    def text(self, index: int) -> str:
        """Return title and contents of row ``index``, as indexes read them."""
        row = self.document(index)
        title = row.get("wikipedia_title")
        return f"{title}\n{row['contents']}" if title else row["contents"]

    def texts(self) -> Iterator[str]:
        """Yield title and contents of each row, for the index."""
        return (self.text(index) for index in range(len(self)))


def _map_file(path: Path) -> bytes | mmap.mmap:
    with _opened(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"The corpus cannot be read ({error.strerror}): {path}. Give the path of a JSON-lines file.") from error
