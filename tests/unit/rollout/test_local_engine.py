"""Workflows on the built-in engine: a real tokenizer and a real tiny model."""

import asyncio
import itertools
import re

import pytest
import torch
from parts import qwen3_config, random_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, RolloutError, WeightUpdateError
from rollwright.inference.request import ModelRequest
from rollwright.rollout.engines import LocalRolloutEngine, RemoteSGLangEngine
from rollwright.workflows.multi_turn import MultiTurnWorkflow
from rollwright.workflows.rlvr import RLVRWorkflow


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(qwen3_config(tokenizer))


@pytest.fixture
def start(model, tokenizer):
    started = []

    def make(**options):
        config = RolloutConfig(**{key: options.pop(key) for key in list(options) if key in RolloutConfig.__dataclass_fields__})
        rollout = LocalRolloutEngine(config, model, tokenizer, **options)
        started.append(rollout)
        rollout.initialize()
        return rollout

    yield make
    for rollout in started:
        rollout.destroy()


async def vowels(prompt, completion, prompt_ids, completion_ids, **data):
    return float(sum(letter in "aeiou" for letter in completion))


def task(number):
    return {"messages": [{"role": "user", "content": f"{number}+{number}="}], "answer": str(2 * number), "ordinal": number}


def trainer_logprobs(model, batch):
    """Log-probabilities of every token by a plain forward pass, in float64, at the row's temperature."""
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits.double()
    logps = torch.log_softmax(logits[:, :-1] / batch["temperature"][:, None, None].double(), dim=-1)
    picked = logps.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(picked, (1, 0))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rlvr_rows_carry_what_the_model_computes(start, model, tokenizer, temperature):
    gconfig = GenerationHyperparameters(max_new_tokens=12, temperature=temperature)
    batch = start().rollout_batch([task(n) for n in range(6)], RLVRWorkflow(vowels, gconfig, tokenizer), group_size=4)
    assert batch["input_ids"].shape[0] == 24
    mask = batch["loss_mask"].bool()
    assert torch.allclose(batch["logprobs"].double()[mask], trainer_logprobs(model, batch)[mask], atol=1e-4)
    assert (batch["versions"][mask] == 0).all()
    assert torch.allclose(batch["temperature"], torch.tensor(temperature))
    for row, reward in zip(range(24), batch["rewards"].tolist(), strict=True):
        completion = tokenizer.decode(batch["input_ids"][row][mask[row]], skip_special_tokens=True)
        assert reward == sum(letter in "aeiou" for letter in completion)


def test_two_deterministic_runs_are_the_same_and_another_seed_is_not(start, tokenizer):
    gconfig = GenerationHyperparameters(max_new_tokens=10)
    batches = []
    for seed in (3, 3, 4):
        rollout = start(seed=seed, deterministic=True)
        batches.append(
            rollout.rollout_batch([task(n) for n in range(5)], RLVRWorkflow(vowels, gconfig, tokenizer), group_size=3)
        )
        rollout.destroy()
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in ("input_ids", "logprobs", "rewards", "sample_ids"))
    assert not (
        batches[0]["input_ids"].shape == batches[2]["input_ids"].shape
        and torch.equal(batches[0]["input_ids"], batches[2]["input_ids"])
    )


@pytest.mark.parametrize("group_size", [1, 4])
def test_n_samples_is_taken_once_whoever_repeats(start, tokenizer, group_size):
    workflow = RLVRWorkflow(vowels, GenerationHyperparameters(max_new_tokens=4, n_samples=4), tokenizer)
    batch = start().rollout_batch([task(1), task(2)], workflow, group_size=group_size)
    assert batch["group_ids"].unique(return_counts=True)[1].tolist() == [4, 4]
    assert batch["sample_ids"].unique().numel() == 8
    assert workflow.gconfig.n_samples == 4  # the user's own is not touched


def test_multi_turn_appends_and_never_encodes_again(start, model, tokenizer):
    seen = []

    async def never(prompt, completion, prompt_ids, completion_ids, **data):
        seen.append((list(prompt_ids), list(completion_ids)))
        return 0.5

    gconfig = GenerationHyperparameters(max_new_tokens=6)
    workflow = MultiTurnWorkflow(never, gconfig, tokenizer, max_turns=3, turn_discount=0.5, feedback_message="again")
    batch = start().rollout_batch([task(1)], workflow)
    assert batch["rewards"].tolist() == [0.125]
    row = batch["input_ids"][0].tolist()
    assert row == seen[-1][0] + seen[-1][1]
    for (before, output), (after, _) in itertools.pairwise(seen):
        assert after[: len(before) + len(output)] == before + output
    assert int(batch["loss_mask"].sum()) == sum(len(output) for _, output in seen)
    text = tokenizer.decode(row, skip_special_tokens=False)
    assert text.count("again") == 2
    mask = batch["loss_mask"].bool()
    assert torch.allclose(batch["logprobs"].double()[mask], trainer_logprobs(model, batch)[mask], atol=1e-4)


def test_multi_turn_stops_when_the_reward_is_reached_or_the_context_is_full(start, tokenizer):
    async def second_time(prompt, completion, prompt_ids, completion_ids, **data):
        return 1.0 if "again" in prompt else 0.0

    gconfig = GenerationHyperparameters(max_new_tokens=6)
    solved = MultiTurnWorkflow(second_time, gconfig, tokenizer, max_turns=5, turn_discount=0.9, feedback_message="again")
    assert start().rollout_batch([task(1)], solved)["rewards"].tolist() == [pytest.approx(0.9)]

    async def never(prompt, completion, prompt_ids, completion_ids, **data):
        return 0.0

    endless = MultiTurnWorkflow(never, gconfig, tokenizer, max_turns=99)
    batch = start(context_length=200).rollout_batch([task(1)], endless)
    assert batch["truncated"].tolist() == [True]
    assert 100 < batch["input_ids"].shape[1] <= 200


def test_dumps_are_written_readable(start, tokenizer, tmp_path):
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    workflow = RLVRWorkflow(vowels, gconfig, tokenizer, dump_dir=str(tmp_path))
    start().rollout_batch([task(7)], workflow, group_size=2)
    files = list((tmp_path / "0").glob("7-*.txt"))
    assert len(files) == 2
    assert re.search(r"reward: .*\ntokens: \d+ \+ \d+(.|\n)*7\+7=", files[0].read_text())


def test_versions_and_places_follow_publication(start, model, tokenizer):
    rollout = start()
    workflow = RLVRWorkflow(vowels, GenerationHyperparameters(max_new_tokens=4), tokenizer)
    loader = [[task(n) for n in range(2)]]
    for version in range(1, 4):
        batch = rollout.prepare_batch(loader, workflow, group_size=2)
        assert (batch["versions"][batch["loss_mask"].bool()] == version - 1).all()
        rollout.pause()
        rollout.publish(version)
        rollout.resume()
        rollout.set_version(version)  # what the engine says already
    with pytest.raises(WeightUpdateError):
        rollout.set_version(9)


def test_pauses_nest_and_calls_before_initialize_say_what_to_do(start, tokenizer):
    rollout = LocalRolloutEngine(RolloutConfig())
    for call in (rollout.pause, rollout.resume, lambda: rollout.rollout_batch([{}], None), rollout.get_version):
        with pytest.raises(RolloutError, match=r"call initialize\(\) first"):
            call()
    with pytest.raises(ConfigError, match=r"rollout\.path"):
        rollout.initialize()
    rollout.destroy()
    RemoteSGLangEngine(RolloutConfig()).destroy()

    rollout = start()
    rollout.pause()
    rollout.pause()
    rollout.resume()
    workflow = RLVRWorkflow(vowels, GenerationHyperparameters(max_new_tokens=2), tokenizer)
    rollout.submit(task(1), workflow)
    with pytest.raises(TimeoutError):
        rollout.wait(1, timeout=0.05)
    rollout.resume()
    rollout.wait(1, timeout=60)


def test_agenerate_from_the_users_own_loop(start, tokenizer):
    rollout = start()
    request = ModelRequest(
        input_ids=tokenizer.encode("hello"), gconfig=GenerationHyperparameters(max_new_tokens=5, greedy=True)
    )

    async def cell():
        several = await asyncio.gather(*(rollout.agenerate(request) for _ in range(3)))
        return [response.output_tokens for response in several]

    first, second, third = asyncio.run(cell())
    assert first == second == third


def test_workflow_by_string_with_a_path_for_the_tokenizer(start, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    batch = start().rollout_batch(
        [task(1)],
        workflow="rollwright.workflows.rlvr.RLVRWorkflow",
        workflow_kwargs={
            "reward_fn": vowels,
            "gconfig": GenerationHyperparameters(max_new_tokens=3),
            "tokenizer": str(tmp_path),
        },
    )
    assert batch["input_ids"].shape[0] == 1


def test_every_token_carries_the_version_that_sampled_it_while_weights_change_under_running_requests(tokenizer, model):
    """Snapshots of every version tell which one gives a token's log-probability, independently of the label."""
    import copy

    trained = copy.deepcopy(model)
    config = RolloutConfig(max_head_offpolicyness=4, max_running_requests=24)
    rollout = LocalRolloutEngine(config, trained, tokenizer)
    rollout.initialize()
    workflow = RLVRWorkflow(vowels, GenerationHyperparameters(max_new_tokens=40, min_new_tokens=30, temperature=0.8), tokenizer)
    loader = [[task(n) for n in range(start, start + 4)] for start in range(0, 24, 4)]
    snapshots, batches = [copy.deepcopy(trained)], []
    try:
        for version in range(1, 6):
            batches.append(rollout.prepare_batch(loader, workflow, group_size=4))
            rollout.pause()
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1.15)
            rollout.publish(version)
            snapshots.append(copy.deepcopy(trained))
            rollout.resume()
    finally:
        rollout.destroy()
    mixed = 0
    for trained_at, batch in enumerate(batches):
        mask = batch["loss_mask"].bool()
        by_version = torch.stack([trainer_logprobs(snapshot, batch) for snapshot in snapshots])
        labelled = by_version.gather(0, batch["versions"].clamp(min=0).long()[None])[0]
        assert torch.allclose(batch["logprobs"].double()[mask], labelled[mask], atol=1e-4)
        assert (trained_at - batch["versions"][mask]).max() <= 4
        mixed += sum(row[row_mask].unique().numel() > 1 for row, row_mask in zip(batch["versions"], mask, strict=True))
    assert mixed > 0  # some rows did begin under one version and end under another
