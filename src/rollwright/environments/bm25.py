"""BM25 over a corpus: the index is built and stored by bm25s, mapped from disk, and searched by a compiled loop.

The index of ``corpus.jsonl`` is kept in ``corpus.jsonl.index/<hash>/`` beside it, or in the user's cache directory where
that place cannot be written. The hash is of the file's content and of how text becomes terms: change either and the index is
built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.atomic import replaced_directory
from rollwright.environments import text_analysis
from rollwright.environments.corpus import Corpus, file_digest
from rollwright.environments.retrieval import SearchHits
from rollwright.errors import DataError
from rollwright.tracking import logging

logger = logging.getLogger("retrieval")

K1, B = 1.5, 0.75
#: Raised when what is stored changes its form or its terms.
_FORMAT = "1"


def _bm25s() -> Any:
    try:
        import bm25s
        import numba  # noqa: F401  (the search loop is compiled)
    except ModuleNotFoundError as error:
        raise DataError(f"BM25 search needs the package {error.name}: pip install 'rollwright[retrieval]'.") from error
    return bm25s


class BM25Retriever:
    """Lucene's BM25 (k1 1.5, b 0.75) over title and contents. Rows without any query term are not returned."""

    name = "bm25"

    def __init__(self, weights: np.ndarray, rows: np.ndarray, starts: np.ndarray, vocabulary: dict[str, int], row_count: int):
        from rollwright.environments.bm25_kernel import top_rows

        self._top_rows = top_rows
        self._index = (weights, rows, starts)
        self._vocabulary = vocabulary
        self.row_count = row_count
        self._scratch = threading.local()

    @classmethod
    def build(cls, texts: Iterable[str]) -> BM25Retriever:
        """Index texts in memory."""
        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(term, len(vocabulary)) for term in text_analysis.terms(text)] for text in texts]
        if not vocabulary:
            raise DataError("No text holds a single word: there is nothing to index. Check the corpus's 'contents'.")
        return cls._from_index(_index_ids(ids, vocabulary), vocabulary, len(ids))

    @classmethod
    def _from_index(cls, index: Any, vocabulary: dict[str, int], row_count: int) -> BM25Retriever:
        scores = index.scores
        return cls(scores["data"], scores["indices"], scores["indptr"], vocabulary, row_count)

    def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """See ``Retriever``. Thread-safe: each thread has its own scratch memory."""
        topk = min(topk, self.row_count)
        scratch = self._scratch_arrays()
        hits = []
        for query in queries:
            known = [self._vocabulary[term] for term in text_analysis.terms(query) if term in self._vocabulary]
            best_rows, best_scores = np.empty(topk, np.int64), np.empty(topk, np.float32)
            count = self._top_rows(*self._index, np.asarray(known, np.int64), topk, *scratch, best_rows, best_scores)
            hits.append(SearchHits(best_rows[:count], best_scores[:count]))
        return hits

    def _scratch_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        arrays = getattr(self._scratch, "arrays", None)
        if arrays is None:
            arrays = (np.zeros(self.row_count, np.float32), np.empty(self.row_count, np.int32))
            self._scratch.arrays = arrays
        return arrays


def _index_ids(ids: list[list[int]], vocabulary: dict[str, int]) -> Any:
    bm25s = _bm25s()
    index = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numpy")
    index.index((ids, vocabulary), show_progress=False, create_empty_token=False)
    return index


def open_index(corpus_path: str | Path, index_root: str | Path | None = None) -> tuple[Corpus, BM25Retriever]:
    """Open a corpus file with its index, building and storing the index where there is none for this content.

    Args:
        corpus_path: JSON-lines file with ``contents`` and, where known, ``wikipedia_title`` or ``title``, ``url``, ``id``.
        index_root: where indexes are kept; None: beside the file, or the cache directory where that cannot be written.

    Raises:
        DataError: the file cannot be read or a row is unusable (with file and line).
    """
    bm25s = _bm25s()
    path = Path(corpus_path)
    analysis = hashlib.blake2b(Path(text_analysis.__file__).read_bytes(), digest_size=4).hexdigest()
    digest = f"{file_digest(path)[:24]}-{_FORMAT}-{analysis}"
    root = Path(index_root) if index_root else _index_root(path)
    folder = root / digest
    if not (folder / "complete.json").exists():
        _build(path, folder)
    corpus = Corpus.with_layout(path, folder)
    index = bm25s.BM25.load(str(folder), mmap=True, load_vocab=False)
    vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    return corpus, BM25Retriever._from_index(index, vocabulary, len(corpus))


def _build(path: Path, folder: Path) -> None:
    """Build into a temporary folder and rename, so that a reader sees a whole index or none."""
    logger.info("building the index of %s", path)
    corpus = Corpus.from_file(path)
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(term, len(vocabulary)) for term in text_analysis.terms(text)] for text in corpus.texts()]
    if not vocabulary:
        raise DataError(f"No document holds a single word: {path}. Check the rows' 'contents'.")
    index = _index_ids(ids, vocabulary)

    def not_built_elsewhere() -> None:
        if (folder / "complete.json").exists():
            raise FileExistsError

    try:
        with replaced_directory(folder, durable=False, before_visible=not_built_elsewhere) as draft:
            index.save(str(draft), show_progress=False)
            corpus.save_layout(draft)
            (draft / "vocabulary.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
            facts = {"corpus": path.name, "rows": len(corpus), "terms": len(vocabulary)}
            (draft / "complete.json").write_text(json.dumps(facts))
    except OSError:
        if not (folder / "complete.json").exists():
            raise  # otherwise another process finished the same index first
    for other in folder.parent.iterdir():  # indexes of earlier content of this file
        if other != folder and (other / "complete.json").exists():
            shutil.rmtree(other, ignore_errors=True)


def _index_root(path: Path) -> Path:
    beside = path.resolve().parent
    if os.access(beside, os.W_OK):
        return beside / f"{path.name}.index"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    return cache / "rollwright" / "retrieval" / f"{path.name}-{place}"
