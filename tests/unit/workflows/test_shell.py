"""The shell workflow on task folders, in real boxes."""

import asyncio

import pytest
from parts import FixedEngine, sampled

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.selectors import taskset_rows
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import PromptTooLongError, VerifierError, WorkflowError
from rollwright.inference.request import ModelResponse
from rollwright.workflows.task_runner import TaskRunner

TOKENIZER = build_character_tokenizer()


class Scripted(FixedEngine):
    """Answers with the given texts."""

    def __init__(self, *replies):
        self.replies, self.prompts = list(replies), []

    async def agenerate(self, request):
        self.prompts.append(TOKENIZER.decode(request.input_ids))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        ids = [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]
        return ModelResponse(request.input_ids, ids, [-0.1] * len(ids), [0] * len(ids), "stop", rid=request.rid)


@pytest.fixture
def task(tmp_path):
    """A task that scores the share of two lines, with another reward beside it, and its path."""
    files = {
        "task.toml": "",
        "instruction.md": "Fill answer.txt.",
        "environment/hint.txt": "two lines",
        "tests/test.sh": "#!/bin/sh\nn=$(wc -l < answer.txt || echo 0)\n"
        'echo "{\\"reward\\": $n.5, \\"lines\\": $n}" > /logs/verifier/reward.json\n',
    }
    for name, text in files.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


def work(path, engine, **arguments):
    taskset = TasksetConfig(kind="harbor", path=str(path), workflow="shell_workflow", workflow_args=arguments)
    [row] = taskset_rows(taskset)

    async def run():
        sample = sampled(engine)
        return await TaskRunner([taskset], TOKENIZER).arun_episode(sample, row)

    return asyncio.run(run())


def test_commands_are_run_and_their_output_is_shown(task):
    engine = Scripted(
        "I look.\n```sh\ncat hint.txt\n```",
        "```\necho a > answer.txt; echo b >> answer.txt\n```",
        "```bash\nfalse\n```",
        "It is done.",
    )
    [experience] = work(task, engine)
    assert experience.reward == 2.5
    assert experience.metrics["verifier_lines"] == 2.0
    assert {key: experience.metrics[key] for key in ("shell_turns", "failed_commands", "agent_timeouts")} == {
        "shell_turns": 4,
        "failed_commands": 1,
        "agent_timeouts": 0,
    }
    shown = [prompt.rpartition("<|user|>")[2].removesuffix("<|assistant|>") for prompt in engine.prompts]
    assert shown == ["Fill answer.txt.<|end|>", "two lines<|end|>", "(no output)<|end|>", "exit code 1<|end|>"]
    assert "```sh" in engine.prompts[0]
    sampled = TOKENIZER.decode(experience.response_tokens[experience.action_mask], skip_special_tokens=True)
    assert sampled.startswith("I look.")
    assert sampled.endswith("It is done.")
    assert "two lines" not in sampled


def test_a_model_whose_whole_reply_is_the_command(task):
    engine = Scripted("echo a > answer.txt")
    [experience] = work(task, engine, fenced=False, max_turns=1, system_prompt="")
    assert experience.reward == 1.5
    assert engine.prompts == ["<|user|>Fill answer.txt.<|end|><|assistant|>"]


def test_turns_are_bounded_and_output_is_cut(task):
    engine = Scripted(*["```sh\nyes | head -c 10000\n```"] * 3)
    work(task, engine, max_turns=3, max_output_characters=20)
    assert len(engine.prompts) == 3
    assert engine.prompts[1].endswith("<|user|>y\ny\ny\ny\ny\n\n...\n\ny\ny\ny\ny\ny<|end|><|assistant|>")


def test_a_command_that_hangs_is_ended_and_told(task):
    engine = Scripted("```sh\necho a > answer.txt; sleep 60\n```", "Then not.")
    [experience] = work(task, engine, command_timeout=0.5)
    assert "The command was ended by a limit: time" in engine.prompts[1]
    assert experience.reward == 1.5


def test_an_agent_out_of_time_is_graded(task):
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 0.5\n")
    [experience] = work(task, Scripted("```sh\necho a > answer.txt; sleep 60\n```", "```sh\nrm answer.txt\n```"))
    assert (experience.reward, experience.metrics["agent_timeouts"]) == (1.5, 1)


def test_a_full_context_ends_the_step_and_is_graded(task):
    [experience] = work(task, Scripted("```sh\necho a > answer.txt\n```", PromptTooLongError("full")))
    assert experience.reward == 1.5


def test_tests_without_a_score_fail_the_sample(task):
    (task / "tests/test.sh").write_text("#!/bin/sh\n")
    with pytest.raises(VerifierError, match="wrote neither"):
        work(task, Scripted("Nothing to do."))


def test_a_full_context_does_not_stand_in_for_a_missing_score(task):
    (task / "tests/test.sh").write_text("#!/bin/sh\n")
    with pytest.raises(VerifierError, match="wrote neither"):
        work(task, Scripted("```sh\ntrue\n```", PromptTooLongError("full")))


def test_wrong_arguments(task):
    with pytest.raises(WorkflowError, match="no argument turns"):
        work(task, Scripted(), turns=3)
    with pytest.raises(WorkflowError, match="above 0"):
        work(task, Scripted(), max_turns=0)
