"""``rollwright retrieve``: serve a corpus to search agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def retrieve(
    corpus: Annotated[Path, typer.Option(help="JSON-lines file: contents, and title or wikipedia_title, url, id where known.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one, which is printed.")] = 5001,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than this machine's own needs --api-key.")
    ] = "127.0.0.1",
    pages: Annotated[
        Path | None, typer.Option(help="JSON-lines file of whole pages (url, contents) for /access; else the corpus.")
    ] = None,
    index_dir: Annotated[
        Path | None, typer.Option(help="Where indexes are kept; else beside the corpus, or the cache directory.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Searches that run at once.")] = 1,
    api_key: Annotated[
        str | None, typer.Option(envvar="ROLLWRIGHT_API_KEY", help="Bearer token that requests must carry.")
    ] = None,
) -> None:
    """Serve BM25 search over a corpus at /retrieve, whole pages at /access, and /health."""
    from rollwright.environments.bm25 import open_index
    from rollwright.environments.corpus import Corpus
    from rollwright.errors import ConfigError

    try:
        from rollwright.environments.retrieval_service import check_exposure, create_app, open_sockets, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollwright retrieve needs the package {error.name}: pip install 'rollwright[retrieval]'."
        ) from error

    check_exposure(host, api_key)
    documents, index = open_index(corpus, index_dir)
    index.search(["warm up the compiled loop"], 1)
    app = create_app(documents, index, api_key=api_key, pages=Corpus.from_file(pages) if pages else None, threads=threads)
    sockets = open_sockets(host, port)
    typer.echo(
        f"Serving {len(documents):,} documents of {corpus} at http://{host}:{sockets[0].getsockname()[1]} (Ctrl-C ends it)."
    )
    serve(app, sockets)
