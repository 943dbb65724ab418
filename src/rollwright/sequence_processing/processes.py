"""Several processes: each generates and scores its share of the prompts, and all get everything.

Numbers travel as flat tensors by the process group that is there (NCCL or Gloo); nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults
from rollwright.training.parallel import gathered_rows, rank, summed, world_size

_REASONS = ("stop", "length", "abort")


def own_share(count: int) -> range:
    """The numbers of this process's prompts: contiguous, in rank order, sizes differing by one at most."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def agreed_seed(seed: int, device: torch.device) -> int:
    """Rank 0's seed, on every rank."""
    return int(summed(torch.tensor(seed if rank() == 0 else 0, device=device)))


def gathered(
    prompts: list[list[int]],
    group: int,
    mine: tuple[BatchedSequences, LogprobResults] | None,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[BatchedSequences, LogprobResults]:
    """Put the shares of all processes together, in the order of the prompts.

    Args:
        prompts: ids of all prompts, the same on every process.
        group: responses to each.
        mine: this process's share; None where it has no prompt.
        tokenizer: decodes responses and names the pad token.
        device, dtype: of the log-probabilities.
    """
    lengths, tokens, reasons, logprobs, entropies = (_everyone(part) for part in _flat(mine, device, dtype))
    sizes = lengths.tolist()
    responses = [piece.tolist() for piece in tokens.split(sizes)]
    rows = [responses[start : start + group] for start in range(0, len(responses), group)]
    names = [_REASONS[code] for code in reasons.tolist()]
    sequences = BatchedSequences.from_tokens(
        prompts,
        rows,
        [tokenizer.batch_decode(row, skip_special_tokens=True) for row in rows],
        tokenizer.pad_token_id,
        device,
        [names[start : start + group] for start in range(0, len(names), group)],
    )
    logprob_pieces, entropy_pieces = list(logprobs.split(sizes)), [p.cpu().numpy() for p in entropies.split(sizes)]
    totals = [float(piece.double().sum()) for piece in logprob_pieces]
    starts = range(0, len(sizes), group)
    return sequences, LogprobResults(
        logprobs=[logprob_pieces[start : start + group] for start in starts],
        entropies=[entropy_pieces[start : start + group] for start in starts],
        sequence_logprobs=[totals[start : start + group] for start in starts],
    )


def _everyone(value: Tensor) -> Tensor:
    return gathered_rows(value)[0]


def _flat(
    mine: tuple[BatchedSequences, LogprobResults] | None, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Lengths, tokens, stop reasons, log-probabilities and entropies, each in one dimension."""
    if mine is None:
        whole = [torch.zeros(0, dtype=torch.int64, device=device) for _ in range(3)]
        return (*whole, torch.zeros(0, dtype=dtype, device=device), torch.zeros(0, dtype=dtype, device=device))  # type: ignore[return-value]
    sequences, results = mine
    pairs = [(b, g) for b, row in enumerate(sequences.gen_lens) for g in range(len(row))]
    codes = [_REASONS.index(sequences.stop_reasons[b][g]) for b, g in pairs]
    return (
        torch.tensor([sequences.gen_lens[b][g] for b, g in pairs], device=device),
        torch.cat([sequences.response(b, g) for b, g in pairs]).to(device),
        torch.tensor(codes, device=device),
        torch.cat([results.logprobs[b][g] for b, g in pairs]).to(device, dtype),
        torch.cat([torch.from_numpy(results.entropies[b][g]) for b, g in pairs]).to(device, dtype),
    )
