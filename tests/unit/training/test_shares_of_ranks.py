"""Who trains on what: whole groups, in every optimizer step, balanced by tokens; and ranks that have nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import grouped_batch, tiny_actor

from rollwright.experience.packed import pack_rows, unpack_rows
from rollwright.experience.trajectory import select_rows
from rollwright.placement.ranks import Call, TrainRanks, merge_written
from rollwright.training.micro_batches import MINIBATCH_IDS, split_minibatches
from rollwright.training.rank_shares import groups_of, sent_columns, shares
from rollwright.training.recovery_checkpoint import RecoverCheckpoints


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    lengths = torch.tensor([draw(st.integers(1, 30)) for _ in groups])
    mask = torch.arange(30) < lengths[:, None]
    return {"input_ids": mask.long(), "attention_mask": mask, "group_ids": torch.tensor(groups) * 7}


@given(batches(), st.integers(1, 4), st.integers(1, 3))
def test_each_row_goes_to_one_rank_with_its_group_and_stays_in_its_minibatch(batch, ranks, minibatches):
    minibatches = min(minibatches, len(batch["group_ids"].unique()))
    divided = shares(batch, groups_of(batch), ranks, minibatches)
    assert sorted(row for rows in divided for row in rows) == list(range(len(batch["group_ids"])))
    holders = {int(batch["group_ids"][row]): rank for rank, rows in enumerate(divided) for row in rows}
    assert all(holders[int(batch["group_ids"][row])] == rank for rank, rows in enumerate(divided) for row in rows)

    sent, whole = sent_columns(batch, minibatches), split_minibatches(batch, minibatches)
    assert (MINIBATCH_IDS in sent) == (minibatches > 1)
    for number, rows in enumerate(whole):
        parts = [split_minibatches(select_rows(sent, share), minibatches)[number] for share in divided]
        assert sorted(share[row] for share, part in zip(divided, parts, strict=True) for row in part.tolist()) == rows.tolist()


@given(batches(), st.integers(2, 4))
def test_no_rank_has_more_tokens_than_its_part_and_one_group(batch, ranks):
    divided = shares(batch, groups_of(batch), ranks)
    lengths = batch["attention_mask"].sum(1)
    loads = [int(lengths[rows].sum()) for rows in divided]
    largest = max(int(lengths[batch["group_ids"] == group].sum()) for group in batch["group_ids"].unique())
    assert max(loads) <= sum(loads) / ranks + largest


def test_columns_of_the_ranks_come_back_to_their_rows():
    batch = {"input_ids": torch.zeros(3, 4, dtype=torch.int64), "attention_mask": torch.ones(3, 4, dtype=torch.bool)}
    parts = [
        {"input_ids": torch.zeros(1, 2), "advantages": torch.tensor([[1.0, 2.0]]), "returns": torch.tensor([5.0])},
        {"input_ids": torch.zeros(2, 4), "advantages": torch.ones(2, 4) * 3, "returns": torch.tensor([6.0, 7.0])},
    ]
    merge_written(batch, [[1], [2, 0]], parts)
    assert batch["advantages"].tolist() == [[3.0] * 4, [1.0, 2.0, 0.0, 0.0], [3.0] * 4]
    assert batch["returns"].tolist() == [7.0, 5.0, 6.0]


def test_a_column_that_the_call_replaced_comes_back_too():
    """Advantages of a workflow, one for each row, become one for each token, as in one process."""
    batch = {**grouped_batch(), "advantages": torch.arange(1.0, 1.0 + len(grouped_batch()["rewards"]))}
    alone = tiny_actor().compute_advantages(dict(batch))
    ranks = TrainRanks(tiny_actor(), RecoverCheckpoints("unused"))
    call = Call(lambda ranks, batch: ranks.engine.compute_advantages(batch))
    divided = shares(batch, groups_of(batch), 2)
    parts = [ranks.make_with(call, unpack_rows(pack_rows(batch, rows)), {})[1] for rows in divided]
    merge_written(batch, divided, [unpack_rows(part) for part in parts])
    assert torch.equal(batch["advantages"], alone["advantages"])


def test_a_rank_without_rows_takes_part():
    """A batch of fewer groups than ranks leaves some with none: they compute a row of which nothing counts."""
    actor = tiny_actor(kl_ctl=0.1)
    batch = select_rows(grouped_batch(), [], width=1)
    before = [parameter.clone() for parameter in actor.model.parameters()]
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    assert batch["advantages"].shape == (0, 1)
    assert all(torch.equal(one, other) for one, other in zip(before, actor.model.parameters(), strict=True))
