"""Who repeats: whatever a workflow declares, it is run until its group is full, whether a run delivers one sample or all."""

from __future__ import annotations

import pytest
from parts import Script

from rollwright import Experience, Workflow
from rollwright.config.sections import RolloutConfig
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.task_runner import TaskRunner, sample_numbers

SIZE = 4


class Base(Workflow):
    """Counts its runs, and what each was asked for."""

    asked: list[int]

    def ask(self, n, content="2+2="):
        experiences = self.model.chat([{"role": "user", "content": content}], n=n)
        for place, experience in enumerate(experiences):
            experience.reward = float(place)
        return experiences

    def one(self):
        self.asked.append(self.task.rollout_args.n)
        return self.ask(1)

    def all_of(self, n):
        self.asked.append(n)
        return self.ask(n)


def declared(name, body, **traits):
    return type(name, (Base,), {"run": body, "asked": [], **traits})


def tells(self, repeat_times, run_id_base):
    self.repeat_times = repeat_times


def groups_of(kind, tokenizer, tasks=3, size=SIZE, **options):
    """The batches of several tasks, one after the other."""
    taskset = TasksetConfig(workflow=kind, format=FormatConfig(prompt_key="question", response_key="answer"))
    runner = TaskRunner([taskset], tokenizer, group_size=size)
    with RolloutExecutor(Script(tokenizer, "4", "5"), RolloutConfig(**options)) as executor:
        return [executor.rollout_batch([{"question": "2+2=", "ordinal": number}], runner) for number in range(tasks)]


ONE = lambda self: self.one()  # noqa: E731
WHOLE = lambda self: self.all_of(self.task.rollout_args.n)  # noqa: E731
TOLD = lambda self: self.all_of(self.repeat_times)  # noqa: E731
FOUR = lambda self: self.all_of(SIZE)  # noqa: E731 - whatever it is asked for


@pytest.mark.parametrize(
    ("body", "traits", "asked"),
    [
        (ONE, {}, [4, 1, 1, 1, *[1] * 8]),  # declares nothing, as step-wise workflows: asked for all once, then known
        (WHOLE, {}, [4, 4, 4]),
        (ONE, {"repeatable": True}, [1] * 12),  # as these docs said it
        (WHOLE, {"repeatable": True}, [1] * 12),
        (ONE, {"can_repeat": False}, [1] * 12),  # as Trinity says it
        (TOLD, {"can_repeat": True, "set_repeat_times": tells}, [4, 4, 4]),
        (TOLD, {"repeatable": property(lambda self: True), "set_repeat_times": tells}, [1] * 12),  # as Trinity said it earlier
        (TOLD, {"set_repeat_times": tells}, [4, 4, 4]),
        (ONE, {"can_repeat": True, "set_repeat_times": tells}, [4, 1, 1, 1, *[1] * 8]),  # says what it does not do
    ],
)
def test_a_group_is_filled_whatever_is_declared(tokenizer, body, traits, asked):
    kind = declared("Kind", body, **traits)
    for batch in groups_of(kind, tokenizer):
        assert batch["sample_ids"].unique().numel() == batch["input_ids"].shape[0] == SIZE
        assert batch["group_ids"].unique().numel() == 1
    assert sorted(kind.asked, reverse=True) == sorted(asked, reverse=True)


def test_a_run_that_fills_the_group_by_itself_ends_the_others(tokenizer):
    kind = declared("Greedy", FOUR, repeatable=True)  # n for each of n runs would be n² samples
    first, *others = groups_of(kind, tokenizer, max_concurrent_samples=1)
    assert first["input_ids"].shape[0] == SIZE
    assert all(batch["input_ids"].shape[0] == SIZE for batch in others)
    assert len(kind.asked) == 3  # one run a task


def test_a_part_of_a_group_is_followed_by_the_rest(tokenizer):
    kind = declared("Half", lambda self: self.all_of(max(1, self.task.rollout_args.n // 2)))
    (batch,) = groups_of(kind, tokenizer, tasks=1)
    assert batch["sample_ids"].unique().numel() == SIZE
    assert kind.asked == [2, 1, 1]


def test_the_steps_of_a_run_are_one_sample(tokenizer):
    def steps(self):
        self.asked.append(self.task.rollout_args.n)
        out = []
        for step in range(SIZE):  # as many rows as the group has samples
            (experience,) = self.ask(1, f"step {step}")
            experience.eid.step = step
            out.append(experience)
        return out

    kind = declared("Steps", steps)
    (batch,) = groups_of(kind, tokenizer, tasks=1)
    assert batch["input_ids"].shape[0] == SIZE * SIZE
    assert batch["sample_ids"].unique(return_counts=True)[1].tolist() == [SIZE] * SIZE


def experience(prompt, run=0, step=0):
    made = Experience(tokens=[*prompt, 9], prompt_length=len(prompt), reward=0.0)
    made.eid.run, made.eid.step = run, step
    return made


@pytest.mark.parametrize(
    ("experiences", "asked", "known", "samples"),
    [
        ([experience([1])] * 3, 3, None, [0, 1, 2]),  # one prompt: three answers
        ([experience([1]), experience([1, 2])] * 2, 2, None, [0, 0, 1, 1]),  # the first prompt begins a sample
        ([experience([1], run=7), experience([2], run=7), experience([1], run=8)], 2, None, [0, 0, 1]),  # numbered
        ([experience([1], step=0), experience([1], step=1)], 2, None, [0, 0]),  # steps that look alike
        ([experience([1]), experience([2])], 2, None, [0, 1]),  # a prompt of its own for each sample
        ([experience([1]), experience([2])], 2, True, [0, 0]),  # of a workflow that is known to deliver one
        ([experience([1]), experience([2]), experience([3])], 2, None, [0, 0, 0]),
        ([experience([1])], 1, None, [0]),
    ],
)
def test_samples_of_a_run(experiences, asked, known, samples):
    assert sample_numbers(experiences, asked, known) == samples
