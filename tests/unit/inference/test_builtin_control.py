"""Pausing, aborting, cancelling, closing and failing: every request ends, and no row is lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from builtin_models import reference_logprobs, step, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError, EngineError, QueueFullError, RequestAborted
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

LONG = GenerationHyperparameters(max_new_tokens=100, ignore_eos=True)


@pytest.fixture
def engine():
    with BuiltinEngine(tiny_model("qwen3"), max_running_requests=4, prefill_tokens=16) as built:
        yield built


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def test_abort_by_conversation_returns_what_there_is(engine):
    engine.pause()
    futures = engine.submit([ModelRequest([5, 6], LONG, rid=rid) for rid in "aabbcc"])
    step(engine, 3)
    engine.abort("a")
    partial = [f.result(60) for f in futures[:2]]
    assert [(r.stop_reason, r.output_len, r.truncated) for r in partial] == [("abort", 4, False)] * 2
    assert all(len(r.output_logprobs) == len(r.output_versions) == 4 for r in partial)
    assert not any(f.done() for f in futures[2:])
    engine.abort()
    rest = [f.result(60) for f in futures[2:]]
    assert [r.output_len for r in rest] == [4, 4, 0, 0]  # two of them never left the queue
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_abort_in_the_middle_of_a_prompt(engine):
    engine.pause()
    futures = engine.submit([ModelRequest([5] * 3, LONG), ModelRequest([6] * 100, LONG, rid="long")])
    step(engine, 2)
    assert engine._stepper.scheduler.partial is not None
    engine.abort("long")
    assert futures[1].result(60).output_len == 0
    engine.resume()
    assert futures[0].result(60).output_len == 100


def test_no_step_runs_after_pause(engine):
    futures = engine.submit([ModelRequest([5, 6], LONG.new(max_new_tokens=200)) for _ in range(8)])
    wait_until(lambda: engine.stats()["generated_tokens"] > 20)
    engine.pause()
    steps = engine.stats()["steps"]
    time.sleep(0.05)
    assert engine.stats()["steps"] == steps
    more = engine.submit([ModelRequest([7], LONG)])  # accepted, not run
    engine.resume()
    assert all(f.result(60).output_len >= 100 for f in [*futures, *more])


async def test_a_cancelled_task_frees_its_row(engine):
    for _ in range(10):  # where this thread was kept from it, those that ran had ended
        tasks = [asyncio.create_task(engine.agenerate(ModelRequest([5, 6], LONG.new(max_new_tokens=240)))) for _ in range(6)]
        await asyncio.sleep(0.02)
        was_running = not tasks[0].done()
        for task in tasks[:5]:
            task.cancel()
        response = await tasks[5]
        assert response.output_len == 240
        ends = await asyncio.gather(*tasks[:5], return_exceptions=True)
        if was_running:
            break
    assert was_running
    assert isinstance(ends[0], asyncio.CancelledError)
    wait_until(lambda: engine.stats()["running"] == 0 and engine.stats()["waiting"] == 0)


def test_several_event_loops_and_synchronous_calls_at_once(engine):
    outputs: dict[int, list[int]] = {}

    def run(index: int) -> None:
        async def several() -> None:
            request = ModelRequest([5 + index], LONG.new(max_new_tokens=8), seed=index)
            responses = await asyncio.gather(*(engine.agenerate(request) for _ in range(3)))
            assert engine.generate([request])[0].output_tokens == responses[0].output_tokens  # while this loop runs
            outputs[index] = responses[2].output_tokens

        asyncio.run(several())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outputs) == list(range(6))


def test_destroy_ends_requests_and_the_thread():
    engine = BuiltinEngine(tiny_model("qwen3"), max_running_requests=2)
    futures = engine.submit([ModelRequest([5, 6], LONG.new(max_new_tokens=240)) for _ in range(200)])
    engine.destroy()
    engine.destroy()
    ended = [future for future in futures if future.exception(60) is None]  # before it was destroyed
    assert len(ended) < 100
    for future in futures[len(ended) :]:
        with pytest.raises(RequestAborted, match="closed"):
            future.result(60)
    assert not engine._thread.is_alive()
    with pytest.raises(RequestAborted, match="closed"):
        engine.generate([ModelRequest([5])])


def test_a_failing_step_fails_its_requests_with_the_cause_and_the_engine_goes_on(engine, monkeypatch):
    forward = engine._runner.forward
    monkeypatch.setattr(engine._runner, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("no more of it")))
    with pytest.raises(EngineError, match="MemoryError: no more of it") as caught:
        engine.generate([ModelRequest([5, 6], LONG), ModelRequest([7], LONG)])
    assert isinstance(caught.value.__cause__, MemoryError)
    monkeypatch.setattr(engine._runner, "forward", forward)
    request = ModelRequest([5, 6], LONG.new(max_new_tokens=5))
    response = engine.generate([request])[0]
    expected = reference_logprobs(engine.model, [5, 6], response.output_tokens)
    assert max(abs(a - b) for a, b in zip(response.output_logprobs, expected.tolist(), strict=True)) < 1e-4


def test_a_full_queue_refuses_and_recovers():
    with BuiltinEngine(tiny_model("qwen3"), max_running_requests=2, max_waiting=3) as engine:
        engine.pause()
        engine.submit([ModelRequest([5], LONG)] * 4)  # two can run, the others wait
        with pytest.raises(QueueFullError, match="max_waiting is 3"):
            engine.submit([ModelRequest([5], LONG)] * 2)
        futures = engine.submit([ModelRequest([5], LONG)])
        engine.resume()
        assert futures[0].result(60).output_len == 100
        assert engine.generate([ModelRequest([5], LONG.new(max_new_tokens=2))])[0].output_len == 2


def test_wrong_settings_and_requests_are_refused(engine):
    with pytest.raises(ConfigError, match="on_weight_update"):
        BuiltinEngine(tiny_model("qwen3"), on_weight_update="never")
    with pytest.raises(ConfigError, match="positions"):
        BuiltinEngine(tiny_model("qwen3"), context_length=10_000)
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        BuiltinEngine(tiny_model("qwen3"), context_length=200, kv_cache_bytes=1000)
    with pytest.raises(
        ConfigError, match=r"kv_cache_bytes leaves 1 bytes for running sequences, and one token of this model takes \d+"
    ):
        BuiltinEngine(tiny_model("qwen3"), kv_cache_bytes=1)
    for change, words in (
        ({"lora_name": "x"}, "lora_name"),
        ({"image_data": ["aGk="]}, "multi_modal"),
        ({"position_ids": [1]}, "position_ids"),
        ({"branch_ids": [1, 1, 1]}, "branch_ids"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.generate([ModelRequest([5, 6], **change)])
