"""A row that forks and joins: a trunk, parallel branches that grow from its end, and the trunk again.

Two layouts of the same tokens:

* **plain**: one causal sequence, branches one after the other. A branch was sampled without those before it, so its tokens
  (all but the first branch's) stand behind other text than they were sampled behind; ``other_context`` marks them.
* **isolated**: the same order, with ``branch_ids`` (0 is the trunk, branches count from 1) and ``position_ids``. Branches do
  not see each other, the trunk after them sees them all. All branches of a fork begin at the position after the trunk's
  last token, and the trunk goes on at the position after the longest branch's end. Sampling and training compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollwright.experience.trajectory import Trajectory
from rollwright.inference.request import ModelResponse
from rollwright.workflows.token_sequence import TokenSequence


class BranchedSequence(TokenSequence):
    """One row in the making, with the layout of its branches.

    Args:
        prompt_ids: where the trunk begins.
        isolated: which of the two layouts the row has.
    """

    def __init__(self, prompt_ids: Sequence[int], *, isolated: bool) -> None:
        self.isolated = isolated
        self.branch_ids: list[int] = []
        self.position_ids: list[int] = []
        self.other_context: list[bool] = []
        self._branch = 0
        self._branches = 0  # opened so far
        self._next_position = 0  # of the branch (or trunk) that is open
        self._fork = 0  # position at which branches of the present fork begin
        self._farthest = 0  # position after the longest of them
        super().__init__(prompt_ids)

    def open_branch(self) -> int:
        """Go on in a new branch, which begins where the trunk ended; returns its number."""
        if self._branch == 0:
            self._fork = self._farthest = self._next_position
        self._branches += 1
        self._branch, self._next_position = self._branches, self._fork
        return self._branch

    def close_branches(self) -> None:
        """Go on in the trunk, behind the longest branch."""
        self._branch, self._next_position = 0, self._farthest

    def append_context(self, ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample, in the open branch."""
        super().append_context(ids)
        self._place(len(ids), is_sampled=False)

    def append_response(self, response: ModelResponse, *, trained: int | None = None) -> None:
        """Tokens as they were sampled, in the open branch.

        Args:
            response: what the engine sampled.
            trained: how many of its tokens are trained, from the first; the rest are context. None: all.
        """
        count = response.output_len if trained is None else trained
        super().append_response(response)
        for column, neutral in ((self.loss_mask, 0), (self.logprobs, 0.0), (self.versions, -1)):
            column[len(self) - response.output_len + count :] = [neutral] * (response.output_len - count)  # type: ignore[list-item]
        self._place(count, is_sampled=True)
        self._place(response.output_len - count, is_sampled=False)

    def _place(self, count: int, *, is_sampled: bool) -> None:
        self.branch_ids += [self._branch] * count
        self.position_ids += range(self._next_position, self._next_position + count)
        self._next_position += count
        self._farthest = max(self._farthest, self._next_position)
        self.other_context += [is_sampled and self._branch > 1 and not self.isolated] * count

    def layout_before(self, opening: Sequence[int], *, in_new_branch: bool) -> dict[str, list[int]]:
        """``position_ids`` and ``branch_ids`` of a request for what follows this row and ``opening``; empty where plain.

        Args:
            opening: tokens that the request has after the row.
            in_new_branch: they begin a branch at the trunk's end, which is open; else they go on where the row is.
        """
        if not self.isolated:
            return {}
        branch = self._branches + 1 if in_new_branch else self._branch
        positions = range(self._next_position, self._next_position + len(opening))
        return {
            "position_ids": [*self.position_ids, *positions],
            "branch_ids": [*self.branch_ids, *[branch] * len(opening)],
        }

    def layout(self) -> dict[str, list[int]]:
        """``position_ids`` and ``branch_ids`` of the row; empty where plain."""
        return {"position_ids": self.position_ids, "branch_ids": self.branch_ids} if self.isolated else {}

    def trajectory(self, reward: float, *, truncated: bool, temperature: float) -> Trajectory:
        """One row ``[1, L]``, with the columns of its layout."""
        row: dict[str, Any] = super().trajectory(reward, truncated=truncated, temperature=temperature)
        row |= {name: torch.tensor([ids], dtype=torch.int64) for name, ids in self.layout().items()}
        if not self.isolated:
            row["other_context"] = torch.tensor([self.other_context], dtype=torch.bool)
        return row
