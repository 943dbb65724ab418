"""A dataset format, a dataset, a selector and a function of a workflow from one file of the user's own."""

from __future__ import annotations

import pytest

from rollwright.tracking.metrics_file import read_metrics

pytestmark = pytest.mark.timeout(600)


def test_a_format_and_a_dataset(run_with, tmp_path):
    plugin = """
    from rollwright import DATASET_REGISTRY, FORMATS, REWARD_FUNCTIONS, Example

    @DATASET_REGISTRY.register("riddles_ext")
    def riddles(split="train", digits=1):
        return [{"riddle": f"{number % 10}+1=", "solution": str(number + 1)} for number in range(10**digits)]

    @FORMATS.register("as_riddles_ext")
    def as_riddles(row):
        return Example(prompt=row["riddle"], answer=row["solution"], extras={"length": len(row["riddle"])})

    @REWARD_FUNCTIONS.register("length_ext")
    def length_reward(prompt, completion, prompt_ids, completion_ids, *, answer, length, solution, **_):
        return float(length if answer == solution else -1)
    """
    dataset = [f"stages.grpo.train_dataset.{key}" for key in ("path=riddles_ext", "format=as_riddles_ext")]
    directory, _ = run_with(plugin, *dataset, "stages.grpo.reward_fn=length_ext")
    assert [record["reward"] for record in read_metrics(directory / "metrics.jsonl")] == [4.0, 4.0]


def test_a_selector_and_a_task_style_workflow(run_with, tmp_path):
    plugin = """
    from rollwright import SELECTORS, Selector, Workflow, WORKFLOWS

    @SELECTORS.register("last_first_ext")
    class LastFirst(Selector):
        def _position(self, draw):
            return self.size - 1 - draw % self.size

    @WORKFLOWS.register_module("place_ext")
    class Place(Workflow):
        repeatable = True

        def run(self):
            experiences = self.model.chat(self.task.messages())
            for experience in experiences:
                experience.reward = float(self.task.truth)
            return experiences
    """
    rows = "".join(f'{{"prompt": "1+1=", "answer": "{number}"}}\n' for number in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    tasksets = f"[{{path: {tmp_path / 'rows.jsonl'}, workflow: place_ext, selector: last_first_ext}}]"
    without = ["stages.grpo.workflow=null", "stages.grpo.reward_fn=null", 'stages.grpo.train_dataset.path=""']
    directory, _ = run_with(plugin, f"stages.grpo.tasksets={tasksets}", *without)
    assert [record["reward"] for record in read_metrics(directory / "metrics.jsonl")] == [4.5, 2.5]
