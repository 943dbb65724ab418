"""The critic against values, gradients and targets that are computed row by row with plain autograd, in float64."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from tiny_policy import VOCABULARY, grouped_batch, tiny_batch, tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.recipes import apply_recipe
from rollwright.config.sections import CriticConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig
from rollwright.errors import CheckpointError, ConfigError, TrainingError
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.hf_checkpoint import save_model
from rollwright.training.rank_shares import own_share
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

SPEC = FinetuneSpec(1, 100, 10)


def ppo_actor(shared=False, model=None, critic=None, max_tokens=8192, **keys):
    """An actor with a critic over the tiny model, on the CPU."""
    keys = {"recipe": "ppo", "optimizer": OptimizerConfig(lr=1e-3), "device": "cpu", **keys}
    actor = FSDPPPOActor(PPOActorConfig(**keys), model=model or (None if keys.get("path") else tiny_model()))
    actor.initialize(None, SPEC)
    of_critic = {"device": "cpu", "shard": keys.get("shard", "auto")} if not shared else {}
    options = {"mb_spec": MicroBatchSpec(max_tokens), "optimizer": OptimizerConfig(lr=1e-2), **of_critic, **(critic or {})}
    actor.add_critic(CriticConfig(shared=shared, **options), SPEC)
    return actor


def head_of(actor):
    critic = actor.critic
    return critic.model.weight if critic.config.shared else critic.model.get_output_embeddings().weight


def randomise(actor, seed=5):
    head = head_of(actor)
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)).to(head))
    return head.detach().clone().double()


def values_written_out(batch, head, model=None):
    """Value before each token and after each row, by one plain forward pass of each row."""
    model, values = model or tiny_model(), []
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        hidden = model.base_model(input_ids=batch["input_ids"][row : row + 1, :length]).last_hidden_state[0]
        values.append((hidden.double() @ head[0].double()).float() if not hidden.requires_grad else hidden @ head[0])
    return values


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("batch_of", [tiny_batch, grouped_batch])
@pytest.mark.parametrize("max_tokens", [20, 8192])
def test_a_value_is_that_of_the_state_before_its_token(shared, batch_of, max_tokens):
    actor, batch = ppo_actor(shared, max_tokens=max_tokens), batch_of()
    head = randomise(actor)
    found, after = actor.critic.compute_values(batch)
    with torch.no_grad():
        expected = values_written_out(batch, head)
    for row, values in enumerate(expected):
        for t in batch["loss_mask"][row].nonzero().flatten().tolist():
            assert float(found[row, t]) == pytest.approx(float(values[t - 1]), abs=1e-5)
        assert float(after[row]) == pytest.approx(float(values[-1]) if batch["truncated"][row] else 0.0, abs=1e-5)
    assert found[batch["loss_mask"] == 0].abs().max() == 0
    assert actor.critic.division.shares_prefixes or batch_of is tiny_batch


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_the_first_advantages_are_the_returns(shared):
    batch = tiny_batch()
    batch["rewards"][1] = 0.0  # the truncated row, whose state after it has value 0
    actor = ppo_actor(shared, adv_estimator_kwargs={"whiten": False})
    actor.compute_advantages(batch)
    assert batch["values"].abs().max() == 0
    expected = batch["rewards"][:, None] * batch["loss_mask"]
    torch.testing.assert_close(batch["advantages"], expected.float())
    torch.testing.assert_close(batch["value_targets"], expected.float())


@pytest.mark.parametrize("max_tokens", [20, 8192])
def test_the_gradient_of_the_value_loss(max_tokens):
    actor, batch = ppo_actor(max_tokens=max_tokens, critic={"eps_clip": 0.1}), tiny_batch()
    head = randomise(actor)
    actor.compute_advantages(batch)
    old, targets, mask = batch["values"].double(), batch["value_targets"].double(), batch["loss_mask"].bool()
    batch["values"] = (
        old + 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    ) * mask  # so that some are clipped
    caught = {}

    def catch(loss):
        caught.update({name: each.grad.clone() for name, each in actor.critic.model.named_parameters()}, loss=loss)
        actor.critic.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": 0.0, "skipped_steps": 0.0}

    actor.critic._step = catch
    actor.critic.update({**batch, "update_mask": mask.float()})
    model = tiny_model()
    head.requires_grad_(True)
    total = 0.0
    for row, values in enumerate(values_written_out(batch, head, model)):
        for t in mask[row].nonzero().flatten().tolist():
            value, before, target = values[t - 1], batch["values"][row, t].double(), targets[row, t]
            near = torch.minimum(torch.maximum(value, before - 0.1), before + 0.1)
            total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2) / mask.sum()
    total.backward()
    assert caught.pop("loss") == pytest.approx(float(total), rel=1e-5)
    torch.testing.assert_close(caught.pop("lm_head.weight"), head.grad, atol=1e-5, rtol=1e-4)
    expected = dict(model.named_parameters())
    for name, grad in caught.items():
        torch.testing.assert_close(grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_warm_up_trains_the_critic_alone(shared):
    actor = ppo_actor(shared, critic={"warmup_steps": 2})
    first, steps = actor.full_weights(), []
    for step in range(3):
        batch, before, head = tiny_batch(step), actor.full_weights(), head_of(actor).detach().clone()
        steps.append(actor.ppo_update(actor.compute_advantages(batch)))
        actor.step_lr_scheduler()
        actor.skip_publication()
        assert not torch.equal(head_of(actor), head)
        same = all(torch.equal(tensor, before[name]) for name, tensor in actor.full_weights().items())
        assert same == (step < 2)
    assert [each["optimizer_steps"] for each in steps] == [0.0, 0.0, 1.0]
    assert all(each["critic/optimizer_steps"] == 1.0 for each in steps)
    assert {"critic/loss", "critic/explained_variance", "critic/returns/mean", "critic/squared_error"} <= steps[1].keys()
    assert first.keys() == actor.full_weights().keys()  # a head on the trunk is not published


def test_the_critic_learns_what_the_rewards_depend_on():
    actor, losses = ppo_actor(critic={"ppo_n_minibatches": 3, "eps_clip": None}), []
    batch = tiny_batch()
    batch["rewards"] = (batch["input_ids"][:, 0] > VOCABULARY // 2).float()
    for _ in range(30):
        actor.compute_advantages(batch)
        losses.append(actor.critic.update({**batch, "update_mask": batch["loss_mask"].float()}))
    assert losses[-1]["critic/squared_error"] < 0.2 * losses[0]["critic/squared_error"]
    assert losses[-1]["critic/explained_variance"] > 0.7
    assert losses[-1]["critic/optimizer_steps"] == 3.0


@pytest.fixture
def group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    save_model(tiny_model(dtype=torch.float32), directory)
    return str(directory)


def trained(actor, steps, start=0):
    for step in range(start, start + steps):
        actor.ppo_update(actor.compute_advantages(tiny_batch(step)))
        actor.step_lr_scheduler()
    return {**actor.full_weights(), **{f"critic.{name}": each for name, each in actor.critic.full_weights().items()}}


def trained_on_share(path, shared):
    """Weights and metrics after two steps of two minibatches; each rank gets some of the groups, one of them perhaps none."""
    critic = {"ppo_n_minibatches": 2, "warmup_steps": 1}
    actor = ppo_actor(shared, path=path, ppo_n_minibatches=2, critic=critic, adv_estimator_kwargs={"lam": 0.9})
    for step in range(2):
        batch = tiny_batch(step)
        batch = batch if parallel.world_size() == 1 else own_share(batch if parallel.rank() == 0 else None, 2)
        stats = actor.ppo_update(actor.compute_advantages(batch))
        actor.step_lr_scheduler()
    weights = {**actor.full_weights(), **{f"critic.{name}": each for name, each in actor.critic.full_weights().items()}}
    return weights | {name: torch.tensor(value) for name, value in stats.items() if not name.startswith("canary")}


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_sharded_critic_trains_as_a_whole_one(path, shared, group):
    whole = trained(ppo_actor(shared, path=path), 2)
    sharded = trained(ppo_actor(shared, path=path, shard="always"), 2)
    assert whole.keys() == sharded.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_resumed_critic_continues_bit_for_bit(path, tmp_path, shared):
    first = ppo_actor(shared, path=path, critic={"warmup_steps": 1})
    trained(first, 2)
    recover = RecoverCheckpoints(tmp_path / "recover")
    recover.save(2, {"actor": first.state_dict()})
    expected = trained(first, 2, start=2)
    second = ppo_actor(shared, path=path, critic={"warmup_steps": 1})
    second.load_state_dict(recover.load()[1]["actor"])
    assert second.critic.version == 2
    for name, tensor in trained(second, 2, start=2).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_checkpoint_without_a_critic_is_refused(path, tmp_path):
    actor = FSDPPPOActor(PPOActorConfig(path=path, device="cpu"))
    actor.initialize(None, SPEC)
    with pytest.raises(CheckpointError, match="this run has a critic and the checkpoint has none"):
        ppo_actor(path=path).load_state_dict(actor.state_dict())


def test_kl_in_the_reward_is_taken_from_each_token():
    """The returns of undiscounted GAE with values of 0 are the rewards to go, each token's less 0.5 · KL at sampling."""
    actor = ppo_actor(kl_ctl=0.5, kl_in="reward", kl_estimator="k1", adv_estimator_kwargs={"whiten": False})
    batch = tiny_batch()
    batch["ref_logp"] = -torch.rand(batch["logprobs"].shape, generator=torch.Generator().manual_seed(9)) * batch["loss_mask"]
    actor.compute_advantages(batch)
    mask = batch["loss_mask"].double()
    penalty = 0.5 * (batch["logprobs"] - batch["ref_logp"]).double() * mask
    for row in range(len(mask)):
        for t in mask[row].nonzero().flatten().tolist():
            expected = float(batch["rewards"][row]) - float(penalty[row, t:].sum())
            assert float(batch["value_targets"][row, t]) == pytest.approx(expected, abs=1e-5)
    stats = actor.ppo_update(batch)
    assert stats["kl"] != 0
    assert stats["loss"] == pytest.approx(stats["policy_loss"], abs=1e-6)


def test_positive_samples_are_imitated():
    """The loss gains μ times the mean negative log-likelihood over the tokens of rows with a reward above 0."""
    batch = tiny_batch()
    batch["rewards"] -= 0.5
    plain, vapo = ppo_actor(), ppo_actor(positive_nll_coef=0.25)
    one, two = (each.ppo_update(each.compute_advantages(dict(batch))) for each in (plain, vapo))
    positive = batch["loss_mask"] * (batch["rewards"] > 0)[:, None]
    logp = ppo_actor().compute_logp(batch)
    expected = -float((logp * positive).sum() / positive.sum())
    assert two["positive_nll"] == pytest.approx(expected, rel=1e-4)
    assert two["loss"] - one["loss"] == pytest.approx(0.25 * expected, rel=1e-4)
    assert 0 < int((batch["rewards"] > 0).sum()) < len(batch["rewards"])


def test_given_advantages_are_kept_and_the_critic_is_trained_all_the_same():
    actor, batch = ppo_actor(), tiny_batch()
    batch["advantages"] = torch.full((len(batch["rewards"]),), 0.75)
    actor.compute_advantages(batch)
    torch.testing.assert_close(batch["advantages"], 0.75 * batch["loss_mask"].float())
    assert batch["value_targets"].abs().max() > 0


def test_groups_of_one_train():
    actor, batch = ppo_actor(), tiny_batch()
    batch["group_ids"] = batch["sample_ids"] = torch.arange(len(batch["rewards"]))
    assert actor.ppo_update(actor.compute_advantages(batch))["advantage/abs_mean"] > 0.1


def test_what_cannot_work_is_refused():
    config = apply_recipe(PPOActorConfig(recipe="ppo", device="cpu", optimizer=OptimizerConfig(lr=1e-3)))
    actor = FSDPPPOActor(config, model=tiny_model())
    actor.initialize(None, SPEC)
    with pytest.raises(TrainingError, match="add_critic"):
        actor.compute_advantages(tiny_batch())
    actor.add_critic(CriticConfig(device="cpu"), SPEC)
    branched = {**tiny_batch(), "branch_ids": torch.ones(12, 14, dtype=torch.long)}
    with pytest.raises(TrainingError, match="one row for each branch"):
        actor.compute_advantages(branched)
    for arguments, message in (
        ({"lambda": 1.0}, "lambda"),
        ({"lam": 1.5}, "lam: must be at most 1"),
        ({"level": "row"}, "level"),
    ):
        with pytest.raises(ConfigError, match=message):
            FSDPPPOActor(dataclasses.replace(config, adv_estimator_kwargs=arguments))
