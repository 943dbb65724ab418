"""What keeps a short step short: requests and answers cross together, rows are planned once, threads are measured."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from builtin_models import VOCABULARY, reference_logprobs, step, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import PromptTooLongError, QueueFullError, RequestAborted
from rollwright.inference.backends.builtin import engine as builtin_engine
from rollwright.inference.backends.builtin.batch import DecodeBatch
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.sampling import StepPlan, counter_uniforms
from rollwright.inference.request import ModelRequest

MODEL = tiny_model("qwen3")


def request(seed: int, new_tokens: int = 12, prompt: tuple[int, ...] = (5, 6, 7), **arguments) -> ModelRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, ignore_eos=True, **arguments)
    return ModelRequest(list(prompt), gconfig, seed=seed)


async def test_requests_of_one_turn_are_queued_together_and_answered_together(monkeypatch):
    loop, crossings = asyncio.get_running_loop(), []
    cross = loop.call_soon_threadsafe
    with BuiltinEngine(MODEL, max_running_requests=32) as engine:
        await engine.agenerate(request(0))
        before = engine.stats()["steps"]
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (crossings.append(a), cross(*a, **k))[1])
        responses = await asyncio.gather(*(engine.agenerate(request(seed)) for seed in range(24)))
        # the step that computes the prompts gives two tokens; a request that came late would take one more
        assert engine.stats()["steps"] - before == 11
    assert len(crossings) == 1
    assert [response.seed for response in responses] == list(range(24))
    assert len({tuple(response.output_tokens) for response in responses}) == 24


async def test_requests_that_can_run_do_not_wait_for_a_long_turn():
    with BuiltinEngine(MODEL, max_running_requests=4) as engine:
        began = threading.Event()
        stepper_step = engine._stepper.step
        engine._stepper.step = lambda finished: (began.set(), stepper_step(finished))[1]
        tasks = [asyncio.ensure_future(engine.agenerate(request(seed))) for seed in range(4)]
        asyncio.get_running_loop().call_soon(began.wait, 20)  # in the turn in which all four ask
        await asyncio.gather(*tasks)
        assert began.is_set()


async def test_one_refused_request_leaves_the_others_of_its_turn():
    with BuiltinEngine(MODEL, max_running_requests=2, max_waiting=1) as engine:
        engine.pause()
        tasks = [asyncio.ensure_future(engine.agenerate(request(seed))) for seed in range(4)]
        tasks.append(asyncio.ensure_future(engine.agenerate(request(9, prompt=(1,) * 300))))
        await asyncio.sleep(0.05)
        engine.resume()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[3:]] == [QueueFullError, PromptTooLongError]
        assert [outcome.seed for outcome in outcomes[:3]] == [0, 1, 2]
    with pytest.raises(RequestAborted):
        await engine.agenerate(request(0))


async def test_a_request_that_is_cancelled_in_the_turn_it_is_made_in_never_runs():
    with BuiltinEngine(MODEL, max_running_requests=8) as engine:
        kept, given_up = (asyncio.ensure_future(engine.agenerate(request(seed))) for seed in range(2))
        asyncio.get_running_loop().call_soon(given_up.cancel)
        assert (await kept).output_len == 12
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert engine.stats()["generated_tokens"] == 12


def test_random_numbers_of_a_plan_are_those_of_each_token():
    engine = BuiltinEngine(MODEL, max_running_requests=3)
    engine.pause()
    engine.submit([request(seed, 60) for seed in (3, 1 << 62, 5)])
    step(engine)
    table = engine._stepper._table
    plan = StepPlan(
        table,
        engine._stepper.scheduler.running,
        slice(0, len(engine._stepper.scheduler.running)),
        VOCABULARY,
        torch.device("cpu"),
    )
    generated = table.generated[:3].copy()
    for count in range(40):
        expected = counter_uniforms(np.array([3, 1 << 62, 5], dtype=np.uint64), generated + count)
        np.testing.assert_array_equal(plan.uniforms().numpy(), expected)
        plan.steps += 1
    engine.destroy()


@pytest.mark.parametrize("gap", [30.0, 300.0])
def test_below_the_minimum_a_token_comes_even_where_the_model_wants_nothing_but_the_end(gap):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
        model.lm_head.bias[2] = gap
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    gconfig = GenerationHyperparameters(max_new_tokens=6, min_new_tokens=5)
    with BuiltinEngine(model, max_running_requests=4) as engine:
        responses = engine.generate([ModelRequest([5, 6, 7], gconfig, seed=seed) for seed in range(20)])
    assert all(2 not in response.output_tokens[:5] and response.output_tokens[5:] == [2] for response in responses)
    assert len({response.output_tokens[0] for response in responses}) > 3
    for response in responses:
        expected = reference_logprobs(model, [5, 6, 7], response.output_tokens)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-3, rtol=1e-5)


def test_rows_that_come_and_go_keep_their_own_limits_minima_and_stop_tokens():
    sent = [
        request(
            seed, new_tokens=3 + 5 * seed % 23, min_new_tokens=seed % 7, stop_token_ids=[10 + seed, 40, 41], temperature=0.7
        )
        for seed in range(20)
    ]
    with BuiltinEngine(MODEL, max_running_requests=6) as engine, BuiltinEngine(MODEL, max_running_requests=1) as alone:
        together, apart = engine.generate(sent), [alone.generate([each])[0] for each in sent]
    for each, response, lonely in zip(sent, together, apart, strict=True):
        tokens, gconfig = response.output_tokens, each.gconfig
        stops = [i for i, t in enumerate(tokens) if t in gconfig.stop_token_ids and i + 1 >= gconfig.min_new_tokens]
        assert stops in ([], [len(tokens) - 1])
        assert (response.stop_reason, response.stop_match) == (("stop", tokens[-1]) if stops else ("length", None))
        assert stops or len(tokens) == gconfig.max_new_tokens
        assert not {10 + each.seed, 40, 41} & set(tokens[: max(0, gconfig.min_new_tokens - 1)])
        assert tokens == lonely.output_tokens


def test_threads_are_measured_and_nobody_elses_change(monkeypatch):
    most = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with BuiltinEngine(tiny_model("qwen3"), max_running_requests=4) as engine:
            assert torch.get_num_threads() == 2
            seen = []
            forward = engine._runner.forward
            monkeypatch.setattr(engine._runner, "forward", lambda *a: (seen.append(torch.get_num_threads()), forward(*a))[1])
            engine.generate([request(0)])
            assert set(seen) == {builtin_engine.fastest_threads(engine._runner, 4)}
            began = []
            thread = threading.Thread(target=lambda: began.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert began == [2]
    finally:
        torch.set_num_threads(most)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_what_decodes_beside_it(threads):
    """Neither the number of rows nor the length of a neighbour shows in a row, from two blocks of rows on."""
    model, before = tiny_model("qwen3", hidden_size=64, head_dim=16, intermediate_size=192), torch.get_num_threads()
    choose = np.random.default_rng(0)
    prompts = [tuple(choose.integers(3, VOCABULARY, length).tolist()) for length in choose.integers(1, 60, 40)]
    seen: dict[tuple[int, int], torch.Tensor] = {}
    compared = 0

    def compare(engine, batch, logits):
        nonlocal compared
        if isinstance(batch, DecodeBatch):
            for row, sequence in enumerate(engine._stepper.scheduler.running):
                token = (sequence.seed, int(engine._stepper._table.generated[row]))
                if token in seen and sequence.seed != 99:
                    compared += 1
                    assert torch.equal(logits[row], seen[token]), (token, batch.row_count, batch.kv_length)
                seen[token] = logits[row].clone()
        return logits

    try:
        torch.set_num_threads(threads)
        for count, length in ((40, 0), (13, 120), (24, 0), (40, 60)):
            engine = BuiltinEngine(model, max_running_requests=56, context_length=256, prefix_cache=False, threads=threads)
            engine.pause()
            forward = engine._runner.forward
            engine._runner.forward = lambda batch, cache, e=engine, f=forward: compare(e, batch, f(batch, cache))
            engine.submit([request(100 + row, 180, (7, row)) for row in range(9)])  # so that there always are two blocks
            step(engine)
            if length:
                engine.submit([request(99, 80, (5,) * length)])
                step(engine)
            for seed in choose.permutation(40)[:count].tolist():  # one by one: prompts are computed alone
                engine.submit([request(seed, 150, prompts[seed])])
                step(engine)
            engine.destroy()
    finally:
        torch.set_num_threads(before)
    assert compared > 500
