"""What is proved of a model before its rows are computed together, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from parts import TINY

from rollwright.config.sections import MicroBatchSpec, TrainEngineConfig
from rollwright.errors import ConfigError, TrainingError
from rollwright.training.engine import TrainEngine
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import BatchDivision, micro_batches

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 2,
    "long_factor": [1.0, 9.0],
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}


def model_of(config) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.dim() > 1 else 1)
    return model


def engine_of(model, **settings) -> TrainEngine:
    engine = TrainEngine(TrainEngineConfig(device="cpu", optimizer=None, **settings), model=model)
    engine.initialize()
    return engine


def padded(rows: list[list[int]], **columns: list[list[int]]) -> dict:
    width = max(map(len, rows))
    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], **columns}
    return {name: torch.tensor([values + [0] * (width - len(values)) for values in column]) for name, column in columns.items()}


def row(length: int, seed: int) -> list[int]:
    return torch.randint(1, 31, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def alone(model, tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def branch_batch(first: int, second: int) -> tuple[dict, list[list[int]]]:
    """A row with two branches of a trunk of 10 tokens, and each as a row of its own."""
    trunk, left, right = row(10, 1), row(first, 2), row(second, 3)
    positions = [*range(10), *range(10, 10 + first), *range(10, 10 + second)]
    batch = padded([trunk + left + right], branch_ids=[[0] * 10 + [1] * first + [2] * second], position_ids=[positions])
    return batch, [trunk + left, trunk + right]


# -- rotary frequencies that follow the length ------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
def test_a_row_has_the_frequencies_of_its_own_length(share):
    model = model_of(transformers.LlamaConfig(**TINY, rope_parameters=LONGROPE))
    prompt = row(12, 0)
    rows = [prompt + row(20, 1), prompt + row(5, 2), prompt + row(7, 3), prompt + row(25, 4), row(24, 5), row(25, 6)]
    scores = engine_of(model, share_prefixes=share).compute_logp(padded(rows))
    for number, tokens in enumerate(rows):
        torch.testing.assert_close(scores[number, 1 : len(tokens)], alone(model, tokens), rtol=0, atol=2e-5)


def test_rows_of_different_frequencies_are_refused_in_one_forward_pass():
    model = model_of(transformers.LlamaConfig(**TINY, rope_parameters=LONGROPE))
    batch = padded([row(30, 0), row(10, 1)])
    with pytest.raises(TrainingError, match=r"positions 10 and 30, .*longrope"):
        TokenScorer(model)(batch, batch["attention_mask"].bool())


def test_branches_on_both_sides_of_the_trained_length_are_refused():
    model = model_of(transformers.LlamaConfig(**TINY, rope_parameters=LONGROPE))
    for share in (True, False):
        batch, rows = branch_batch(20, 18)
        scores = engine_of(model, share_prefixes=share).compute_logp(batch)
        torch.testing.assert_close(scores[0, 10:30], alone(model, rows[0])[9:], rtol=0, atol=2e-5)
        torch.testing.assert_close(scores[0, 30:], alone(model, rows[1])[9:], rtol=0, atol=2e-5)
        with pytest.raises(TrainingError, match=r"positions 15 and 30, .*one row for each branch"):
            engine_of(model, share_prefixes=share).compute_logp(branch_batch(20, 5)[0])


def test_dynamic_frequencies_are_refused_past_their_limit():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = model_of(transformers.LlamaConfig(**TINY | {"max_position_embeddings": 24}, rope_parameters=rope))
    rows = [row(24, 0), row(9, 1)]
    scores = engine_of(model).compute_logp(padded(rows))
    torch.testing.assert_close(scores[1, 1:9], alone(model, rows[1]), rtol=0, atol=2e-5)
    with pytest.raises(ConfigError, match="rope_type=dynamic"):
        engine_of(model).compute_logp(padded([row(25, 0), row(9, 1)]))


def test_groups_have_micro_batches_of_their_own_and_rows_keep_their_places():
    batch = padded([row(length, length) for length in (9, 3, 8, 2, 7)])
    for at_least in (1, 4, 7):
        parts = micro_batches(batch, MicroBatchSpec(), groups=[1, 0, 1, 0, 1], at_least=at_least)
        assert len(parts) >= at_least
        found = [index.tolist() for index, _ in parts if len(index)]
        assert sorted(row for index in found for row in index) == [0, 1, 2, 3, 4]
        assert all({0, 2, 4}.issuperset(index) or {1, 3}.issuperset(index) for index in found)
        for index, part in parts:
            for place, number in enumerate(index.tolist()):
                width = min(part["input_ids"].shape[1], batch["input_ids"].shape[1])
                assert part["input_ids"][place, :width].tolist() == batch["input_ids"][number, :width].tolist()


# -- branches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2"])
def test_a_branch_past_a_window_is_scored_as_a_row_of_its_own(family, share, attention):
    settings = {"sliding_window": 8, **({"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {})}
    config_class = {
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "gemma2": transformers.Gemma2Config,
    }[family]
    model = model_of(config_class(**TINY, **settings))
    if family != "gemma2":  # which has no sdpa
        model.set_attn_implementation(attention)
    batch, rows = branch_batch(12, 9)
    scores = engine_of(model, share_prefixes=share).compute_logp(batch)
    assert float((alone(model, rows[0])[-12:] - alone(without_window(model), rows[0])[-12:]).abs().max()) > 0.05
    torch.testing.assert_close(scores[0, 10:22], alone(model, rows[0])[9:], rtol=0, atol=2e-5)
    torch.testing.assert_close(scores[0, 22:], alone(model, rows[1])[9:], rtol=0, atol=2e-5)


def without_window(model):
    config = type(model.config).from_dict(model.config.to_dict() | {"sliding_window": 200})
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("share", [True, False])
def test_a_model_that_looks_at_columns_where_positions_were_given_is_refused(share):
    class ByColumn(transformers.LlamaForCausalLM):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    model = ByColumn(model_of(transformers.LlamaConfig(**TINY)).config).eval()
    model.base_model.forward_before = model.base_model.forward
    model.base_model.forward = lambda *args, position_ids=None, **kwargs: model.base_model.forward_before(*args, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.dim() > 1 else 1)
    with pytest.raises(TrainingError, match=r"ByColumn: a log-probability in a row with branches .* differs by"):
        engine_of(model, share_prefixes=share).compute_logp(
            branch_batch(6, 7)[0] | {"attention_mask": torch.ones(1, 23).long()}
        )


def test_positions_are_refused_where_a_model_takes_none():
    config = transformers.BloomConfig(vocab_size=31, hidden_size=16, n_layer=2, n_head=4)
    with pytest.raises(TrainingError, match="The batch has position_ids, but BloomForCausalLM does not accept them"):
        engine_of(model_of(config)).compute_logp(branch_batch(6, 7)[0])


def test_positions_that_jump_do_not_cut_a_row():
    model = model_of(transformers.LlamaConfig(**TINY))
    batch = padded([row(12, 0), row(9, 1)], position_ids=[[*range(6), *range(20, 26)], list(range(9))])
    scores = engine_of(model).compute_logp(batch)
    with torch.no_grad():
        ids, positions = batch["input_ids"][:1], batch["position_ids"][:1]
        logits = model(ids, position_ids=positions, attention_mask=torch.ones(1, 12)).logits[0, :-1]
    torch.testing.assert_close(scores[0, 1:], logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0], rtol=0, atol=2e-5)


# -- shared prefixes --------------------------------------------------------------------------------------------------


def test_sharing_is_proved_again_past_each_regime_and_stops_where_it_is_not(monkeypatch, caplog):
    """A regime that nothing but the numbers shows: longer rows attend to a token less over a tree."""
    from rollwright.training import tree_attention

    model = model_of(transformers.LlamaConfig(**TINY, attention_window_size=20))
    attend = tree_attention.attend

    def blind_past_20(query, key, value, tree, *rest):
        return attend(query, key.roll(tree.longest // 21, dims=1), value, tree, *rest)

    monkeypatch.setattr(tree_attention, "attend", blind_past_20)
    engine, prompt = engine_of(model), row(12, 0)
    short = [prompt + row(length, length) for length in (4, 5, 6)]
    long = [prompt + row(length, length) for length in (3, 9, 16)]
    engine.compute_logp(padded(short))
    assert engine.division.shares_prefixes
    scores = engine.compute_logp(padded(long))
    assert not engine.division.shares_prefixes
    assert "with shared prefixes a log-probability of LlamaForCausalLM differs by" in caplog.text
    for number, tokens in enumerate(long):
        torch.testing.assert_close(scores[number, 1 : len(tokens)], alone(model, tokens), rtol=0, atol=2e-5)


class Scaled(transformers.LlamaForCausalLM):
    """From the 21st place of what it is given on, tokens are others, whatever their positions are."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        places = torch.arange(outputs.logits.shape[1])
        return type(outputs)(logits=outputs.logits * torch.where(places < 20, 1.0, 1.5)[None, :, None])


def scaled() -> Scaled:
    config = transformers.LlamaConfig(**TINY, attention_window_size=20)
    model = Scaled(config).eval()
    model.load_state_dict(model_of(config).state_dict())
    return model


def test_a_tree_with_more_tokens_than_a_regime_is_proved_though_no_row_has_as_many(caplog):
    model = scaled()
    engine, prompt = engine_of(model), row(8, 0)
    engine._scorer._head_applies = False
    few, many = ([prompt + row(length, length) for length in lengths] for lengths in ((4, 5), (4, 5, 6, 7, 8, 9)))
    engine.compute_logp(padded(few))
    assert engine.division.shares_prefixes
    scores = engine.compute_logp(padded(many))
    assert not engine.division.shares_prefixes
    for number, tokens in enumerate(many):
        torch.testing.assert_close(scores[number, 1 : len(tokens)], alone(model, tokens), rtol=0, atol=2e-5)


def test_branches_at_columns_past_a_regime_are_proved_though_none_is_as_long():
    engine = engine_of(scaled())
    engine._scorer._head_applies = False
    engine.compute_logp(branch_batch(4, 5)[0])
    with pytest.raises(TrainingError, match="in a row with branches"):
        engine.compute_logp(branch_batch(9, 8)[0])


def test_a_model_that_sees_later_tokens_is_refused_at_the_start():
    model = model_of(transformers.LlamaConfig(**TINY))
    model.config.is_causal = False
    with pytest.raises(ConfigError, match="is not a causal language model"):
        engine_of(model)


def test_a_model_that_fails_on_rows_with_branches_is_named(monkeypatch):
    def fails(*_arguments):
        raise RuntimeError("upper bound and lower bound inconsistent")

    monkeypatch.setattr("rollwright.training.micro_batches._compare_branch", fails)
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "branch_ids": torch.tensor([[0, 0, 1, 2]]),
    }
    scorer = SimpleNamespace(model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)))
    with pytest.raises(
        TrainingError, match=r"LlamaForCausalLM fails on rows with branches \(branch_ids\): RuntimeError: upper"
    ):
        BatchDivision(TrainEngineConfig(device="cpu")).micro_batches(scorer, batch)
