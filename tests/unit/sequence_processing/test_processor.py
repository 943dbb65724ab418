"""Generation and scoring: layout, truth of the numbers, reproducibility, wrong use."""

import random

import numpy as np
import pytest
import torch
from processed_models import reference, small_model, tokenizer

from rollwright import DATASET_REGISTRY, Example
from rollwright.errors import ConfigError, DataError, PromptTooLongError
from rollwright.sequence_processing import BatchedSequences, GenerationConfig, SequenceProcessor

PROMPTS = ["ab+c=", "a", "jihgfedcba abc?"]


@pytest.fixture(scope="module")
def model():
    return small_model()


def processor_of(model, **config):
    return SequenceProcessor(model, tokenizer(), GenerationConfig(**{"max_new_tokens": 12, **config}), progress=False)


@pytest.fixture(scope="module")
def answered(model):
    return processor_of(model, temperature=0.7, top_p=0.9).generate_with_logprobs(PROMPTS, 4, seed=3)


def test_responses_stand_right_after_their_prompts_and_padding_after_both(answered):
    sequences, _ = answered
    assert sequences.sequences.shape[:2] == (3, 4)
    for b, prompt in enumerate(PROMPTS):
        p = sequences.prompt_lens[b]
        assert sequences.sequences[b, 0, :p].tolist() == tokenizer()(prompt)["input_ids"]
        for g in range(4):
            n = sequences.gen_lens[b][g]
            row = sequences.sequences[b, g]
            assert sequences.responses_text[b][g] == tokenizer().decode(row[p : p + n], skip_special_tokens=True)
            assert (row[p + n :] == tokenizer().pad_token_id).all()
            assert sequences.attention_masks[b, g].tolist() == [1] * (p + n) + [0] * (len(row) - p - n)


def test_lengths_count_the_end_token(model):
    sequences = processor_of(model, max_new_tokens=40, stop_after_answer=False).generate_batched(PROMPTS, 16, seed=1)
    reasons = [r for row in sequences.stop_reasons for r in row]
    assert {"stop", "length"} == set(reasons)
    for b in range(3):
        for g, reason in enumerate(sequences.stop_reasons[b]):
            tokens = sequences.response(b, g).tolist()
            assert (tokens[-1] == tokenizer().eos_token_id) == (reason == "stop")
            assert reason == "stop" or len(tokens) == 40
            assert tokenizer().eos_token_id not in tokens[:-1]


@pytest.mark.parametrize("config", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}, {"do_sample": False}])
def test_logprobs_and_entropies_are_those_of_the_tempered_softmax_before_top_p(model, config):
    sequences, results = processor_of(model, **config).generate_with_logprobs(PROMPTS, 3, seed=5, tf_batch_size=2)
    temperature = config.get("temperature", 1.0)
    for b in range(3):
        for g in range(3):
            p, n = sequences.prompt_lens[b], sequences.gen_lens[b][g]
            logprobs, entropy = reference(model, sequences.sequences[b, g, : p + n].tolist(), p, temperature)
            torch.testing.assert_close(results.logprobs[b][g].double(), logprobs, atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(results.entropies[b][g], entropy.detach(), atol=1e-4, rtol=1e-4)
            assert results.sequence_logprobs[b][g] == pytest.approx(float(logprobs.detach().sum()), abs=1e-3)
            assert not results.logprobs[b][g].requires_grad


def test_another_temperature_can_be_scored(model, answered):
    sequences, _ = answered
    results = processor_of(model, temperature=0.7).teacher_force_logprobs(sequences, temperature=1.0)
    p, n = sequences.prompt_lens[0], sequences.gen_lens[0][0]
    expected, _ = reference(model, sequences.sequences[0, 0, : p + n].tolist(), p)
    torch.testing.assert_close(results.logprobs[0][0].double(), expected, atol=1e-4, rtol=1e-4)


def test_sampling_draws_from_the_distribution_that_is_reported(model):
    sequences, results = processor_of(model, max_new_tokens=1, temperature=0.5).generate_with_logprobs(["ab"], 3000, seed=0)
    first = sequences.sequences[0, :, 2]
    top = int(first.mode().values)
    reported = float(next(results.logprobs[0][g] for g in range(3000) if int(first[g]) == top).exp())
    assert float((first == top).float().mean()) == pytest.approx(reported, abs=0.04)


@pytest.mark.parametrize("tf_batch_size", [64, 2])
def test_gradients_are_those_of_a_plain_float64_forward(tf_batch_size):
    model = small_model(torch.float64)
    processor = processor_of(model, temperature=0.75, tf_batch_size=tf_batch_size)  # exact in float32
    sequences, results = processor.generate_with_logprobs(PROMPTS, 2, seed=2, with_grad=True)
    weights = [[random.Random(b * 2 + g).random() for g in range(2)] for b in range(3)]
    loss = sum(weights[b][g] * results.logprobs[b][g].sum() for b in range(3) for g in range(2))
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        for g in range(2):
            p, n = sequences.prompt_lens[b], sequences.gen_lens[b][g]
            expected = (
                expected + weights[b][g] * reference(model, sequences.sequences[b, g, : p + n].tolist(), p, 0.75)[0].sum()
            )
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_dropout_is_off_and_the_mode_of_the_model_is_kept():
    model = small_model(attention_dropout=0.5)
    expected = processor_of(model).generate_with_logprobs(PROMPTS, 2, seed=1)
    model.train()
    found = processor_of(model).generate_with_logprobs(PROMPTS, 2, seed=1, with_grad=True)
    assert all(module.training for module in model.modules())
    assert expected[0].share_changed(found[0]) == 0
    torch.testing.assert_close(found[1].logprobs[2][1].detach(), expected[1].logprobs[2][1])


def test_empty_generations_give_empty_arrays(model):
    sequences, results = processor_of(model, max_new_tokens=0).generate_with_logprobs(PROMPTS, 2)
    assert sequences.gen_lens == [[0, 0]] * 3
    assert sequences.responses_text == [["", ""]] * 3
    assert [len(e) for row in results.entropies for e in row] == [0] * 6
    assert results.logprobs[0][0].shape == (0,)
    assert results.sequence_logprobs == [[0.0, 0.0]] * 3
    some = BatchedSequences.from_tokens([[7, 8]], [[[9], []]], [["a", ""]], 0)
    mixed = processor_of(model).teacher_force_logprobs(some, with_grad=True)
    assert [len(row) for row in mixed.logprobs[0]] == [1, 0]
    mixed.logprobs[0][0].sum().backward()


def test_generation_stops_after_the_answer_and_includes_the_tag(model):
    tag = tokenizer().convert_tokens_to_ids("</answer>")
    on = processor_of(model, max_new_tokens=60).generate_batched(PROMPTS, 16, seed=1)
    off = processor_of(model, max_new_tokens=60, stop_after_answer=False).generate_batched(PROMPTS, 16, seed=1)
    cut = 0
    for b in range(3):
        for g in range(16):
            tokens = off.response(b, g).tolist()
            if tag in tokens:
                cut += tokens.index(tag) + 1 < len(tokens)
                tokens = tokens[: tokens.index(tag) + 1]
                assert on.responses_text[b][g].endswith("</answer>")
            assert on.response(b, g).tolist() == tokens
    assert cut


def test_a_seed_repeats_and_batch_sizes_change_nothing_but_rounding(model):
    processor = processor_of(model, deterministic=True)
    first, scores = processor.generate_with_logprobs(PROMPTS, 8, seed=11)
    again, same = processor.generate_with_logprobs(PROMPTS, 8, seed=11)
    assert torch.equal(first.sequences, again.sequences)
    assert all(
        torch.equal(a, b) for x, y in zip(scores.logprobs, same.logprobs, strict=True) for a, b in zip(x, y, strict=True)
    )
    smaller = processor.generate_batched(PROMPTS, 8, seed=11, gen_batch_size=3)
    assert first.share_changed(smaller) <= 0.1
    assert first.share_changed(processor.generate_batched(PROMPTS, 8, seed=12)) > 0.5


def test_without_a_seed_the_global_generator_decides(model):
    processor = processor_of(model)
    torch.manual_seed(4)
    first, other = processor.generate_batched(PROMPTS, 2), processor.generate_batched(PROMPTS, 2)
    torch.manual_seed(4)
    assert first.share_changed(processor.generate_batched(PROMPTS, 2)) == 0
    assert first.share_changed(other) > 0


def test_bfloat16_scores_come_in_float32():
    model = small_model(torch.bfloat16)
    sequences, results = processor_of(model).generate_with_logprobs(PROMPTS, 2, seed=1)
    assert results.logprobs[0][0].dtype == torch.float32
    assert results.entropies[0][0].dtype == np.float32
    p, n = sequences.prompt_lens[2], sequences.gen_lens[2][0]
    expected, _ = reference(model, sequences.sequences[2, 0, : p + n].tolist(), p)
    torch.testing.assert_close(results.logprobs[2][0].double(), expected, atol=0.15, rtol=0.05)


def test_a_row_is_scored_with_the_frequencies_of_its_own_length():
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 9.0], "factor": 4.0}
    model = small_model(
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors, "original_max_position_embeddings": 24}
    )
    prompt, responses = [3, 4, 5, 6], [[7, 8, 9] * 10, [9, 7] * 5, [8, 7] * 10, [5] * 3]
    sequences = BatchedSequences.from_tokens([prompt], [responses], [[""] * 4], 0)
    results = processor_of(model, temperature=1.0).teacher_force_logprobs(sequences)
    for found, response in zip(results.logprobs[0], responses, strict=True):
        np.testing.assert_allclose(found, reference(model, prompt + response, 4)[0].detach().numpy(), atol=2e-5)


def test_a_missing_pad_token_becomes_the_end_token(model):
    import copy

    bare = copy.deepcopy(tokenizer())
    bare.pad_token = None
    sequences = SequenceProcessor(model, bare, GenerationConfig(max_new_tokens=8)).generate_batched(PROMPTS, 2)
    assert bare.pad_token_id == bare.eos_token_id
    assert int(sequences.sequences[1, 0, -1]) == bare.eos_token_id
    bare.pad_token = bare.eos_token = None
    with pytest.raises(ConfigError, match="neither a pad nor an end token"):
        SequenceProcessor(model, bare)


def test_prompts_may_be_ids_or_conversations(model):
    ids = tokenizer()("ab+c=")["input_ids"]
    conversation = [{"role": "user", "content": "ab"}]
    sequences = processor_of(model).generate_batched([ids, conversation], 1, seed=1)
    assert sequences.prompt(0).tolist() == ids
    assert tokenizer().decode(sequences.prompt(1)) == "<|user|>ab<|end|><|assistant|>"


def test_datasets_by_name_and_by_file(model, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASET_REGISTRY._entries, "letters", lambda split="train", n=9: [Example(c) for c in "abcdefghij"[:n]])
    processor = processor_of(model)
    assert processor.sample_prompts("letters", num_prompts=None) == list("abcdefghi")
    drawn = processor.sample_prompts("letters", "train", 4, seed=42)
    assert drawn == processor.sample_prompts("letters", "train", 4, seed=42)
    assert len(set(drawn)) == 4
    assert drawn != processor.sample_prompts("letters", "train", 4, seed=43)
    by_name, _ = processor.generate_with_logprobs(dataset_name="letters", num_prompts=4, G=2, seed=42)
    assert torch.equal(by_name.sequences, processor.generate_batched(drawn, 2, seed=42).sequences)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "abc", "answer": "d"}\n{"question": "ab?", "answer": "e"}\n')
    assert processor.sample_prompts(str(tmp_path / "mine.jsonl")) == ["abc", "ab?"]
    with pytest.raises(ConfigError, match="num_prompts is 10, and letters"):
        processor.sample_prompts("letters", num_prompts=10)


def test_gsm8k_is_read_from_a_local_file(model, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "How many?", "answer": "Two.\\n#### 2"}\n')
    (prompt,) = processor_of(model).sample_prompts("gsm8k_r1_template", "test", 1, path=str(tmp_path))
    assert "How many?" in prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give prompts or dataset_name"),
        ({"prompts": ["a"], "dataset_name": "arithmetic"}, "both given"),
        ({"prompts": ["a"], "num_prompts": 1}, "leave it out"),
        ({"prompts": ["a"], "G": 0}, "G is 0"),
        ({"prompts": "a"}, r"give a list of prompts"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["a", ""]}, "Prompt 1 has no tokens"),
        ({"prompts": ["a"], "gen_batch_size": 0}, "gen_batch_size is 0"),
    ],
)
def test_wrong_use_says_what_to_do(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        processor_of(model).generate_with_logprobs(**arguments)


def test_unknown_datasets_and_splits_name_the_known(model):
    processor = processor_of(model)
    with pytest.raises(DataError, match=r"registered: arithmetic, .*gsm8k, gsm8k_r1_template"):
        processor.generate_with_logprobs(dataset_name="gsm8k_r1_templates")
    with pytest.raises(DataError, match="train, test"):
        processor.generate_with_logprobs(dataset_name="gsm8k_r1_template", split="dev")


def test_prompts_that_fill_the_context_are_refused_by_number(model):
    with pytest.raises(PromptTooLongError, match="Prompt 1 has 96 tokens and the model's context is 96"):
        processor_of(model).generate_batched(["a", "b" * 96])
    sequences = processor_of(model).generate_batched(["b" * 95], 1)
    assert sequences.gen_lens == [[1]]


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"top_p": 0}, {"max_new_tokens": -1}, {"gen_batch_size": "big"}, {"tf_batch_size": 0},
     {"gen_batch_size": "auto", "deterministic": True}],
)  # fmt: skip
def test_configs_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        GenerationConfig(**values)


def test_with_grad_needs_something_to_train():
    model = small_model().requires_grad_(False)
    with pytest.raises(ConfigError, match="unfreeze"):
        processor_of(model).generate_with_logprobs(["a"], 1, with_grad=True)


def test_no_prompts_are_an_empty_batch(model):
    empty = processor_of(model).generate_batched([])
    assert len(empty) == 0
    assert (empty.prompt_lens, empty.gen_lens, empty.responses_text) == ([], [], [])
    assert tuple(empty.sequences.shape) == (0, 0, 0)
