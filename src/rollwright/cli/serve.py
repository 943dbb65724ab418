"""``rollwright serve-model`` serves a model with the built-in engine, ``retrieve`` a corpus to search agents, and ``serve-boxes`` boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollwright.errors import ConfigError


def serve_model(
    model: str = typer.Argument(..., metavar="DIR", help="Model directory or Hugging Face name."),
    host: str = typer.Option("127.0.0.1", help="Interface to bind. Any other than loopback needs --api-key."),
    port: int = typer.Option(30000, min=0, max=65535, help="Port to listen on; 0 chooses a free one and logs it."),
    api_key: str | None = typer.Option(None, envvar="ROLLWRIGHT_API_KEY", help="Bearer token that requests must carry."),
    model_name: str = typer.Option("", help="Name in the OpenAI protocol; default: DIR."),
    tokenizer: str | None = typer.Option(None, help="Tokenizer directory; default: DIR."),
    device: str = typer.Option("auto", help="auto uses a GPU if there is one."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    context_length: int | None = typer.Option(None, min=2, help="Prompt and new tokens together; default: the model's."),
    max_running_requests: int = typer.Option(256, min=1, help="Sequences decoded together."),
    max_waiting: int = typer.Option(16384, min=1, help="Requests that may wait; more get 429."),
    kv_cache_bytes: int | None = typer.Option(None, min=1, help="Memory of the cache; default: a quarter of free memory."),
    prefix_cache: bool = typer.Option(True, help="Keep the cache of finished requests for a conversation's next turn."),
    prompt_lookup_tokens: int = typer.Option(
        0, min=0, help="Tokens that a step drafts from a request's earlier text, while that is faster; 0: none."
    ),
    max_prompt_tokens: int | None = typer.Option(None, min=1, help="Longest prompt; default: what the context holds."),
    max_samples: int = typer.Option(256, min=1, help="Most completions of one request: its prompts times n."),
    max_body_bytes: int = typer.Option(
        0, min=0, help="Largest request body; 0: 1 MiB and 256 bytes for each token of the context."
    ),
    weights_root: list[Path] = typer.Option(  # noqa: B008 - how typer declares a repeated option
        [], help="Weights may be loaded from below this directory (repeatable); default: updates from disk are refused."
    ),
    max_adapters: int = typer.Option(16, min=1, help="LoRA adapters held at once, for each run."),
    run_key: list[str] = typer.Option(  # noqa: B008
        [],
        envvar="ROLLWRIGHT_RUN_KEYS",
        metavar="NAME=KEY",
        help="A run that shares the server, and its key (repeatable); the variable separates several by spaces.",
    ),
    receive_seconds: float = typer.Option(60.0, min=0.1, help="Time limit for receiving a request; then it is closed."),
    update_seconds: float = typer.Option(300.0, min=0.1, help="Undo a weight update after this time without a call."),
    threads: int | None = typer.Option(None, min=1, max=1024, help="Compute threads; default: one for each core."),
    random_seed: int = typer.Option(0, help="Seed of requests without one."),
    batch_invariant: bool = typer.Option(False, help="Answer a request with the same bits whatever else is computed."),
    enable_return_routed_experts: bool = typer.Option(
        False, help="Record the experts of each token, for requests with return_routed_experts."
    ),
    trust_remote_code: bool = typer.Option(False, help="Run code that comes with the model."),
    allowed_host: list[str] = typer.Option(  # noqa: B008
        [], help="Additional host name to accept, such as that of a reverse proxy (repeatable)."
    ),
    image_host: list[str] = typer.Option(  # noqa: B008
        [], help="Host to fetch images of chats from (repeatable); all other images must be data: URLs."
    ),
    log_level: str = typer.Option("warning", help="Of the HTTP server."),
) -> None:
    """Serve a model to clients of SGLang's native protocol and of the OpenAI protocol."""
    from rollwright.inference.server.settings import ServerSettings

    try:
        from rollwright.inference.server.application import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollwright serve-model needs the package {error.name}: pip install 'rollwright[server]'."
        ) from error

    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        model_name=model_name,
        weights_roots=[str(path) for path in weights_root],
        max_body_bytes=max_body_bytes,
        allowed_hosts=allowed_host,
        image_hosts=image_host,
        max_samples=max_samples,
        max_prompt_tokens=max_prompt_tokens,
        max_pending=max_waiting + max_running_requests,
        receive_seconds=receive_seconds,
        update_seconds=update_seconds,
        max_adapters=max_adapters,
        run_keys=_run_keys(run_key),
    )
    serve(
        model,
        settings,
        threads=threads,
        log_level=log_level,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        context_length=context_length,
        max_running_requests=max_running_requests,
        max_waiting=max_waiting,
        kv_cache_bytes=kv_cache_bytes,
        prefix_cache=prefix_cache,
        prompt_lookup_tokens=prompt_lookup_tokens,
        seed=random_seed,
        batch_invariant=batch_invariant,
        routing_replay=enable_return_routed_experts,
        trust_remote_code=trust_remote_code,
    )


def _run_keys(given: list[str]) -> dict[str, str]:
    """Parse ``NAME=KEY`` of each run.

    Raises:
        ConfigError: one has another form, or a name occurs twice.
    """
    pairs = [text.partition("=") for text in given]
    if wrong := next((name for name, _, key in pairs if not name or not key), None):
        raise ConfigError(f"--run-key of {wrong!r} has to be NAME=KEY, such as first=secret.")
    if len({name for name, *_ in pairs}) < len(pairs):
        raise ConfigError("--run-key names a run twice; give each run one key.")
    return {name: key for name, _, key in pairs}


def retrieve(
    corpus: Annotated[Path, typer.Option(help="JSON-lines file: contents, and title or wikipedia_title, url, id where known.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one, which is printed.")] = 5001,
    host: Annotated[str, typer.Option(help="Interface to bind. Any other than loopback needs --api-key.")] = "127.0.0.1",
    pages: Annotated[
        Path | None, typer.Option(help="JSON-lines file of whole pages (url, contents) for /access; else the corpus.")
    ] = None,
    index_dir: Annotated[
        Path | None, typer.Option(help="Directory for indexes; default: beside the corpus, or the cache directory.")
    ] = None,
    retriever: Annotated[
        str | None, typer.Option(help="bm25, dense or hybrid; default: hybrid with an encoder, bm25 without.")
    ] = None,
    bm25_weight: Annotated[
        float | None, typer.Option(help="Weight of BM25's list in hybrid search; that of dense search is 1. Default: 1.")
    ] = None,
    encoder: Annotated[Path | None, typer.Option(help="Directory of the encoder of dense search.")] = None,
    encoder_style: Annotated[
        str | None, typer.Option(help="e5, bge or plain: pooling and prefixes of the encoder's family.")
    ] = None,
    pooling: Annotated[str | None, typer.Option(help="mean, cls or last, in place of the style's.")] = None,
    query_prefix: Annotated[str | None, typer.Option(help="Text before each query, in place of the style's.")] = None,
    passage_prefix: Annotated[str | None, typer.Option(help="Text before each passage, in place of the style's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longer texts are cut before they are encoded; default: 256.")
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option(help="Folder of an existing dense index, such as one built on another machine.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Searches that run at once.")] = 1,
    api_key: Annotated[
        str | None, typer.Option(envvar="ROLLWRIGHT_API_KEY", help="Bearer token that requests must carry.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request body.")] = 8 << 20,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Additional host name to accept (repeatable).")] = None,
    receive_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit for receiving a request; then it is closed.")
    ] = 60.0,
) -> None:
    """Serve search over a corpus at /retrieve, whole pages at /access, and /health."""
    from rollwright.environments.corpus import Corpus
    from rollwright.environments.encoders import named_encoder
    from rollwright.environments.retrieval import open_retriever
    from rollwright.inference.server.settings import ServiceSettings, check_exposure

    try:
        from rollwright.environments.retrieval_service import create_app
        from rollwright.inference.server.service import bind, run, url_of
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollwright retrieve needs the package {error.name}: pip install 'rollwright[retrieval]'."
        ) from error

    check_exposure(host, api_key)
    settings_of_encoder = named_encoder(encoder, encoder_style, pooling, query_prefix, passage_prefix, max_tokens)
    documents, index = open_retriever(corpus, retriever, settings_of_encoder, index_dir, embeddings, bm25_weight)
    index.search(["warm up the compiled loop"], 1)
    settings = ServiceSettings(host, port, api_key, max_body_bytes, allowed_host or [], receive_seconds)
    app = create_app(documents, index, settings, pages=Corpus.from_file(pages) if pages else None, threads=threads)
    sockets = bind(settings)
    for listener in sockets:
        listener.listen()  # so that clients can connect as soon as the address is printed
    typer.echo(f"Serving {len(documents):,} documents of {corpus} at {url_of(settings)} (Ctrl-C ends it).")
    run(app, settings, sockets)


def serve_boxes(
    sandbox: Annotated[str, typer.Option(help="Kind of the boxes: bubblewrap, docker, docker:IMAGE, podman.")] = "bubblewrap",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one, which is printed.")] = 8200,
    host: Annotated[str, typer.Option(help="Interface to bind. Any other than loopback needs --api-key.")] = "127.0.0.1",
    api_key: Annotated[
        str | None, typer.Option(envvar="ROLLWRIGHT_BOXES_KEY", help="Bearer token that requests must carry.")
    ] = None,
    readable: Annotated[
        list[Path] | None, typer.Option(help="Directory that boxes may show to their programs (repeatable); default: none.")
    ] = None,
    max_boxes: Annotated[int, typer.Option(min=1, help="Boxes at a time.")] = 64,
    idle_seconds: Annotated[float, typer.Option(min=1.0, help="A box without a request for so long is stopped.")] = 3600.0,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request body: four thirds of an upload.")] = 128 << 20,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Additional host name to accept (repeatable).")] = None,
) -> None:
    """Lend boxes of this machine to runs on others: rollout.sandbox is the address."""
    from rollwright.inference.server.settings import ServiceSettings, check_exposure
    from rollwright.processes.boxes import check_box

    try:
        from rollwright.environments.box_service import BoxService
        from rollwright.inference.server.service import bind, run, url_of
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollwright serve-boxes needs the package {error.name}: pip install 'rollwright[server]'."
        ) from error

    check_exposure(host, api_key)
    service = BoxService(sandbox, readable or [], max_boxes, idle_seconds)
    check_box(sandbox)
    settings = ServiceSettings(host, port, api_key, max_body_bytes, allowed_host or [])
    sockets = bind(settings)
    for listener in sockets:
        listener.listen()
    typer.echo(f"Lending up to {max_boxes} boxes ({sandbox}) at {url_of(settings)} (Ctrl-C ends it).")
    run(service.app(settings), settings, sockets)
