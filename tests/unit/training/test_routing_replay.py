"""Training sends tokens to the experts that sampling chose, and everything else stays the model's own."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from types import MethodType

import numpy as np
import pytest
import torch
import transformers

from rollwright import Experience, GenerationHyperparameters, ModelRequest, RolloutConfig
from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.rules import faults_of
from rollwright.config.sections import CriticConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig
from rollwright.errors import ConfigError, TrainingError
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.writing import Journal
from rollwright.experience.packed import as_packed, unpacked
from rollwright.experience.trajectory import concat_padded_tensors
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.builtin.prompt_lookup import StepSeconds
from rollwright.rollout.engines import LocalRolloutEngine
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import attended_tokens
from rollwright.training.publish_and_audit import answer_rows, ask_engines, audit_engine, probe_request

VOCABULARY, LAYERS, EXPERTS, TOP_K = 64, 3, 16, 2
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": TOP_K, "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES = {
    "Qwen3Moe": {**MOE, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": EXPERTS, "head_dim": 8},
    "Olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False, "num_key_value_heads": 4},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
        "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}  # fmt: skip


def mixture(family="Qwen3Moe", seed=0):
    """A random model whose routers are far from sure, so that rounding changes their choice."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def routers_of(model):
    return {index: layer.mlp.gate for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}


def rows_of(lengths=(13, 9), seed=1):
    """Rows whose every token but the last is sent to random experts, two different ones in each layer."""
    generator = torch.Generator().manual_seed(seed)
    B, L = len(lengths), max(lengths)
    mask_BL = torch.arange(L)[None] < torch.tensor(lengths)[:, None]
    ids_BL = torch.randint(3, VOCABULARY, (B, L), generator=generator) * mask_BL
    experts = torch.rand(B, L, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices + 1
    has_next_BL = torch.arange(L)[None] < torch.tensor(lengths)[:, None] - 1
    routed_BLW = (experts.flatten(2) * has_next_BL[..., None]).to(torch.uint8)
    return {"input_ids": ids_BL, "attention_mask": mask_BL, "routed_experts": routed_BLW}


def forced(family, model, rows):
    """The untouched model, whose routers are written out here and take the given experts."""
    config = model.config
    flat = rows["routed_experts"].long().flatten(0, 1)

    def forward(router, hidden):
        given = flat[:, router.place * TOP_K : (router.place + 1) * TOP_K]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = hidden @ router.weight.t()
        probabilities = logits.sigmoid() if family == "DeepseekV3" else logits.softmax(-1)
        own = type(router).forward(router, hidden)[2]
        ids = torch.where(given > 0, given - 1, own)
        weights = probabilities[torch.arange(len(ids))[:, None], ids]
        if family != "Olmoe":
            weights = weights / weights.sum(-1, keepdim=True)
        if family == "DeepseekV3":
            weights = weights * config.routed_scaling_factor
        return logits, weights, ids

    for place, router in routers_of(model).items():
        router.place, router.forward = place, MethodType(forward, router)
    return model


def own_choice(model, ids_BL):
    """What the untouched model's routers choose for rows without padding, as a record."""
    chosen = torch.zeros(*ids_BL.shape, LAYERS, TOP_K, dtype=torch.uint8)
    hooks = [
        router.register_forward_hook(
            lambda _, __, out, place=place: chosen.__setitem__(
                (slice(None), slice(None), place), out[2].view(*ids_BL.shape, -1) + 1
            )
        )
        for place, router in routers_of(model).items()
    ]
    with torch.no_grad():
        model(ids_BL)
    for hook in hooks:
        hook.remove()
    return chosen.flatten(2)


def logprobs_of(model, rows):
    wanted_BL = attended_tokens(rows)
    return TokenScorer(model)(rows, wanted_BL)[0]


def actor_of(model, *, max_tokens=8192, **keys):
    keys = {"optimizer": OptimizerConfig(lr=1e-3), "mb_spec": MicroBatchSpec(max_tokens_per_mb=max_tokens), **keys}
    actor = FSDPPPOActor(PPOActorConfig(device="cpu", dtype="float32", **keys), model=model)
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor


# -- the forward pass of training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradients_are_those_of_a_model_whose_experts_are_forced(family):
    rows = rows_of()
    ours, theirs = mixture(family), forced(family, mixture(family), rows)
    logprobs_BL = logprobs_of(ours, rows)
    expected_BL = torch.zeros_like(logprobs_BL)
    expected_BL[:, 1:] = (
        theirs(rows["input_ids"]).logits.float().log_softmax(-1)[:, :-1].gather(2, rows["input_ids"][:, 1:, None])[..., 0]
    )
    expected_BL = expected_BL * attended_tokens(rows)
    torch.testing.assert_close(logprobs_BL, expected_BL, atol=2e-5, rtol=1e-4)
    plain = {name: value for name, value in rows.items() if name != "routed_experts"}
    assert (logprobs_of(mixture(family), plain) - expected_BL).abs().max() > 0.1  # the choice matters
    logprobs_BL.sum().backward()
    expected_BL.sum().backward()
    gates = 0
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=2e-4, rtol=2e-3, msg=lambda said, name=name: f"{name}: {said}")
        gates += "gate.weight" in name and bool(one.grad.abs().sum() > 0)
    assert gates == len(routers_of(ours))  # gradients reach every router


@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_of_the_models_own_choice_changes_no_bit(family):
    rows = rows_of(lengths=(12, 12))
    rows["routed_experts"] = own_choice(mixture(family), rows["input_ids"])
    untouched = {name: value for name, value in rows.items() if name != "routed_experts"}
    expected_BL, empty = logprobs_of(mixture(family), untouched), torch.zeros_like(rows["routed_experts"])
    assert torch.equal(logprobs_of(mixture(family), rows), expected_BL)
    assert torch.equal(logprobs_of(mixture(family), {**rows, "routed_experts": empty}), expected_BL)


def test_rows_that_share_a_prefix_and_its_experts_are_computed_once_and_others_apart():
    rows = rows_of(lengths=(14, 14, 14))
    for name in ("input_ids", "routed_experts"):
        rows[name][:, :8] = rows[name][0, :8]
    rows["routed_experts"][2, 5] = rows["routed_experts"][2, 5].roll(TOP_K)  # another engine batch chose others here
    rows |= {"loss_mask": (torch.arange(14) >= 8).int().expand(3, 14), "group_ids": torch.zeros(3, dtype=torch.long)}
    alone = actor_of(mixture(), share_prefixes=False).compute_logp(rows)
    shared = actor_of(mixture())
    torch.testing.assert_close(shared.compute_logp(rows), alone, atol=2e-5, rtol=1e-4)
    parts = shared.division.micro_batches(shared._scorer, rows)
    assert shared.division.shares_prefixes
    assert parts[0][1]["prefix_tree"].tokens == 14 + 6 + 9


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_policy_update_recomputes_checkpointed_layers_with_the_record(dtype):
    rows = rows_of(lengths=(13, 9, 11, 13))
    B, L = rows["input_ids"].shape
    mask_BL = attended_tokens(rows)
    generator = torch.Generator().manual_seed(3)
    rows |= {
        "routed_experts": rows["routed_experts"].to(dtype),
        "loss_mask": mask_BL.int(),
        "logprobs": -torch.rand(B, L, generator=generator) * mask_BL,
        "versions": torch.where(mask_BL, 0, -1).int(),
        "advantages": torch.randn(B, L, generator=generator) * mask_BL,
        "rewards": torch.zeros(B),
        "truncated": torch.zeros(B, dtype=torch.bool),
    }
    weights, shares = [], []
    for keys in ({}, {"gradient_checkpointing": True, "max_tokens": 16}):
        actor = actor_of(mixture(), recompute_logprob=True, **keys)
        stats = actor.ppo_update(dict(rows))
        shares.append(stats["replayed_experts_share"])
        weights.append(actor.full_weights())
    assert shares == [1.0, 1.0]
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, atol=1e-5, rtol=1e-4)
    untouched = actor_of(mixture(), recompute_logprob=True)
    untouched.ppo_update({name: value for name, value in rows.items() if name != "routed_experts"})
    assert not torch.allclose(
        untouched.full_weights()["model.layers.0.mlp.gate.weight"], weights[0]["model.layers.0.mlp.gate.weight"]
    )


def test_the_reference_and_a_critic_of_its_own_route_as_they_do():
    rows = rows_of()
    rows["loss_mask"] = attended_tokens(rows).int()
    plain = {name: value for name, value in rows.items() if name != "routed_experts"}
    actor = actor_of(mixture(), kl_ctl=0.1, adv_estimator="gae")
    assert torch.equal(actor.compute_ref_logp(rows), actor.compute_ref_logp(plain))
    assert not torch.equal(actor.compute_logp(rows), actor.compute_logp(plain))
    for settings, is_equal in (({"path": ""}, True), ({"shared": True}, False)):
        actor.add_critic(CriticConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-3), **settings), FinetuneSpec(1, 100, 10))
        with torch.no_grad():
            next(parameter for parameter in actor.critic.model.parameters() if parameter.shape[0] == 1).normal_()
        given = {**rows, "truncated": torch.zeros(2, dtype=torch.bool)}
        values = [actor.critic.compute_values({**each, "truncated": given["truncated"]})[0] for each in (rows, plain)]
        assert torch.equal(*values) == is_equal


def test_a_record_of_another_model_is_refused():
    rows = rows_of()
    with pytest.raises(TrainingError, match=r"has 4 entries for each token.*3 layers with 2 of 16 experts, 6 entries"):
        logprobs_of(mixture(), {**rows, "routed_experts": rows["routed_experts"][..., :4]})
    rows["routed_experts"][0, 0, 0] = 17
    with pytest.raises(TrainingError, match="sampled by another model"):
        logprobs_of(mixture(), rows)


def test_models_whose_experts_cannot_be_replayed_are_refused_by_name():
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, "head_dim": 8}))
    with pytest.raises(ConfigError, match="a qwen3 model cannot be recorded and used again: it has no experts"):
        BuiltinEngine(dense, routing_replay=True)
    phi = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**SIZES, num_local_experts=4))
    with pytest.raises(
        ConfigError, match=r"a phimoe model .* PhimoeTopKRouter does not choose its experts and weigh them by one topk"
    ):
        BuiltinEngine(phi, routing_replay=True)


# -- from sampling to training -----------------------------------------------------------------------------------------


def response_rows(responses):
    """One row for each response, with its record."""
    rows = []
    for response in responses:
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        record = torch.from_numpy(response.routed_experts)
        assert len(record) == ids.shape[1] - 1
        sampled = torch.arange(ids.shape[1])[None] >= response.input_len
        logprobs = torch.tensor([[0.0] * response.input_len + response.output_logprobs])
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "loss_mask": sampled.int()}
        rows.append(
            {**row, "logprobs": logprobs, "routed_experts": torch.cat([record, record.new_zeros(1, record.shape[1])])[None]}
        )
    return concat_padded_tensors(rows)


def requests(count=6, new_tokens=24):
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, ignore_eos=True)
    return [
        ModelRequest(input_ids=[3 + (7 * n + i * i) % 60 for i in range(10 + 5 * n)], gconfig=gconfig, seed=n)
        for n in range(count)
    ]


def test_with_the_record_a_float32_trainer_agrees_with_a_bfloat16_engine():
    model = mixture()
    with BuiltinEngine(copy.deepcopy(model), dtype="bfloat16", routing_replay=True, prefill_tokens=16, threads=1) as engine:
        rows = response_rows(engine.generate(requests()))
    at = rows["loss_mask"].bool()
    plain = {name: value for name, value in rows.items() if name != "routed_experts"}
    with torch.no_grad():
        own, replayed = ((logprobs_of(model, each) - rows["logprobs"])[at].abs() for each in (plain, rows))
    assert rows["routed_experts"].dtype == torch.uint8
    assert replayed.mean() < own.mean() / 2
    assert replayed.max() < own.max() / 4
    assert replayed.mean() < 0.05


@pytest.mark.parametrize("has_memory", [True, False])
def test_an_engine_records_what_its_model_chose_however_the_tokens_were_computed(has_memory):
    """Prompts in parts, prompts with a common prefix, second turns; and rows that are put back for want of memory."""
    model, asked = mixture(), requests(7, new_tokens=20 if has_memory else 90)
    asked += [ModelRequest(input_ids=[*asked[6].input_ids, 5], gconfig=asked[6].gconfig, seed=9)]
    memory = {} if has_memory else {"kv_cache_bytes": 200 * 390, "prefix_cache": False}
    with BuiltinEngine(model, routing_replay=True, prefill_tokens=16, max_running_requests=8, threads=1, **memory) as engine:
        answers = engine.generate(asked)
        answers += engine.generate([asked[6]])
        if has_memory:
            turns = [[*answer.input_tokens, *answer.output_tokens, 5, 6] for answer in answers[:3]]
            answers += engine.generate([ModelRequest(input_ids=ids, gconfig=asked[0].gconfig, seed=1) for ids in turns])
        stats = engine.stats()
    assert stats["reused_tokens" if has_memory else "preemptions"] > 0
    for answer in answers:
        ids = torch.tensor([answer.input_tokens + answer.output_tokens])
        assert torch.equal(torch.from_numpy(answer.routed_experts), own_choice(model, ids)[0, :-1])


def test_drafted_tokens_that_are_rejected_leave_no_record():
    class Free(StepSeconds):
        """As if all steps took the same time, so that every draft is used."""

        def of_plain(self, rows):
            return 9.0

        def of_wide(self, rows, widths):
            return np.ones(len(widths))

    model, gconfig = mixture(), GenerationHyperparameters(max_new_tokens=40, ignore_eos=True, temperature=0.5)
    asked = [ModelRequest(input_ids=[3 + i % 5 + n for i in range(30)], gconfig=gconfig, seed=n) for n in range(3)]
    with BuiltinEngine(model, routing_replay=True, threads=1, max_running_requests=4, prompt_lookup_tokens=4) as engine:
        engine._stepper.lookup.seconds = Free()
        answers = engine.generate(asked)
        assert engine._stepper.lookup.proposed > engine._stepper.lookup.accepted
    for answer in answers:
        ids = torch.tensor([answer.input_tokens + answer.output_tokens])
        assert torch.equal(torch.from_numpy(answer.routed_experts), own_choice(model, ids)[0, :-1])


def test_the_audit_compares_an_answer_with_its_experts():
    trainer, request = actor_of(mixture()), probe_request(mixture(), 48)
    with BuiltinEngine(mixture(), dtype="bfloat16", routing_replay=True, threads=1) as engine:
        (answer,) = ask_engines(engine, request).responses.values()
        (agreement,) = audit_engine(engine, trainer, 0, 48)
    at = slice(answer.input_len, None)
    batch, rows = answer_rows([answer, answer, replace(answer, routed_experts=None)])
    assert rows == [0, 0, 1]
    sampled, (replayed, own) = torch.tensor(answer.output_logprobs), trainer.compute_logp(batch)[:, at]
    assert agreement.mean == pytest.approx(float((replayed - sampled).abs().mean()), rel=1e-3)
    assert float((replayed - own).abs().max()) > 1e-3  # the trainer would have chosen others


class TwoTurns:
    """Two turns with tool text between them, in rows of different lengths, as the workflow of a user returns them."""

    async def arun_episode(self, engine, data):
        gconfig = GenerationHyperparameters(max_new_tokens=5 + data["extra"], ignore_eos=True)
        ids, mask = list(data["prompt"]), [0] * len(data["prompt"])
        for turn in range(2):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig, rid=f"{data['extra']}-{id(self)}"))
            ids, mask = [*ids, *response.output_tokens], [*mask, *[1] * response.output_len]
            if turn == 0:
                ids, mask = [*ids, 7, 8, 9], [*mask, 0, 0, 0]
        return {"input_ids": ids, "loss_mask": mask, "reward": float(sum(ids))}


def test_the_record_reaches_the_rows_through_journal_replay_packing_and_a_store(tmp_path):
    model = mixture()
    tasks = [{"prompt": [3, 4, 5 + extra], "extra": extra} for extra in range(2)]
    engine = LocalRolloutEngine(RolloutConfig(routing_replay=True, max_running_requests=4, device="cpu"), model, seed=3)
    engine.journal = Journal(tmp_path)
    with engine:
        batch = engine.prepare_batch(iter(tasks), TwoTurns(), group_size=2, batch_size=2)
    routed = batch["routed_experts"]
    lengths = batch["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == 2
    for row, length in enumerate(lengths):
        expected = own_choice(model, batch["input_ids"][row : row + 1, :length])[0]
        assert torch.equal(routed[row, : length - 1], expected[:-1])
        assert not routed[row, length - 1 :].any()
    # each token once in the journal, from which a run that was killed goes on
    calls = [each for episode in read_episodes(tmp_path) for each in episode.calls]
    assert len(calls) == 8
    assert sum(len(each.call.experts) for each in calls) == sum(length - 1 for length in lengths) * LAYERS * TOP_K
    resumed = LocalRolloutEngine(
        RolloutConfig(routing_replay=True, device="cpu"), mixture(seed=1), seed=3
    )  # would choose others
    resumed.journal = Journal(tmp_path)
    with resumed:
        resumed.executor.recall([tmp_path])
        again = resumed.prepare_batch(iter(tasks), TwoTurns(), group_size=2, batch_size=2)
        assert resumed.client.stats()["generated_tokens"] == 0
    assert all(torch.equal(again[name], batch[name]) for name in ("input_ids", "logprobs", "routed_experts"))
    # on the way to ranks and to a store
    assert torch.equal(unpacked(as_packed(batch))["routed_experts"], routed)
    stored = [Experience.deserialize(each.serialize()) for each in Experience.from_trajectory(batch)]
    assert torch.equal(concat_padded_tensors([each.to_trajectory() for each in stored])["routed_experts"], routed)
    # rows of another model have none
    other = {name: value for name, value in batch.items() if name != "routed_experts"}
    joined = concat_padded_tensors([other, batch])["routed_experts"]
    assert torch.equal(joined[4:], routed)
    assert not joined[:4].any()


def test_tokens_that_are_computed_again_after_a_publication_keep_the_record_they_were_sampled_with():
    model, other = mixture(), mixture(seed=1)
    (request,) = requests(1, new_tokens=60)

    async def sample(engine):
        seen = []
        async for part in engine.astream(request):
            seen.append(part)
            if len(part.output_tokens) == 20 or (len(seen) == 1 and len(part.output_tokens) > 20):
                engine.update_weights(version=1, weights=dict(other.named_parameters()))
        return seen[-1]

    with BuiltinEngine(copy.deepcopy(model), dtype="float32", routing_replay=True, threads=1) as engine:
        answer = asyncio.run(sample(engine))
    ids = torch.tensor([answer.input_tokens + answer.output_tokens])
    new = answer.output_versions.index(1)
    assert 0 < new < 60
    before = answer.input_len + new - 1  # tokens computed before the publication
    assert torch.equal(torch.from_numpy(answer.routed_experts[:before]), own_choice(model, ids)[0, :before])
    changed = own_choice(other, ids)[0]
    assert torch.equal(torch.from_numpy(answer.routed_experts[before:]), changed[before:-1])
    assert not np.array_equal(answer.routed_experts[:before], changed[:before].numpy())


def test_compiled_layers_are_refused():
    config = PPOConfig()
    config.rollout.routing_replay = config.actor.compile_layers = True
    said = [message for path, message in faults_of(config) if path == ("rollout", "routing_replay")]
    assert any("compile_layers" in each for each in said)
