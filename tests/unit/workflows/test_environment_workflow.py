"""Playing text environments: messages, invalid replies, rewards at the end and by step."""

import asyncio

import pytest
import torch
from parts import Script, played

from rollwright.algorithms.advantages import returns_to_go
from rollwright.config.tasksets import TasksetConfig
from rollwright.data.tokenizer import build_word_tokenizer
from rollwright.environments.text_environment import StepResult
from rollwright.errors import WorkflowError
from rollwright.workflows.environment import with_step_rewards
from rollwright.workflows.task_runner import TaskRunner

pytest.importorskip("gymnasium")
TOKENIZER = build_word_tokenizer(["left", "down", "right", "up"])
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False, "render_mode": "ansi"},
    "action_names": ["left", "down", "right", "up"],
}


def play(*replies, row=None, engine=None, **arguments):
    engine = engine or Script(TOKENIZER, *replies)
    arguments = {"environment": "gymnasium", "environment_args": LAKE, "max_turns": len(replies), **arguments}
    taskset = TasksetConfig(workflow="environment_workflow", workflow_args=arguments)

    experiences, rows = asyncio.run(played(taskset, row or {"seed": 1}, engine, TOKENIZER))
    return experiences, rows, [TOKENIZER.decode(request.input_ids) for request in engine.requests]


DESC = {"environment_args": {"kwargs": {"is_slippery": False, "render_mode": "ansi", "desc": ["SF", "HG"]}}, "seed": 1}


def test_an_episode_is_one_row_whose_trained_tokens_are_the_replies():
    [experience], rows, prompts = play("right", "down", "left", row=DESC)
    assert experience.reward == 1.0
    assert experience.metrics == {"turns": 2, "invalid_actions": 0, "finished": 1.0}
    mask = rows["loss_mask"][0].bool()
    assert TOKENIZER.decode(rows["input_ids"][0][mask], skip_special_tokens=True) == "rightdown"
    assert prompts[0] == "<|system|>Answer with one of: left, down, right, up.<|end|><|user|>[S]F\nHG<|end|><|assistant|>"
    assert prompts[1].startswith(prompts[0])
    assert prompts[1].endswith("S[F]\nHG<|end|><|assistant|>")
    assert len(prompts) == 2


def test_invalid_replies_are_told_or_end_the_episode():
    [experience], _, prompts = play("no", "right", "up", row=DESC, system_prompt="", invalid_reward=-0.1)
    assert prompts[0].startswith("<|user|>[S]F")
    assert prompts[1].endswith("<|user|>Answer with one of: left, down, right, up.\n[S]F\nHG<|end|><|assistant|>")
    assert experience.reward == pytest.approx(-0.1)
    assert experience.metrics == {"turns": 3, "invalid_actions": 1, "finished": 0.0}
    [experience], _, prompts = play("no", "right", "up", row=DESC, on_invalid="end", invalid_reward=-0.5)
    assert (len(prompts), experience.reward) == (1, -0.5)


class Counting:
    """Pays 1, 2, 3, … for each step."""

    def __init__(self, seed, most=3):
        self.seed, self.count, self.most = seed, 0, most

    def observation(self):
        return f"seed {self.seed}, step {self.count}"

    def step(self, action):
        self.count += 1
        return StepResult(self.observation(), float(self.count), self.count == self.most, {})


def test_a_class_by_its_path_and_the_seed_of_the_task():
    [experience], _, prompts = play(
        "up", "up", "up", environment=Counting, row={"seed": 7, "environment_args": {"most": 2}}, environment_args={"most": 3}
    )
    assert prompts[0] == "<|user|>seed 7, step 0<|end|><|assistant|>"
    assert experience.reward == 3.0
    _, _, prompts = play("up", environment=Counting, environment_args={}, row={"ordinal": 11})
    assert "seed 11" in prompts[0]


class Slow(Counting):
    """The same with async methods."""

    closed = 0

    async def observation(self):
        await asyncio.sleep(0)
        return super().observation()

    async def step(self, action):
        self.count += 1
        return StepResult(await self.observation(), float(self.count), self.count == self.most, {})

    async def close(self):
        await asyncio.sleep(0)
        Slow.closed += 1


def test_methods_may_be_async():
    [experience], _, prompts = play("up", "up", "up", environment=Slow, environment_args={})
    assert prompts[2].endswith("<|user|>seed 1, step 2<|end|><|assistant|>")
    assert (experience.reward, Slow.closed) == (6.0, 1)


def test_a_reply_is_credited_with_the_rewards_from_its_step_on():
    [experience], rows, _ = play("up", "up", "up", environment=Counting, environment_args={}, rewards="step")
    assert experience.reward == 6.0  # figures and baselines see the whole episode
    credit = rows["rewards"][0] + returns_to_go(rows["token_rewards"], torch.ones_like(rows["token_rewards"]))[0]
    trained = rows["loss_mask"][0].bool()
    assert credit[trained].tolist() == [6.0, 6.0, 5.0, 5.0, 3.0, 3.0]  # a reply is a word and the end of the turn


def test_rows_of_a_rewritten_conversation_keep_the_credit():
    def row(replies):
        from rollwright.experience.experience import Experience

        mask = torch.tensor([True, False] * replies)
        return Experience(tokens=torch.zeros(1 + 2 * replies, dtype=torch.long), prompt_length=1, action_mask=mask, reward=10.0)

    rows = with_step_rewards([row(2), row(2)], [1.0, 2.0, 3.0, 4.0])
    credit = [10.0 + each.token_rewards.flip(0).cumsum(0).flip(0) for each in rows]
    assert [each[::2].tolist() for each in credit] == [[10.0, 9.0], [7.0, 4.0]]
    with pytest.raises(WorkflowError, match="2 steps, 3 replies"):
        with_step_rewards([row(3)], [1.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"environment": None}, "names no environment"),
        ({"environment": "no.such.thing"}, "no.such"),
        ({"environment_args": {**LAKE, "colour": 1}}, "colour"),
        ({"environment": "builtins.repr", "environment_args": {}}, r"made a str, which has no observation\(\)"),
        ({"on_invalid": "ignore"}, "on_invalid is 'ignore'; choose tell or end"),
        ({"rewards": "turn"}, "choose end or step"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"turns": 3}, "has no argument turns"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(WorkflowError, match=message):
        play("up", **arguments)


def test_it_plays_in_a_process_of_its_own():
    arguments = {"environment": "gymnasium", "environment_args": LAKE, "max_turns": 2}
    taskset = TasksetConfig(workflow="environment_workflow", workflow_args=arguments, isolation="process", isolated_processes=1)

    async def run():
        runner = TaskRunner([taskset], TOKENIZER)
        experiences, _ = await played(taskset, DESC, Script(TOKENIZER, "right", "down"), TOKENIZER, runner)
        for processes in runner._processes.values():
            processes.close()
        return experiences

    [experience] = asyncio.run(run())
    assert experience.reward == 1.0
