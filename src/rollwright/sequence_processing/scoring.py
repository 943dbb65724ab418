"""Teacher forcing: computes log-probabilities and entropies of responses, at most ``tf_batch_size`` sequences per forward pass.

The training code's ``TokenScorer`` does the computation. Only hidden states before response tokens go through the output layer, in chunks,
so there is never a ``[B, L, V]`` tensor of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollwright.inference.model_facts import frequency_groups
from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults
from rollwright.sequence_processing.generation import BatchSize
from rollwright.sequence_processing.models import evaluation_mode, halved_after, scoring_batch_size
from rollwright.training.logprobs import TokenScorer

#: Number of logits computed at a time. Several float32 tensors of this size are in memory together.
_CHUNK_ENTRIES = {"cpu": 1 << 21, "cuda": 1 << 25}

#: Once a batch has ``_FEW_ROWS`` rows, it ends before a row that is shorter than this share of the longest row.
_LEAST_FILLED, _FEW_ROWS = 0.8, 8


def score(
    module: nn.Module,
    sequences: BatchedSequences,
    *,
    inner: Any,
    temperature: float,
    batch_size: BatchSize,
    with_grad: bool = False,
    may_halve: bool = True,
    advance: Callable[[int], None] = lambda steps: None,
) -> LogprobResults:
    """Score every response.

    Args:
        module: a Hugging Face causal model, possibly wrapped.
        sequences: the sequences to score.
        inner: the unwrapped Hugging Face model, for its sizes.
        temperature: divisor of the logits.
        batch_size: number of sequences per forward pass; ``"auto"`` chooses by free memory.
        with_grad: keep the graph. If there are several batches, each is recomputed in the backward pass, so that only one batch's
            activations are in memory.
        may_halve: continue with half the batch size if memory runs out. If False, raise the error.
        advance: called with the number of newly scored sequences.
    """
    prompts, group, length = sequences.sequences.shape
    if batch_size == "auto":
        batch_size = scoring_batch_size(inner, prompts * group, length, with_grad)
    vocabulary = inner.config.get_text_config().vocab_size
    device = next(module.parameters()).device
    rows = [(b, g) for b in range(prompts) for g in range(group) if sequences.gen_lens[b][g]]
    lengths = {(b, g): sequences.prompt_lens[b] + sequences.gen_lens[b][g] for b, g in rows}
    rows.sort(key=lengths.__getitem__, reverse=True)  # if memory does not suffice, the first batch fails
    groups = dict(zip(rows, frequency_groups(inner.config, [lengths[row] for row in rows]), strict=True))
    scorer = TokenScorer(module, chunk_bytes=4 * max(16 * vocabulary, _CHUNK_ENTRIES.get(device.type, 1 << 21)))
    dtype = torch.promote_types(next(module.parameters()).dtype, torch.float32)
    scored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    recompute = with_grad and len(rows) > batch_size
    while remaining := rows[len(scored) :]:
        batch = _of_like_length(remaining[:batch_size], lengths, groups)
        try:
            logprobs_T, entropy_T = _score_batch(scorer, sequences, batch, temperature, device, with_grad, recompute)
        except Exception as error:
            batch_size, recompute = halved_after(error, len(batch), "tf_batch_size", may_halve), with_grad
            continue
        sizes = [sequences.gen_lens[b][g] for b, g in batch]
        pieces = zip(logprobs_T.split(sizes), entropy_T.split(sizes), strict=True)
        scored.update(zip(batch, pieces, strict=True))
        advance(len(batch))
    nothing = torch.empty(0, dtype=dtype, device=device)
    pairs = [scored.get((b, g), (nothing, nothing)) for b in range(prompts) for g in range(group)]
    return LogprobResults.from_tensors([logprobs_T for logprobs_T, _ in pairs], [entropy_T for _, entropy_T in pairs], group)


def _of_like_length(
    rows: list[tuple[int, int]], lengths: dict[tuple[int, int], int], groups: dict[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """Return the leading rows that can be computed together with little padding, which costs as much as tokens.

    All of these rows use the same rotary frequencies (``frequency_groups``).
    """
    least, group = lengths[rows[0]] * _LEAST_FILLED, groups[rows[0]]
    is_short = ((index >= _FEW_ROWS and lengths[row] < least) or groups[row] != group for index, row in enumerate(rows))
    count = next((index for index, ends in enumerate(is_short) if ends), len(rows))
    return rows[:count]


def _score_batch(
    scorer: TokenScorer,
    sequences: BatchedSequences,
    batch: list[tuple[int, int]],
    temperature: float,
    device: torch.device,
    with_grad: bool,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies of the batch's response tokens, ``[T]`` each, row after row."""
    b_B, g_B = (torch.tensor(column) for column in zip(*batch, strict=True))
    start_B = torch.tensor([sequences.prompt_lens[b] for b, _ in batch])
    end_B = start_B + torch.tensor([sequences.gen_lens[b][g] for b, g in batch])
    stored = sequences.sequences.device
    ids_BL = sequences.sequences[b_B.to(stored), g_B.to(stored), : int(end_B.max())].to(device)
    columns_L = torch.arange(ids_BL.shape[1])
    wanted_BL = ((columns_L >= start_B[:, None]) & (columns_L < end_B[:, None])).to(device)
    inputs = {
        "input_ids": ids_BL,
        "attention_mask": (columns_L < end_B[:, None]).to(device),
        "temperature": torch.full((len(batch),), temperature, device=device),
    }

    def compute(inputs: dict[str, Tensor], wanted_BL: Tensor) -> tuple[Tensor, Tensor]:
        with evaluation_mode(scorer.model):  # also when the checkpoint recomputes it in the backward pass
            logprobs_BL, entropy_BL = scorer(inputs, wanted_BL, with_entropy=True)
        return logprobs_BL[wanted_BL], entropy_BL[wanted_BL].detach()

    if not with_grad:
        with torch.no_grad():
            return compute(inputs, wanted_BL)
    with torch.enable_grad():
        if recompute:
            return checkpoint(compute, inputs, wanted_BL, use_reentrant=False)
        return compute(inputs, wanted_BL)
