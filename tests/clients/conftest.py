"""Clients of other projects, unmodified, in an environment of their own: run as processes, and what they did is in the record.

``scripts/make_client_envs.sh`` makes the environment; without it these tests are skipped. ``--write-agents-table`` writes the table
of docs/agents.md anew; otherwise it has to be what the tests showed.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from client_cases import Case, Played, World, environment_of, run_program
from command_programs import settings_of
from directed_model import Directed, check_record, defaults, dialects_of, small_engine


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """One engine and one front for all clients; tests are skipped without the clients' environment."""
    environment_of("vendors_openai")
    pytest.importorskip("llguidance")
    from rollwright.inference.front.openai_front import OpenAIFront

    path, refused, losses = tmp_path_factory.mktemp("clients") / "policy", defaultdict(list), defaultdict(list)
    watched = watched_for_refusals(refused, losses)
    with watched, small_engine(path) as engine, OpenAIFront(engine.tokenizer, str(path)) as front:
        yield World(engine, front, path, refused, losses)


@contextlib.contextmanager
def watched_for_refusals(refused: dict[str, list[tuple[str, str, int]]], losses: dict[str, list[str]]) -> Iterator[None]:
    """Note each request of a front that is made meanwhile and not answered with success, under its key; lose answers on their way.

    ``losses`` has, for each key, how the next answers are lost after the model has given them: ``error`` (status 500), or ``closed`` (the
    connection ends in their middle).
    """
    from rollwright.inference.front import openai_front
    from rollwright.inference.server.exchange import given_key

    make = openai_front._application

    def watched(*arguments: Any) -> Any:
        app = make(*arguments)

        @app.middleware("http")
        async def watch(request: Any, call_next: Any) -> Any:
            response, key = await call_next(request), given_key(request.headers) or ""
            if response.status_code >= 400:
                seen = request.method, request.url.path, response.status_code
                refused[key].append(seen)
            elif request.method == "POST" and losses[key]:
                answer = b"".join([part async for part in response.body_iterator])
                return lost(answer, response.media_type, losses[key].pop())
            return response

        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_front, "_application", watched)
        yield


def lost(answer: bytes, media_type: str | None, how: str) -> Any:
    """The response of a server that fails after the model has answered."""
    from fastapi.responses import JSONResponse, StreamingResponse

    if how == "error":
        return JSONResponse({"error": {"message": "The server had an error.", "type": "server_error"}}, status_code=500)

    async def half() -> Any:
        yield answer[: len(answer) // 2]
        raise ConnectionResetError("lost on purpose")

    return StreamingResponse(half(), media_type=media_type or "text/event-stream")


@pytest.fixture(scope="session")
def skipped() -> list[Case]:
    """The cases that did not run here."""
    return []


@pytest.fixture(autouse=True)
def _long_forms(request, skipped):
    """Skip what runs by command only."""
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    if isinstance(case, Case) and case.is_long and not request.config.getoption("--whole-programs"):
        skipped.append(case)
        pytest.skip("runs with --whole-programs")


@pytest.fixture(scope="session")
def processes(request, world):
    """One process for each program whose cases are to be run; two at a time, as starting one is most of its time."""
    programs: dict[str, list[Case]] = defaultdict(list)
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, Case) and (not case.is_long or request.config.getoption("--whole-programs")):
            programs[case.program].append(case)

    def play(cases: list[Case]) -> tuple[dict[str, Any], dict[str, Any]]:
        opened = {}
        for case in cases:
            engine = Directed(world.engine, case.replies, case.aside, case.beside)
            episode = world.front.episode(engine, gconfig=defaults(), **settings_of(case))
            world.losses[episode.api_key] += case.lost
            opened[case.name] = engine, episode
        shared = {"model_path": str(world.path)} if cases[0].program.startswith("evaluators") else {}
        asked = {
            name: {"base_url": episode.base_url, "api_key": episode.api_key, **shared} for name, (_, episode) in opened.items()
        }
        return opened, run_program(cases, asked, world.front.socket)

    with ThreadPoolExecutor(2) as pool:
        yield {program: pool.submit(play, cases) for program, cases in programs.items()}


@pytest.fixture(scope="session")
def shown() -> list[tuple[str, ...]]:
    """The lines of the table: client, version, dialect, what was shown, calls, rows."""
    return []


@pytest.fixture
def play(processes, world, shown, skipped):
    """Run a case (with the others of its program), check its record, and add its line to the table."""

    def played(case: Case) -> Played:
        try:
            opened, said = processes[case.program].result()
        except pytest.skip.Exception:
            skipped.append(case)
            raise
        engine, episode = opened[case.name]
        result = said["results"][case.name]
        asked = "\n---\n".join(world.text(each.input_ids)[-1500:] for each in engine.requests)
        assert "error" not in result, f"{result['error']}\nThe model was asked {len(engine.requests)} times:\n{asked}"
        assert not [*engine.left, *engine.left_beside], f"replies that were not asked for:\n{asked}"
        rows = check_record(episode, world.engine, engine.said)
        assert len(rows) == case.rows, f"{len(rows)} rows of {len(episode.calls)} calls:\n{asked}"
        dialects = ", ".join(f"`{dialect}`" for dialect in dialects_of(episode))
        told = case.shown + (f"; {case.why}" if case.why else "")
        shown.append((case.client, said["versions"][case.client], dialects, told, str(len(episode.calls)), str(len(rows))))
        refused = world.refused[episode.api_key]
        return Played(
            result["value"], rows, episode.records, engine.requests, refused, episode.side_calls, episode.retries.count
        )

    return played
