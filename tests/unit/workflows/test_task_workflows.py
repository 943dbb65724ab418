"""Task-style workflows: tasks from rows, traits, threads, the model wrapper, the built-in ones."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from parts import FixedEngine

from rollwright import Experience, ModelWrapper, Task, Workflow
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.errors import DataError, RolloutError, WorkflowError
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import class_trait, trait
from rollwright.workflows.task_runner import AbandonableThreads, TaskRunner


class Scripted(FixedEngine):
    """Answers with the given texts, one after the other."""

    version = 3

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(0)
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        output = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return ModelResponse(request.input_ids, output, [-0.1] * len(output), [3] * len(output), "stop")


TASKSET = TasksetConfig(format=FormatConfig(prompt_key="question", response_key="answer"))


def run(workflow, row, engine, tokenizer, taskset=TASKSET, **options):
    taskset.workflow = workflow
    return asyncio.run(TaskRunner([taskset], tokenizer, **options).arun_episode(engine, row))


class TwoAnswers(Workflow):
    def run(self):
        responses = self.model.chat(self.task.messages(), n=self.task.rollout_args.n, temperature=0.5)
        for response in responses:
            response.reward = float(response.response_text == self.task.truth)
        return responses


def test_a_synchronous_workflow_runs_in_a_thread_and_makes_its_own_group(tokenizer):
    engine = Scripted(tokenizer, "4", "5")
    experiences = run(TwoAnswers, {"question": "2+2=", "answer": "4"}, engine, tokenizer, group_size=2)
    assert [e.reward for e in experiences] == [1.0, 0.0]
    assert engine.requests[0].gconfig.temperature == 0.5
    assert experiences[0].versions.tolist() == [3, 3]
    assert tokenizer.decode(experiences[0].tokens[: experiences[0].prompt_length]).count("2+2=") == 1


@pytest.mark.parametrize("form", ["attribute", "property", "method"])
def test_a_trait_may_have_three_forms(form):
    body = {"attribute": True, "property": property(lambda self: True), "method": lambda self: True}[form]
    kind = type("Kind", (Workflow,), {"resettable": body})
    assert class_trait(kind, "resettable", Task())
    assert trait(object.__new__(kind), "resettable")
    assert not class_trait(Workflow, "resettable", Task())


def test_what_ran_in_another_process_is_learnt_from_here(tokenizer):
    told = []
    runner = TaskRunner(
        [TasksetConfig(workflow=TwoAnswers)], tokenizer, group_size=2, feedback=lambda *words: told.append(words)
    )
    row = {"question": "1", "answer": "1", "ordinal": 7}
    assert runner.first_runs(row) == [2]
    runner.ran_elsewhere(row, 2, {"sample_ids": torch.tensor([0, 0]), "rewards": torch.tensor([1.0, 0.5])})
    assert runner.first_runs(row) == [1, 1]  # one run delivers one sample, whatever the class declares
    assert told == [(7, 0.75)]


def test_who_repeats(tokenizer):
    row = {"question": "1", "answer": "1"}
    once = TasksetConfig(workflow=TwoAnswers)
    assert TaskRunner([once], tokenizer, group_size=6).first_runs(row) == [6]
    often = TasksetConfig(workflow="simple_workflow", reward_fn="exact_match_reward")
    assert TaskRunner([often], tokenizer, group_size=6).first_runs(row) == [1] * 6


def test_a_resettable_workflow_is_reused_with_its_next_task_and_arguments(tokenizer):
    built = []

    class Heavy(Workflow):
        resettable = True

        def __init__(self, *, task, model, auxiliary_models=None):
            super().__init__(task=task, model=model)
            built.append(self)
            self.question = task.raw_task["question"]

        def reset(self, task):
            self.question = task.raw_task["question"]

        def run(self):
            (response,) = self.model.chat([{"role": "user", "content": self.question}])
            response.reward = 0.0
            return [response]

    engine = Scripted(tokenizer, "x")
    runner = TaskRunner([TasksetConfig(workflow=Heavy)], tokenizer, group_size=1)
    asyncio.run(runner.arun_episode(engine, {"question": "first"}))
    asyncio.run(runner.arun_episode(engine, {"question": "second"}))
    assert len(built) == 1
    assert "second" in tokenizer.decode(engine.requests[1].input_ids)


def test_the_math_workflow_asks_in_its_format_and_scores_accuracy_and_format(tokenizer):
    taskset = TasksetConfig(format=FormatConfig(prompt_key="question", response_key="answer"), group_size=1)
    good = "<think>easy</think> <answer>4</answer>"
    row = {"question": "2+2=", "answer": "4"}
    (right,) = run("math_workflow", row, Scripted(tokenizer, good), tokenizer, taskset)
    assert right.reward == pytest.approx(1.1)
    (wrong,) = run("math_workflow", row, Scripted(tokenizer, "7"), tokenizer, taskset)
    assert wrong.reward == pytest.approx(-0.1)
    assert "<think>" in tokenizer.decode(right.prompt_tokens)


def test_a_missing_column_is_told(tokenizer):
    taskset = TasksetConfig(format=FormatConfig(prompt_key="problem"), reward_fn="exact_match_reward")
    with pytest.raises(DataError, match="no column 'problem'"):
        run("simple_workflow", {"question": "1"}, Scripted(tokenizer, "x"), tokenizer, taskset)


def test_what_is_no_experience_is_refused(tokenizer):
    class Wrong(Workflow):
        def run(self):
            return [{"reward": 1}]

    with pytest.raises(WorkflowError, match="returned dict among its experiences"):
        run(Wrong, {"question": "1"}, Scripted(tokenizer, "x"), tokenizer)


def test_a_synchronous_call_on_the_loop_is_refused(tokenizer):
    class Blocking(Workflow):
        async def run_async(self):
            return self.model.chat([{"role": "user", "content": "hi"}])

    with pytest.raises(WorkflowError, match="await the _async form"):
        run(Blocking, {"question": "1"}, Scripted(tokenizer, "x"), tokenizer)


def test_history_of_a_conversation_is_one_experience(tokenizer):
    from rollwright.experience.recorder import Recorder

    recorder = Recorder()

    class Recorded(Scripted):
        async def agenerate(self, request):
            response = await super().agenerate(request)
            recorder.record(request, response)
            return response

    model = ModelWrapper(Recorded(tokenizer, "one", "two"), tokenizer, recorder=recorder)
    messages = [{"role": "user", "content": "a"}]
    (first,) = model.chat(messages)
    messages += [{"role": "assistant", "content": first.response_text}, {"role": "user", "content": "b"}]
    model.chat(messages)
    (experience,) = model.extract_experience_from_history()
    assert isinstance(experience, Experience)
    assert tokenizer.decode(experience.tokens[experience.prompt_length :][experience.action_mask]).count("one") == 1
    assert int(experience.action_mask.sum()) == len("one") + len("two") + 2
    assert model.extract_experience_from_history() == []


def test_a_thread_that_hangs_is_left_behind_and_counted():
    release = threading.Event()

    async def scenario():
        threads = AbandonableThreads(limit=1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(threads.run(release.wait, "stuck"), 0.05)
        assert threads.abandoned == 1
        with pytest.raises(RolloutError, match="cannot be killed"):
            await threads.run(lambda: 1, "next")
        release.set()
        for _ in range(6000):
            if threads.abandoned == 0:
                break
            await asyncio.sleep(0.01)
        assert await threads.run(lambda: 1, "next") == 1

    asyncio.run(scenario())


def test_threads_do_not_wait_for_each_other():
    all_run = threading.Barrier(20, timeout=60)

    async def scenario():
        threads = AbandonableThreads(limit=1)
        return await asyncio.gather(*(threads.run(all_run.wait, str(i)) for i in range(20)))

    assert sorted(asyncio.run(scenario())) == list(range(20))


def test_the_built_in_names_are_registered():
    for name in ("simple_workflow", "math_workflow", "math_boxed_workflow"):
        assert issubclass(WORKFLOWS.get(name), Workflow)


def test_generation_arguments_have_trinitys_names():
    arguments = GenerationHyperparameters.from_names(n=4, max_tokens=7)
    assert (arguments.n, arguments.max_tokens) == (4, 7)


class RecordedScript(Scripted):
    """A scripted engine whose answers are recorded, as a sample's engine records them."""

    def __init__(self, tokenizer, *texts):
        from rollwright.experience.recorder import Recorder

        super().__init__(tokenizer, *texts)
        self.recorder = Recorder()

    async def agenerate(self, request):
        response = await super().agenerate(request)
        self.recorder.record(request, response)
        return response


def test_a_finished_conversation_becomes_one_experience_of_its_sampled_tokens(tokenizer):
    engine = RecordedScript(tokenizer, "one", "two", "aside")
    model = ModelWrapper(engine, tokenizer, recorder=engine.recorder)
    messages = [{"role": "user", "content": "a"}]
    for question in ("b", None):
        (answer,) = model.chat(messages)
        messages.append({"role": "assistant", "content": answer.response_text})
        if question:
            messages.append({"role": "user", "content": question})
    model.chat([{"role": "user", "content": "another conversation"}])
    experience = model.convert_messages_to_experience(messages)
    first, second = engine.recorder.records[:2]
    assert experience.tokens.tolist() == [*second.prompt_ids, *second.output_ids]
    assert experience.tokens[experience.prompt_length :][experience.action_mask].tolist() == [
        *first.output_ids,
        *second.output_ids,
    ]
    assert experience.versions[experience.versions >= 0].unique().tolist() == [3]
    messages[1] = {"role": "assistant", "content": "uno"}
    with pytest.raises(WorkflowError, match="no reply in these messages was sampled"):
        model.convert_messages_to_experience([messages[0], messages[1]])


def test_evaluation_has_arguments_of_its_own_also_in_a_workflow_that_trains(tokenizer):
    class Reused(Workflow):
        resettable = True

        def reset(self, task):
            self.task = task

        def run(self):
            (response,) = self.model.chat(self.task.messages(), n=1)
            response.reward = float(self.task.is_eval)
            return [response]

    trained = TasksetConfig(workflow=Reused, format=FormatConfig(prompt_key="question"))
    trained.gconfig = GenerationHyperparameters(temperature=0.7, max_new_tokens=9)
    held_out = TasksetConfig(workflow=Reused, format=FormatConfig(prompt_key="question"))
    evaluator = GenerationHyperparameters(greedy=True, max_new_tokens=5)
    own = TasksetConfig(workflow=Reused, format=FormatConfig(prompt_key="question"))
    own.gconfig = GenerationHyperparameters(temperature=0.3, max_new_tokens=4)
    engine = Scripted(tokenizer, "x")
    training = TaskRunner([trained], tokenizer, group_size=1)
    rewards = []
    for runner in (
        training,
        TaskRunner([held_out], tokenizer, gconfig=evaluator, is_eval=True),
        TaskRunner([own], tokenizer, gconfig=evaluator, is_eval=True),
        training,
    ):
        (experience,) = asyncio.run(runner.arun_episode(engine, {"question": "1"}))
        rewards.append(experience.reward)
    asked = [(request.gconfig.effective_temperature, request.gconfig.max_new_tokens) for request in engine.requests]
    assert asked == [(0.7, 9), (1.0, 5), (0.3, 4), (0.7, 9)]
    assert engine.requests[1].gconfig.greedy
    assert rewards == [0.0, 1.0, 1.0, 0.0]


class OfItsTaskset(Workflow):
    """Reads its arguments once, as a workflow does whose building is heavy."""

    can_reset = True  # the second name of resettable

    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model)
        self.level = task.workflow_args["level"]

    def reset(self, task): ...

    def run(self):
        (response,) = self.model.chat(self.task.messages())
        response.reward = float(self.level)
        return [response]


def test_a_workflow_is_reused_within_its_taskset_alone(tokenizer):
    tasksets = [
        TasksetConfig(name=name, workflow=OfItsTaskset, workflow_args={"level": level}, format=TASKSET.format)
        for name, level in (("easy", 1), ("hard", 2))
    ]
    runner = TaskRunner(tasksets, tokenizer)
    engine = Scripted(tokenizer, "x")
    rewards = []
    for name in ("easy", "hard", "easy", "hard"):
        (experience,) = asyncio.run(runner.arun_episode(engine, {"question": "1", "taskset": name}))
        rewards.append(experience.reward)
    assert rewards == [1.0, 2.0, 1.0, 2.0]
    assert sum(map(len, runner._workflows._idle.values())) == 2  # reused, not built four times


def test_a_trait_may_go_by_the_task_but_by_nothing_else():
    by_task = type("ByTask", (Workflow,), {"repeatable": property(lambda self: self.task.workflow_args.get("often", False))})
    assert not class_trait(by_task, "repeatable", Task())
    assert class_trait(by_task, "repeatable", Task(workflow_args={"often": True}))
    by_more = type("ByMore", (Workflow,), {"repeatable": property(lambda self: self.model.is_cheap)})
    with pytest.raises(WorkflowError, match=r"ByMore\.repeatable is asked before there is an instance"):
        class_trait(by_more, "repeatable", Task())


def test_who_asks_to_be_told_the_group_s_size_is_told(tokenizer):
    class Told(Workflow):
        def set_repeat_times(self, repeat_times, run_id_base):
            self.repeat_times = repeat_times

        def run(self):
            responses = self.model.chat(self.task.messages(), n=self.repeat_times)
            for response in responses:
                response.reward = 0.0
            return responses

    assert len(run(Told, {"question": "1", "answer": "1"}, Scripted(tokenizer, "x"), tokenizer, group_size=3)) == 3


def test_a_taskset_without_generation_arguments_has_the_run_s(tokenizer):
    from rollwright import GRPOConfig
    from rollwright.data.selectors import TaskMixture
    from rollwright.placement.task_services import TaskServices
    from rollwright.trainers.drawn_tasks import training_workflow

    config = GRPOConfig(gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=7, temperature=0.6))
    config.tasksets = [
        TasksetConfig(name="plain"),
        TasksetConfig(name="own", gconfig=GenerationHyperparameters(max_new_tokens=9)),
    ]
    mixture = TaskMixture(config.tasksets, [[{"prompt": "1"}], [{"prompt": "2"}]], 1)
    runner = training_workflow(config, tokenizer, mixture, TaskServices(config, tokenizer))
    asked = [runner.generation_of(taskset) for taskset in config.tasksets]
    assert [(each.max_new_tokens, each.temperature) for each in asked] == [(7, 0.6), (9, 1.0)]
