"""The engine protocol: what a minimal engine inherits, and that nobody asks an engine what it has."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
import torch

import rollwright
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse

SOURCE = Path(rollwright.__file__).parent
ENGINES = {"engine", "client", "backend", "rollout", "server", "publisher"}


def is_an_engine(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_") in ENGINES


def asks_what_it_has(path: Path) -> list[str]:
    """Calls of ``hasattr`` and ``getattr`` on an engine in one file."""
    return [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
        and isinstance(node.args[1], ast.Constant)
        and any(is_an_engine(inner) for inner in ast.walk(node.args[0]) if isinstance(inner, ast.Name | ast.Attribute))
    ]


def test_no_engine_is_asked_what_it_has():
    found = [
        place
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "config"  # where these are names of sections
        for place in asks_what_it_has(path)
    ]
    assert found == []


class Minimal(InferenceEngine):
    """The six methods that an engine has to define."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if request.input_ids == [0]:
            raise EngineError("no")
        try:
            await asyncio.sleep(0.01 * request.input_ids[0])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ModelResponse(list(request.input_ids), [1], [-0.5], [0])

    def get_version(self) -> int:
        return 0

    def set_version(self, version: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self, rid: str | None = None) -> None: ...


async def test_a_batch_comes_in_order_and_ends_with_the_first_failure():
    engine = Minimal()
    answers = await engine.agenerate_batch([ModelRequest([2]), ModelRequest([1])])
    assert [answer.input_tokens for answer in answers] == [[2], [1]]
    with pytest.raises(EngineError, match="no"):
        await engine.agenerate_batch([ModelRequest([500]), ModelRequest([0])])
    await asyncio.sleep(0)
    assert engine.cancelled == 1


async def test_a_stream_is_the_whole_response():
    assert [part.output_tokens async for part in Minimal().astream(ModelRequest([1]))] == [[1]]


def test_what_a_minimal_engine_does_not_say_has_a_default():
    engine, called = Minimal(), []
    engine.when_resumed(lambda: called.append(1))
    engine.go_back(0)
    assert called == [1]
    assert engine.probe(ModelRequest([1])) == engine.stats() == {}
    assert (engine.context_length, engine.recorder, engine.local_model, engine.logprob_tolerance) == (None,) * 4
    with pytest.raises(WeightUpdateError, match="Minimal can be given no weights"):
        engine.update_weights(version=1, weights={"a": torch.zeros(1)})
    with pytest.raises(WeightUpdateError, match="Minimal can be given no weights"):
        engine.publish(1)
