"""Where the indexes of a corpus are stored: in ``corpus.jsonl.index/`` next to the file, or in the user's cache directory if the file's
directory is not writable.

The name of an index's folder contains a hash of the corpus file and one of everything else that the index depends on, so that a changed
corpus or another encoder gets another index.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollwright.atomic import replaced_directory
from rollwright.environments.corpus import file_digest

#: Written last; holds facts about the index.
COMPLETE = "complete.json"


def stored_index(
    corpus: Path, root: str | Path | None, kind: str, version: str, build: Callable[[Path], dict[str, Any]], *, one: bool
) -> Path:
    """Return the folder of an index. If there is none, the index is built first.

    Args:
        corpus: the corpus file.
        root: directory of the indexes. By default it is beside the corpus, or in the cache directory if that is not writable.
        kind: kind of index, such as ``"bm25"``.
        version: hash of what the index depends on besides the corpus.
        build: writes the index into an empty folder and returns facts for ``complete.json``.
        one: remove other versions of this kind. Indexes of earlier content of the file are always removed.
    """
    digest = file_digest(corpus)[:24]
    folder = (Path(root) if root else _default_root(corpus)) / f"{digest}-{kind}-{version}"
    complete = folder / COMPLETE
    if complete.exists():
        return folder

    def refuse_second_build() -> None:
        if complete.exists():
            raise FileExistsError

    try:  # in a temporary folder, so that a reader sees a complete index or none
        with replaced_directory(folder, durable=False, before_visible=refuse_second_build) as draft:
            facts = build(draft)
            (draft / COMPLETE).write_text(json.dumps({"corpus": corpus.name, "corpus_digest": digest, **facts}, indent=2))
    except OSError:
        if not complete.exists():
            raise  # if the file exists, another process has finished the same index first
    for other in folder.parent.iterdir():
        stale = not other.name.startswith(digest) or (one and other.name.startswith(f"{digest}-{kind}-"))
        if stale and other != folder and (other / COMPLETE).exists():
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _default_root(path: Path) -> Path:
    beside = path.resolve().parent
    if os.access(beside, os.W_OK):
        return beside / f"{path.name}.index"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    return cache / "rollwright" / "retrieval" / f"{path.name}-{digest}"
