"""The loop in your own hands: gradients of several calls, named losses and functions, and what `save`, `load` and the states keep."""

import copy

import pytest
import torch
from tiny_policy import tiny_actor, tiny_batch, tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig, TrainEngineConfig
from rollwright.errors import TrainingError
from rollwright.experience.trajectory import select_rows
from rollwright.training.batch_losses import BATCH_LOSSES, BatchLoss
from rollwright.training.preferences import PreferenceEngine

HALVES = ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11])


def engine_over(model, engine_class=PreferenceEngine, **keys):
    engine = engine_class(TrainEngineConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2), **keys), model=model)
    engine.initialize(None, FinetuneSpec(1, 100, 10))
    return engine


def gradient(engine):
    return {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}


def by_hand(batch, token_loss):
    """The gradient of a mean over trained tokens, row by row without padding, by autograd over the whole softmax in float64."""
    model, total = tiny_model(), torch.zeros((), dtype=torch.float64)
    for row in range(len(batch["input_ids"])):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        logprobs = (model(ids[None]).logits[0, :-1] / batch["temperature"][row].double()).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        picked = logprobs.gather(-1, ids[1:, None])[:, 0]
        mask = batch["loss_mask"][row, 1:length]
        total = total + (token_loss(picked, entropy) * mask).sum()
    (total / batch["loss_mask"].sum()).backward()
    return float(total.detach() / batch["loss_mask"].sum()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [20, 8192])
@pytest.mark.parametrize("is_summed", [False, True])
def test_a_function_as_the_loss_has_the_gradient_of_its_formula(max_tokens, is_summed):
    def loss(rows, logprobs, entropies):
        tokens = logprobs.square() - 0.5 * entropies
        return (rows["loss_weights"] * tokens).sum() if is_summed else tokens

    actor, batch = tiny_actor(max_tokens=max_tokens), tiny_batch()
    metrics = actor.forward_backward(batch, loss, with_entropy=True, entropy_gradient=True)
    value, expected = by_hand(batch, lambda logprobs, entropies: logprobs.square() - 0.5 * entropies)
    assert metrics == {"loss": pytest.approx(value, abs=1e-6)}
    for name, found in gradient(actor).items():
        torch.testing.assert_close(found, expected[name], atol=1e-6, rtol=0)


def test_a_batch_in_two_calls_has_the_gradient_of_the_whole():
    actor, batch = tiny_actor(), tiny_batch()
    batch["loss_weights"] = actor.loss_weights(batch)
    for rows in HALVES:
        actor.forward_backward(select_rows(batch, torch.tensor(rows)), lambda rows, logprobs, entropies: logprobs.square())
    value, expected = by_hand(batch, lambda logprobs, entropies: logprobs.square())
    for name, found in gradient(actor).items():
        torch.testing.assert_close(found, expected[name], atol=1e-6, rtol=0)
    assert actor.optim_step()["loss"] == pytest.approx(value, abs=1e-6)
    assert all(parameter.grad is None for parameter in actor.model.parameters())


@pytest.mark.parametrize("keys", [{}, {"kl_ctl": 0.1, "entropy_coef": 0.01, "use_decoupled_loss": True}])
def test_the_policy_loss_makes_the_trainers_step_and_metrics(keys):
    trainer, own = (tiny_actor(**keys, loss_aggregation="row") for _ in range(2))
    for seed in range(3):
        theirs = trainer.ppo_update(trainer.compute_advantages(tiny_batch(seed)))
        batch = own.compute_advantages(tiny_batch(seed))
        ours = {**own.forward_backward(batch, "policy"), **own.optim_step()}
        for actor in (trainer, own):
            actor.step_lr_scheduler()
            actor.skip_publication()
        assert ours == {name: value for name, value in theirs.items() if name != "optimizer_steps"}
        assert batch["trainer_logprobs"].shape == batch["input_ids"].shape
    for mine, other in zip(own.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_another_policy_loss_by_name_is_that_of_the_section():
    batches = []
    for actor, name in (
        (tiny_actor(policy_loss="cispo", policy_loss_kwargs={"weight_high": 1.1}), "policy"),
        (tiny_actor(), "cispo"),
    ):
        arguments = {"weight_high": 1.1} if name == "cispo" else {}
        actor.forward_backward(actor.compute_advantages(tiny_batch()), name, **arguments)
        batches.append(gradient(actor))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    clipped = tiny_actor()
    clipped.forward_backward(clipped.compute_advantages(tiny_batch()), "clip")
    assert any(not torch.equal(batches[0][name], found) for name, found in gradient(clipped).items())


def test_losses_of_several_kinds_add_up():
    policy, rows, both = tiny_actor(), tiny_actor(), tiny_actor()
    policy.forward_backward(policy.compute_advantages(tiny_batch(1)), "policy")
    rows.forward_backward(tiny_batch(2), "sft")
    both.forward_backward(both.compute_advantages(tiny_batch(1)), "policy")
    both.forward_backward(tiny_batch(2), "sft")
    parts = gradient(policy), gradient(rows)
    for name, found in gradient(both).items():
        torch.testing.assert_close(found, parts[0][name] + parts[1][name], atol=1e-12, rtol=1e-12)


def test_a_preference_by_name_is_the_update_of_its_stage():
    batch = tiny_batch()
    engines = engine_over(tiny_model()), engine_over(tiny_model())
    stats = engines[0].dpo_update(batch, beta=0.3)
    assert {**engines[1].forward_backward(batch, "dpo", beta=0.3), **engines[1].optim_step()} == stats
    with pytest.raises(TrainingError, match="needs a reference"):
        tiny_actor().forward_backward(batch, "dpo")


def test_a_registered_loss_is_found_by_its_name():
    @BATCH_LOSSES.register("squares_of_this_test")
    def squares(engine, batch, *, scale):
        batch = {**batch, "loss_weights": engine.loss_weights(batch)}
        return BatchLoss(batch, lambda rows, logprobs, entropies: scale * logprobs.square(), measure=lambda: {"scale": scale})

    try:
        metrics = tiny_actor().forward_backward(tiny_batch(), "squares_of_this_test", scale=2.0)
        assert metrics["scale"] == 2.0
        assert metrics["loss"] == pytest.approx(
            2 * by_hand(tiny_batch(), lambda logprobs, entropies: logprobs.square())[0], abs=1e-6
        )
        with pytest.raises(TrainingError, match="missing a required argument: 'scale'"):
            tiny_actor().forward_backward(tiny_batch(), "squares_of_this_test")
    finally:
        del BATCH_LOSSES["squares_of_this_test"]


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        ("grpo", {}, "is a recipe.*'policy'"),
        ("polcy", {}, "no loss 'polcy'. Did you mean 'policy'"),
        ("sft", {"beta": 1.0}, "the loss 'sft' was given beta, but"),
        (
            lambda rows, logprobs, entropies: logprobs.mean(-1),
            {},
            r"returned a tensor of \[12\]; return the loss of each token",
        ),
        (lambda rows, logprobs, entropies: 0.0, {}, "returned float"),
        (lambda rows, logprobs, entropies: logprobs, {"beta": 1.0}, "takes no beta"),
    ],
)
def test_what_cannot_be_a_loss_is_refused(loss, arguments, message):
    actor = tiny_actor()
    with pytest.raises(TrainingError, match=message):
        actor.forward_backward(actor.compute_advantages(tiny_batch()), loss, **arguments)
    with pytest.raises(TrainingError, match="there is no gradient yet"):
        actor.optim_step()


def test_a_call_that_fails_leaves_no_part_of_its_gradient():
    actor, calls = tiny_actor(max_tokens=20), []

    def loss(rows, logprobs, entropies):
        calls.append(rows)
        if len(calls) == 2:
            raise ValueError("the user's function fails in the second micro-batch")
        return logprobs

    with pytest.raises(ValueError, match="the user's function"):
        actor.forward_backward(tiny_batch(), loss)
    assert all(parameter.grad is None for parameter in actor.model.parameters())


def test_an_anchor_is_needed_after_the_first_step_of_a_version():
    actor = tiny_actor(use_decoupled_loss=True, prox_logp_method="recompute")
    batch = actor.compute_advantages(tiny_batch())
    anchored = {**batch, "prox_logp": actor.compute_logp(batch)}
    actor.forward_backward(batch, "policy")
    actor.optim_step()
    with pytest.raises(TrainingError, match="before that step, set batch"):
        actor.forward_backward(batch, "policy")
    actor.forward_backward(anchored, "policy")
    actor.optim_step()
    actor.skip_publication()
    actor.forward_backward(batch, "policy")


def test_a_batch_without_trained_tokens_makes_no_step():
    actor = tiny_actor(mask_truncated=True)
    batch = actor.compute_advantages({**tiny_batch(), "truncated": torch.ones(12, dtype=torch.bool)})
    before = actor.full_weights()
    trainers = tiny_actor(mask_truncated=True).ppo_update({**batch})
    ours = {**actor.forward_backward(batch, "policy"), **actor.optim_step()}
    assert ours == {name: value for name, value in trainers.items() if name != "optimizer_steps"}
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.full_weights().items())


def test_weights_come_back_in_place_and_a_whole_state_goes_on_bit_for_bit(tmp_path):
    actor = tiny_actor(dtype=torch.float32)

    def step(seed):
        actor.forward_backward(tiny_batch(seed), "sft")
        actor.optim_step()
        actor.step_lr_scheduler()

    step(0)
    actor.save(tmp_path / "weights")
    actor.save_state(tmp_path / "state")
    saved, places = actor.full_weights(), [parameter.data_ptr() for parameter in actor.model.parameters()]
    step(1)
    after = actor.full_weights()
    actor.load(tmp_path / "weights")
    assert all(torch.equal(saved[name], tensor) for name, tensor in actor.full_weights().items())
    assert places == [parameter.data_ptr() for parameter in actor.model.parameters()]
    step(1)  # the moments are those after two steps
    assert any(not torch.equal(after[name], tensor) for name, tensor in actor.full_weights().items())
    actor.forward_backward(tiny_batch(3), "sft")  # a gradient of other weights, which is not used
    actor.load_state(tmp_path / "state")
    step(1)
    assert all(torch.equal(after[name], tensor) for name, tensor in actor.full_weights().items())


def test_a_stepped_policy_is_not_as_published():
    actor = tiny_actor()
    assert actor.is_as_published
    state = copy.deepcopy(actor.state_dict())
    actor.forward_backward(tiny_batch(), "sft")
    assert actor.is_as_published
    actor.optim_step()
    assert not actor.is_as_published
    actor.load_state_dict(state)
    assert actor.is_as_published


def test_only_an_engine_that_runs_workflows_samples():
    with pytest.raises(TrainingError, match="no engine is connected"):
        tiny_actor().sample([{"x": 1}], None)
