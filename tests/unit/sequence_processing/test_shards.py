"""Experiments on disk: what the files hold, resume, refusals, metrics."""

import json

import pytest
import torch
from processed_models import small_model, tokenizer

from rollwright.errors import CheckpointError, ConfigError
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor, shards
from rollwright.tracking.metrics_file import read_metrics

PROMPTS = ["a", "ab", "abc", "b", "bc"]


@pytest.fixture(scope="module")
def processor():
    return SequenceProcessor(small_model(), tokenizer(), GenerationConfig(max_new_tokens=8, temperature=0.75), progress=False)


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_shards_hold_what_one_call_gives(processor, tmp_path, file_format):
    options = {"prompts_per_shard": 2, "file_format": file_format}
    experiment = processor.generate_to_shards(tmp_path / "x", PROMPTS, 3, seed=5, **options)
    assert [file.name for file in experiment.files] == [f"shard-0000{n}.{file_format}" for n in range(3)]
    rows = list(experiment.rows())
    sequences, results = processor.generate_with_logprobs(PROMPTS, 3, seed=5)
    assert [(row["prompt_index"], row["response_index"]) for row in rows] == [(b, g) for b in range(5) for g in range(3)]
    for row in rows:
        b, g = row["prompt_index"], row["response_index"]
        assert row["prompt"] == PROMPTS[b]
        assert row["response"] == sequences.responses_text[b][g]
        assert row["response_ids"] == sequences.response(b, g).tolist()
        assert row["prompt_ids"] == sequences.prompt(b).tolist()
        assert row["stop_reason"] == sequences.stop_reasons[b][g]
        torch.testing.assert_close(torch.tensor(row["logprobs"]), results.logprobs[b][g], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(row["entropies"]), torch.tensor(results.entropies[b][g]), atol=1e-5, rtol=1e-5)
        assert row["sequence_logprob"] == pytest.approx(results.sequence_logprobs[b][g], abs=1e-4)
    metrics = read_metrics(tmp_path / "x" / "metrics.jsonl")
    assert [record["shard"] for record in metrics] == [0, 1, 2]
    assert sum(record["generated_tokens"] for record in metrics) == sum(map(sum, sequences.gen_lens))


def test_an_interrupted_experiment_goes_on_with_the_missing_shards(processor, tmp_path, monkeypatch):
    whole = processor.generate_to_shards(tmp_path / "whole", PROMPTS, 2, seed=7, prompts_per_shard=1, file_format="jsonl")
    written, write = [], shards._write_jsonl

    def write_until_the_third(path, rows):
        if len(written) == 2:
            path.write_text("half a l")
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, rows)

    monkeypatch.setattr(shards, "_write_jsonl", write_until_the_third)
    arguments = {"prompts": PROMPTS, "G": 2, "prompts_per_shard": 1, "file_format": "jsonl"}
    with pytest.raises(KeyboardInterrupt):
        processor.generate_to_shards(tmp_path / "cut", seed=7, **arguments)
    monkeypatch.setattr(shards, "_write_jsonl", lambda path, rows: (written.append(path.name), write(path, rows)))
    resumed = processor.generate_to_shards(tmp_path / "cut", resume=True, **arguments)  # the seed is the directory's
    assert len(written) == len(set(written)) == 5
    assert [f.read_text() for f in resumed.files] == [f.read_text() for f in whole.files]
    assert [record["shard"] for record in read_metrics(tmp_path / "cut" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_directory_is_never_silently_reused(processor, tmp_path):
    directory = tmp_path / "x"
    processor.generate_to_shards(directory, PROMPTS[:2], 2, seed=1)
    with pytest.raises(CheckpointError, match="resume=True"):
        processor.generate_to_shards(directory, PROMPTS[:2], 2, seed=1)
    for changed in ({"seed": 2}, {"G": 3}, {"prompts": PROMPTS[:3]}):
        arguments = {"prompts": PROMPTS[:2], "G": 2, "seed": 1, **changed}
        with pytest.raises(CheckpointError, match=f"differs in .*{next(iter(changed))}"):
            processor.generate_to_shards(directory, resume=True, **arguments)
    other = SequenceProcessor(small_model(seed=1), tokenizer(), processor.config, progress=False)
    with pytest.raises(CheckpointError, match="differs in weights_digest"):
        other.generate_to_shards(directory, PROMPTS[:2], 2, seed=1, resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        processor.generate_to_shards(tmp_path / "full", PROMPTS, 1)


def test_the_seed_of_an_experiment_without_one_is_written_down(processor, tmp_path):
    experiment = processor.generate_to_shards(tmp_path / "x", PROMPTS[:2], 2)
    seed = json.loads((tmp_path / "x" / "experiment.json").read_text())["seed"]
    sequences = processor.generate_batched(PROMPTS[:2], 2, seed=seed)
    assert [row["response_ids"] for row in experiment.rows()] == [
        sequences.response(b, g).tolist() for b, g in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]


def test_metrics_go_to_the_sinks(processor, tmp_path):
    pytest.importorskip("tensorboard")
    processor.generate_to_shards(tmp_path / "x", PROMPTS, 1, seed=1, prompts_per_shard=3, sinks=["tensorboard"])
    assert list((tmp_path / "x" / "tensorboard").iterdir())
    with pytest.raises(ConfigError, match="metric sink 'nowhere' was not found"):
        processor.generate_to_shards(tmp_path / "y", PROMPTS, 1, sinks=["nowhere"])


@pytest.mark.parametrize("options", [{"prompts_per_shard": 0}, {"file_format": "csv"}])
def test_options_out_of_range_are_refused(processor, tmp_path, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        processor.generate_to_shards(tmp_path / "x", PROMPTS, 1, **options)
