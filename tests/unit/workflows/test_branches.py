"""BranchedSequence: columns stay side by side, and every request sees what its row says that its tokens saw."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.inference.request import ModelResponse
from rollwright.workflows.turns import BranchedSequence

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def said(count, first):
    ids = list(range(first, first + count))
    return ModelResponse([1], ids, [-0.5] * count, [7] * count, "stop")


def visible(branches, positions, ids, at):
    """What token ``at`` attends to, as (position, id)."""
    seen = (j for j in range(at + 1) if 0 in (branches[j], branches[at]) or branches[j] == branches[at])
    return [(positions[j], ids[j]) for j in seen]


@settings(max_examples=60, deadline=None)
@given(forks=st.lists(LENGTHS, min_size=1, max_size=3), isolated=st.booleans(), trained=st.integers(0, 4))
def test_a_row_of_forks_and_joins(forks, isolated, trained):
    row = BranchedSequence([1, 2, 3], isolated=isolated)
    token, requests = 10, []
    for lengths in forks:
        base = len(row)
        layouts = [row.layout_before([5, 6], in_new_branch=True) for _ in lengths]
        prompt = list(row.input_ids)
        for length, layout in zip(lengths, layouts, strict=True):
            row.open_branch()
            row.append_context([5, 6])
            requests.append((len(row), [*prompt, 5, 6], layout))
            row.append_response(said(length, token), trained=min(trained, length))
            token += length
        longest = max(lengths) + 2
        row.close_branches()
        row.append_context([4])
        requests.append((len(row), list(row.input_ids), row.layout_before([], in_new_branch=False)))
        if isolated:
            assert row.position_ids[-1] == row.position_ids[base - 1] + longest + 1
    columns = (row.input_ids, row.loss_mask, row.branch_ids, row.position_ids, row.other_context)
    assert {len(column) for column in columns} == {len(row)}
    assert sum(row.loss_mask) == sum(min(trained, length) for lengths in forks for length in lengths)
    assert row.version == (7 if sum(map(sum, forks)) else 0)
    if not isolated:
        assert all(layout == {} for _, _, layout in requests)
        later = [branch > 1 and bool(mask) for branch, mask in zip(row.branch_ids, row.loss_mask, strict=True)]
        assert row.other_context == later
        return
    assert not any(row.other_context)
    for end, ids, layout in requests:
        branches, positions = layout["branch_ids"], layout["position_ids"]
        sampling = visible(branches, positions, ids, len(ids) - 1)
        training = visible(row.branch_ids, row.position_ids, row.input_ids, end - 1)
        assert sampling == training


def test_the_columns_of_each_layout():
    for isolated, own in ((True, {"position_ids", "branch_ids"}), (False, {"other_context"})):
        row = BranchedSequence([1, 2], isolated=isolated)
        row.open_branch()
        row.append_response(said(2, 10))
        row.close_branches()
        columns = row.row(1.0)
        assert own == columns.keys() - {"input_ids", "loss_mask", "rewards", "truncated"}
        assert {len(columns[name]) for name in own} == {4}
