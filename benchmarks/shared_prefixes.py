"""Scoring and gradients over shared prefixes against padded rows: time, distinct tokens, peak memory.

    python benchmarks/shared_prefixes.py [--json FILE]

Forward and backward of a 3.9M Qwen3 on one thread, both ways in turn in one process (median of the rounds); peak memory of one
pass each in a process of its own. `tokens` is tokens of all rows over distinct ones; `time_over_tokens` is the part of that ratio
which the time keeps. Where nothing is shared (`alone`, `alone_ragged`: one sample a prompt) `slower` is the median of the pairs' time
with shared prefixes over that of padded rows.

    python benchmarks/shared_prefixes.py --costs    # what `attention_calls` weighs: a call and a copy, in products of query and key
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report

VOCABULARY = 2048


def rows_of(lengths: list[list[tuple[int, int]]], draw: Any) -> list[list[int]]:
    """Rows from (number of a piece, its tokens): pieces of one number and length are equal."""
    import torch

    pieces: dict[tuple[int, int], list[int]] = {}
    rows = []
    for row in lengths:
        for piece in row:
            if piece not in pieces:
                pieces[piece] = torch.randint(2, VOCABULARY, (piece[1],), generator=draw).tolist()
        rows.append([token for piece in row for token in pieces[piece]])
    return rows


def groups() -> dict[str, Any]:
    """Four prompts of 256 tokens, eight samples of 64 each."""
    lengths = [[(g, 256), (100 + g * 8 + s, 64)] for g in range(4) for s in range(8)]
    return _batch(lengths, sampled=lambda row: range(256, 320), group=lambda row: row // 8)


def turns() -> dict[str, Any]:
    """Eight conversations of five turns, a row each: 64 tokens of prompt, then 48 sampled and 32 of an answer a turn."""
    lengths = []
    for c in range(8):
        pieces = [(c, 64)]
        for turn in range(5):
            pieces = [*pieces, (1000 + c * 10 + turn, 48)]
            lengths.append(list(pieces))
            pieces = [*pieces, (2000 + c * 10 + turn, 32)]
    return _batch(lengths, sampled=lambda row: range(64 + 80 * (row % 5), 64 + 80 * (row % 5) + 48), group=lambda row: row // 5)


def branches() -> dict[str, Any]:
    """Two prompts of 128 tokens, eight episodes each: four isolated branches of 64 tokens, then 32 that see them all."""
    import torch

    lengths = [[(g, 128), (100 + g * 8 + s, 4 * 64 + 32)] for g in range(2) for s in range(8)]
    batch = _batch(lengths, sampled=lambda row: range(128, 416), group=lambda row: row // 8)
    marks = torch.tensor([0] * 128 + [branch for branch in range(1, 5) for _ in range(64)] + [0] * 32)
    positions = torch.tensor([*range(128), *list(range(128, 192)) * 4, *range(192, 224)])
    batch["branch_ids"], batch["position_ids"] = marks.expand(16, -1).clone(), positions.expand(16, -1).clone()
    return batch


def search() -> dict[str, Any]:
    """The first batch of the search agent: 32 questions, 8 episodes each, recorded from `examples/search_agent.yaml`."""
    import torch

    recorded = json.loads((Path(__file__).parent / "search_batch.json").read_text())
    width = max(len(row["ids"]) for row in recorded)
    ids = torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in recorded])
    wanted = torch.zeros(ids.shape, dtype=torch.bool)
    for row, entry in enumerate(recorded):
        for start, end in entry["sampled"]:
            wanted[row, start:end] = True
    mask = torch.tensor([[1] * len(row["ids"]) + [0] * (width - len(row["ids"])) for row in recorded])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "group_ids": torch.tensor([row["group"] for row in recorded]),
        "_wanted": wanted,
    }


def alone() -> dict[str, Any]:
    """32 prompts of 256 tokens, one sample of 64 each."""
    lengths = [[(g, 256), (100 + g, 64)] for g in range(32)]
    return _batch(lengths, sampled=lambda row: range(256, 320), group=lambda row: row)


def alone_ragged() -> dict[str, Any]:
    """32 prompts of 64 to 256 tokens, one sample of 16 to 64 each."""
    prompts, samples = [64 + 67 * g % 193 for g in range(32)], [16 + 37 * g % 49 for g in range(32)]
    lengths = [[(g, prompts[g]), (100 + g, samples[g])] for g in range(32)]
    return _batch(lengths, sampled=lambda row: range(prompts[row], prompts[row] + samples[row]), group=lambda row: row)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "groups": groups,
    "turns": turns,
    "branches": branches,
    "search": search,
    "alone": alone,
    "alone_ragged": alone_ragged,
}
#: Cases in which rows have no token in common.
NOTHING_SHARED = ("alone", "alone_ragged")


def _batch(
    lengths: list[list[tuple[int, int]]], *, sampled: Callable[[int], Any], group: Callable[[int], int]
) -> dict[str, Any]:
    import torch

    rows = rows_of(lengths, torch.Generator().manual_seed(0))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    wanted = torch.zeros(ids.shape, dtype=torch.bool)
    for row in range(len(rows)):
        wanted[row, list(sampled(row))] = True
    groups_B = torch.tensor([group(row) for row in range(len(rows))])
    return {"input_ids": ids, "attention_mask": mask, "group_ids": groups_B, "_wanted": wanted}


class Pass:
    """Forward and backward of one batch, both ways."""

    def __init__(self, case: str) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from rollwright.training.layers import use_fast_layers
        from rollwright.training.logprobs import TokenScorer

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        self.model = Qwen3ForCausalLM(config)
        use_fast_layers(self.model)
        self.scorer = TokenScorer(self.model)
        self.case, self.batch = case, CASES[case]()

    def seconds(self, *, shared: bool) -> float:
        """Of all micro-batches, cutting them and making their trees included."""
        from rollwright.config.sections import MicroBatchSpec
        from rollwright.training.micro_batches import micro_batches

        self.model.zero_grad()
        begin = time.perf_counter()
        for _, part in micro_batches(self.batch, MicroBatchSpec(), share_prefixes=shared):
            assert ("prefix_tree" in part) == shared or self.case in NOTHING_SHARED
            logprobs, _ = self.scorer(part, part["_wanted"], with_entropy=True)
            logprobs.sum().backward()
        return time.perf_counter() - begin

    def tokens(self) -> float:
        """Tokens of all rows over distinct ones."""
        from rollwright.training.prefix_tree import SortedRows

        return int(self.batch["attention_mask"].sum()) / SortedRows(self.batch).distinct


def costs() -> None:
    """Print what a call and a copied token cost, forward and backward, in products of a query and a key."""
    import torch

    from rollwright.training.prefix_tree import AttentionCall
    from rollwright.training.tree_attention import TreeAttention

    print(f"{'heads x size':>14}{'product, ns':>14}{'a call':>10}{'a copy':>10}   in products")
    for heads, size in ((4, 16), (4, 64), (8, 64), (16, 128)):
        x_THD = torch.randn(3 * 2048, heads, size).requires_grad_()

        def seconds(*calls: AttentionCall, x: torch.Tensor = x_THD) -> float:
            def once() -> float:
                begin = time.perf_counter()
                q, k, v = x.split(2048)
                TreeAttention.apply(q, k, v, list(calls), [], 0.1, None, None).sum().backward()
                return time.perf_counter() - begin

            return min(once() for _ in range(15))

        def piece(count: int, length: int, *, copied: bool = False) -> AttentionCall:
            places = torch.arange(count * length).view(count, length) if copied else slice(0, count * length)
            return AttentionCall(count, places, places)

        many, one = seconds(*[piece(1, 32)] * 65), seconds(piece(1, 32))
        product = (seconds(piece(8, 256)) - seconds(piece(32, 64))) / (8 * 256**2 - 32 * 64**2)
        call = (many - one) / 64 - 32**2 * product
        copy = (seconds(piece(32, 64, copied=True)) - seconds(piece(32, 64))) / 2048
        print(f"{heads:>8} x {size:<3}{product * 1e9:>14.1f}{call / product:>10.0f}{copy / product:>10.0f}")


def peak(case: str, *, shared: bool) -> float:
    """MiB that one pass takes above what was there before it, in a process of its own."""
    command = [sys.executable, __file__, "--one", case, str(int(shared))]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _resident(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="times that the two ways alternate")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    parser.add_argument("--costs", action="store_true", help="measure what the choice of calls weighs, and nothing else")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SHARED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one = Pass(arguments.one[0])
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        one.seconds(shared=arguments.one[1] == "1")
        print(_resident("VmHWM") - before)
        return
    import torch

    torch.set_num_threads(1)
    if arguments.costs:
        costs()
        return
    report = Report("Shared prefixes against padded rows, forward and backward, 3.9M, one thread")
    for case in arguments.cases.split(","):
        one = Pass(case)
        pairs = []
        for turn in range(max(arguments.rounds, 10 * (case in NOTHING_SHARED)) + 1):
            order = (False, True) if turn % 2 else (True, False)  # what comes second finds memory that the first freed
            seconds = {shared: one.seconds(shared=shared) for shared in order}
            pairs += [seconds] * (turn > 0)
        padded, tree = (statistics.median(pair[shared] for pair in pairs) for shared in (False, True))
        memory = {shared: peak(case, shared=shared) for shared in (False, True)}
        report.row(
            case=case,
            padded_s=padded,
            shared_s=tree,
            time=padded / tree,
            tokens=one.tokens(),
            padded_mib=memory[False],
            shared_mib=memory[True],
        )
        if case in NOTHING_SHARED:
            report.ratio(f"slower/{case}", statistics.median(pair[True] / pair[False] for pair in pairs))
        else:
            report.ratio(f"time_over_tokens/{case}", padded / tree / one.tokens())
        report.ratio(f"memory/{case}", memory[True] / memory[False])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
