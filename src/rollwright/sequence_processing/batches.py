"""Results of generation and scoring, and their gathering across processes.

Axes: ``B`` prompts, ``G`` responses to each prompt, ``L`` padded length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.training.parallel import gathered_rows, rank, world_size

Value = TypeVar("Value")
_REASONS = ("stop", "length", "abort")


@dataclass
class BatchedSequences:
    """Prompts and their responses, right-padded.

    Response ``g`` to prompt ``b`` is ``sequences[b, g, p : p + n]`` with ``p = prompt_lens[b]`` and ``n = gen_lens[b][g]``. It includes the
    end token, or the tokens of the stop string, that ended it; ``gen_lens`` counts these tokens, too.

    Attributes:
        sequences: ``[B, G, L]`` int64, prompt and response, then pad tokens.
        prompt_lens: ``[B]``, number of tokens of each prompt.
        gen_lens: ``[B][G]``, number of tokens of each response.
        attention_masks: ``[B, G, L]`` int64, 1 for tokens of prompt or response, else 0.
        responses_text: ``[B][G]``, decoded responses without special tokens.
        stop_reasons: ``[B][G]``, ``"stop"``, or ``"length"`` if a limit cut the response. The list is empty if the reasons are unknown.
    """

    sequences: Tensor
    prompt_lens: list[int]
    gen_lens: list[list[int]]
    attention_masks: Tensor
    responses_text: list[list[str]]
    stop_reasons: list[list[str]] = field(default_factory=list)

    @classmethod
    def from_tokens(
        cls,
        prompts: Sequence[list[int]],
        responses: Sequence[Sequence[list[int]]],
        texts: list[list[str]],
        pad_id: int,
        device: torch.device | str = "cpu",
        stop_reasons: list[list[str]] | None = None,
    ) -> BatchedSequences:
        """Build a batch from lists of tokens.

        Args:
            prompts: ``[B]``, token ids of each prompt.
            responses: ``[B][G]``, token ids of each response.
            texts: ``[B][G]``, decoded responses.
            pad_id: id of the pad token.
            device: device of the tensors.
            stop_reasons: see the attribute.
        """
        count = {len(row) for row in responses}
        if len(prompts) != len(responses) or len(count) > 1:
            raise ConfigError(f"{len(prompts)} prompts came with responses {[len(row) for row in responses]}: give each G.")
        rows = [[*prompt, *response] for prompt, own in zip(prompts, responses, strict=True) for response in own]
        shape = (len(prompts), max(count, default=0), max(map(len, rows), default=0))
        lengths_BG = torch.tensor([len(row) for row in rows], dtype=torch.int64).view(shape[:2])
        mask_BGL = torch.arange(shape[2]) < lengths_BG[..., None]
        sequences_BGL = torch.full(shape, pad_id, dtype=torch.int64)
        sequences_BGL[mask_BGL] = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int64)
        return cls(
            sequences=sequences_BGL.to(device),
            prompt_lens=[len(prompt) for prompt in prompts],
            gen_lens=[[len(response) for response in own] for own in responses],
            attention_masks=mask_BGL.long().to(device),
            responses_text=texts,
            stop_reasons=stop_reasons or [],
        )

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def prompt(self, b: int) -> Tensor:
        """Return the token ids of prompt ``b``."""
        return self.sequences[b, 0, : self.prompt_lens[b]]

    def response(self, b: int, g: int) -> Tensor:
        """Return the token ids of response ``g`` to prompt ``b``."""
        start = self.prompt_lens[b]
        return self.sequences[b, g, start : start + self.gen_lens[b][g]]

    def share_changed(self, other: BatchedSequences) -> float:
        """Return the share of responses that differ from those of ``other`` in any token.

        With the same seed, logits at different batch sizes are equal up to rounding, which may change a sampled token if two tokens are
        nearly tied.

        Raises:
            ConfigError: the numbers of prompts or responses differ.
        """
        if self.sequences.shape[:2] != other.sequences.shape[:2]:
            raise ConfigError(
                f"{tuple(self.sequences.shape[:2])} and {tuple(other.sequences.shape[:2])} prompts and responses cannot be "
                "compared one by one: generate both with the same prompts and G."
            )
        prompts, group = self.sequences.shape[:2]
        pairs = [(self.response(b, g), other.response(b, g)) for b in range(prompts) for g in range(group)]
        return sum(not torch.equal(mine, theirs.to(mine.device)) for mine, theirs in pairs) / len(pairs)


@dataclass
class LogprobResults:
    """Log-probabilities and entropies of responses, in nats, with one entry for each response token.

    Attributes:
        logprobs: ``[B][G]``, one float32 tensor (float64 for a float64 model) per response: log-probability of each token at the sampling
            temperature, before top-p. With ``with_grad=True`` gradients flow through these tensors to the model.
        entropies: ``[B][G]``, one array per response: entropy of the softmax at each token, at the same temperature and before top-p.
        sequence_logprobs: ``[B][G]``, sums of ``logprobs``.
    """

    logprobs: list[list[Tensor]]
    entropies: list[list[np.ndarray]]
    sequence_logprobs: list[list[float]]

    @classmethod
    def from_tensors(cls, logprobs: Sequence[Tensor], entropies: Sequence[Tensor], group: int) -> LogprobResults:
        """Build results from one tensor of log-probabilities and one of entropies per response, in the order of the prompts."""
        return cls(
            logprobs=grouped(logprobs, group),
            entropies=grouped([entropy_T.cpu().numpy() for entropy_T in entropies], group),
            sequence_logprobs=grouped([float(logprobs_T.detach().double().sum()) for logprobs_T in logprobs], group),
        )


def grouped(values: Sequence[Value], group: int) -> list[list[Value]]:
    """Group ``[B * G]`` values as ``[B][G]``."""
    return [list(values[start : start + group]) for start in range(0, len(values), group)]


def decoded(
    prompts: list[list[int]],
    responses: list[list[int]],
    stop_reasons: list[str],
    group: int,
    tokenizer: Any,
    device: torch.device,
) -> BatchedSequences:
    """Decode the responses, ``group`` for each prompt in order, and combine them with the prompts."""
    rows = grouped(responses, group)
    texts = [tokenizer.batch_decode(row, skip_special_tokens=True) for row in rows]
    return BatchedSequences.from_tokens(prompts, rows, texts, tokenizer.pad_token_id, device, grouped(stop_reasons, group))


# ------------------------------------------------------------------ several processes


def own_share(count: int) -> range:
    """Return the indices of this process's prompts. Shares are contiguous, in rank order, and differ in size by at most one."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def gathered(
    prompts: list[list[int]],
    group: int,
    mine: tuple[BatchedSequences, LogprobResults] | None,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[BatchedSequences, LogprobResults]:
    """Gather the shares of all processes in the order of the prompts, over the default process group and without pickle.

    Args:
        prompts: ids of all prompts, the same on every process.
        group: number of responses to each prompt.
        mine: results of this process's share, or None if the share is empty.
        tokenizer: decodes responses and defines the pad token.
        device, dtype: device and type of the log-probabilities.
    """
    lengths, tokens, reasons, logprobs, entropies = (gathered_rows(part)[0] for part in _flat(mine, device, dtype))
    sizes = lengths.tolist()
    responses = [piece.tolist() for piece in tokens.split(sizes)]
    sequences = decoded(prompts, responses, [_REASONS[code] for code in reasons.tolist()], group, tokenizer, device)
    return sequences, LogprobResults.from_tensors(logprobs.split(sizes), entropies.split(sizes), group)


def _flat(mine: tuple[BatchedSequences, LogprobResults] | None, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return lengths, tokens, stop reasons, log-probabilities and entropies as one-dimensional tensors."""
    if mine is None:
        return tuple(torch.zeros(0, dtype=kind, device=device) for kind in (*[torch.int64] * 3, dtype, dtype))
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
