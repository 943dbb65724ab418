"""Each kind of service, over real HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from rollwright import GRPOConfig
from rollwright.config.modes import StoreConfig
from rollwright.environments.bm25 import BM25Retriever
from rollwright.environments.corpus import Corpus
from rollwright.environments.retrieval_service import create_app
from rollwright.inference.server.application import create_application
from rollwright.inference.server.service import ServerThread
from rollwright.inference.server.settings import ServerSettings, ServiceSettings

pytest.importorskip("openai")
pytest.importorskip("sqlalchemy")

from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.store import ExperienceStore
from rollwright.trainers.modes.serve import RunBook, application


@contextlib.contextmanager
def service(kind: str, engine) -> Iterator[httpx.Client]:
    """A client of a service of this kind, with the key that it wants."""
    with contextlib.ExitStack() as opened:
        headers = {}
        if kind == "front":
            front = opened.enter_context(OpenAIFront(engine.tokenizer, max_body_bytes=4096))
            episode = opened.enter_context(front.episode(engine))
            url, headers = front.url, {"Authorization": f"Bearer {episode.api_key}"}
        else:
            settings = ServiceSettings(max_body_bytes=4096)
            if kind == "server":
                app = create_application(engine, settings := ServerSettings(port=0, max_body_bytes=4096))
            elif kind == "retrieval":
                corpus = Corpus.from_rows([{"contents": "red mug"}])
                app = create_app(corpus, BM25Retriever.build(corpus.texts()), settings)
            else:
                settings.api_key = "secret"
                headers = {"Authorization": "Bearer secret"}
                config = GRPOConfig(mode="serve", store=StoreConfig())
                front = opened.enter_context(OpenAIFront(engine.tokenizer))
                store = opened.enter_context(ExperienceStore("sqlite://"))
                app = application(RunBook(front, engine, store, config, "service-1"), settings)
            thread = ServerThread(app, settings)  # which leaves the shared engine open
            opened.callback(thread.stop)
            url = thread.url
        yield opened.enter_context(httpx.Client(base_url=url, headers=headers, timeout=120))
    engine.resume()
