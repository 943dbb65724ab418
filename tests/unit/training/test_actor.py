"""The actor's calls: gradients that do not depend on how a batch is cut, and what each setting does to them."""

import math

import pytest
import torch
from tiny_policy import gradients, tiny_actor, tiny_batch, tiny_model

from rollwright.config.sections import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig
from rollwright.errors import ConfigError, TrainingError, WeightUpdateError
from rollwright.inference.engine import InferenceEngine
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor


def written_out_gradient(batch, advantages, *, eps_clip=0.2, how="token", constant=1024.0, mask=None):
    """The gradient of the clipped loss, row by row without padding, by autograd over the whole softmax."""
    model = tiny_model()
    mask = batch["loss_mask"].bool() if mask is None else mask
    rows_with_tokens = int((mask.sum(-1) > 0).sum())
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(mask)):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        logits = model(ids[None]).logits[0, :-1] / batch["temperature"][row].double()
        logp = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        for t in range(1, length):
            if not mask[row, t]:
                continue
            ratio = torch.exp(logp[t - 1] - batch["logprobs"][row, t].double())
            advantage = advantages[row, t].double()
            token = -torch.minimum(ratio * advantage, ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantage)
            share = {
                "token": 1 / mask.sum(),
                "row": 1 / mask[row].sum() / rows_with_tokens,
                "constant": 1 / (constant * len(mask)),
            }
            loss = loss + token * share[how]
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("how", ["token", "row", "constant"])
@pytest.mark.parametrize("max_tokens", [10, 40, 8192])
def test_micro_batches_leave_the_gradient_unchanged(how, max_tokens):
    actor, batch = tiny_actor(max_tokens=max_tokens, loss_aggregation=how, loss_constant=7.0), tiny_batch()
    actor.compute_advantages(batch)
    caught = gradients(actor)
    actor.ppo_update(batch)
    expected = written_out_gradient(batch, batch["advantages"], how=how, constant=7.0)
    assert caught.keys() == expected.keys()
    for name, grad in caught.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-7, rtol=0)


def test_advantages_are_written_into_the_batch_and_returned():
    actor, batch = tiny_actor(), tiny_batch()
    assert actor.compute_advantages(batch) is batch
    assert batch["advantages"].shape == batch["input_ids"].shape
    assert batch["advantages"][batch["loss_mask"] == 0].abs().max() == 0
    rewards = batch["rewards"][:4].double()
    means = torch.stack([rewards[:2].mean(), rewards[2:].mean()])
    deviation = math.sqrt(float(((rewards - means.mean()) ** 2).mean()))
    expected = (rewards - means.mean()) / (deviation + 1e-6)
    for row in range(4):
        tokens = batch["advantages"][row][batch["loss_mask"][row] > 0]
        assert tokens.tolist() == pytest.approx([expected[row].item()] * len(tokens), rel=1e-4)


def test_rewards_are_shifted_scaled_and_clipped():
    actor, batch = tiny_actor(adv_norm=None, reward_bias=1.0, reward_scaling=10.0, reward_clip=4.0), tiny_batch()
    batch["rewards"] = torch.tensor([-0.9, -1.0, 5.0, -9.0] * 3)
    actor.compute_advantages(batch)
    assert [batch["advantages"][row].sum().item() / batch["loss_mask"][row].sum().item() for row in range(4)] == pytest.approx(
        [1.0, 0.0, 4.0, -4.0], abs=1e-5
    )


def warnings_of(caplog, about):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and about in record.getMessage()]


def test_rewards_are_not_clipped_unless_asked_for(caplog):
    actor, batch = tiny_actor(), tiny_batch()
    batch["rewards"] = torch.linspace(25.0, 100.0, 12)
    with caplog.at_level("WARNING"):
        metrics = actor.ppo_update(actor.compute_advantages(batch))
    assert metrics["groups_without_variance"] == 0
    assert metrics["reward_clipped_share"] == 0
    assert metrics["advantage/abs_mean"] > 0.5
    assert not warnings_of(caplog, "reward_clip")


def test_clipped_rewards_are_counted_told_once_and_leave_groups_without_variance(caplog):
    actor = tiny_actor(reward_clip=20.0)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            batch = tiny_batch()
            batch["rewards"] = torch.tensor([25.0, 50.0, 75.0, 100.0] * 2 + [1.0, 2.0, 3.0, 99.0])
            metrics = actor.ppo_update(actor.compute_advantages(batch))
    assert metrics["groups_without_variance"] == pytest.approx(2 / 3)
    assert metrics["reward_clipped_share"] == pytest.approx(9 / 12)
    (warning,) = warnings_of(caplog, "reward_clip")
    assert "9 of 12 rows" in warning
    assert "100" in warning


def test_rewards_that_another_rank_clips_are_told(caplog, monkeypatch):
    actor, batch = tiny_actor(reward_clip=20.0), tiny_batch()
    batch["rewards"] = torch.ones(12)
    others = torch.tensor([3, 12])
    monkeypatch.setattr(parallel, "summed", lambda value: value + others if value.shape == others.shape else value)
    with caplog.at_level("WARNING"):
        actor.compute_advantages(batch)
    (warning,) = warnings_of(caplog, "reward_clip")
    assert "3 of 24 rows" in warning


def test_groups_of_one_are_told_once_under_a_group_baseline_only(caplog):
    def warned(groups, **keys):
        caplog.clear()
        actor = tiny_actor(**keys)
        with caplog.at_level("WARNING"):
            for _ in range(2):
                batch = tiny_batch()
                batch["sample_ids"], batch["group_ids"] = torch.arange(12), torch.tensor(groups)
                actor.compute_advantages(batch)
        return warnings_of(caplog, "one sample")

    (warning,) = warned(list(range(12)))
    assert "12 of 12 groups" in warning
    assert "n_samples" in warning
    assert "1 of 3 groups" in warned([0] + [1] * 5 + [2] * 6)[0]
    assert warned([0] * 6 + [1] * 6) == []
    assert warned(list(range(12)), recipe="reinforceplusplus") == []


@pytest.mark.parametrize("loss", ["reinforce", "opmd", "topr"])
def test_recomputed_log_probabilities_do_not_hide_who_sampled(loss):
    """The weight to the behaviour policy is the same whether the anchor is recomputed or not."""
    found = []
    for recompute in (False, True):
        actor, batch = tiny_actor(policy_loss=loss, recompute_logprob=recompute), tiny_batch()
        actor.compute_advantages(batch)
        found.append(gradients(actor))
        metrics = actor.ppo_update(batch)
        assert metrics["ratio/mean"] != pytest.approx(1.0, abs=0.05)
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_interpolation_takes_the_exact_anchor_before_the_first_step(minibatches):
    def first_gradient(method):
        actor, batch = (
            tiny_actor(
                use_decoupled_loss=True, prox_logp_method=method, ppo_n_minibatches=minibatches, behav_imp_weight_cap=None
            ),
            tiny_batch(),
        )
        actor.version = 4
        batch["versions"] = torch.where(batch["loss_mask"] > 0, 2, -1).int()
        actor.compute_advantages(batch)
        steps, caught = [], gradients(actor)
        catch = actor._step

        def first_alone(loss):
            steps.append(loss)
            return catch(loss) if len(steps) == 1 else {"loss": loss, "grad_norm": 0.0, "skipped_steps": 0.0}

        actor._step = first_alone
        actor.ppo_update(batch)
        assert len(steps) == minibatches
        return caught

    exact, interpolated = first_gradient("recompute"), first_gradient("interpolate")
    for name, grad in exact.items():
        torch.testing.assert_close(grad, interpolated[name], atol=1e-9, rtol=0)


def test_token_rewards_are_what_the_row_still_collects():
    actor, batch = tiny_actor(adv_norm=NormConfig(std_level="none")), tiny_batch()
    batch["sample_ids"] = torch.arange(12)
    batch["token_rewards"] = torch.zeros(12, 14)
    batch["token_rewards"][0, 4] = 2.0
    actor.compute_advantages(batch)
    totals = batch["rewards"].clone()
    totals[0] += 2
    mean = totals[:4].mean()
    assert batch["advantages"][0, 3].item() == pytest.approx(float(totals[0] - mean), abs=1e-6)
    assert batch["advantages"][0, 5].item() == pytest.approx(float(batch["rewards"][0] - mean), abs=1e-6)


def test_truncated_samples_count_as_baseline_but_do_not_train():
    actor, plain, batch = tiny_actor(mask_truncated=True), tiny_actor(), tiny_batch()
    expected = plain.compute_advantages(dict(batch))["advantages"]
    actor.compute_advantages(batch)
    assert batch["advantages"][1].abs().sum() == 0
    torch.testing.assert_close(batch["advantages"][2], expected[2])
    caught = gradients(actor)
    metrics = actor.ppo_update(batch)
    mask = batch["loss_mask"].bool() & ~batch["truncated"][:, None]
    wanted = written_out_gradient(batch, batch["advantages"], mask=mask)
    for name, grad in caught.items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-7, rtol=0)
    assert metrics["masked_share"] == pytest.approx(float(batch["loss_mask"][1].sum() / batch["loss_mask"].sum()))


def test_what_a_batch_lacks_is_named():
    actor, batch = tiny_actor(), tiny_batch()
    with pytest.raises(TrainingError, match=r"'advantages'.*compute_advantages"):
        actor.ppo_update(batch)
    del batch["group_ids"]
    with pytest.raises(TrainingError, match=r"group_ids.*executor fills"):
        actor.compute_advantages(batch)
    del batch["loss_mask"]
    with pytest.raises(TrainingError, match="loss_mask"):
        actor.compute_advantages(batch)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_recomputed_log_probabilities_are_the_anchor(minibatches):
    """With prox_logp given, or computed by itself, the first step's ratio is 1 and the update the same."""
    metrics, weights = [], []
    for given in (True, False):
        actor, batch = (
            tiny_actor(use_decoupled_loss=True, behav_imp_weight_cap=None, ppo_n_minibatches=minibatches),
            tiny_batch(),
        )
        if given:
            batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        metrics.append(actor.ppo_update(batch))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in actor.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=0)
    if minibatches == 1:
        assert metrics[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["optimizer_steps"] == minibatches


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    "keys",
    [
        {"recompute_logprob": True},
        {"use_decoupled_loss": True},
        {"recompute_logprob": True, "use_decoupled_loss": True, "prox_logp_method": "interpolate"},
    ],
)
def test_the_trainers_own_take_the_place_of_shifted_log_probabilities(keys, minibatches):
    """What a server gave after top-p changes nothing: neither the update nor the comparison with the engine."""
    results = []
    for shifted in (False, True):
        actor, batch = tiny_actor(ppo_n_minibatches=minibatches, **keys), tiny_batch()
        mask = batch["loss_mask"].bool()
        batch["logprobs"] = actor.compute_logp(batch) * mask
        if shifted:
            batch["logprobs"][:4] = -0.01 * mask[:4]
            batch["logprobs_shifted"] = torch.arange(12) < 4
        metrics = actor.ppo_update(actor.compute_advantages(batch))
        results.append((metrics, torch.cat([parameter.detach().flatten() for parameter in actor.model.parameters()])))
    (plain, expected), (metrics, weights) = results
    torch.testing.assert_close(weights, expected, atol=1e-7, rtol=0)
    assert metrics["logprob_difference/max"] < 1e-5
    for name in ("effective_sample_size", "mismatch/kl", "ratio/mean"):
        assert metrics[name] == pytest.approx(plain[name], abs=1e-6), name


def test_shifted_log_probabilities_are_refused_where_nothing_takes_their_place():
    actor, batch = tiny_actor(), tiny_batch()
    actor.compute_advantages(batch)
    batch["logprobs_shifted"] = torch.arange(12) < 4
    with pytest.raises(TrainingError, match=r"of 4 of 12 rows .* set actor.recompute_logprob"):
        actor.ppo_update(batch)


def test_decoupled_loss_weighs_by_the_behaviour_policy():
    """On policy for the anchor, its gradient is -A · w ∇ log π with w = prox / behaviour, capped."""
    actor, batch = tiny_actor(use_decoupled_loss=True, behav_imp_weight_cap=0.2, behav_imp_weight_mode="clamp"), tiny_batch()
    actor.compute_advantages(batch)
    logp = actor.compute_logp(batch).double()
    caught = gradients(actor)
    metrics = actor.ppo_update(batch)
    mask = batch["loss_mask"].bool()
    weight = torch.exp(logp - batch["logprobs"]).clamp(max=0.2)
    weighted = {**batch, "logprobs": logp}
    expected = written_out_gradient(weighted, batch["advantages"].double() * weight)
    for name, grad in caught.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=0)
    assert 0 < metrics["behaviour_weight/capped_share"] < 1
    assert metrics["behaviour_weight/mean"] == pytest.approx(float(weight[mask].mean()), rel=1e-5)


def test_metrics_of_ratio_mismatch_and_staleness():
    actor, batch = tiny_actor(max_tokens=30), tiny_batch()
    actor.version = 3
    mask = batch["loss_mask"].bool()
    batch["versions"] = torch.where(mask, 3, -1).int()
    batch["versions"][5][mask[5]] = 1
    actor.compute_advantages(batch)
    logp = actor.compute_logp(batch).double()
    gradients(actor)
    metrics = actor.ppo_update(batch)
    difference = (logp - batch["logprobs"].double())[mask]
    ratio = difference.exp()
    assert metrics["ratio/mean"] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert metrics["ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-5)
    assert metrics["ratio/min"] == pytest.approx(float(ratio.min()), rel=1e-5)
    assert metrics["effective_sample_size"] == pytest.approx(
        float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())), rel=1e-5
    )
    fresh = (logp - batch["logprobs"].double())[batch["versions"] == 3]
    assert metrics["logprob_difference/mean"] == pytest.approx(float(fresh.abs().mean()), rel=1e-5)
    assert metrics["logprob_difference/max"] == pytest.approx(float(fresh.abs().max()), rel=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(float((fresh.exp() - 1 - fresh).mean()), rel=1e-5)
    share = float(mask[5].sum() / mask.sum())
    assert metrics["staleness/share_0"] == pytest.approx(1 - share)
    assert metrics["staleness/share_2"] == pytest.approx(share)
    assert metrics["staleness/max"] == 2
    assert metrics["groups_without_variance"] == 0


def test_metrics_do_not_depend_on_micro_batches():
    found = []
    for max_tokens in (14, 8192):
        actor, batch = tiny_actor(max_tokens=max_tokens, kl_ctl=0.1, entropy_coef=0.01), tiny_batch()
        actor.compute_advantages(batch)
        found.append(actor.ppo_update(batch))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, abs=1e-6), name


def test_the_reference_is_the_policy_at_the_start():
    actor, batch = tiny_actor(kl_ctl=0.5, lr=1e-2), tiny_batch()
    before = actor.compute_logp(batch, loss_tokens_only=True)
    assert actor.ppo_update(actor.compute_advantages(dict(batch)))["kl"] == pytest.approx(0, abs=1e-9)
    second = actor.compute_advantages(dict(batch))
    torch.testing.assert_close(second["ref_logp"], before)
    assert actor.ppo_update(second)["kl"] > 1e-6
    with pytest.raises(TrainingError, match="kl_ctl is 0"):
        tiny_actor().compute_ref_logp(batch)


def test_a_kl_penalty_pulls_back():
    found = []
    for weight in (0.0, 5.0):
        actor, batch = tiny_actor(lr=5e-3), tiny_batch()
        actor.reference = actor.frozen_copy()
        actor.config.kl_ctl = weight
        for _ in range(5):
            actor.ppo_update(actor.compute_advantages(dict(batch)))
        drift = actor.compute_logp(batch, loss_tokens_only=True) - actor.compute_ref_logp(batch)
        found.append(float(drift.square().mean()))
    assert found[1] < found[0] * 0.9


def test_an_entropy_bonus_raises_entropy():
    found = []
    for weight in (0.0, 1.0):
        actor, batch = tiny_actor(lr=1e-2, entropy_coef=weight, adv_norm=None), tiny_batch()
        batch["rewards"] = torch.zeros(12)
        batch["input_ids"][:, 3:] = 7
        for _ in range(3):
            metrics = actor.ppo_update(actor.compute_advantages(dict(batch)))
        found.append(metrics["entropy"])
    assert found[1] > found[0]


def test_learning_raises_what_was_rewarded():
    actor, batch = tiny_actor(dtype=torch.float32, lr=3e-3), tiny_batch()
    batch["logprobs"] = actor.compute_logp(batch, loss_tokens_only=True)
    before = batch["logprobs"].sum(-1)
    for _ in range(3):
        actor.ppo_update(actor.compute_advantages(dict(batch)))
        actor.step_lr_scheduler()
    change = actor.compute_logp(batch, loss_tokens_only=True).sum(-1) - before
    advantage = actor.compute_advantages(dict(batch))["advantages"].sum(-1)
    assert float((change * advantage).sum()) > 0


def test_nothing_to_train_is_not_a_step():
    actor, batch = tiny_actor(), tiny_batch()
    batch["loss_mask"].zero_()
    before = [parameter.clone() for parameter in actor.model.parameters()]
    metrics = actor.ppo_update(actor.compute_advantages(batch))
    assert metrics["optimizer_steps"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, actor.model.parameters(), strict=True))


def test_steps_that_are_not_finite_are_skipped_and_stop_the_run():
    actor, batch = tiny_actor(max_bad_steps=2), tiny_batch()
    actor.compute_advantages(batch)
    good = batch["advantages"].clone()
    batch["advantages"][0, 3] = float("nan")
    before = [parameter.clone() for parameter in actor.model.parameters()]
    assert actor.ppo_update(batch)["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, actor.model.parameters(), strict=True))
    assert actor.ppo_update({**batch, "advantages": good})["skipped_steps"] == 0  # a good step starts the count anew
    actor.ppo_update(batch)
    with pytest.raises(TrainingError, match="2 optimizer steps in a row"):
        actor.ppo_update(batch)


class RecordingEngine(InferenceEngine):
    """Notes what the actor asks of it; it computes with the actor's own model."""

    def __init__(self, model):
        self.calls, self.model = [], model

    @property
    def local_model(self):
        return self.model

    async def agenerate(self, request): ...

    def abort(self, rid=None): ...

    def get_version(self): ...

    def set_version(self, version): ...

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def publish(self, version):
        self.calls.append(("publish", version))


def test_an_engine_that_shares_weights_does_not_step_while_they_change():
    actor, batch = tiny_actor(ppo_n_minibatches=3), tiny_batch()
    engine = RecordingEngine(actor.model)
    actor.connect_engine(engine)
    actor.compute_advantages(batch)
    actor.compute_logp(batch)
    assert engine.calls == []
    actor.ppo_update(batch)
    assert engine.calls == ["pause"]
    actor.update_weights()
    assert engine.calls == ["pause", ("publish", 1), "resume"]
    actor.set_version(1)
    with pytest.raises(WeightUpdateError, match="published version 1"):
        actor.set_version(2)


def test_naming_the_way_only_at_publication_still_lets_the_engine_go_on():
    from rollwright.inference.weights.transfer import WeightUpdateMeta

    actor = tiny_actor()
    engine = RecordingEngine(actor.model)
    actor.connect_engine(engine)
    actor.ppo_update(actor.compute_advantages(tiny_batch()))
    actor.update_weights(WeightUpdateMeta.shared())
    assert engine.calls == ["pause", ("publish", 1), "resume"]


def test_publishing_to_nobody_is_an_error(monkeypatch):
    for name in ("ROLLWRIGHT_LLM_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS"):
        monkeypatch.delenv(name, raising=False)
    actor = tiny_actor()
    with pytest.raises(WeightUpdateError, match="connect_engine"):
        actor.update_weights()
    assert actor.version == 0


def test_configurations_that_cannot_be_trained_are_refused():
    with pytest.raises(ConfigError, match="recipe"):
        FSDPPPOActor(PPOActorConfig(recipe="grop"))
    with pytest.raises(ConfigError, match="float16"):
        tiny_actor(dtype=torch.float32).__class__(
            PPOActorConfig(dtype="float16", device="cpu"), model=tiny_model()
        ).initialize()
    with pytest.raises(ConfigError, match="path is empty"):
        FSDPPPOActor(PPOActorConfig(device="cpu")).initialize()
    config = PPOActorConfig(device="cpu", optimizer=OptimizerConfig(lr_scheduler_type="cosine"))
    with pytest.raises(ConfigError, match="FinetuneSpec"):
        FSDPPPOActor(config, model=tiny_model()).initialize()


def test_gradient_checkpointing_leaves_the_gradient_unchanged(tmp_path):
    from rollwright.training.hf_checkpoint import save_model

    save_model(tiny_model(dtype=torch.float32), tmp_path / "model")
    found = []
    for checkpointing in (False, True):
        config = PPOActorConfig(
            path=str(tmp_path / "model"), device="cpu", gradient_checkpointing=checkpointing, mb_spec=MicroBatchSpec(n_mbs=2)
        )
        actor, batch = FSDPPPOActor(config), tiny_batch()
        actor.initialize()
        actor.compute_advantages(batch)
        found.append(gradients(actor))
        actor.ppo_update(batch)
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], atol=1e-6, rtol=1e-4)


def test_supervised_update_is_the_mean_negative_log_likelihood():
    actor, batch = tiny_actor(max_tokens=20), tiny_batch()
    batch["temperature"] = torch.ones(12)
    logp, mask = actor.compute_logp(batch), batch["loss_mask"].bool()
    metrics = actor.sft_update({key: batch[key] for key in ("input_ids", "attention_mask", "loss_mask")})
    assert metrics["loss"] == pytest.approx(float(-logp[mask].mean()), rel=1e-6)
    assert actor.sft_update(batch)["loss"] < metrics["loss"]
    with pytest.raises(TrainingError, match="no token"):
        actor.sft_update({**batch, "loss_mask": torch.zeros(12, 14)})


def test_every_minibatch_of_rloo_has_trls_gradient():
    """TRL's RLOO over three optimizer steps: rewards less the others' mean, one clipped ratio a row, mean over rows.

    The ratio is taken to the policy that sampled, so it is not 1 from the second step on, and the clip bites.
    """
    actor = tiny_actor(
        lr=3e-3,
        adv_norm=NormConfig(std_level="none", leave_one_out=True),
        importance_level="sequence_product",
        loss_aggregation="constant",
        loss_constant=1.0,
        ppo_n_minibatches=3,
    )
    batch = tiny_batch() | {"sample_ids": torch.arange(12), "truncated": torch.zeros(12, dtype=torch.bool)}
    batch["logprobs"] = actor.compute_logp(batch).double() * batch["loss_mask"]
    actor.compute_advantages(batch)
    found, step = [], actor._step

    def caught(loss):
        weights = {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}
        found.append((weights, {name: parameter.grad.clone() for name, parameter in actor.model.named_parameters()}))
        return step(loss)

    actor._step = caught
    actor.ppo_update(batch)
    ratios = []
    for group, (weights, gradient) in enumerate(found):
        model = tiny_model()
        model.load_state_dict(weights, strict=False)
        rewards, loss = batch["rewards"][4 * group : 4 * group + 4].double(), torch.zeros((), dtype=torch.float64)
        for place in range(4):
            row = 4 * group + place
            length = int(batch["attention_mask"][row].sum())
            ids, mask = batch["input_ids"][row, :length], batch["loss_mask"][row, 1:length].bool()
            logits = model(ids[None]).logits[0, :-1] / batch["temperature"][row].double()
            logp = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            ratio = (logp - batch["logprobs"][row, 1:length])[mask].sum().exp()
            advantage = rewards[place] - (rewards.sum() - rewards[place]) / 3
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 4
            ratios.append(ratio.item())
        loss.backward()
        for name, parameter in model.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient[name], wanted, atol=1e-7, rtol=1e-5)
    assert ratios[:4] == pytest.approx([1.0] * 4, abs=1e-5)
    assert max(abs(ratio - 1.0) for ratio in ratios[4:]) > 0.2


@pytest.mark.parametrize("keys", [{}, {"max_tokens": 40}, {"ppo_n_minibatches": 3, "recompute_logprob": True}])
def test_an_update_leaves_what_it_computed_of_each_token_in_the_batch(keys):
    actor, batch = tiny_actor(mask_truncated=True, **keys), tiny_batch()
    batch["truncated"] = torch.arange(len(batch["rewards"])) % 4 == 0
    before = actor.compute_logp(batch, loss_tokens_only=True)
    logits = actor.model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits.detach()
    scaled = logits.double() / batch["temperature"][:, None, None].clamp(min=1e-3)
    entropy = torch.distributions.Categorical(logits=scaled).entropy()
    actor.ppo_update(actor.compute_advantages(batch))
    trained = (batch["loss_mask"] > 0) & ~batch["truncated"][:, None] & batch["attention_mask"].bool()
    torch.testing.assert_close(batch["trainer_logprobs"], (before * trained).float(), atol=1e-5, rtol=1e-5)
    assert bool(((batch["entropies"] > 0) == trained).all())
    if not keys.get("ppo_n_minibatches"):
        expected = torch.zeros_like(entropy)
        expected[:, 1:] = entropy[:, :-1]
        torch.testing.assert_close(batch["entropies"], (expected * trained).float(), atol=1e-5, rtol=1e-5)
