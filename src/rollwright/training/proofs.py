"""How a batch reaches the model: padded, with shared prefixes, with branches; each proved on rows of the run before it is trusted.

The reference of every proof is the model's own, untouched forward of one row without padding. A proof holds for rows of the regimes that
it reached: rows that reach the next window, chunk or set of rotary frequencies (``model_facts.regime_lengths``) are proved again, on
themselves, so a regime that no row of the run comes to costs nothing. A proof costs two or five forward passes over a few rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollwright.config.sections import TrainEngineConfig
from rollwright.errors import TrainingError
from rollwright.experience.branches import sees
from rollwright.experience.trajectory import MULTI_MODAL, Trajectory, row_lengths, select_rows
from rollwright.inference.model_facts import Proofs, frequency_groups
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.logprobs import own_lengths, picture_ids
from rollwright.training.micro_batches import attended_tokens, micro_batches
from rollwright.training.prefix_tree import build as build_tree
from rollwright.training.tree_attention import why_not

logger = getLogger("training")

#: Rows that are scored with shared prefixes and without, before prefixes are shared.
_PROVEN_ROWS = 4


class BatchDivision:
    """The micro-batches of a model's batches, and what was proved of the model."""

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
        """True once rows were scored with shared prefixes and without, and were the same."""
        return self._shares and self._sharing is not None

    def micro_batches(self, scorer: Any, batch: Trajectory) -> list[tuple[Tensor, Trajectory]]:
        """The micro-batches of a batch, as many on each rank as on the one with the most.

        Args:
            scorer: a ``TokenScorer``, sharded or not.
            batch: the rows of this rank.

        Raises:
            TrainingError: the model does not compute rows with branches as it computes the trunk and each branch alone.
            ConfigError: it cannot compute rows of this length.
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
        """The same on every rank."""
        if not self._shares:
            return False
        reason = why_not(model, parallel.largest(batch["input_ids"].shape[1], batch["input_ids"].device))
        if reason is not None:
            self._say(reason)
        return reason is None

    def _say(self, reason: str, level: str = "info") -> None:
        if reason not in self._said:
            getattr(logger, level)("Prefixes that rows share are computed for each row: %s.", reason)
        self._said.add(reason)

    @torch.no_grad()
    def _is_proven(self, scorer: Any, parts: list[Trajectory]) -> bool:
        """Whether micro-batches may be computed as they are; else nothing is shared from now on."""
        device = parts[0]["input_ids"].device
        trees = [part for part in parts if "prefix_tree" in part]
        longest = parallel.largest(max((part["prefix_tree"].longest for part in trees), default=0), device)
        proofs = self._sharing or Proofs(scorer.model.config)
        if not longest or not proofs.is_due(longest):
            return True  # no rank has anything to share, or nothing that was not proved
        part = max(trees, key=lambda part: part["prefix_tree"].longest, default=parts[0])
        reason, difference = _compare_shared(scorer, part)
        limit = _limit(scorer.model, device)
        failed = parallel.largest(int(reason is not None or not difference <= limit), device)
        if failed:
            self._shares = False
            self._say(
                reason
                or f"with shared prefixes a log-probability of {type(scorer.model).__name__} differs by {difference:.3g} (limit {limit}) "
                "from that of the row alone, so its layers see something that attention over a row's tokens does not give",
                "info" if reason else "warning",
            )
            return False
        proofs.passed(longest)
        self._sharing = proofs
        return True

    # Branches

    @torch.no_grad()
    def _prove_branches(self, scorer: Any, batch: Trajectory) -> None:
        """Score a row with branches, and its trunk with one branch as a row without; the branch's tokens are to be alike."""
        device = batch["input_ids"].device
        proofs = self._branches or Proofs(scorer.model.config)
        if not proofs.is_due(parallel.largest(batch["input_ids"].shape[1], device)):
            return
        found = _longest_branch(batch)
        longest = parallel.largest(0 if found is None else found[2], device)
        if not longest or not proofs.is_due(longest):
            return
        difference = _compare_branch(scorer, batch, found)
        limit = _limit(scorer.model, device)
        if parallel.largest(int(not difference <= limit), device):
            raise TrainingError(
                f"{type(scorer.model).__name__}: a log-probability in a row with branches (branch_ids) differs by {difference:.3g} (limit "
                f"{limit}) from that of the trunk and the branch alone, so its layers do not take what tokens may see, or not their "
                "positions. Train it on rows without branches: one row for each."
            )
        proofs.passed(longest)
        self._branches = proofs


def _limit(model: Any, device: torch.device) -> float:
    is_half = torch.is_autocast_enabled(device.type) or next(model.parameters()).dtype.itemsize < 4
    return 0.25 if is_half else 1e-3


def _compare_shared(scorer: Any, part: Trajectory) -> tuple[str | None, float]:
    """Score a few rows, the longest among them, with shared prefixes and each alone.

    Returns:
        Why the model cannot share, and the largest difference. A rank that has nothing to share computes with the others.
    """
    tree, rows = part.get("prefix_tree"), part["input_ids"].shape[0]
    lengths = row_lengths(part).clamp(min=1).tolist()
    last = max(lengths.index(max(lengths)), min(_PROVEN_ROWS, rows) - 1)
    chosen = list(range(max(0, last + 1 - _PROVEN_ROWS), last + 1))
    few = select_rows({name: value for name, value in part.items() if name != "prefix_tree"}, chosen)
    together = {**few}
    if tree is not None:
        shared = tree.repeated[chosen].sum(1).tolist()
        tree = together["prefix_tree"] = build_tree(few, [0, *shared[1:]])
        tree.is_tried = True
    wanted_BL = attended_tokens(few)
    scores_BL, _ = scorer(together, wanted_BL)
    apart = []
    for number in range(_PROVEN_ROWS):  # as many on every rank
        row = min(number, len(chosen) - 1)
        width = lengths[chosen[row]]
        alone_BL, _ = scorer(select_rows(few, [row], width=width), wanted_BL[[row], :width])
        apart.append((alone_BL[0] - scores_BL[row, :width]).abs().max())
    difference = float(torch.stack(apart).max())  # not a number, where one of them is not
    name = type(scorer.model).__name__
    if tree is not None and tree.refusal:
        return f"{name} cannot share them, as {tree.refusal}", difference
    if tree is not None and not tree.uses:
        return f"{name} passes no prefix_tree on", difference
    return None, difference


def _longest_branch(batch: Trajectory) -> tuple[int, int, int] | None:
    """Row, branch and visible tokens of the branch that sees the most; None: there are only trunks."""
    lengths = row_lengths(batch).tolist()
    found = []
    for row, (branches_L, length) in enumerate(zip(batch["branch_ids"], lengths, strict=True)):
        found += [
            (row, branch, len(_seen_by(batch, row, branch))) for branch in branches_L[:length].unique().tolist() if branch
        ]
    return max(found, key=lambda each: each[2], default=None)


def _seen_by(batch: Trajectory, row: int, branch: int) -> Tensor:
    """Columns that the last token of a branch sees."""
    branches_L = batch["branch_ids"][row, : int(row_lengths(batch)[row])]
    last = int((branches_L == branch).nonzero().max())
    seen_L = sees(branches_L[last : last + 1], branches_L[: last + 1])[0]
    return seen_L.nonzero()[:, 0]


def _compare_branch(scorer: Any, batch: Trajectory, found: tuple[int, int, int] | None) -> float:
    """Largest difference of a branch's log-probabilities in its row and in a row of what it sees."""
    row, branch, _ = found or (0, 0, 0)
    plain = {name: value for name, value in batch.items() if name not in ("branch_ids", MULTI_MODAL, "loss_mask")}
    alone = select_rows(plain, [row])
    together = {**alone, "branch_ids": batch["branch_ids"][row][None]}
    wanted_BL = attended_tokens(together)
    scores_BL, _ = scorer(together, wanted_BL)
    columns = torch.arange(int(row_lengths(batch)[row].clamp(min=1)), device=batch["input_ids"].device)
    if found is not None:
        columns = _seen_by(batch, row, branch)
    for name in ("input_ids", "attention_mask", "position_ids"):
        if alone.get(name) is not None:
            alone[name] = alone[name][:, columns]
    if alone.get("position_ids") is None and found is not None:
        alone["position_ids"] = columns[None]
    alone_BL, _ = scorer(
        {
            name: value
            for name, value in alone.items()
            if name in ("input_ids", "attention_mask", "position_ids", "temperature")
        },
        wanted_BL[:, columns],
    )
    if found is None:
        return 0.0
    of_branch = batch["branch_ids"][row][columns] == branch
    return float((alone_BL[0] - scores_BL[0, columns])[of_branch].abs().max())
