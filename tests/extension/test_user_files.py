"""What a user adds from one file of their own, in a run started from YAML: nothing of the package is touched."""

from __future__ import annotations

from rollwright.tracking.metrics_file import read_metrics


def test_a_reward(run_with):
    plugin = """
    from rollwright import REWARD_FUNCTIONS

    @REWARD_FUNCTIONS.register("short_is_good_ext")
    def short_is_good(prompt, completion, prompt_ids, completion_ids, **columns):
        return 10.0 - len(completion_ids)
    """
    directory, _ = run_with(plugin, "stages.grpo.reward_fn=short_is_good_ext")
    rewards = [record["reward"] for record in read_metrics(directory / "metrics.jsonl")]
    assert len(rewards) == 2
    assert all(6.0 <= reward <= 9.0 for reward in rewards)


def test_a_workflow_and_a_metric_on_the_display(run_with):
    plugin = """
    from rollwright import WORKFLOWS, ModelRequest, RolloutWorkflow, get_tracker

    @WORKFLOWS.register_module("ask_twice_ext")
    class AskTwice(RolloutWorkflow):
        def __init__(self, gconfig, tokenizer):
            self.gconfig, self.tokenizer = gconfig, tokenizer

        async def arun_episode(self, engine, data):
            ids = self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True)
            first = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
            ids = first.input_tokens + first.output_tokens
            answer = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
            get_tracker().scalar(second_length=len(answer.output_tokens))
            return {"input_ids": ids, "output_ids": answer.output_tokens, "reward": float(len(answer.output_tokens))}
    """
    directory, output = run_with(
        plugin, "stages.grpo.workflow=ask_twice_ext", "stages.grpo.stats_logger.show=[second_length, actor/entropy]"
    )
    records = read_metrics(directory / "metrics.jsonl")
    assert len(records) == 2
    for record in records:
        line = next(line for line in output.splitlines() if line.startswith(f"step {record['step']}/2"))
        assert f"second_length {record['second_length']:.4g} " in line
        assert f"actor/entropy {record['actor/entropy']:.4g} " in line


def test_a_store_operator(run_with):
    plugin = """
    from rollwright import OPERATORS, ExperienceOperator

    @OPERATORS.register("doubled_ext")
    class Doubled(ExperienceOperator):
        def __init__(self, factor=2.0):
            self.factor = factor

        def process(self, experiences):
            for experience in experiences:
                experience.reward = self.factor * (1.0 + experience.reward)
            return experiences, {"doubled": float(len(experiences))}
    """
    directory, _ = run_with(plugin, "stages.grpo.store={operators: [{name: doubled_ext, args: {factor: 3.0}}]}")
    for record in read_metrics(directory / "metrics.jsonl"):
        assert record["reward"] >= 3.0


def test_a_metric_sink(run_with):
    plugin = """
    from rollwright import SINKS

    @SINKS.register("rewards_file_ext")
    class RewardsFile:
        def __init__(self, run):
            self.file = (run.directory / "rewards.csv").open("a")

        def write(self, step, metrics):
            print(step, metrics["reward"], sep=",", file=self.file)

        def close(self):
            self.file.close()
    """
    directory, _ = run_with(plugin, "stages.grpo.stats_logger.sinks=[rewards_file_ext]")
    written = [line.split(",") for line in (directory / "rewards.csv").read_text().splitlines()]
    records = read_metrics(directory / "metrics.jsonl")
    assert [(int(step), float(reward)) for step, reward in written] == [(r["step"], r["reward"]) for r in records]


def test_a_name_that_nobody_registered_is_an_error_with_its_place(run_with):
    _, output = run_with("", "stages.grpo.stats_logger.sinks=[nowhere]", succeeds=False)
    assert "stats_logger.sinks" in output
    assert "nowhere" in output
