"""Shared prefixes: log-probabilities, entropies and gradients of the tree are those of the rows, one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import grouped_batch, tiny_actor

from rollwright.config.sections import MicroBatchSpec
from rollwright.experience.trajectory import MULTI_MODAL
from rollwright.training import prefix_tree, tree_attention
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import micro_batches
from rollwright.training.prefix_tree import SortedRows, build
from rollwright.training.tree_attention import attend, attend_in_blocks, why_not

VOCABULARY = 11


def make_model(kind: str, **changes):
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    } | changes
    torch.manual_seed(1)
    if kind == "gemma":
        common |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 64}
        config = transformers.Gemma2Config(**common, attn_implementation="eager")
    else:
        config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[kind](
            **common, attn_implementation="sdpa"
        )
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma"])
def model(request):
    model = make_model(request.param)
    return model


def padded(rows: list[list[int]], **columns: list[list[int]]) -> dict:
    width = max(map(len, rows))
    full = {name: torch.tensor([v + [0] * (width - len(v)) for v in values]) for name, values in columns.items()}
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, **full}


def gradients(model, batch, wanted_BL, weights_BL, *, parts) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Scores, entropies and the gradient of their weighted sum."""
    scorer = TokenScorer(model)
    model.zero_grad()
    scores_BL, entropies_BL = torch.zeros_like(weights_BL), torch.zeros_like(weights_BL)
    for index, part in parts({**batch, "_wanted": wanted_BL, "_weights": weights_BL}):
        scores, entropies = scorer(part, part["_wanted"], with_entropy=True)
        ((scores + 0.3 * entropies) * part["_weights"]).sum().backward()
        scores_BL[index, : scores.shape[1]], entropies_BL[index, : scores.shape[1]] = scores.detach(), entropies.detach()
    return scores_BL, entropies_BL, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model, batch, wanted_BL, weights_BL, spec: MicroBatchSpec) -> None:
    alone = gradients(
        model, batch, wanted_BL, weights_BL, parts=lambda b: micro_batches(b, MicroBatchSpec(n_mbs=len(batch["input_ids"])))
    )

    def tree_parts(everything):
        rows = SortedRows(everything)
        for places in rows.parts(spec):
            index = rows.order[places].tolist()
            part = {name: value[index] for name, value in everything.items()}
            yield index, {**part, "prefix_tree": build(part, [0, *rows.shared[places[1:]].tolist()])}

    together = gradients(model, batch, wanted_BL, weights_BL, parts=tree_parts)
    torch.testing.assert_close(together[0], alone[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(together[1], alone[1], rtol=1e-6, atol=1e-6)
    rounding = 1e-4 if model.config._attn_implementation == "eager" else 1e-6  # transformers' eager softmax is float32
    for mine, theirs in zip(together[2], alone[2], strict=True):
        assert float((mine - theirs).norm()) <= rounding * float(theirs.norm()) + 1e-12


@st.composite
def trees(draw):
    """Rows that grow from each other, with what each token counts for."""
    token = st.integers(1, VOCABULARY - 1)
    rows = [draw(st.lists(token, min_size=2, max_size=8))]
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(rows))
        kept = base[: draw(st.integers(0, len(base)))]
        rows.append(kept + draw(st.lists(token, min_size=0 if len(kept) > 1 else 2, max_size=5)))
    return draw(st.permutations(rows))


@settings(max_examples=10, deadline=None)
@given(rows=trees(), seed=st.integers(0, 1000), budget=st.integers(4, 60))
def test_random_trees_equal_their_rows(model, rows, seed, budget):
    batch = padded(rows)
    draw = torch.Generator().manual_seed(seed)
    batch["temperature"] = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, (len(rows),), generator=draw)]
    batch["group_ids"] = torch.randint(2, (len(rows),), generator=draw)
    wanted_BL = (torch.rand(batch["input_ids"].shape, generator=draw) < 0.7) & (batch["attention_mask"] > 0)
    wanted_BL[:, 0] = False
    weights_BL = torch.randn(wanted_BL.shape, generator=draw, dtype=torch.float64) * wanted_BL
    compare(model, batch, wanted_BL, weights_BL, MicroBatchSpec(max_tokens_per_mb=budget))


@settings(max_examples=8, deadline=None)
@given(
    trunk=st.integers(1, 5),
    branches=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=3),
    tail=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_isolated_branches_equal_their_masks(model, trunk, branches, tail, seed):
    draw = torch.Generator().manual_seed(seed)
    rows, marks = [], []
    for lengths in branches:  # episodes of one prompt, each with its branches and what comes after them
        mark = [0] * trunk + [b for b, length in enumerate(lengths, 1) for _ in range(length)] + [0] * tail
        row = torch.randint(1, VOCABULARY, (len(mark),), generator=draw).tolist()
        row[:trunk] = list(range(1, trunk + 1))
        rows.append(row)
        marks.append(mark)
    batch = padded(rows, branch_ids=marks)
    positions = torch.cumsum(batch["attention_mask"], 1) - 1  # a branch goes on from the trunk
    for row, lengths in enumerate(branches):
        start = trunk
        for length in lengths:
            positions[row, start : start + length] = torch.arange(trunk, trunk + length)
            start += length
    batch["position_ids"] = positions
    wanted_BL = batch["attention_mask"].bool()
    wanted_BL[:, 0] = False
    weights_BL = torch.randn(wanted_BL.shape, generator=draw, dtype=torch.float64) * wanted_BL
    compare(model, batch, wanted_BL, weights_BL, MicroBatchSpec(max_tokens_per_mb=24))


def test_a_group_is_counted_once_and_parts_hold_whole_groups():
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    rows = [prompts[g] + [9, g + 1, s + 1] for s in range(4) for g in range(2)]
    batch = padded(rows) | {"group_ids": torch.tensor([g for _ in range(4) for g in range(2)])}
    parts = micro_batches(batch, MicroBatchSpec(max_tokens_per_mb=14), share_prefixes=True)
    assert [sorted(index.tolist()) for index, _ in parts] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [part["prefix_tree"].tokens for _, part in parts] == [4 + 2 + 4] * 2  # prompt, two tokens of all four, four ends


def test_a_group_above_the_budget_is_cut_and_its_path_is_computed_again():
    rows = [[1, 2, 3, 4, 5, 6, end] for end in range(1, 9)]
    parts = micro_batches(padded(rows), MicroBatchSpec(max_tokens_per_mb=10), share_prefixes=True)
    assert [part["prefix_tree"].tokens for _, part in parts] == [10, 10]
    assert sorted(row for index, _ in parts for row in index.tolist()) == list(range(8))


def test_rows_without_a_common_prefix_stay_padded():
    batch = padded([[row + 1] * 6 for row in range(4)])
    parts = micro_batches(batch, MicroBatchSpec(), share_prefixes=True)
    assert all("prefix_tree" not in part for _, part in parts)


def test_pictures_that_differ_keep_equal_tokens_apart():
    same, other = {"pixel_values": torch.ones(2, 3)}, {"pixel_values": torch.zeros(2, 3)}
    batch = padded([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) | {MULTI_MODAL: [same, dict(same), other]}
    assert SortedRows(batch).distinct == 3 + 1 + 3


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True},
            "sliding_window=8 tokens",
        ),
        ("qwen3", {}, None),
    ],
)
def test_models_that_do_not_see_all_ancestors_are_recognised(kind, changes, reason):
    found = why_not(make_model(kind, **changes), longest=20)
    assert found is None if reason is None else reason in found


def test_what_a_tree_holds_does_not_grow_with_the_square_of_a_row():
    rows = [[1] * 400 + [2 + row] * 2 for row in range(8)]
    marks = [[0] * 200 + [1] * 100 + [2] * 100 + [0] * 2] * 8
    tree = build(padded(rows, branch_ids=marks))
    calls = [*tree.own_calls, *tree.shared_calls]
    held = sum(t.numel() for call in calls for t in (call.queries, call.keys) if isinstance(t, torch.Tensor))
    assert tree.tokens == 400 + 8 * 2
    assert held < 2 * 8 * 402


def test_a_long_prompt_is_attended_to_in_one_call_that_copies_nothing():
    prompts = torch.randint(1, VOCABULARY, (2, 300), generator=torch.Generator().manual_seed(0)).tolist()
    tree = build(padded([prompts[g] + [s + 1] * (120 + s) for g in range(2) for s in range(4)]))
    assert [(call.keys.stop - call.keys.start, call.queries.stop - call.queries.start) for call in tree.shared_calls] == [
        (300, 121 + 122 + 123)  # the first answer goes on where its prompt ends
    ] * 2
    assert all(isinstance(call.queries, slice) and call.is_causal for call in tree.own_calls)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("weights", [(0, 0), (10**9, 1), (10**9, 10**9)], ids=["close sizes", "one call", "few copies"])
def test_attention_is_the_same_by_whatever_calls(monkeypatch, weights, softcap):
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 6], [1, 2, 3, 4, 5, 6, 1], [2, 2, 3], [2, 2, 4, 4, 4]]
    marks = [[0, 0, 1, 1, 2, 0], [0, 0, 1, 2, 2, 0], [0, 0, 1, 1, 2, 0, 0], [0, 0, 0], [0, 0, 0, 0, 0]]
    for batch in (padded(rows), padded(rows, branch_ids=marks)):
        results = []
        for call_cost, copy_cost in ((0, 10**6), weights):
            monkeypatch.setattr(prefix_tree, "_CALL_COST", call_cost)
            monkeypatch.setattr(prefix_tree, "_COPY_COST", copy_cost)
            tree = build(batch)
            draw = torch.Generator().manual_seed(1)
            inputs = [torch.randn(h, tree.tokens, 16, generator=draw, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
            out = attend(*inputs, tree, 0.25, softcap)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_for_gpus_see_what_the_calls_see(softcap):
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 6], [1, 2, 3, 4, 5, 6, 1], [2, 2, 3]]
    marks = [[0, 0, 1, 1, 2, 0], [0, 0, 1, 2, 2, 0], [0, 0, 1, 1, 2, 0, 0], [0, 0, 0]]
    for batch in (padded(rows), padded(rows, branch_ids=marks)):
        tree = build(batch)
        draw = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(heads, tree.tokens, 16, generator=draw) for heads in (4, 2, 2))
        blocks = attend_in_blocks(q, k, v, tree, 0.25, softcap, compiled=False)
        torch.testing.assert_close(blocks, attend(q, k, v, tree, 0.25, softcap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "keys", [{}, {"gradient_checkpointing": True}, {"ppo_n_minibatches": 3}, {"kl_ctl": 0.1, "recompute_logprob": True}]
)
def test_an_update_is_the_same_with_shared_prefixes_and_without(keys):
    weights, scores, metrics = [], [], []
    for share in (True, False):
        actor = tiny_actor(share_prefixes=share, max_tokens=40, lr=1e-2, **keys)
        batch = actor.compute_advantages(grouped_batch())
        scores.append(actor.compute_logp(batch))
        metrics.append([actor.ppo_update(batch) for _ in range(2)])
        weights.append(actor.full_weights())
        assert actor.division.shares_prefixes == share
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(*metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-7)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-5)


def test_a_model_that_sees_something_else_takes_the_padded_path(monkeypatch, caplog):
    def blind(query, key, value, tree, *rest):
        return attend(query, key, value.roll(1, dims=1), tree, *rest)

    expected = tiny_actor(share_prefixes=False).compute_logp(grouped_batch())
    monkeypatch.setattr(tree_attention, "attend", blind)
    actor = tiny_actor()
    for _ in range(2):
        torch.testing.assert_close(actor.compute_logp(grouped_batch()), expected, rtol=1e-6, atol=1e-6)
    assert caplog.text.count("with shared prefixes a log-probability of Qwen3ForCausalLM differs by") == 1


def test_a_model_that_passes_no_tree_on_takes_the_padded_path(caplog):
    actor = tiny_actor()
    expected = tiny_actor(share_prefixes=False).compute_logp(grouped_batch())
    for layer in actor.model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, prefix_tree=None, forward=forward, **kwargs: forward(*args, **kwargs)
    for _ in range(2):
        torch.testing.assert_close(actor.compute_logp(grouped_batch()), expected, rtol=1e-6, atol=1e-6)
    assert caplog.text.count("does not pass prefix_tree on") == 1


def test_bfloat16_is_as_near_with_shared_prefixes_as_without():
    exact = tiny_actor(dtype=torch.float32, share_prefixes=False).compute_logp(grouped_batch())
    errors = []
    for share in (True, False):
        actor = tiny_actor(dtype=torch.float32, share_prefixes=share)
        actor.compute_dtype = torch.bfloat16
        errors.append(float((actor.compute_logp(grouped_batch()) - exact).abs().max()))
    assert 0 < errors[0] < 2 * errors[1] + 1e-3
