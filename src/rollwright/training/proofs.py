"""Check shared prefixes and branches against the model on rows of the run before using them.

The reference of every check is the model's own, unmodified forward of one row without padding. A check covers the regimes that its rows
reached: rows that reach the next window, chunk or set of rotary frequencies (``model_facts.regime_lengths``) trigger another check on
those rows, so a regime that no row reaches costs nothing. A check costs a few forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollwright.config.sections import TrainEngineConfig
from rollwright.errors import TrainingError
from rollwright.experience.branches import sees
from rollwright.experience.trajectory import Trajectory, row_lengths, select_rows
from rollwright.inference.model_facts import Proofs, frequency_groups
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.logprobs import own_lengths, picture_ids
from rollwright.training.micro_batches import attended_tokens, micro_batches
from rollwright.training.tree_attention import why_not

logger = getLogger("training")

#: Rows of a micro-batch that are scored both with and without shared prefixes.
_PROVEN_ROWS = 4


class BatchDivision:
    """Splits a model's batches into micro-batches and keeps the results of the checks."""

    def __init__(self, config: TrainEngineConfig) -> None:
        """
        Args:
            config: the model's section.
        """
        self.config = config
        self._shares = config.share_prefixes
        self._said: set[str] = set()
        self._sharing: Proofs | None = None
        self._branches: Proofs | None = None

    @property
    def shares_prefixes(self) -> bool:
        """True once the scores of rows with and without shared prefixes agreed."""
        return self._shares and self._sharing is not None

    def micro_batches(self, scorer: Any, batch: Trajectory) -> list[tuple[Tensor, Trajectory]]:
        """Split a batch into micro-batches, the same number on each rank.

        Args:
            scorer: a ``TokenScorer``, sharded or not.
            batch: the rows of this rank.

        Raises:
            TrainingError: a row with branches gets other log-probabilities than the trunk with each branch alone.
            ConfigError: the model cannot compute rows of this length.
        """
        if batch.get("branch_ids") is not None:
            self._prove_branches(scorer, batch)
        share = self._may_share(scorer.model, batch)
        options = {
            "share_prefixes": share,
            "picture_ids": picture_ids(scorer.model.config),
            "groups": frequency_groups(scorer.model.config, own_lengths(batch)),
        }
        parts = micro_batches(batch, self.config.mb_spec, **options)
        most = parallel.largest(len(parts), batch["input_ids"].device)
        if most != len(parts):
            parts = micro_batches(batch, self.config.mb_spec, at_least=most, **options)
        if share and not self._is_proven(scorer, [part for _, part in parts]):
            return self.micro_batches(scorer, batch)
        return parts

    # Shared prefixes

    def _may_share(self, model: Any, batch: Trajectory) -> bool:
        """Whether prefixes may be shared; equal on every rank."""
        if not self._shares:
            return False
        reason = why_not(model, parallel.largest(batch["input_ids"].shape[1], batch["input_ids"].device))
        if reason is not None:
            self._say(reason)
        return reason is None

    def _say(self, reason: str, level: str = "info") -> None:
        if reason not in self._said:
            getattr(logger, level)("Shared prefixes are computed for each row: %s.", reason)
        self._said.add(reason)

    @torch.no_grad()
    def _is_proven(self, scorer: Any, parts: list[Trajectory]) -> bool:
        """Whether the micro-batches pass the check; if not, sharing is disabled from now on.

        The length that counts is that of a tree, because some models use a token's index in their input. So the check covers the
        micro-batch with the most tokens and the one with the longest row.
        """
        device = parts[0]["input_ids"].device
        trees = [part for part in parts if "prefix_tree" in part]
        tokens = parallel.largest(max((part["prefix_tree"].tokens for part in trees), default=0), device)
        proofs = self._sharing or Proofs(scorer.model.config)
        if not tokens or not proofs.is_due(tokens):
            return True  # no rank shares anything, or everything was checked before
        widest = max(trees, key=lambda part: part["prefix_tree"].tokens, default=parts[0])
        longest = max(trees, key=lambda part: part["prefix_tree"].longest, default=parts[0])
        found = [_compare_shared(scorer, part) for part in (widest, longest)]
        reason, limit = next((reason for reason, _ in found if reason), None), _limit(scorer.model, device)
        if parallel.largest(int(reason is not None or any(not apart <= limit for _, apart in found)), device):
            self._shares = False
            self._say(
                reason
                or f"with shared prefixes a log-probability of {type(scorer.model).__name__} differs by "
                f"{max(apart for _, apart in found):.3g} (limit {limit}) from that of the row alone, so its layers depend on more than "
                "attention over the row's tokens",
                "info" if reason else "warning",
            )
            return False
        proofs.passed(tokens)
        self._sharing = proofs
        return True

    # Branches

    @torch.no_grad()
    def _prove_branches(self, scorer: Any, batch: Trajectory) -> None:
        """Compare the scores of a branch's tokens in a row with branches and in a row of the trunk and this branch alone."""
        device = batch["input_ids"].device
        longest = parallel.largest(batch["input_ids"].shape[1], device)
        proofs = self._branches or Proofs(scorer.model.config)
        if not proofs.is_due(longest):
            return
        branches = _branches_of(batch)
        if not parallel.largest(len(branches), device):
            return
        most = max(branches, key=lambda each: len(each.columns), default=None)
        last = max(branches, key=lambda each: int(each.columns[-1]), default=None)
        try:
            with parallel.watched():
                difference = torch.stack([_compare_branch(scorer, batch, branch) for branch in (most, last)]).max()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # a foreign forward given a mask and positions
            name, said = type(scorer.model).__name__, f"{type(error).__name__}: {error}"
            raise TrainingError(
                f"{name} fails on rows with branches (branch_ids): {said}. Train it on rows without branches: one row for each branch."
            ) from error
        limit = _limit(scorer.model, device)
        if parallel.largest(int(not difference <= limit), device):
            raise TrainingError(
                f"{type(scorer.model).__name__}: a log-probability in a row with branches (branch_ids) differs by {difference:.3g} (limit "
                f"{limit}) from that of the trunk and the branch alone, so its layers ignore the attention mask or the "
                "positions. Train it on rows without branches: one row for each branch."
            )
        proofs.passed(longest)
        self._branches = proofs


def _limit(model: Any, device: torch.device) -> float:
    is_half = torch.is_autocast_enabled(device.type) or next(model.parameters()).dtype.itemsize < 4
    return 0.25 if is_half else 1e-3


def _compare_shared(scorer: Any, part: Trajectory) -> tuple[str | None, float]:
    """Score rows of a micro-batch both with shared prefixes and alone: the longest, and the last ones in the tree.

    Returns:
        Why the model cannot share, and the largest difference. A rank with nothing to share still takes part in the forward passes.
    """
    tree, rows = part.get("prefix_tree"), part["input_ids"].shape[0]
    lengths = row_lengths(part).clamp(min=1).tolist()
    chosen = [lengths.index(max(lengths)), *range(max(0, rows - _PROVEN_ROWS + 1), rows)]
    attended_BL, wanted_BL = attended_tokens(part), torch.zeros_like(part["input_ids"], dtype=torch.bool)
    wanted_BL[chosen] = attended_BL[chosen]
    if tree is not None:
        tree.is_tried = True
    scores_BL, _ = scorer(part, wanted_BL)
    plain = {name: value for name, value in part.items() if name != "prefix_tree"}
    apart = []
    for number in range(_PROVEN_ROWS):  # the same number on every rank
        row = chosen[min(number, len(chosen) - 1)]
        width = lengths[row]
        alone_BL, _ = scorer(select_rows(plain, [row], width=width), wanted_BL[[row], :width])
        apart.append((alone_BL[0] - scores_BL[row, :width]).abs().max())
    difference = float(torch.stack(apart).max())  # NaN if any of them is
    if tree is not None:
        tree.is_tried = False
    name = type(scorer.model).__name__
    if tree is not None and tree.refusal:
        return f"{name} cannot share them, because {tree.refusal}", difference
    if tree is not None and not tree.uses:
        return f"{name} does not pass prefix_tree on to its layers", difference
    return None, difference


@dataclass(frozen=True)
class _Branch:
    """A branch of a row, and the columns that its last token sees."""

    row: int
    number: int
    columns: Tensor


def _branches_of(batch: Trajectory) -> list[_Branch]:
    found = []
    for row, (branches_L, length) in enumerate(zip(batch["branch_ids"], row_lengths(batch).tolist(), strict=True)):
        for number in branches_L[:length].unique().tolist():
            if number:
                before_L = branches_L[: int((branches_L[:length] == number).nonzero().max()) + 1]
                found.append(_Branch(row, number, sees(before_L[-1:], before_L)[0].nonzero()[:, 0]))
    return found


def _compare_branch(scorer: Any, batch: Trajectory, branch: _Branch | None) -> Tensor:
    """Largest difference of a branch's log-probabilities between its row and a row of what it sees; 0 without a branch."""
    row = 0 if branch is None else branch.row
    names = [name for name in ("input_ids", "attention_mask", "position_ids", "temperature") if batch.get(name) is not None]
    length = int(row_lengths(batch)[row].clamp(min=1))
    alone = select_rows({name: batch[name] for name in names}, [row], width=length)
    wanted_BL = attended_tokens(alone)
    together_BL, _ = scorer({**alone, "branch_ids": batch["branch_ids"][row : row + 1, :length]}, wanted_BL)
    columns = torch.arange(length, device=wanted_BL.device) if branch is None else branch.columns
    positions_L = columns if batch.get("position_ids") is None else alone["position_ids"][0, columns]
    alone = {name: value[:, columns] if value.dim() > 1 else value for name, value in alone.items()}
    alone["position_ids"] = positions_L[None]
    if torch.equal(positions_L, torch.arange(len(columns), device=positions_L.device)):
        del alone["position_ids"]  # an ordinary row: the model counts, some from another number than 0
    alone_BL, _ = scorer(alone, wanted_BL[:, columns])
    apart_L = (alone_BL[0] - together_BL[0, columns]).abs()
    return apart_L.max() * 0 if branch is None else apart_L[batch["branch_ids"][row, columns] == branch.number].max()
