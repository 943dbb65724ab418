"""Classes and functions written for TRL: tools, rewards, one thread or process for an environment, exact tokens of rollouts."""

from __future__ import annotations

import asyncio

import pytest
import trl_environments
from parts import Script, played, sampled, tool_tokenizer

from rollwright.compat.trl_workflows import EnvironmentThread
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import TasksetConfig
from rollwright.data.tokenizer import build_word_tokenizer
from rollwright.errors import RollwrightError, WorkflowError
from rollwright.experience.normaliser import normalise
from rollwright.workflows.task_runner import TaskRunner

PROMPT = [{"role": "user", "content": "Please."}]


def calls(name, **arguments):
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def converse(script, row=None, runner=None, isolation="thread", **arguments):
    tokenizer = tool_tokenizer()
    taskset = TasksetConfig(workflow="trl_environment_workflow", workflow_args=arguments, isolation=isolation)
    engine = Script(tokenizer, *script)
    experiences, rows = await played(taskset, row or {"prompt": PROMPT, "target": 3}, engine, tokenizer, runner)
    return experiences, rows, [tokenizer.decode(request.input_ids) for request in engine.requests]


@pytest.fixture(autouse=True)
def _count():
    trl_environments.Counter.made = 0


async def test_public_methods_are_tools_and_the_environment_scores():
    script = [calls("increment", step=1) + calls("increment", step=2), calls("look"), "Done."]
    [experience], _, prompts = await converse(script, environment_factory="trl_environments.Counter")
    assert experience.reward == 1.0
    assert "Please. Count to 3." in prompts[0]
    assert prompts[0].startswith("<|system|>fail increment look ")  # neither reset, get_reward nor what begins with _
    assert "The value is 1." in prompts[1]
    assert "The value is 3." in prompts[1]
    assert prompts[2].rpartition("look")[2].count("3") == 1
    assert experience.metrics["tool_calls"] == 3


async def test_an_error_of_a_tool_is_text_for_the_model():
    [experience], _, prompts = await converse([calls("fail"), "Done."], environment_factory=trl_environments.made_counter)
    assert "RuntimeError: no" in prompts[1]
    assert experience.metrics["failed_tool_calls"] == 1
    assert experience.reward == 0.0


async def test_rewards_add_up_and_none_is_no_reward():
    functions = ["trl_environments.short", trl_environments.none]
    [experience], _, _ = await converse(
        [calls("increment", step=3), "Done."], environment_factory=trl_environments.Counter, reward_funcs=functions
    )
    assert experience.reward == 1.5
    with pytest.raises(WorkflowError, match=r"returned 0\.0 for one completion"):
        await converse(["Done."], environment_factory=trl_environments.Counter, reward_funcs=[lambda **columns: 0.0])


async def test_an_instance_is_reset_for_the_next_task_and_never_shared():
    tokenizer = tool_tokenizer()
    taskset = TasksetConfig(
        workflow="trl_environment_workflow", workflow_args={"environment_factory": "trl_environments.Counter"}
    )
    runner = TaskRunner([taskset], tokenizer)
    script = [calls("increment", step=2), "Done."]
    for target, reward in ((2, 1.0), (4, 0.0)):
        [experience], _, _ = await converse(script, {"prompt": PROMPT, "target": target}, runner)
        assert experience.reward == reward
    assert trl_environments.Counter.made == 1
    both = await asyncio.gather(*(converse(script, {"prompt": PROMPT, "target": target}, runner) for target in (2, 4)))
    assert [experiences[0].reward for experiences, _, _ in both] == [1.0, 0.0]
    assert trl_environments.Counter.made == 2


async def test_rows_choose_among_several_environments_or_bring_no_prompt():
    named = {"count": "trl_environments.Counter", "dice": "trl_environments.Dice"}
    [experience], _, prompts = await converse(
        [calls("roll"), "Done."], {"environment": "dice", "seed": 4}, environment_factory=named
    )
    assert experience.reward in range(1, 7)
    assert "increment" not in prompts[0]
    with pytest.raises(WorkflowError, match="has the environment 'chess'; environment_factory has 'count', 'dice'"):
        await converse(["Done."], {"environment": "chess"}, environment_factory=named)


async def test_episodes_in_processes_do_not_share_random_numbers():
    tokenizer = tool_tokenizer()
    taskset = TasksetConfig(
        workflow="trl_environment_workflow",
        workflow_args={"environment_factory": "trl_environments.Dice"},
        isolation="process",
        isolated_processes=2,
    )
    runner = TaskRunner([taskset], tokenizer)
    script = [calls("roll"), calls("roll"), calls("roll"), "Done."]
    row = {"prompt": PROMPT, "seed": 5}
    results = await asyncio.gather(*(converse(script, row, runner) for _ in range(3)))
    for processes in runner._processes.values():
        processes.close()
    assert len({experiences[0].reward for experiences, _, _ in results}) == 1


class NoReset:
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "names no environment_factory"),
        ({"environment_factory": "no.such"}, "no.such"),
        ({"environment_factory": NoReset}, "NoReset, made by the environment_factory, has no method reset"),
        ({"environment_factory": "trl_environments.Counter", "max_turn": 1}, "has no argument max_turn"),
    ],
)
async def test_what_is_missing_is_named(arguments, message):
    with pytest.raises(WorkflowError, match=message):
        await converse(["Done."], **arguments)


# -- rollout_func --------------------------------------------------------------------------------------------------------

WORDS = build_word_tokenizer(["one", "two", "then"])


async def roll(script, row, samples=1, **arguments):
    taskset = TasksetConfig(
        workflow="trl_rollout_workflow",
        workflow_args=arguments,
        gconfig=GenerationHyperparameters(max_new_tokens=4, n_samples=samples),
    )
    sample = sampled(Script(WORDS, *script))
    sample.samples_asked = samples
    experiences = await TaskRunner([taskset], WORDS).arun_episode(sample, row)
    return experiences, normalise(experiences, sample.recorder, tokenizer=WORDS)


async def test_each_completion_is_a_sample_of_the_tokens_that_were_sampled():
    row = {"prompt": [{"role": "user", "content": "one"}], "wanted": "two"}
    experiences, rows = await roll(
        ["two", "one"] * 2, row, 2, rollout_func="trl_environments.echo_rollout", reward_funcs=["trl_environments.word_reward"]
    )
    assert [experience.reward for experience in experiences] == [1.0, 1.0]
    mask = rows["loss_mask"].bool()
    assert WORDS.decode(rows["input_ids"][0][mask[0]], skip_special_tokens=True) == "twoone"
    assert rows["logprobs"][mask].tolist() == [-0.25] * int(mask.sum())
    assert (rows["logprobs"][~mask] == 0).all()
    assert WORDS.decode(rows["input_ids"][0]) == "<|user|>one<|end|><|assistant|>two<|end|>thenone<|end|>"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (None, "names no rollout_func"),
        ("trl_environments.other_attribute", r"trainer.vllm_client, which Rollwright's trainer does not have"),
        ("trl_environments.one_row_only", "returned 1 rows of 'prompt_ids' for 2 prompts"),
        ("trl_environments.without_ids", "a dict without prompt_ids, logprobs"),
        ("trl_environments.invented_tokens", "were produced by no recorded request"),
    ],
)
async def test_what_a_rollout_func_may_not_do_is_named(function, message):
    with pytest.raises((RollwrightError, AttributeError), match=message):
        await roll(["two"], {"prompt": "one"}, 2, rollout_func=function, reward_funcs=[lambda completions, **_: [0.0]])


def test_trl_itself_trains_with_the_class_and_finds_the_same_tools(tmp_path, monkeypatch):
    """Needs the trl package, which the test environment does not have; see docs/bring-your-environment.md for the version."""
    trl = pytest.importorskip("trl")
    from pathlib import Path

    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollwright.workflows.tools import Tools

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.padding_side = "left"
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), intermediate_size=64, **size))
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 8, "max_steps": 1}
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], save_strategy="no", **settings),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "target": 3}] * 4),
        processing_class=tokenizer,
        environment_factory=trl_environments.Counter,
    )
    trainer.train()

    async def ours():
        environment = EnvironmentThread(trl_environments.Counter)
        await environment.start()
        return Tools(environment.tools()).schemas

    from transformers.utils.chat_template_utils import get_json_schema

    assert asyncio.run(ours()) == [get_json_schema(tool) for tool in trainer.tools]
