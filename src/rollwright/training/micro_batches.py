"""Division of a batch over ranks, into minibatches (one optimizer step each), and of these into micro-batches that fit into memory.

The loss weights are computed beforehand (``aggregation_weights``), so micro-batches do not change the gradient. Rows whose rotary
frequencies differ (``model_facts.frequency_groups``) never share a micro-batch. If rows share prefixes, a micro-batch gets a
``prefix_tree``. Otherwise a micro-batch has rows of similar length, and columns beyond its longest row are cut off.

Before it uses shared prefixes or branches, ``BatchDivision`` scores some rows of the run both with them and by the model's own, unmodified
forward pass of one row without padding, and compares the results. The check is repeated when longer rows reach the next attention window,
chunk or set of rotary frequencies (``model_facts.regime_lengths``). It costs a few forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollwright.config.sections import MicroBatchSpec, TrainEngineConfig
from rollwright.errors import TrainingError
from rollwright.experience.contract import MULTI_MODAL, ROUTED_EXPERTS
from rollwright.experience.trajectory import Trajectory, row_lengths, select_rows
from rollwright.inference.attention_masks import sees
from rollwright.inference.model_facts import Proofs, frequency_groups
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.logprobs import own_lengths, picture_ids
from rollwright.training.prefix_tree import SortedRows, enough_parts
from rollwright.training.prefix_tree import build as build_tree
from rollwright.training.tree_attention import why_not

#: Column that holds the minibatch number of each row in a rank's share of a batch.
MINIBATCH_IDS = "minibatch_ids"

#: Ratio of distinct to padded tokens above which prefix sharing is no faster.
_WORTH_SHARING = 0.9


def attended_tokens(batch: Trajectory) -> Tensor:
    """Return the bool mask ``[B, L]`` of the tokens that have a log-probability: all except padding and the first token of each row."""
    mask = batch.get("attention_mask")
    wanted_BL = torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool().clone()
    wanted_BL[:, 0] = False
    return wanted_BL


def split_rows(lengths: Sequence[int], spec: MicroBatchSpec, *, at_least: int = 1) -> list[list[int]]:
    """Divide rows into micro-batches by a budget of padded tokens.

    Args:
        lengths: tokens of each row.
        spec: the budget and the minimum number of micro-batches.
        at_least: a second minimum, usually the largest number on any rank. If there are not enough rows, empty micro-batches are added.

    Returns:
        Lists of row indices, longest rows first. Every row is in exactly one list; a row that exceeds the budget has its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    parts: list[list[int]] = []
    for row in order:
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= spec.max_tokens_per_mb:
            parts[-1].append(row)
        else:
            parts.append([row])
    return enough_parts(parts, spec, at_least, lambda part: (len(part) > 1, len(part) * lengths[part[0]]))


def micro_batches(
    batch: Trajectory,
    spec: MicroBatchSpec,
    *,
    at_least: int = 1,
    share_prefixes: bool = False,
    picture_ids: Sequence[int] = (),
    groups: Sequence[int] | None = None,
) -> list[tuple[torch.Tensor, Trajectory]]:
    """Split a batch into micro-batches, each with the indices of its rows.

    Args:
        batch: the rows to split.
        spec: the budget, in padded tokens, or in distinct tokens if prefixes are shared.
        at_least: minimum number of micro-batches (usually the largest number on any rank).
        share_prefixes: give each micro-batch its ``prefix_tree`` if that saves at least a tenth of the padded tokens.
        picture_ids: image placeholder tokens.
        groups: group of each row; rows of different groups never share a micro-batch. If None, all rows are in one group.

    An empty micro-batch (see ``split_rows``) holds only the first token of row 0, or a placeholder if the batch has no rows. It is
    computed because every rank must take part in a sharded forward pass. Its row indices are empty, so it does not contribute.
    """
    group_of_row = [0] * batch["input_ids"].shape[0] if groups is None else list(groups)
    result: list[tuple[torch.Tensor, Trajectory]] = []
    kinds = sorted(set(group_of_row)) or [0]
    for kind in kinds:
        of_kind = [row for row, group in enumerate(group_of_row) if group == kind]
        own = batch if len(kinds) == 1 else select_rows(batch, of_kind)
        lengths, missing = row_lengths(own).clamp(min=1).tolist(), at_least - len(result) if kind == kinds[-1] else 1
        parts = split_rows(lengths, spec, at_least=missing)
        rows = SortedRows(own, picture_ids) if share_prefixes and len(lengths) > 1 else None
        if rows is not None and rows.distinct <= _WORTH_SHARING * sum(len(part) * lengths[part[0]] for part in parts if part):
            parts = rows.parts(spec, at_least=missing)
        else:
            rows = None
        for part in parts:
            chosen = part if rows is None else rows.order[part].tolist()
            width = max(lengths[row] for row in chosen) if chosen else 1
            selected = select_rows(own if lengths else _one_row(own), chosen or [0], width=width)
            if rows is not None and chosen:
                selected["prefix_tree"] = build_tree(selected, [0, *rows.shared[part[1:]].tolist()])
            index_B = torch.tensor([of_kind[row] for row in chosen], dtype=torch.long, device=batch["input_ids"].device)
            result.append((index_B, selected))
    return result


def _one_row(batch: Trajectory) -> Trajectory:
    """Make a placeholder of one token for a batch without rows. Its score is not used."""
    return {
        key: value.new_full((1, *value.shape[1:]), key in ("attention_mask", "temperature"))
        if isinstance(value, Tensor)
        else [None]
        for key, value in batch.items()
    }


def split_minibatches(batch: Trajectory, count: int) -> list[torch.Tensor]:
    """Divide a batch into minibatches, one optimizer step each. Groups stay whole; without ``group_ids``, each row is a group.

    If a batch has ``minibatch_ids``, as a rank's share of a batch does, they determine the division.

    Returns:
        ``count`` tensors of row indices. Groups keep their order, and the minibatches' numbers of groups differ by at most one.

    Raises:
        TrainingError: there are fewer groups than minibatches.
    """
    rows = int(batch["input_ids"].shape[0])
    device = batch["input_ids"].device
    if count == 1:
        return [torch.arange(rows, device=device)]
    if batch.get(MINIBATCH_IDS) is not None:
        return [torch.nonzero(batch[MINIBATCH_IDS] == part).flatten() for part in range(count)]
    groups = batch.get("group_ids")
    in_order: dict[int, int] = {}  # groups are numbered in order of appearance
    numbers = range(rows) if groups is None else [in_order.setdefault(group, len(in_order)) for group in groups.tolist()]
    unit_of_row = torch.tensor(numbers, dtype=torch.long)
    units = int(unit_of_row.max()) + 1 if rows else 0
    if units < count:
        what = "rows" if groups is None else "groups"
        raise TrainingError(
            f"A batch of {units} {what} cannot be divided into actor.ppo_n_minibatches={count} optimizer steps; lower "
            "ppo_n_minibatches or raise train_dataset.batch_size."
        )
    part_of_unit = torch.arange(units) * count // units
    part_of_row = part_of_unit[unit_of_row]
    return [torch.nonzero(part_of_row == part).flatten().to(device) for part in range(count)]


def ranks_of_groups(tokens: Sequence[int], ranks: int, *, at_least: int = 1) -> list[int]:
    """Assign each group to a rank so that all ranks compute about the same number of tokens; groups stay whole.

    The largest remaining group goes to the rank with the fewest tokens. The fullest rank then has at most 4/3 of the tokens of the
    fullest rank in the optimal division (Graham 1969, theorem 2).

    Args:
        tokens: distinct tokens of each group (``SortedRows.tokens_of_groups``).
        ranks: number of ranks.
        at_least: groups that each rank needs (``ppo_n_minibatches``).

    Returns:
        The rank of each group. Equal arguments give equal results.

    Raises:
        TrainingError: there are too few groups.
    """
    if len(tokens) < ranks * at_least:
        raise TrainingError(
            f"A batch of {len(tokens)} groups cannot be divided over {ranks} ranks that need {at_least} each (actor.ppo_n_minibatches): "
            "train with fewer ranks, or raise train_dataset.batch_size."
        )
    loads, counts, result = [0] * ranks, [0] * ranks, [0] * len(tokens)
    for left, group in zip(range(len(tokens), 0, -1), sorted(range(len(tokens)), key=lambda g: -tokens[g]), strict=True):
        lacking = sum(max(0, at_least - count) for count in counts)
        choices = [r for r in range(ranks) if counts[r] < at_least or lacking < left]
        result[group] = rank = min(choices, key=lambda r: (loads[r], r))
        loads[rank] += tokens[group]
        counts[rank] += 1
    return result


def distinct_tokens(batch: Trajectory) -> dict[int, int]:
    """Count the distinct tokens of each group. Tokens that rows of the group share count once."""
    return SortedRows(batch).tokens_of_groups()


def all_tokens(batch: Trajectory) -> dict[int, int]:
    """Count all tokens of each group, including repeated prefixes. Also works on a packed batch."""
    tokens: dict[int, int] = {}
    for group, length in zip(batch["group_ids"].tolist(), row_lengths(batch).tolist(), strict=True):
        tokens[group] = tokens.get(group, 0) + length
    return tokens


def rows_of_ranks(
    batch: Trajectory, ranks: int, *, at_least: int = 1, count_tokens: Callable[[Trajectory], dict[int, int]] = distinct_tokens
) -> list[torch.Tensor]:
    """Return the rows that each rank trains, in order. Groups stay whole; without ``group_ids``, each row is a group.

    Args:
        batch: the rows.
        ranks: number of ranks.
        at_least: minimum number of groups per rank.
        count_tokens: returns the number of tokens of each group; ``ranks_of_groups`` balances their sums over the ranks.
    """
    groups_B = torch.arange(len(batch["input_ids"])) if batch.get("group_ids") is None else batch["group_ids"]
    tokens = count_tokens({**batch, "group_ids": groups_B})
    chosen = dict(zip(tokens, ranks_of_groups(list(tokens.values()), ranks, at_least=at_least), strict=True))
    rank_B = torch.tensor([chosen[group] for group in groups_B.tolist()], device=batch["input_ids"].device)
    return [torch.nonzero(rank_B == rank).flatten() for rank in range(ranks)]


logger = getLogger("training")

#: Number of rows of a micro-batch that are scored both with and without shared prefixes.
_PROVEN_ROWS = 4


class BatchDivision:
    """Splits a model's batches into micro-batches, and remembers up to which row length its checks passed."""

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
        """True if sharing prefixes is enabled and has passed a check."""
        return self._shares and self._sharing is not None

    def micro_batches(self, scorer: Any, batch: Trajectory) -> list[tuple[Tensor, Trajectory]]:
        """Split a batch into micro-batches, the same number on each rank.

        Args:
            scorer: a ``TokenScorer``, sharded or not.
            batch: the rows of this rank.

        Raises:
            TrainingError: the log-probabilities of a row with branches differ from those of the trunk with each branch alone.
            ConfigError: the model cannot compute rows of this length.
        """
        if batch.get("branch_ids") is not None:
            self._prove_branches(scorer, batch)
        config, device, has_pictures = scorer.model.config, batch["input_ids"].device, any(batch.get(MULTI_MODAL) or [])
        share = self._shares  # equal on every rank
        if share and (reason := why_not(scorer.model, parallel.largest(batch["input_ids"].shape[1], device))) is not None:
            share = False
            self._say(reason)
        options = {
            "share_prefixes": share,
            "picture_ids": picture_ids(config) if has_pictures else (),
            "groups": frequency_groups(config, own_lengths(batch)) if scorer.frequencies_vary else None,
        }
        parts = micro_batches(batch, self.config.mb_spec, **options)
        most = parallel.largest(len(parts), device)
        if most != len(parts):
            parts = micro_batches(batch, self.config.mb_spec, at_least=most, **options)
        if share and not self._is_proven(scorer, [part for _, part in parts]):
            return self.micro_batches(scorer, batch)
        return parts

    # Shared prefixes

    def _say(self, reason: str, level: str = "info") -> None:
        if reason not in self._said:
            getattr(logger, level)("Shared prefixes are computed for each row: %s.", reason)
        self._said.add(reason)

    @torch.no_grad()
    def _is_proven(self, scorer: Any, parts: list[Trajectory]) -> bool:
        """Check shared prefixes on the micro-batches if that is due. If the check fails, disable sharing and return False.

        Some models use a token's index in their input, so the length of the whole tree matters, not only that of a row. The check
        therefore covers the micro-batch with the most tokens and the one with the longest row.
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
        """Check that a branch's tokens score the same in a row with branches as in a row of the trunk and this branch alone."""
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
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # the forward may not support a mask or positions
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
        The reason why the model cannot share (None if it can), and the largest difference. A rank that has nothing to share still takes
        part in the forward passes.
    """
    tree, rows = part.get("prefix_tree"), part["input_ids"].shape[0]
    lengths = row_lengths(part).clamp(min=1).tolist()
    chosen = [lengths.index(max(lengths)), *range(max(0, rows - _PROVEN_ROWS + 1), rows)]
    attended_BL, wanted_BL = attended_tokens(part), torch.zeros_like(part["input_ids"], dtype=torch.bool)
    wanted_BL[chosen] = attended_BL[chosen]
    if tree is not None:
        tree.is_tried = True
    scores_BL, _ = scorer(part, wanted_BL, **scorer.check_options)
    plain = {name: value for name, value in part.items() if name != "prefix_tree"}
    apart = []
    for number in range(_PROVEN_ROWS):  # the same number on every rank
        row = chosen[min(number, len(chosen) - 1)]
        width = lengths[row]
        alone_BL, _ = scorer(select_rows(plain, [row], width=width), wanted_BL[[row], :width], **scorer.check_options)
        apart.append((alone_BL[0] - scores_BL[row, :width]).abs().max())
    reason, name = None, type(scorer.model).__name__
    if tree is not None:
        tree.is_tried = False
        if tree.refusal:
            reason = f"{name} cannot share them, because {tree.refusal}"
        elif not tree.uses:
            reason = f"{name} does not pass prefix_tree on to its layers"
    return reason, float(torch.stack(apart).max())  # NaN if any difference is


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
    """Compare a branch's log-probabilities in its row with those in a row of only the tokens it sees.

    Returns the largest difference; 0 if ``branch`` is None, in which case the forward passes are still computed.
    """
    row = 0 if branch is None else branch.row
    names = ("input_ids", "attention_mask", "position_ids", "temperature", ROUTED_EXPERTS)
    names = [name for name in names if batch.get(name) is not None]
    length = int(row_lengths(batch)[row].clamp(min=1))
    alone = select_rows({name: batch[name] for name in names}, [row], width=length)
    wanted_BL = attended_tokens(alone)
    together = {**alone, "branch_ids": batch["branch_ids"][row : row + 1, :length]}
    together_BL, _ = scorer(together, wanted_BL, **scorer.check_options)
    columns = torch.arange(length, device=wanted_BL.device) if branch is None else branch.columns
    positions_L = columns if batch.get("position_ids") is None else alone["position_ids"][0, columns]
    alone = {name: value[:, columns] if value.dim() > 1 else value for name, value in alone.items()}
    alone["position_ids"] = positions_L[None]
    if torch.equal(positions_L, torch.arange(len(columns), device=positions_L.device)):
        del alone["position_ids"]  # an ordinary row: let the model number the positions, because some start above 0
    alone_BL, _ = scorer(alone, wanted_BL[:, columns], **scorer.check_options)
    apart_L = (alone_BL[0] - together_BL[0, columns]).abs()
    return apart_L.max() * 0 if branch is None else apart_L[batch["branch_ids"][row, columns] == branch.number].max()
