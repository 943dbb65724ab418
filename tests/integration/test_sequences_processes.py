"""Two processes over Gloo generate what one does: shares that are gathered, shards that are dealt out, resume by another number."""

import json
from pathlib import Path

import pytest
from rank_scripts import run_ranks

TESTS = Path(__file__).parents[1]

WORKER = """
import os, sys
sys.path[:0] = {paths!r}
import torch
from processed_models import small_model, tokenizer
from rollwright.errors import CheckpointError
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor
from rollwright.training.parallel import join_processes, rank, world_size

out = sys.argv[1]
join_processes(torch.device("cpu"))
torch.manual_seed(100 + rank())
processor = SequenceProcessor(small_model(), tokenizer(), GenerationConfig(max_new_tokens=10), progress=False)
prompts = ["a", "bc=", "def", "g+h?", "ij"]
both = processor.generate_with_logprobs(prompts, 2, seed=3, across_processes=True)
one = processor.generate_with_logprobs(["abc"], 2, across_processes=True)  # rank 0 has no prompt, and there is no seed
torch.save((both, one), f"{{out}}/rank{{rank()}}.pt")
processor.generate_to_shards(out + "/shards", prompts, 2, seed=4, prompts_per_shard=1, file_format="jsonl")
try:
    processor.generate_to_shards(out + "/shards", prompts, 2, seed=4)
except CheckpointError:
    open(f"{{out}}/refused{{rank()}}", "w").close()
if world_size() > 1:
    torch.distributed.destroy_process_group()
    # A Gloo thread that is left can abort the process while Python ends.
    names = [open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    assert not [name for name in names if "gloo" in name], names
"""


def run_workers(directory: Path, world: int) -> None:
    directory.mkdir()
    script = directory / "worker.py"
    script.write_text(WORKER.format(paths=[str(TESTS), str(TESTS / "unit" / "sequence_processing")]))
    run_ranks(script, directory, count=world)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_generate_what_one_does(tmp_path):
    import torch

    run_workers(tmp_path / "one", 1)
    run_workers(tmp_path / "two", 2)
    (alone, scores), _ = torch.load(tmp_path / "one" / "rank0.pt", weights_only=False)
    results = [torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    for (sequences, logprobs), _ in results:
        assert torch.equal(sequences.sequences, alone.sequences)
        assert torch.equal(sequences.attention_masks, alone.attention_masks)
        assert sequences.gen_lens == alone.gen_lens
        assert sequences.prompt_lens == alone.prompt_lens
        assert sequences.responses_text == alone.responses_text
        assert sequences.stop_reasons == alone.stop_reasons
        for b in range(5):
            for g in range(2):
                torch.testing.assert_close(logprobs.logprobs[b][g], scores.logprobs[b][g], atol=1e-5, rtol=1e-5)
                assert logprobs.entropies[b][g].shape == scores.entropies[b][g].shape
                assert logprobs.sequence_logprobs[b][g] == pytest.approx(scores.sequence_logprobs[b][g], abs=1e-4)
    assert torch.equal(results[0][1][0].sequences, results[1][1][0].sequences)

    one, two = tmp_path / "one" / "shards", tmp_path / "two" / "shards"
    assert json.loads((one / "experiment.json").read_text()) == json.loads((two / "experiment.json").read_text())
    for number in range(5):
        name = f"shard-{number:05d}.jsonl"
        ours, theirs = ([json.loads(line) for line in (d / name).read_text().splitlines()] for d in (one, two))
        assert [row["response_ids"] for row in ours] == [row["response_ids"] for row in theirs]
    shards = [
        [json.loads(line)["shard"] for line in (two / f).read_text().splitlines()]
        for f in ("metrics.jsonl", "metrics-rank1.jsonl")
    ]
    assert shards == [[0, 2, 4], [1, 3]]
    assert (tmp_path / "two" / "refused0").exists()
    assert (tmp_path / "two" / "refused1").exists()
