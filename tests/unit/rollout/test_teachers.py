"""Teachers score samples: against the whole softmax of transformers, through each engine, from the journal, and refused if they misbehave."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from parts import FixedEngine, qwen3_config, random_model

from rollwright import GenerationHyperparameters, ModelRequest, RolloutConfig
from rollwright.config.sections import JournalConfig
from rollwright.config.teachers import TeacherConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError, EngineError, RolloutError, WorkflowError
from rollwright.experience.journal.writing import Journal
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelResponse
from rollwright.inference.server.application import create_application
from rollwright.inference.server.service import ServerThread
from rollwright.inference.server.settings import ServerSettings
from rollwright.placement.teachers import _server_client
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.teachers import Teacher, Teachers, refuse_other_tokenizer

TEMPERATURE, TOP = 0.7, 4
TASK = {"question": "1+1=", "answer": "2", "taskset": "sums"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer("0123456789+= ")


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(qwen3_config(tokenizer), seed=3, scale=3.0)


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    engine = BuiltinEngine(model, tokenizer, max_running_requests=8)
    yield engine
    engine.destroy()


@pytest.fixture(scope="module")
def served(engine):
    settings = ServerSettings(port=0)
    thread = ServerThread(create_application(engine, settings), settings)
    yield thread.url.removeprefix("http://")
    thread.stop()


class Student(FixedEngine):
    """Samples random tokens of the vocabulary."""

    async def agenerate(self, request):
        draw = random.Random(request.seed)
        ids = [draw.randrange(4, 14) for _ in range(request.gconfig.max_new_tokens)]
        return ModelResponse(request.input_ids, ids, [-1.5] * len(ids), [0] * len(ids), temperature=TEMPERATURE)


class TwoTurns:
    """Two answers with a tool's text between them."""

    async def arun_episode(self, engine, data):
        gconfig = GenerationHyperparameters(max_new_tokens=5, temperature=TEMPERATURE)
        ids, mask = [5, 6, 7], [0, 0, 0]
        for tool in ([8, 9], []):
            response = await engine.agenerate(ModelRequest(ids, gconfig, rid="a"))
            ids, mask = [*ids, *response.output_tokens, *tool], [*mask, *[1] * 5, *[0] * len(tool)]
        return {"input_ids": ids, "loss_mask": mask, "reward": 1.0}


def sampled(teachers, data=TASK, journal=None, student=None, **settings):
    """The rows of one group."""
    config = RolloutConfig(sandbox="unsafe", max_sample_retries=0, **settings)
    executor = RolloutExecutor(student or Student(), config, journal=journal, batch_size=1, teachers=teachers)
    try:
        return executor.rollout_batch([dict(data)], TwoTurns(), group_size=2)
    finally:
        executor.destroy()


def exact(model, ids, temperature=TEMPERATURE):
    """Log-probabilities ``[L, V]`` of the token at each place, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double() / temperature
    return torch.cat([torch.zeros(1, logits.shape[1]), logits[:-1].log_softmax(-1)])


@pytest.mark.parametrize("through", ["builtin", "serve-model"])
def test_scores_are_those_of_transformers(model, engine, tokenizer, served, through):
    with ExitStack() as opened:
        teacher = engine
        if through == "serve-model":
            teacher = _server_client(TeacherConfig(addresses=[served]))
            opened.callback(teacher.destroy)
            teacher.initialize()
        rows = sampled(Teachers([Teacher(TeacherConfig(loss_weight=0.5), teacher, tokenizer)], top_k=TOP, skip_tokens=2))
    assert rows["input_ids"].shape == (2, 15)
    for row in range(2):
        expected = exact(model, rows["input_ids"][row].tolist())
        taught = rows["teacher_weights"][row] > 0
        assert taught.nonzero()[:, 0].tolist() == [5, 6, 7, 10, 11, 12, 13, 14]  # but the two skipped tokens
        assert rows["teacher_weights"][row].unique().tolist() == [0.0, 0.5]
        own = expected.gather(1, rows["input_ids"][row][:, None])[:, 0]
        torch.testing.assert_close(rows["teacher_logprobs"][row][taught].double(), own[taught], atol=1e-4, rtol=0)
        top, ids = expected[taught].topk(TOP)
        assert torch.equal(rows["teacher_top_ids"][row][taught], ids)
        torch.testing.assert_close(rows["teacher_top_logprobs"][row][taught].double(), top, atol=1e-4, rtol=0)
        assert not rows["teacher_logprobs"][row][~taught].any()
        assert not rows["teacher_top_logprobs"][row][~taught].any()


def test_the_policy_with_the_answer_teaches_the_policy_without(model, engine, tokenizer):
    class Policy(Student):
        async def agenerate(self, request):
            return await (super() if request.prompt_logprobs_from is None else engine).agenerate(request)

    config = TeacherConfig(policy=True, context="= {answer} ")
    rows = sampled(Teachers([Teacher(config, None, tokenizer)]), student=Policy())
    context = tokenizer.encode("= 2 ", add_special_tokens=False)
    for row in range(2):
        ids, trained = rows["input_ids"][row], rows["loss_mask"][row].bool()
        expected = exact(model, [*context, *ids.tolist()])[len(context) :].gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(rows["teacher_logprobs"][row][trained].double(), expected[trained], atol=1e-4, rtol=0)
        without = exact(model, ids.tolist()).gather(1, ids[:, None])[:, 0]
        assert (expected - without)[trained].abs().max() > 0.1
    with pytest.raises(RolloutError, match=r"solution.*the task has the fields answer"):
        sampled(Teachers([Teacher(replace(config, context="{solution}"), None, tokenizer)]), student=Policy())


def test_teachers_are_chosen_by_task_and_mixed(model, engine, tokenizer):
    other = random_model(qwen3_config(tokenizer), seed=4, scale=3.0)
    with ExitStack() as opened:
        second = BuiltinEngine(other, tokenizer, max_running_requests=4)
        opened.callback(second.destroy)
        one = Teacher(TeacherConfig("one", weight=3.0, tasks={"taskset": ["sums", "code"]}), engine, tokenizer)
        two = Teacher(TeacherConfig("two", weight=1.0, loss_weight=2.0, tasks={"answer": "2"}), second, tokenizer)
        mixed = sampled(Teachers([one, two]))
        alone = sampled(Teachers([one, two]), {**TASK, "answer": "3"})
        nobody = sampled(Teachers([one, two], top_k=2), {"taskset": "poems"})
        with pytest.raises(RolloutError, match="'one' and 'two' both teach this task"):
            sampled(Teachers([one, two], top_k=2))
    ids, trained = mixed["input_ids"][0], mixed["loss_mask"][0].bool()
    scores = [exact(each, ids.tolist()).gather(1, ids[:, None])[:, 0].numpy() for each in (model, other)]
    expected = np.log(0.75 * np.exp(scores[0]) + 0.25 * np.exp(scores[1]))
    np.testing.assert_allclose(mixed["teacher_logprobs"][0][trained], expected[trained], atol=1e-4)
    assert mixed["teacher_weights"][0][trained].unique().tolist() == [1.25]
    np.testing.assert_allclose(
        alone["teacher_logprobs"][0][trained],
        exact(model, alone["input_ids"][0].tolist()).gather(1, alone["input_ids"][0][:, None])[:, 0][trained],
        atol=1e-4,
    )
    assert not nobody["teacher_weights"].any()
    assert nobody["teacher_top_ids"].shape == (2, 15, 2)


class Misbehaving(FixedEngine):
    """A real engine whose answers are changed."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    async def agenerate(self, request):
        return self.change(await self.engine.agenerate(request))


def _other_tops(response):
    wrong = [[(token, score - 1.0) for token, score in top] for top in response.input_top_logprobs]
    return replace(response, input_top_logprobs=wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda response: replace(response, input_logprobs=None), "no log-probabilities for 12 tokens"),
        (lambda response: replace(response, input_logprobs=response.input_logprobs[:-1]), "of 11 tokens for 12"),
        (lambda response: replace(response, input_tokens=[*response.input_tokens[:-1], 5, 5]), "16 other tokens than the 15"),
        (lambda response: replace(response, input_logprobs=[None, *response.input_logprobs[1:]]), "1 of 12 .* None at token 3"),
        (lambda response: replace(response, input_logprobs=[float("nan")] * 12), "12 of 12 .* nan at token 3"),
        (lambda response: replace(response, input_top_logprobs=None), "most likely tokens at 0 of 12 places"),
        (lambda response: replace(response, input_top_logprobs=[top[:1] for top in response.input_top_logprobs]), "0 of 12"),
        (_other_tops, "among the most likely tokens"),
    ],
)
def test_a_teacher_that_does_not_score_is_an_error(engine, tokenizer, change, said):
    teachers = Teachers([Teacher(TeacherConfig("mentor"), Misbehaving(engine, change), tokenizer)], top_k=TOP)
    with pytest.raises(RolloutError, match=f"teacher 'mentor', .*0.*{said}"):
        sampled(teachers)


def test_an_engine_that_fails_names_the_teacher(tokenizer):
    class Failing(FixedEngine):
        async def agenerate(self, request):
            raise EngineError("the server has ended.")

    with pytest.raises(RolloutError, match=r"teacher 'mentor'.* did not score 12 tokens: the server has ended"):
        sampled(Teachers([Teacher(TeacherConfig("mentor"), Failing(), tokenizer)]))


def test_a_resumed_run_does_not_ask_again(engine, tokenizer, tmp_path):
    class Counting(Misbehaving):
        asked = 0

        async def agenerate(self, request):
            self.asked += 1
            return await super().agenerate(request)

    counting = Counting(engine, lambda response: response)

    def live(teacher):
        journal = Journal(tmp_path, JournalConfig())
        executor = RolloutExecutor(
            Student(), RolloutConfig(sandbox="unsafe"), journal=journal, batch_size=1, teachers=Teachers([teacher], top_k=TOP)
        )
        try:
            executor.recall([tmp_path])
            return executor.prepare_batch(iter([{**TASK, "ordinal": 0}]), TwoTurns(), group_size=2, batch_size=1)
        finally:
            executor.destroy()
            journal.close()

    first = live(Teacher(TeacherConfig("mentor"), counting, tokenizer))
    assert counting.asked == 2
    again = live(Teacher(TeacherConfig("mentor"), counting, tokenizer))
    assert counting.asked == 2
    for key in ("input_ids", "teacher_logprobs", "teacher_weights", "teacher_top_ids", "teacher_top_logprobs"):
        assert torch.equal(first[key], again[key])


def test_rows_that_are_no_plain_text_are_refused(engine, tokenizer):
    rows = {"input_ids": torch.ones(1, 3), "branch_ids": torch.zeros(1, 3), "loss_mask": torch.ones(1, 3)}
    with pytest.raises(WorkflowError, match="branch_ids"):
        asyncio.run(Teachers([Teacher(TeacherConfig(), engine, tokenizer)]).score(rows, engine, TASK, "sample 1"))


def test_another_tokenizer_is_refused_with_the_first_token(tokenizer):
    refuse_other_tokenizer(tokenizer, tokenizer, "mentor")
    other = build_character_tokenizer("0123456798+= ")
    number = tokenizer.get_vocab()["8"]
    with pytest.raises(ConfigError, match=f"token {number} is '8' for the policy and '9' for the teacher"):
        refuse_other_tokenizer(tokenizer, other, "mentor")
