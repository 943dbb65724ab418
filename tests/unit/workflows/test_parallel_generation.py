"""ParallelGenerationWorkflow: its form, its markers, what it does with output that breaks the form, and exact branches."""

import asyncio

import pytest
import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import OptimizerConfig, PPOActorConfig, RolloutConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError, EngineError, PromptTooLongError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.experience.trajectory import concat_padded_tensors
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.sglang import SGLangClient, SGLangFacts
from rollwright.inference.backends.vllm import VLLMClient
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.tracking.metrics import get_tracker
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.model import new_model
from rollwright.workflows import parallel_generation
from rollwright.workflows.parallel_generation import ParallelGenerationWorkflow, outline_numbers

GCONFIG = GenerationHyperparameters(max_new_tokens=64, temperature=0.7)
TASK = {"messages": [{"role": "user", "content": "6*7="}], "answer": "42", "query_id": "sum/1"}
GOAL = "<Outline>1. add</Outline>\n<Outline>3. multiply</Outline>\n</Goal>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer(pieces=["<Path>", "</Path>"])


class Author:
    """Writes what it is told: by the part that is open, each answer once, in order. "…" at the end: cut by a limit."""

    def __init__(self, tokenizer, goal=GOAL, paths=(" six </Path>", " seven </Path>"), conclusion="42</Conclusion>"):
        self.tokenizer = tokenizer
        self.answers = {"<Goal>\n": [goal], "<Path>\n": list(paths), "<Conclusion>\n": [conclusion]}
        self.requests, self.running, self.most_running = [], 0, 0

    async def agenerate(self, request):
        self.requests.append(request)
        text = self.tokenizer.decode(request.input_ids)
        part = max(self.answers, key=text.rfind)
        number = self.answers[part].pop(0)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if number is None:
            raise PromptTooLongError("no room")
        tokens = self.tokenizer.encode(number.removesuffix("…").removesuffix("■"), add_special_tokens=False)
        if number.endswith("■"):
            tokens.append(self.tokenizer.eos_token_id)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.5] * len(tokens),
            output_versions=[2] * len(tokens),
            stop_reason="length" if number.endswith("…") else "stop",
            temperature=0.7,
            rid=request.rid,
        )


async def whole(prompt, completion, prompt_ids, completion_ids, answer, **data):
    return float(answer in completion.rpartition("<Conclusion>")[2]) + 0.5 * completion.startswith("<Goal>")


def run(workflow, engine):
    return asyncio.run(workflow.arun_episode(engine, TASK))


def completion_of(tokenizer, row, engine):
    prompt = len(engine.requests[0].input_ids) - len("<Goal>\n")
    return tokenizer.decode(row["input_ids"][0][prompt:], skip_special_tokens=False)


def trained_text(tokenizer, row):
    return tokenizer.decode(row["input_ids"][0][row["loss_mask"][0].bool()], skip_special_tokens=False)


def test_the_row_has_the_form_and_only_what_was_sampled_is_trained(tokenizer):
    engine = Author(tokenizer)
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer), engine)
    assert completion_of(tokenizer, row, engine) == (
        "<Goal>\n" + GOAL + "\n<Path>\n1. six </Path>\n<Path>\n3. seven </Path>\n<Conclusion>\n42</Conclusion>\n"
    )
    assert trained_text(tokenizer, row) == GOAL.removesuffix("</Goal>") + " six  seven 42"
    marker = ~row["loss_mask"].bool()
    assert set(row["logprobs"][marker].tolist()) == {0.0}
    assert set(row["versions"][marker].tolist()) == {-1}
    assert set(row["logprobs"][~marker].tolist()) == {-0.5}
    assert set(row["versions"][~marker].tolist()) == {2}
    assert bool(row["attention_mask"].all())
    assert row["rewards"].tolist() == [1.5]  # the reward saw goal, paths and conclusion
    assert row["truncated"].tolist() == [False]
    assert {len(value[0]) for value in row.values() if value.dim() == 2} == {row["input_ids"].shape[1]}
    assert engine.most_running == 2  # the paths, at once
    assert len({request.rid for request in engine.requests}) == 1


def test_closing_tags_are_trained_where_asked_for(tokenizer):
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, train_closing_tags=True), Author(tokenizer))
    assert trained_text(tokenizer, row) == GOAL + " six </Path> seven </Path>42</Conclusion>"


def test_every_part_has_its_limit_and_its_stop(tokenizer):
    engine = Author(tokenizer)
    limits = {"max_goal_tokens": 10, "max_path_tokens": 20, "max_conclusion_tokens": 100}
    run(ParallelGenerationWorkflow(whole, GCONFIG.new(stop=["###"]), tokenizer, **limits), engine)
    asked = [(request.gconfig.max_new_tokens, request.gconfig.stop) for request in engine.requests]
    assert asked == [
        (10, ["###", "</Goal>"]),
        (20, ["###", "</Path>"]),
        (20, ["###", "</Path>"]),
        (64, ["###", "</Conclusion>"]),  # gconfig.max_new_tokens is the upper limit of all
    ]


@pytest.mark.parametrize(
    ("goal", "numbers"),
    [
        ("<Outline>1. a</Outline><Outline> 2: b</Outline>", ["1", "2"]),
        ("<Outline>2) b</Outline>\n<Outline>1. a</Outline>\n<Outline>2. again</Outline>", ["2", "1"]),
        ("Plan:\n1. one way\n 2. another\n", ["1", "2"]),
        ("In 1995. we <Outline>1.2. sub</Outline>\n7. not an outline\n", ["1.2"]),
        ("no numbers", []),
    ],
)
def test_outlines_are_found_by_their_number(goal, numbers):
    assert outline_numbers(goal) == numbers


def test_a_goal_without_outlines_gets_one_path_numbered_1(tokenizer):
    workflow = ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, rollout_stat_scope="test_malformed")
    engine = Author(tokenizer, goal="I do not know</Goal>", paths=[" guess</Path>"])
    row = run(workflow, engine)
    assert "<Path>\n1. guess</Path>\n<Conclusion>" in completion_of(tokenizer, row, engine)
    metrics = get_tracker("test_malformed").export(reset=True)
    assert metrics["test_malformed/goal_malformed"] == 1.0
    assert metrics["test_malformed/paths"] == 1.0


def test_a_goal_and_a_path_cut_by_their_limits_are_closed_and_count_as_truncated(tokenizer):
    workflow = ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, rollout_stat_scope="test_cut")
    engine = Author(tokenizer, goal="<Outline>1. a</Outline><Outline>2. b…", paths=[" x…", " y</Path>"])
    row = run(workflow, engine)
    text = completion_of(tokenizer, row, engine)
    assert "<Outline>2. b\n</Goal>\n<Path>\n1. x\n</Path>\n<Path>\n2. y</Path>\n" in text
    assert "</Goal>" not in trained_text(tokenizer, row)
    assert row["truncated"].tolist() == [True]
    metrics = get_tracker("test_cut").export(reset=True)
    assert (metrics["test_cut/paths_cut"], metrics["test_cut/goal_malformed"]) == (0.5, 1.0)


def test_a_missing_conclusion_is_scored_as_it_is(tokenizer):
    engine = Author(tokenizer, conclusion="■")
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, rollout_stat_scope="test_missing"), engine)
    assert completion_of(tokenizer, row, engine).endswith(f"<Conclusion>\n{tokenizer.eos_token}\n</Conclusion>\n")
    assert row["rewards"].tolist() == [0.5]
    assert row["truncated"].tolist() == [False]
    metrics = get_tracker("test_missing").export(reset=True)
    assert (metrics["test_missing/conclusion_missing"], metrics["test_missing/conclusion_unclosed"]) == (1.0, 1.0)


def test_a_conclusion_of_nothing_counts_as_missing(tokenizer):
    workflow = ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, rollout_stat_scope="test_nothing")
    row = run(workflow, Author(tokenizer, conclusion="</Conclusion>"))
    assert row["rewards"].tolist() == [0.5]
    metrics = get_tracker("test_nothing").export(reset=True)
    assert (metrics["test_nothing/conclusion_missing"], metrics["test_nothing/conclusion_unclosed"]) == (1.0, 0.0)


def test_outlines_beyond_the_most_paths_get_none(tokenizer):
    engine = Author(tokenizer)
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, max_paths=1), engine)
    text = completion_of(tokenizer, row, engine)
    assert "<Path>\n1. six</Path>" in text.replace("six </Path>", "six</Path>")
    assert "<Path>\n3." not in text


@pytest.mark.parametrize("part", range(4))
def test_an_aborted_part_rejects_the_sample(tokenizer, part):
    class Aborts(Author):
        async def agenerate(self, request):
            response = await super().agenerate(request)
            if len(self.requests) == part + 1 or (len(self.requests) > part and self.requests[part] is request):
                response.stop_reason = "abort"
            return response

    assert run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer), Aborts(tokenizer)) is None


def test_defaults_are_those_of_the_guide():
    import inspect

    parameters = inspect.signature(ParallelGenerationWorkflow).parameters
    assert list(parameters)[:3] == ["reward_fn", "gconfig", "tokenizer"]
    assert {name: parameters[name].default for name in list(parameters)[3:11]} == {
        "enable_thinking": False,
        "max_goal_tokens": 2048,
        "max_path_tokens": 4096,
        "max_conclusion_tokens": 2048,
        "rollout_stat_scope": "rollout",
        "dump_dir": None,
        "get_input_ids_fn": None,
        "data_extract_prompt_fn": None,
    }


def test_the_prompt_can_be_made_by_functions_and_their_import_paths(tokenizer):
    engine = Author(tokenizer)
    made = ParallelGenerationWorkflow(
        whole,
        GCONFIG,
        tokenizer,
        enable_thinking=True,
        get_input_ids_fn=lambda prompt, tokenizer, thinking: tokenizer.encode(f"{prompt}{thinking}", add_special_tokens=False),
        data_extract_prompt_fn=lambda data: data["query_id"],
    )
    run(made, engine)
    assert tokenizer.decode(engine.requests[0].input_ids) == "sum/1True<Goal>\n"
    by_path = ParallelGenerationWorkflow(
        "exact_match_reward",
        GCONFIG,
        tokenizer,
        get_input_ids_fn="rollwright.workflows.episode.chat_input_ids",
        data_extract_prompt_fn="rollwright.workflows.episode.extract_messages",
    )
    engine = Author(tokenizer)
    run(by_path, engine)
    chat = tokenizer.apply_chat_template(TASK["messages"], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.requests[0].input_ids, skip_special_tokens=False) == chat + "<Goal>\n"


def test_no_room_leaves_a_path_empty_and_the_conclusion_out(tokenizer):
    engine = Author(tokenizer, paths=[None, " seven </Path>"], conclusion=None)
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer), engine)
    text = completion_of(tokenizer, row, engine)
    assert text.endswith("<Path>\n1.\n</Path>\n<Path>\n3. seven </Path>\n")
    assert row["truncated"].tolist() == [True]
    with pytest.raises(PromptTooLongError, match="no room for a goal"):
        run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer), Author(tokenizer, goal=None))


def test_a_token_that_straddles_text_and_tag_is_content():
    tokenizer = build_character_tokenizer(pieces=["x<", "/Path>"])
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer), Author(tokenizer, paths=["ax</Path>", "b</Path>"]))
    assert "ax<b" in trained_text(tokenizer, row)


def test_sync_rewards_dumps_and_statistics(tokenizer, tmp_path):
    workflow = ParallelGenerationWorkflow(
        "exact_match_reward", GCONFIG, tokenizer, dump_dir=str(tmp_path), rollout_stat_scope="test_stats"
    )
    assert run(workflow, Author(tokenizer))["rewards"].tolist() == [0.0]
    (file,) = tmp_path.glob("2/sum_1-*.txt")
    text = file.read_text(encoding="utf-8")
    assert all(part in text for part in ("path 2", "⟦<Path>\n3.⟧ seven ", "conclusion", "reward: 0.0", "of them trained"))
    metrics = get_tracker("test_stats").export(reset=True)
    assert (metrics["test_stats/paths"], metrics["test_stats/conclusion_tokens"]) == (2.0, 2.0)
    assert 0 < metrics["test_stats/other_context_share"] < 1


def test_wrong_arguments_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="branch_attention is 'exact'"):
        ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, branch_attention="exact")
    with pytest.raises(ConfigError, match="max_path_tokens is 0"):
        ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, max_path_tokens=0)


class Recording:
    """An engine with the record that an executor would keep."""

    def __init__(self, engine):
        self.engine, self.recorder = engine, Recorder()

    async def agenerate(self, request):
        response = await self.engine.agenerate(request)
        self.recorder.record(request, response)
        return response


def branched_batch(model, tokenizer, branch_attention, count=4):
    """Rows of a model with random weights, which is given three outlines each time."""
    workflow = ParallelGenerationWorkflow(
        whole,
        GCONFIG.new(temperature=0.7),
        tokenizer,
        max_goal_tokens=6,
        max_path_tokens=12,
        max_conclusion_tokens=8,
        branch_attention=branch_attention,
    )
    rows = []
    with BuiltinEngine(model, tokenizer, seed=3) as engine:
        for _ in range(count):
            recording = Recording(engine)
            row = normalise(asyncio.run(workflow.arun_episode(recording, TASK)), recording.recorder)
            check_trajectory(row)
            rows.append(row)
    return concat_padded_tensors(rows)


@pytest.fixture
def random_model(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_generation, "outline_numbers", lambda goal: ["1", "2", "3"])
    model = new_model(tmp_path / "model", tokenizer=tokenizer, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with torch.no_grad():  # far from uniform, so that another context is another distribution
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def actor_over(model):
    actor = FSDPPPOActor(PPOActorConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-4)), model=model)
    actor.initialize()
    return actor


def test_isolated_branches_train_with_the_log_probabilities_of_sampling(random_model, tokenizer):
    batch = branched_batch(random_model, tokenizer, "isolated")
    mask = batch["loss_mask"].bool()
    assert batch["branch_ids"].max() == 3
    logp = actor_over(random_model).compute_logp(batch)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp[mask], batch["logprobs"][mask], atol=1e-4, rtol=0)
    without = {key: value for key, value in batch.items() if key not in ("branch_ids", "position_ids")}
    assert (actor_over(random_model).compute_logp(without) - batch["logprobs"])[mask].abs().max() > 1e-2


def test_branches_begin_where_the_trunk_ends_and_the_conclusion_after_the_longest(random_model, tokenizer):
    batch = branched_batch(random_model, tokenizer, "isolated", count=1)
    branches, positions = batch["branch_ids"][0], batch["position_ids"][0]
    fork = int((branches != 0).nonzero()[0])
    starts = {int(positions[branches == branch][0]) for branch in (1, 2, 3)}
    assert starts == {fork}
    last = int((branches != 0).nonzero()[-1])
    assert int(positions[last + 1]) == int(positions[: last + 1].max()) + 1


def test_the_plain_form_reports_its_mismatch_apart(random_model, tokenizer):
    batch = branched_batch(random_model, tokenizer, "plain")
    assert "branch_ids" not in batch
    batch["advantages"] = torch.zeros_like(batch["logprobs"])
    metrics = actor_over(random_model).ppo_update(batch)
    assert metrics["logprob_difference/max"] < 1e-4  # goal, first path, conclusion
    assert metrics["context_mismatch/mean"] > 1e-2  # second and third path


def test_servers_that_cannot_do_branches_refuse_them_at_the_first_request(tokenizer):
    engine = Author(tokenizer)
    row = run(ParallelGenerationWorkflow(whole, GCONFIG, tokenizer, branch_attention="isolated"), engine)
    assert row["branch_ids"].shape == row["input_ids"].shape
    goal = engine.requests[0]
    assert set(goal.branch_ids) == {0}
    sglang = SGLangClient(RolloutConfig(), addresses=["127.0.0.1:1"])
    sglang.backend.facts["127.0.0.1:1"] = SGLangFacts()
    with pytest.raises(EngineError, match="has no position_ids; use the built-in engine"):
        sglang.backend.check(goal, "the sglang server at 127.0.0.1:1")
    with pytest.raises(EngineError, match="position_ids cannot travel to the vllm server"):
        VLLMClient(RolloutConfig(), addresses=["127.0.0.1:1"]).backend.check(goal, "the vllm server at 127.0.0.1:1")
    assert isinstance(goal, ModelRequest)
