"""BM25 search over a corpus. bm25s builds and stores the index, which is memory-mapped and searched by a compiled loop.

The stored index depends on the corpus file's content and on the code that converts text to terms; if either changes, it is rebuilt.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import threading
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.environments.corpus import Corpus, SearchHits
from rollwright.environments.stored_index import stored_index
from rollwright.errors import DataError
from rollwright.tracking import logging

logger = logging.getLogger("retrieval")

K1, B = 1.5, 0.75
#: Version of the stored format.
_FORMAT = "1"


class BM25Retriever:
    """Lucene's BM25 (k1 1.5, b 0.75). Rows that contain no query term are not returned."""

    name = "bm25"

    def __init__(self, index: Any, vocabulary: dict[str, int], row_count: int) -> None:
        self._search = _compiled()
        self._index = tuple(index.scores[name] for name in ("data", "indices", "indptr"))
        self._vocabulary = vocabulary
        self.row_count = row_count
        self._scratch = threading.local()

    @classmethod
    def build(cls, texts: Iterable[str]) -> BM25Retriever:
        """Index texts in memory."""
        return cls(*_index(texts, "there is nothing to index"))

    def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """See ``Retriever``. Thread-safe: each thread has its own scratch memory."""
        topk = min(topk, self.row_count)
        if not hasattr(self._scratch, "arrays"):
            self._scratch.arrays = (np.zeros(self.row_count, np.float32), np.empty(self.row_count, np.int32))
        hits = []
        for query in queries:
            known = [self._vocabulary[term] for term in terms(query) if term in self._vocabulary]
            best_rows, best_scores = np.empty(topk, np.int64), np.empty(topk, np.float32)
            count = self._search(*self._index, np.asarray(known, np.int64), topk, *self._scratch.arrays, best_rows, best_scores)
            hits.append(SearchHits(best_rows[:count], best_scores[:count]))
        return hits


def open_index(corpus_path: str | Path, index_root: str | Path | None = None) -> tuple[Corpus, BM25Retriever]:
    """Open a corpus file and its index, which is built and stored if there is none for the file's content.

    Args:
        corpus_path: JSON-lines file with ``contents`` and, optionally, ``wikipedia_title`` or ``title``, ``url`` and ``id``.
        index_root: directory of the indexes. None uses the corpus's directory, or the cache directory if the former is not writable.

    Raises:
        DataError: the file cannot be read, or a row is unusable (the message has file and line).
    """
    bm25s = _bm25s()
    path = Path(corpus_path)
    analysis = "".join(map(inspect.getsource, (fold, stem, terms))) + " ".join(sorted(STOP_WORDS))
    version = f"{_FORMAT}-{hashlib.blake2b(analysis.encode(), digest_size=4).hexdigest()}"
    folder = stored_index(path, index_root, "bm25", version, functools.partial(_build, path), one=True)
    corpus = Corpus.with_layout(path, folder)
    vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    return corpus, BM25Retriever(bm25s.BM25.load(str(folder), mmap=True, load_vocab=False), vocabulary, len(corpus))


def _build(path: Path, folder: Path) -> dict[str, Any]:
    logger.info("building the index of %s", path)
    corpus = Corpus.from_file(path)
    index, vocabulary, _ = _index(corpus.texts(), str(path))
    index.save(str(folder), show_progress=False)
    corpus.save_layout(folder)
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    return {"rows": len(corpus), "terms": len(vocabulary)}


def _index(texts: Iterable[str], source: str) -> tuple[Any, dict[str, int], int]:
    """Index texts.

    Returns:
        The index, the number of each term, and the number of texts.
    """
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)] for text in texts]
    if not vocabulary:
        raise DataError(f"No text holds a single word: {source}. Check the corpus's 'contents'.")
    index = _bm25s().BM25(method="lucene", k1=K1, b=B, backend="numpy")
    index.index((ids, vocabulary), show_progress=False, create_empty_token=False)
    return index, vocabulary, len(ids)


def _bm25s() -> Any:
    try:
        import bm25s
        import numba  # noqa: F401  (compiles the search loop)
    except ModuleNotFoundError as error:
        raise DataError(f"BM25 search needs the package {error.name}: pip install 'rollwright[retrieval]'.") from error
    return bm25s


# -- terms -----------------------------------------------------------------------------------------------------------

#: Function words that say nothing about a passage's subject.
STOP_WORDS = frozenset(
    """
    a an and are as at be been but by did do does for from had has have he her his how i if in into is it its me
    my no not of on or our she so such that the their them then there these they this to was we were what when
    where which who whom whose why will with you your
    """.split()  # noqa: SIM905 - a line each would be 65 lines
)


def fold(text: str) -> str:
    """Lower case without diacritics: ``"Röntgen"`` becomes ``"rontgen"``."""
    text = text.lower()
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def stem(word: str) -> str:
    """Merge a plural with its singular, and nothing more (Harman's S-stemmer, JASIS 42(1), 1991)."""
    if len(word) < 4 or not word.endswith("s"):
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        return word[:-3] + "y"
    if word.endswith("es") and word[-3] not in "aeo":
        return word[:-1]
    if word[-2] not in "us":
        return word[:-1]
    return word


def terms(text: str) -> list[str]:
    """The index terms of a text, in order, with repetitions.

    Text that consists of function words only keeps them, so that "The Who" can be found.
    """
    words = re.findall(r"\w+", fold(text))
    return [stem(word) for word in words if word not in STOP_WORDS] or words


# -- the inner loop --------------------------------------------------------------------------------------------------


@functools.cache
def _compiled() -> Any:
    """Compile the inner loop of search, which releases the GIL, so that searches do not block the event loop."""
    from numba import njit

    return njit(nogil=True, cache=True)(_top_rows)


def _top_rows(
    weights: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    term_ids: np.ndarray,
    topk: int,
    scores: np.ndarray,
    touched: np.ndarray,
    best_rows: np.ndarray,
    best_scores: np.ndarray,
) -> int:
    """Sum the posting lists of a query's terms and find the best rows; ties go to the lower row number.

    Only rows that contain a term are visited and reset, so the cost of a query depends on its posting lists and not on the corpus size.

    Args:
        weights: BM25 weight of each posting.
        rows: row number of each posting.
        starts: index of each term's first posting.
        term_ids: the query's terms, ``[Q]``.
        topk: maximum number of results.
        scores: scratch memory, ``[N]`` float32, all zero before and after.
        touched: scratch memory, ``[N]`` int32.
        best_rows: output, ``[topk]`` row numbers, best first.
        best_scores: output, ``[topk]`` scores.

    Returns:
        Number of results.
    """
    count = 0
    for term in term_ids:
        for posting in range(starts[term], starts[term + 1]):
            row = rows[posting]
            if scores[row] == 0.0:
                touched[count] = row
                count += 1
            scores[row] += weights[posting]

    found = 0
    for position in range(count):
        row = touched[position]
        score = scores[row]
        scores[row] = 0.0
        if found == topk:
            worst = best_scores[topk - 1]
            if score < worst or (score == worst and row > best_rows[topk - 1]):
                continue
            slot = topk - 1
        else:
            slot = found
            found += 1
        while slot > 0 and (score > best_scores[slot - 1] or (score == best_scores[slot - 1] and row < best_rows[slot - 1])):
            best_scores[slot] = best_scores[slot - 1]
            best_rows[slot] = best_rows[slot - 1]
            slot -= 1
        best_scores[slot] = score
        best_rows[slot] = row
    return found
