"""Dense search: the passages whose vectors have the largest inner product with the query's vector.

Up to ``EXACT_ROWS`` passages, NumPy compares the query with each of them. For more, FAISS (an inverted file with 8-bit codes) finds
candidates. In both cases the best candidates are scored again in float64, one by one, so that the order does not depend on how many
queries are searched together or on the number of threads.

An index is a folder: ``embeddings.npy`` (``[N, D]`` float32, memory-mapped), ``complete.json`` (corpus, encoder, pooling, prefix), the
positions of the corpus's rows, and ``faiss.index`` if there are more than ``EXACT_ROWS``. It can be made on a machine with a GPU and copied.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.environments.corpus import Corpus, SearchHits, file_digest
from rollwright.environments.encoders import Encoder, EncoderSettings, encoder_digest
from rollwright.environments.stored_index import COMPLETE, stored_index
from rollwright.errors import ConfigError, DataError
from rollwright.tracking import logging

logger = logging.getLogger("retrieval")

#: With more rows, candidates come from FAISS.
EXACT_ROWS = 100_000
#: Candidates beyond ``topk`` that are scored again.
_MARGIN = 64
#: Passages that are tokenized and sorted by length together.
_CHUNK = 4096
#: Version of the stored format.
_FORMAT = "1"


class DenseRetriever:
    """Rows in the order of their vectors' inner product with the query's. Every row matches; ties go to the lower row number.

    Args:
        encoder: encodes queries.
        embeddings_ND: the rows' vectors, ``[N, D]`` float32.
        candidates: a FAISS index over the same rows. If None, each query is compared with every row.
    """

    name = "dense"

    def __init__(self, encoder: Encoder, embeddings_ND: np.ndarray, candidates: Any = None) -> None:
        if embeddings_ND.ndim != 2 or embeddings_ND.shape[1] != encoder.dimensions:
            raise ConfigError(
                f"The vectors of the index have the shape {list(embeddings_ND.shape)}, but {encoder.settings.directory} makes vectors "
                f"of {encoder.dimensions} dimensions. Use the encoder that the index was made with, or make the index again."
            )
        self._encoder = encoder
        self._embeddings_ND = embeddings_ND
        self._candidates = candidates

    def search(self, queries: list[str], topk: int) -> list[SearchHits]:
        """See ``Retriever``. Thread-safe."""
        return [self._search(self._encoder.query(query), topk) for query in queries]

    def _search(self, query_D: np.ndarray, topk: int) -> SearchHits:
        wanted = min(topk + _MARGIN, len(self._embeddings_ND))
        if self._candidates is None:
            scores_N = self._embeddings_ND @ query_D
            rows = np.argpartition(-scores_N, wanted - 1)[:wanted]
        else:
            rows = self._candidates.search(query_D[None], wanted)[1][0]
            rows = rows[rows >= 0]  # fewer if the visited cells hold fewer
        scores = (self._embeddings_ND[rows].astype(np.float64) * query_D.astype(np.float64)).sum(1)
        order = np.lexsort((rows, -scores))[:topk]
        return SearchHits(rows[order].astype(np.int64), scores[order].astype(np.float32))


def open_dense_index(
    corpus_path: str | Path,
    settings: EncoderSettings,
    index_root: str | Path | None = None,
    embeddings: str | Path | None = None,
    device: str = "auto",
) -> tuple[Corpus, DenseRetriever]:
    """Open a corpus file and its dense index.

    Args:
        corpus_path: JSON-lines file, see ``Corpus``.
        settings: the encoder.
        index_root: directory of indexes, see ``stored_index``. The index is built there if there is none for this corpus and encoder.
        embeddings: folder of an existing index, which is only read. If None, the index is in ``index_root``.
        device: device of the encoder; ``"auto"`` uses a GPU if there is one.

    Raises:
        ConfigError: the encoder cannot be loaded, or the index belongs to another corpus, encoder, pooling, prefix or length.
        DataError: the index is incomplete or damaged, or needs FAISS, which is not installed.
    """
    path = Path(corpus_path)
    made_with = {
        "corpus_digest": file_digest(path)[:24],
        "pooling": settings.pooling,
        "passage_prefix": settings.passage_prefix,
        "max_tokens": settings.max_tokens,
        "encoder_digest": encoder_digest(settings.directory),
    }
    if embeddings is not None and not (Path(embeddings) / COMPLETE).is_file():
        raise DataError(
            f"There is no dense index in {embeddings}: it has no {COMPLETE}. Name a folder that was built for this corpus."
        )
    encoder = Encoder(settings, device)
    if embeddings is None:
        version = hashlib.blake2b(json.dumps([_FORMAT, made_with]).encode(), digest_size=8).hexdigest()
        folder = stored_index(
            path, index_root, "dense", version, functools.partial(_build, path, encoder, made_with), one=False
        )
    else:
        folder = Path(embeddings)
    facts = _checked_facts(folder, {**made_with, "dimensions": encoder.dimensions})
    try:
        vectors = np.load(folder / "embeddings.npy", mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"The vectors of the index cannot be read ({error}): {folder}. Delete the folder to build it again."
        ) from error
    if vectors.shape != (facts["rows"], facts["dimensions"]):
        raise DataError(
            f"The index {folder} is damaged: embeddings.npy has the shape {list(vectors.shape)}, {COMPLETE} says "
            f"{[facts['rows'], facts['dimensions']]}. Delete the folder to build it again."
        )
    candidates = _open_candidates(folder) if len(vectors) > EXACT_ROWS else None
    return Corpus.with_layout(path, folder), DenseRetriever(encoder, vectors, candidates)


def _checked_facts(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Read what an index was made with, and refuse another corpus, encoder or setting."""
    try:
        facts = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"The index {folder} is damaged ({COMPLETE}: {error}). Delete the folder to build it again.") from None
    differing = [
        f"{key.replace('_', ' ')} {facts.get(key)!r}, now {value!r}"
        for key, value in expected.items()
        if facts.get(key) != value
    ]
    if differing:
        raise ConfigError(
            f"The index {folder} was made differently: {'; '.join(differing)}. Vectors can only be compared if they were made in the "
            "same way: use the same corpus, encoder and settings, or build an index for these."
        )
    return facts


def _build(path: Path, encoder: Encoder, made_with: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Encode every passage of a corpus. Returns the facts for ``complete.json``."""
    corpus = Corpus.from_file(path)
    rows = len(corpus)
    if rows > EXACT_ROWS:
        _faiss()  # fails before the work
    logger.info("encoding the %s passages of %s with %s", f"{rows:,}", path, encoder.settings.directory)
    vectors = np.lib.format.open_memmap(
        folder / "embeddings.npy", mode="w+", dtype=np.float32, shape=(rows, encoder.dimensions)
    )
    reported = time.monotonic()
    for first in range(0, rows, _CHUNK):
        texts = [corpus.text(row) for row in range(first, min(first + _CHUNK, rows))]
        for positions, batch_KD in encoder.passages(texts):
            if not np.isfinite(batch_KD).all():
                raise DataError(f"The encoder {encoder.settings.directory} gives vectors that are not finite; use another one.")
            vectors[first + positions] = batch_KD
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            logger.info("%s of %s passages", f"{first + len(texts):,}", f"{rows:,}")
    vectors.flush()
    corpus.save_layout(folder)
    if rows > EXACT_ROWS:
        _write_candidates(vectors, folder)
    directory = encoder.settings.directory.resolve().name
    return {**made_with, "encoder": directory, "rows": rows, "dimensions": encoder.dimensions}


# -- candidates of large corpora -------------------------------------------------------------------------------------


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise DataError(
            f"Dense search over more than {EXACT_ROWS:,} passages needs the package faiss: pip install 'rollwright[dense]'."
        ) from error
    return faiss


def _write_candidates(vectors_ND: np.ndarray, folder: Path) -> None:
    """Build the inverted file: ``4 sqrt(N)`` cells, trained on 64 random rows per cell."""
    faiss = _faiss()
    rows, dimensions = vectors_ND.shape
    cells = int(4 * math.sqrt(rows))
    index = faiss.index_factory(dimensions, f"IVF{cells},SQ8", faiss.METRIC_INNER_PRODUCT)
    sample = np.sort(np.random.default_rng(0).choice(rows, min(rows, 64 * cells), replace=False))
    index.train(np.ascontiguousarray(vectors_ND[sample]))
    for first in range(0, rows, 65_536):
        index.add(np.ascontiguousarray(vectors_ND[first : first + 65_536]))
    faiss.write_index(index, str(folder / "faiss.index"))


def _open_candidates(folder: Path) -> Any:
    faiss = _faiss()
    try:
        index = faiss.read_index(str(folder / "faiss.index"))
    except RuntimeError as error:
        raise DataError(f"The index cannot be read ({error}): {folder}. Delete the folder to build it again.") from error
    index.nprobe = max(16, index.nlist // 16)  # a sixteenth of the cells
    return index
