"""Out of memory on the way, batch sizes from free memory, and what is held at a time."""

import pytest
import torch
from processed_models import small_model, tokenizer

from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.model import LlamaFamily
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor, models
from rollwright.training.logprobs import TokenScorer

PROMPTS = ["ab+c=", "jihg?", "b"]


def processor_of(model, **config):
    return SequenceProcessor(model, tokenizer(), GenerationConfig(**{"max_new_tokens": 24, **config}), progress=False)


@pytest.fixture
def cramped(monkeypatch):
    """Generation runs out of memory at more than 3 rows, scoring at more than 2; says at which sizes they were tried."""
    tried = {"generate": [], "score": []}
    run, forward = LlamaFamily.__call__, TokenScorer.forward

    def run_cramped(self, batch, cache):
        tried["generate"].append(batch.row_count)
        if batch.last_tokens is None and batch.row_count > 3:
            raise torch.OutOfMemoryError("no room for keys")
        return run(self, batch, cache)

    def score_cramped(self, batch, wanted, **arguments):
        tried["score"].append(len(wanted))
        if len(wanted) > 2:
            raise torch.OutOfMemoryError("no room for activations")
        return forward(self, batch, wanted, **arguments)

    monkeypatch.setattr(LlamaFamily, "__call__", run_cramped)
    monkeypatch.setattr(TokenScorer, "forward", score_cramped)
    return tried


def test_batches_are_halved_until_they_fit_and_nothing_changes(cramped, monkeypatch):
    model = small_model()
    sequences, results = processor_of(model).generate_with_logprobs(PROMPTS, 4, seed=1)
    monkeypatch.undo()
    expected, scores = processor_of(model).generate_with_logprobs(PROMPTS, 4, seed=1)
    assert max(cramped["generate"]) > 3
    refused = [size for size in cramped["score"] if size > 2]
    assert len(refused) > 1
    assert refused == sorted(refused, reverse=True) == cramped["score"][: len(refused)]
    assert sum(cramped["score"][len(refused) :]) == 12
    assert sequences.share_changed(expected) == 0
    torch.testing.assert_close(results.logprobs[2][3], scores.logprobs[2][3])


def test_it_goes_on_where_it_stopped(monkeypatch):
    model, run, steps = small_model(), LlamaFamily.__call__, []

    def run_out_late(self, batch, cache):
        steps.append(batch.row_count)
        if len(steps) == 20:
            raise torch.OutOfMemoryError("late")
        return run(self, batch, cache)

    expected = processor_of(model).generate_batched(PROMPTS, 8, seed=1, gen_batch_size=4)
    served = []
    from rollwright.sequence_processing import generation

    attempt = generation._attempt
    monkeypatch.setattr(generation, "_attempt", lambda *a: (served.append(len(a[3])), attempt(*a))[1])
    monkeypatch.setattr(LlamaFamily, "__call__", run_out_late)
    found = processor_of(model).generate_batched(PROMPTS, 8, seed=1, gen_batch_size=4)
    assert served[0] == 24
    assert 0 < served[1] < 24
    assert expected.share_changed(found) == 0


def test_a_deterministic_run_does_not_change_its_batches(cramped):
    with pytest.raises(EngineError, match="no room for keys"):
        processor_of(small_model(), deterministic=True).generate_batched(PROMPTS, 4, seed=1)


def test_another_failure_is_raised_at_once(monkeypatch):
    monkeypatch.setattr(LlamaFamily, "__call__", lambda self, batch, cache: 1 / 0)
    with pytest.raises(EngineError, match="division by zero"):
        processor_of(small_model()).generate_batched(PROMPTS, 4)


def test_batch_sizes_from_free_memory(monkeypatch):
    model = small_model()
    per_sequence = models.cache_bytes(model, 1, 64)
    assert per_sequence == 64 * 2 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, heads, size, bytes
    monkeypatch.setattr(models, "free_bytes", lambda device: 100 * per_sequence)
    few = models.generation_batch_size(model, 1000, 64)
    assert 10 < few < 50
    assert models.generation_batch_size(model, 5, 64) == 5
    monkeypatch.setattr(models, "free_bytes", lambda device: 0)
    assert models.generation_batch_size(model, 1000, 64) == 1
    monkeypatch.setattr(models, "free_bytes", lambda device: 1 << 40)
    assert models.scoring_batch_size(model, 1000, 64, True) == 256
    sequences, _ = processor_of(model, gen_batch_size="auto", tf_batch_size="auto").generate_with_logprobs(PROMPTS, 2, seed=1)
    assert sequences.sequences.shape[:2] == (3, 2)


def test_what_running_out_of_memory_looks_like():
    assert models.is_out_of_memory(MemoryError())
    assert models.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    wrapped = EngineError("step failed")
    wrapped.__cause__ = torch.OutOfMemoryError("x")
    assert models.is_out_of_memory(wrapped)
    assert not models.is_out_of_memory(RuntimeError("shape mismatch"))
    assert models.free_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize("with_grad", [False, True])
def test_no_float32_logits_of_a_whole_batch_are_made(monkeypatch, with_grad):
    from torch.utils._python_dispatch import TorchDispatchMode

    from rollwright.sequence_processing import scoring

    model = small_model()
    vocabulary = model.config.vocab_size
    monkeypatch.setitem(scoring._CHUNK_ENTRIES, "cpu", 16 * vocabulary)
    head_shape, widest = (model.config.hidden_size, vocabulary), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                is_head = tensor.shape == head_shape if isinstance(tensor, torch.Tensor) else True
                if not is_head and tensor.dim() > 1 and tensor.shape[-1] == vocabulary:
                    widest.append(tensor.numel() // vocabulary)
            return result

    sequences = processor_of(model).generate_batched(PROMPTS, 8, seed=1)
    assert sum(map(sum, sequences.gen_lens)) > 100
    with Watch():
        processor_of(model).teacher_force_logprobs(sequences, with_grad=with_grad)
    assert max(widest) == 16
