"""``batch_invariant``: what a request is answered has the same bits alone and among any others."""

import functools
import itertools
import logging
import random
import re

import pytest
import torch
from builtin_models import VOCABULARY, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError, EngineError
from rollwright.inference.backends.builtin import batch_invariance
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.kv_cache import KVCache
from rollwright.inference.backends.builtin.model import DOWN, HEAD, QKV
from rollwright.inference.request import ModelRequest

MODELS = ["llama", "qwen2", "qwen3", "gpt2"]


@functools.cache
def shared_model(architecture):
    """What an engine finds when it starts is kept with the model."""
    return tiny_model(architecture)


def start(model, rows, threads=1, **settings):
    settings = {"kv_cache_bytes": 1 << 23, "batch_invariant": True, "threads": threads, **settings}
    return BuiltinEngine(model, max_running_requests=rows, **settings)


def requests(count, longest=150, tokens=14, **arguments):
    """Prompts of all lengths, some of them twice, some with a common beginning; lengths, temperatures and limits differ."""
    drawn = random.Random(1)
    beginning = [drawn.randrange(3, VOCABULARY) for _ in range(60)]
    made = []
    for number in range(count):
        prompt = [drawn.randrange(3, VOCABULARY) for _ in range(drawn.choice([1, 2, 7, 15, 16, 17, 33, 70, longest]))]
        prompt = beginning[: drawn.randrange(60)] + prompt if number % 3 == 0 else prompt
        prompt = made[-1].input_ids if number % 5 == 4 else prompt
        gconfig = GenerationHyperparameters(
            max_new_tokens=drawn.randrange(1, tokens + 1),
            temperature=drawn.choice([1.0, 1.0, 0.7]),
            top_p=drawn.choice([1.0, 1.0, 0.9]),
            ignore_eos=True,
            **arguments,
        )
        made.append(ModelRequest(list(prompt)[-200:], gconfig, seed=number, rid=str(number)))
    return made


def keeps_bits(rows, outputs=96, inputs=32):
    """Whether this machine's library gives a row the same bits among ``rows`` rows, also in reverse, as in blocks of 16."""
    generator = torch.Generator().manual_seed(9)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    blocks = torch.cat([torch.nn.functional.linear(part, weight) for part in x.split(16)])
    return all(
        torch.equal(torch.nn.functional.linear(part, weight), kept) for part, kept in ((x, blocks), (x.flip(0), blocks.flip(0)))
    )


def bits(responses):
    return [(r.output_tokens, r.output_logprobs) for r in responses]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("architecture", MODELS)
def test_the_same_bits_alone_and_among_any_number_of_others(architecture, threads, caplog):
    model, asked = shared_model(architecture), requests(16 if architecture == "gpt2" else 45)
    with start(model, 1, threads, prefix_cache=False) as engine:
        alone = bits(engine.generate([request])[0] for request in asked)
    assert architecture == "gpt2" or "one at a time" not in caplog.text
    for rows, prefill_tokens in ((3, 2048), (20, 100), (64, 37)):
        prefill_tokens = 2048 if architecture == "gpt2" else prefill_tokens  # there prompts are cut by it
        with start(model, rows, threads, prefill_tokens=prefill_tokens) as engine:
            order = list(range(len(asked)))
            random.Random(rows).shuffle(order)
            among = bits(engine.generate([asked[number] for number in order]))
            assert engine.stats()["running"] == 0
        assert among == [alone[number] for number in order]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_what_is_kept_of_earlier_turns_changes_no_bit(architecture, threads):
    model = shared_model(architecture)
    gconfig = GenerationHyperparameters(max_new_tokens=20, ignore_eos=True)
    transcripts, reused = [], []
    for prefix_cache, beside in ((False, 0), (True, 0), (True, 30)):
        with start(model, 32, threads, prefix_cache=prefix_cache) as engine:
            prompt, transcript = list(range(3, 40)), []
            for turn in range(4):
                asked = [ModelRequest(prompt, gconfig, seed=turn), *requests(beside, longest=60)]
                response = engine.generate(asked)[0]
                transcript += bits([response])
                prompt = [*prompt, *response.output_tokens, 5, 6, 7 + turn]
            transcripts.append(transcript)
            reused.append(engine.stats()["reused_tokens"])
    assert transcripts[0] == transcripts[1] == transcripts[2]
    if architecture == "qwen3":
        assert reused[1] > reused[0] == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_branches_positions_and_scores_of_prompts_too(threads):
    model, drawn = shared_model("qwen3"), random.Random(3)
    gconfig = GenerationHyperparameters(max_new_tokens=12, ignore_eos=True)
    asked = []
    for number in range(24):
        trunk, own = drawn.randrange(5, 60), drawn.randrange(1, 30)
        ids = [drawn.randrange(3, VOCABULARY) for _ in range(trunk + 2 * own)]
        branches = [0] * trunk + [1] * own + [2] * own
        positions = [*range(trunk), *range(trunk, trunk + own), *range(trunk, trunk + own)]
        layout = (
            {"branch_ids": branches, "position_ids": positions}
            if number % 2
            else {"prompt_logprobs_from": 1, "top_logprobs": 3}
        )
        asked.append(ModelRequest(ids, gconfig, seed=number, **layout))

    def everything(responses):
        return [
            (r.output_tokens, r.output_logprobs, r.input_logprobs, r.input_top_logprobs, r.output_top_logprobs)
            for r in responses
        ]

    with start(model, 1, threads) as engine:
        alone = everything(engine.generate([request])[0] for request in asked)
    with start(model, 24, threads, prefill_tokens=200) as engine:
        assert everything(engine.generate(asked + requests(20)))[:24] == alone


@pytest.mark.parametrize("head_dim", [8, 128])
def test_prompts_longer_than_what_is_summed_at_once_too(head_dim):
    model, drawn = tiny_model("qwen3", max_position_embeddings=1024, head_dim=head_dim), random.Random(5)
    gconfig = GenerationHyperparameters(max_new_tokens=6, ignore_eos=True)
    asked = [
        ModelRequest([drawn.randrange(3, VOCABULARY) for _ in range(length)], gconfig, seed=length)
        for length in (187, 193, 225, 379, 384, 390, 500, 770, 1000)
    ]
    with start(model, 8, prefix_cache=False, kv_cache_bytes=1 << 27) as engine:
        alone = bits(engine.generate([request])[0] for request in asked)
    with start(model, 8, prefill_tokens=333, kv_cache_bytes=1 << 27) as engine:
        assert engine._runner.cache.invariant
        assert bits(engine.generate(asked)) == alone


def test_memory_that_is_short_changes_no_bit_and_ends_no_sequence_early():
    model, asked = tiny_model("qwen3"), requests(30)
    with start(model, 32, prefix_cache=False) as engine:
        plenty = bits(engine.generate(asked))
        per_token = engine._runner.cache.bytes_per_token
    with start(model, 32, prefix_cache=False, kv_cache_bytes=per_token * 16 * 256) as engine:
        assert bits(engine.generate(asked)) == plenty
        assert engine.stats()["preemptions"] == 0
        assert engine.context_length == 256
    with pytest.raises(ConfigError, match="a block of 16 sequences of context_length=256 needs"):
        start(model, 32, kv_cache_bytes=per_token * 16 * 128, context_length=256)


def test_answers_are_those_of_the_model():
    from builtin_models import reference_logprobs

    model = shared_model("qwen3")
    with start(model, 8) as engine:
        for response in engine.generate(requests(12)):
            expected = reference_logprobs(model, response.input_tokens, response.output_tokens, response.temperature)
            torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=2e-5, rtol=0)


def test_a_matrix_whose_rows_go_by_their_number_is_multiplied_with_as_many_as_do_not(monkeypatch, caplog):
    linear, most = torch.nn.functional.linear, 48

    def rounds_by_the_number_of_rows(inputs, *others):
        result = linear(inputs, *others)
        return result if len(inputs) <= most else result * (1 + 1e-6)

    plain, fewer = (256, 48) if keeps_bits(32) else (16, 16)
    monkeypatch.setattr("torch.nn.functional.linear", rounds_by_the_number_of_rows)
    model, asked = tiny_model("qwen3"), requests(70, tokens=4)
    with start(model, 64) as engine:
        assert engine._runner.forward.most_rows[QKV] == engine._runner.forward.most_rows[HEAD] == fewer
        assert engine._runner.forward.most_rows[DOWN] == plain
        together = bits(engine.generate(asked))
        assert together[::6] == bits(engine.generate([request])[0] for request in asked[::6])
    most = 16
    with start(tiny_model("qwen3"), 64) as engine:
        assert engine._runner.forward.most_rows[QKV] == 16
        assert bits(engine.generate(asked)) == together
    assert "one at a time" not in caplog.text


def test_a_product_that_is_added_is_tried_as_it_is_computed(monkeypatch):
    """To nothing, two ways of adding up may come to the same bits: (0 + a) + b and 0 + (a + b)."""

    def add_by_the_number_of_rows(x, rows, weight):
        half = rows.shape[1] // 2
        first, second = rows[:, :half] @ weight[:half], rows[:, half:] @ weight[half:]
        return x.copy_(x + first + second if len(x) <= 48 else x + (first + second))

    monkeypatch.setattr("torch.Tensor.addmm_", add_by_the_number_of_rows)
    with start(tiny_model("qwen3"), 64) as engine:
        assert engine._runner.forward.most_rows[DOWN] == (48 if keeps_bits(32) else 16)


def test_attention_that_rounds_by_the_place_of_a_query_is_computed_for_as_many_as_do_not(monkeypatch):
    """As MKL with AVX2 on an Intel processor: it multiplies six rows at a time, and rounds otherwise where two are left."""
    bmm = torch.bmm

    def rounds_where_two_are_left(rows, factor):
        result = bmm(rows, factor)
        if result.shape[1] % 6 == 2 and result.shape[1] >= 8:
            result[:, -2:] *= 1 + 1e-6
        return result

    monkeypatch.setattr("torch.bmm", rounds_where_two_are_left)
    model, asked = tiny_model("qwen3"), requests(30)
    with start(model, 32, prefix_cache=False) as engine:
        alone = bits(engine.generate([request])[0] for request in asked)
    with start(model, 32, prefill_tokens=100) as engine:
        assert engine._runner.invariant_attention.keywords == {"most_rows": 16}
        assert bits(engine.generate(asked)) == alone


def test_a_sum_that_goes_by_masked_columns_is_found(monkeypatch, caplog):
    """As MKL with AVX2, which cuts a sum over more than 256 columns in the middle."""
    monkeypatch.setattr(logging.getLogger("rollwright"), "propagate", True)
    bmm = torch.bmm

    def cuts_in_the_middle(rows, factor):
        half = rows.shape[2] // 2
        if half <= 64:
            return bmm(rows, factor)
        return bmm(rows[:, :, :half], factor[:, :half]) + bmm(rows[:, :, half:], factor[:, half:])

    monkeypatch.setattr("torch.bmm", cuts_in_the_middle)
    with start(tiny_model("qwen3"), 16) as engine:
        assert not engine._runner.cache.invariant
    assert re.search("one at a time.* queries get other bits from [0-9]+ keys of 8 if [0-9]+ masked ones follow", caplog.text)


def test_two_threads_that_cut_a_long_sum_by_the_number_of_rows(monkeypatch, caplog, request):
    """With two threads, MKL gives a row other bits among 64 to 192 rows of a 512 × 1536 matrix, and on Intel's AVX2 at other places among 16."""
    monkeypatch.setattr(logging.getLogger("rollwright"), "propagate", True)
    model = tiny_model("qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=1)
    asked = requests(80, longest=20, tokens=3)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    keeps = keeps_bits(16, outputs=64, inputs=512)
    with start(model, 80, threads=2, prefix_cache=False) as engine:
        among = bits(engine.generate(asked))
        assert among[::9] == bits(engine.generate([request])[0] for request in asked[::9])
        assert engine._runner.cache.invariant
    assert ("computes with one thread" in caplog.text) != keeps


def test_a_machine_that_rounds_by_the_place_of_a_row_computes_one_at_a_time_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("rollwright"), "propagate", True)
    model, asked = tiny_model("qwen3"), requests(20)
    linear = torch.nn.functional.linear

    def rounds_by_place(inputs, *others):
        return linear(inputs, *others) * (1 + 1e-6 * (torch.arange(len(inputs)) % 2)[:, None])

    monkeypatch.setattr("torch.nn.functional.linear", rounds_by_place)
    with start(model, 16) as engine:
        (warning,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
        assert "requests are computed one at a time, with 1 threads, as query, key and value" in warning
        assert "gives a row other bits at another place among 16" in warning
        assert engine.is_batch_invariant
        assert bits(engine.generate(asked)) == bits(engine.generate([request])[0] for request in asked)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_one_thread_in_blocks_comes_before_two_with_one_request_at_a_time(monkeypatch, caplog, architecture):
    monkeypatch.setattr(logging.getLogger("rollwright"), "propagate", True)
    softmax, used = torch.Tensor.softmax, set()

    def rounds_by_place(x, *arguments, **options):
        used.add(torch.get_num_threads())
        place = torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1)) % 3
        return softmax(x, *arguments, **options) * (1 + 1e-6 * place * (torch.get_num_threads() > 1))

    monkeypatch.setattr(torch.Tensor, "softmax", rounds_by_place)
    model, asked = tiny_model(architecture), requests(20, longest=40)
    with start(model, 16, threads=2) as engine:
        used.clear()
        assert bits(engine.generate(asked)) == bits(engine.generate([one])[0] for one in asked)
        assert used == {1}
        assert engine.stats()["cache_rows"] == 16
    assert "this engine computes with one thread, as with 2 threads a request" in caplog.text


def test_a_softmax_that_goes_by_its_rows_is_found_by_whole_requests(monkeypatch):
    softmax = torch.Tensor.softmax
    model = tiny_model("qwen3")
    with start(model, 16) as engine:
        runner = engine._runner
        assert batch_invariance.differing_request(runner, 2048) is None
        monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a, **k: softmax(x, *a, **k) * (1 + 1e-6 * (len(x) > 40)))
        assert "gets different bits among" in (batch_invariance.differing_request(runner, 2048) or "")


def test_what_an_engine_finds_does_not_go_by_how_many_requests_it_may_run(monkeypatch):
    """As with AVX2 and two threads: an engine for one request tried one row, and computed otherwise than one for twenty."""
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a, **k: softmax(x, *a, **k) * (1 + 1e-6 * (len(x) > 40)))
    model, asked, answers = tiny_model("qwen3"), requests(10, longest=40), []
    for rows in (1, 3, 20):
        with start(model, rows) as engine:
            answers.append(bits(engine.generate(asked)))
            assert engine.stats()["cache_rows"] == 1
    assert answers[0] == answers[1] == answers[2]


def test_one_at_a_time_nothing_goes_by_what_waits(monkeypatch):
    """Memory was laid out for the longest request that waited, and rows of padding went by the layout."""
    linear = torch.nn.functional.linear

    def rounds_by_number_and_place(inputs, *others):
        return linear(inputs, *others) * (1 + 1e-6 * (len(inputs) + torch.arange(len(inputs)) % 2)[:, None])

    monkeypatch.setattr("torch.nn.functional.linear", rounds_by_number_and_place)
    model, asked = tiny_model("qwen3"), requests(12, longest=190)
    with start(model, 16) as engine:
        per_token = engine._runner.cache.bytes_per_token
    with start(model, 16, prefix_cache=False, kv_cache_bytes=per_token * 16 * 64) as engine:
        alone = bits(engine.generate([request])[0] for request in asked)
        assert bits(engine.generate(asked)) == alone
    with start(model, 16, prefix_cache=True, kv_cache_bytes=per_token * 16 * 96) as engine:
        assert bits(engine.generate(asked)) == alone
        assert bits(engine.generate(asked[::-1]))[::-1] == alone  # and none is found in a cache
        assert engine.stats()["reused_tokens"] == 0


def test_where_one_at_a_time_does_not_help_either_it_is_refused(monkeypatch):
    linear, calls = torch.nn.functional.linear, itertools.count()
    monkeypatch.setattr("torch.nn.functional.linear", lambda *a: linear(*a) * (1 + 1e-6 * (next(calls) % 2)))
    before = torch.get_num_threads()
    with pytest.raises(
        EngineError, match=r"(?s)is not possible on this machine with 1 threads: .* one request at a time, a request .* turn"
    ):
        start(tiny_model("qwen3"), 16)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["insert", "copy"])
def test_keys_and_values_that_change_when_they_are_used_again_are_found(monkeypatch, name):
    original = getattr(KVCache, name)

    def inexact(cache, *arguments):
        original(cache, *arguments)
        for tensor in cache._flat.values():
            tensor.mul_(1 + 1e-6)

    with start(tiny_model("qwen3"), 16) as engine:
        monkeypatch.setattr(KVCache, name, inexact)
        differs = batch_invariance.differing_request(engine._runner, 2048)
        assert re.search("among|after its beginning|as a second turn", differs or "")


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_sampling_that_goes_by_its_rows_is_found(monkeypatch, name):
    """``softmax`` is that of tokens of which any may come, ``log_softmax`` that of top-k, top-p, min-p and scored prompts."""
    with start(tiny_model("qwen3"), 16) as engine:
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, *a, **k: original(x, *a, **k) * (1 + 1e-5 * (x.dim() == 2 and len(x) > 2))
        )
        assert "different bits" in (batch_invariance.differing_request(engine._runner, 2048) or "")


def test_memory_of_keys_and_values_begins_at_a_multiple_of_64_bytes():
    """Where libraries align what they add up, the order goes by where memory begins."""
    model = tiny_model("qwen3")
    for size in ((1 << 20) + 8 * number for number in range(6)):
        with start(model, 4, kv_cache_bytes=size, batch_invariant=False) as engine:
            assert engine._runner.cache.flat.data_ptr() % 64 == 0


def test_what_is_known_to_go_by_the_batch_is_computed_one_at_a_time(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("rollwright"), "propagate", True)
    with start(tiny_model("llama", torch.bfloat16), 4) as engine:
        assert "bfloat16 on cpu is multiplied in an order that depends on the batch" in caplog.text
        asked = requests(12)
        assert bits(engine.generate(asked)) == bits(engine.generate([request])[0] for request in asked)


def test_engines_over_one_model_try_it_once_for_each_setting(monkeypatch, caplog):
    tried = []
    original = batch_invariance.differing_request
    monkeypatch.setattr(batch_invariance, "differing_request", lambda *a: tried.append(a[0].cache.shapes) or original(*a))
    model, asked = tiny_model("llama"), requests(6)
    answers = []
    for rows in (4, 8, 4):
        with start(model, rows) as engine:
            answers.append((bits(engine.generate(asked)), engine._runner.forward.most_rows))
    assert answers[0] == answers[1] == answers[2]
    assert len(tried) == 1
    with start(model, 4, prefill_tokens=99):
        assert len(tried) == 2
    half = tiny_model("llama", torch.bfloat16)
    for _ in range(2):
        with start(half, 4):
            assert len(tried) == 3
