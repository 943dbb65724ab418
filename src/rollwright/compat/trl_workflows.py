"""Environments and rollouts written for TRL's GRPOTrainer: ``environment_factory`` classes and ``rollout_func``, by their import path.

Neither needs the trl package. The form is that of trl 1.16, where both are experimental.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from rollwright.errors import WorkflowError
from rollwright.experience.durable import durable
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.task import Task, TaskReward, Workflow
from rollwright.workflows.tool_calling import MAX_TURNS, ToolCallingWorkflow
from rollwright.workflows.tools import Tools

_NO_TOOLS = ("reset", "get_reward")
_NO_COLUMNS = ("prompt", "completion", "completion_ids")


@WORKFLOWS.register_module("trl_environment_workflow")
class TrlEnvironmentWorkflow(ToolCallingWorkflow):
    """Plays an ``environment_factory`` class of TRL: its public methods are tools, and its text after ``reset`` ends the user's message.

    ``reset(**row)`` gets the columns of the task. The sample's reward is the sum of the environment's ``get_reward()``, if it has one,
    of ``reward_funcs``, and of the task's reward function, if it names one. An instance plays one episode at a time, always in the
    same thread, and is reset for the next one. A tool that raises is answered with the error's name and message. With calls in the
    journal, a replay does not play the environment again, and a resumed run starts the episode over. ``workflow_args`` may hold:

    * ``environment_factory``: a class, or a function without arguments; or its import path; or a mapping from the value of the task's
      column ``environment`` to these;
    * ``tools``: further tools, as for ``tool_calling_workflow``;
    * ``reward_funcs``: reward functions in TRL's form, or their import paths;
    * ``max_turns`` (8), ``tool_timeout`` (30 seconds).
    """

    uses_sandbox = staticmethod(lambda arguments: False)

    def reset(self, task: Task) -> None:
        """Take the next task; the instance of its environment is kept."""
        self.task = task
        arguments = task.arguments(environment_factory=None, tools=[], reward_funcs=[], tool_timeout=30.0, max_turns=MAX_TURNS)
        self.max_turns = arguments["max_turns"]
        self._arguments = arguments
        self._rewards = TrlRewards(arguments["reward_funcs"], task)
        self._kept: dict[Any, EnvironmentThread] = getattr(self, "_kept", {})

    async def run_async(self) -> list[Experience]:
        """Reset the environment, converse, and score."""
        name, factory = self._chosen()
        environment = self._kept.get(name)
        if environment is None or environment.is_busy:
            environment = self._kept[name] = EnvironmentThread(factory)
        self._environment = environment
        await environment.start()
        row = {key: value for key, value in self.task.raw_task.items() if name is None or key != "environment"}
        observation = await durable("reset", kind="restart").awaited(environment.reset, **row)
        self.tools = Tools([*self._arguments["tools"], *environment.tools()], self._arguments["tool_timeout"])
        async with self.tools:
            return await self._converse(with_observation(self._prompt(), observation))

    def _chosen(self) -> tuple[Any, Callable[[], Any]]:
        """Return the name of the task's environment, None if there is only one, and its factory."""
        factory = self._arguments["environment_factory"]
        name = None
        if factory is None:
            raise WorkflowError("trl_environment_workflow: workflow_args names no environment_factory.")
        if isinstance(factory, Mapping):
            name = self.task.raw_task.get("environment")
            if name not in factory:
                raise WorkflowError(
                    f"task {self.task.task_id!r} has the environment {name!r}; environment_factory has {', '.join(map(repr, factory))}."
                )
            factory = factory[name]
        return name, resolve_function(factory, "environment_factory")

    def _prompt(self) -> list[dict[str, Any]]:
        names = ("prompt", "messages", self.task.format_args.prompt_key, self.task.format_args.messages_key)
        if not any(name in self.task.raw_task for name in names):
            return [{"role": "user", "content": ""}]  # the environment owns the data
        return self.task.messages()

    async def _score(self, reply: Experience, messages: list[dict[str, Any]], calls: list[dict[str, Any]]) -> float:
        environment = self._environment
        first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        ids = reply.tokens[reply.prompt_length :].tolist()
        own = await durable("get_reward", kind="restart").awaited(environment.get_reward)
        return await self._rewards(
            reply,
            given=[] if own is None else [float(own)],
            prompts=[messages[:first]],
            completions=[messages[first:]],
            completion_ids=[ids],
            environments=[environment.instance],
            run=environment.call,
        )


class EnvironmentThread:
    """One instance of an environment, all of whose methods run in one thread, because some belong to their thread.

    Args:
        factory: makes the instance.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory
        self.instance: Any = None
        self._running = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    @property
    def is_busy(self) -> bool:
        """True if a method of an earlier episode still runs, after its time limit."""
        return self._running > 0

    async def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function in the thread; an async one is awaited on the event loop."""
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        context = contextvars.copy_context()
        self._running += 1
        future = self._thread.submit(context.run, functools.partial(function, **arguments))
        future.add_done_callback(self._ended)
        return await asyncio.wrap_future(future)

    def _ended(self, _: Any) -> None:
        self._running -= 1

    async def start(self) -> None:
        """Make the instance, if there is none.

        Raises:
            WorkflowError: it has no ``reset``.
        """
        if self.instance is None:
            self.instance = await self.call(self.factory)
        if not callable(getattr(self.instance, "reset", None)):
            raise WorkflowError(f"{type(self.instance).__name__}, made by the environment_factory, has no method reset(**row).")

    async def reset(self, **row: Any) -> Any:
        """Reset the instance with a row, and return its observation."""
        return await self.call(self.instance.reset, **row)

    async def get_reward(self) -> float | None:
        """Return the environment's own reward, or None if it has none."""
        own = getattr(type(self.instance), "get_reward", None)
        return None if own is None else await self.call(self.instance.get_reward)

    def tools(self) -> list[Callable[..., Any]]:
        """Return the public methods of the instance's class as async tools."""
        names = [name for name, _ in inspect.getmembers(type(self.instance), predicate=inspect.isfunction)]
        return [self._tool(getattr(self.instance, name)) for name in names if name not in _NO_TOOLS and name[0] != "_"]

    def _tool(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def call(**arguments: Any) -> Any:
            result = await self.call(method, **arguments)
            return result if isinstance(result, str) else str(result)

        return call if hasattr(method, "durable") else durable(kind="restart")(call)


def with_observation(messages: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """Append the text that ``reset`` returned to the last message.

    Raises:
        WorkflowError: it returned something else than text, text blocks or None.
    """
    if observation is None:
        return messages
    if isinstance(observation, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in observation):
        observation = "".join(part["text"] for part in observation)
    if not isinstance(observation, str):
        raise WorkflowError(f"reset returned {observation!r:.80}: return a text, or None. Images are not supported.")
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{observation}"}]


class TrlRewards:
    """Sums the rewards of a completion, as TRL does with weights of 1.

    Args:
        functions: reward functions in TRL's form, ``function(prompts, completions, completion_ids, **columns) -> list``, plain or async,
            or their import paths. None in the list means no reward.
        task: the task, whose own reward function, if any, is added.
    """

    def __init__(self, functions: Sequence[Any], task: Task) -> None:
        self.functions = [resolve_function(function, "reward_funcs") for function in functions]
        self.task = task
        self.own = TaskReward(task, "the TRL workflow") if task.reward_function() is not None else None

    async def __call__(
        self,
        reply: Experience,
        *,
        given: Sequence[float] = (),
        run: Callable[..., Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> float:
        """Return the sum of the rewards of one completion.

        Args:
            reply: the last reply, for the task's own function.
            given: rewards that are known already.
            run: awaited with a plain function and its arguments; default: in another thread.
            extra: further columns, each with the value for this completion.
            arguments: ``prompts``, ``completions``, ``completion_ids`` and ``environments``, lists of one.

        Raises:
            WorkflowError: a function returned no list of one reward, or there is no reward at all.
        """
        columns = {key: [value] for key, value in self.task.raw_task.items() if key not in _NO_COLUMNS}
        columns |= {key: [value] for key, value in (extra or {}).items()}
        rewards: list[float] = list(given)
        for function in self.functions:
            arguments_of_all = {
                **columns,
                **arguments,
                "trainer_state": SimpleNamespace(global_step=0),
                "log_extra": lambda column, values: None,
                "log_metric": lambda name, value: get_tracker("rollout").scalar(**{name: float(value)}),
            }
            if inspect.iscoroutinefunction(function):
                result = await function(**arguments_of_all)
            else:
                result = await (run or asyncio.to_thread)(function, **arguments_of_all)
            if not isinstance(result, Sequence) or len(result) != 1:
                raise WorkflowError(
                    f"the reward function {getattr(function, '__name__', function)!r} returned {result!r:.80} for one completion: "
                    "return a list with one reward for each."
                )
            rewards += [float(value) for value in result if value is not None]
        if self.own is not None:
            rewards.append(await self.own(reply))
        if not rewards:
            raise WorkflowError(
                f"task {self.task.task_id!r} has no reward: give the environment a get_reward(), or set reward_funcs or the taskset's "
                "reward_fn."
            )
        return sum(rewards)


@WORKFLOWS.register_module("trl_rollout_workflow")
class TrlRolloutWorkflow(Workflow):
    """Runs a ``rollout_func`` of TRL, ``rollout_func(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", …}``.

    ``prompts`` holds the task's prompt once for each sample that is missing, and ``trainer`` is a :class:`TrlTrainer`. Each completion
    is a sample; ``env_mask`` says which of its tokens the model sampled. Log-probabilities come from the record, so those that are
    returned are not used. A token that counts as sampled but was not is an error. Other columns go to the reward functions.
    ``workflow_args`` may hold:

    * ``rollout_func``: the function, or its import path;
    * ``reward_funcs``: reward functions in TRL's form, or their import paths. The taskset's reward function is added, if it has one.
    """

    def run(self) -> list[Experience]:
        """Call the function, and score its completions."""
        arguments = self.task.arguments(rollout_func=None, reward_funcs=[])
        if arguments["rollout_func"] is None:
            raise WorkflowError("trl_rollout_workflow: workflow_args names no rollout_func.")
        function = resolve_function(arguments["rollout_func"], "rollout_func")
        rewards = TrlRewards(arguments["reward_funcs"], self.task)
        prompt = self.task.raw_task["prompt"] if "prompt" in self.task.raw_task else self.task.messages()
        count = self.task.rollout_args.n_samples
        output = function([prompt] * count, TrlTrainer(self.model, self.task))
        rows = _completions(function, output, count)
        return [self._scored(prompt, number, row, rewards) for number, row in enumerate(rows)]

    def _scored(self, prompt: Any, number: int, row: dict[str, Any], rewards: TrlRewards) -> Experience:
        ids, completion = list(row.pop("prompt_ids")), list(row.pop("completion_ids"))
        row.pop("logprobs")
        mask = row.pop("env_mask", None)
        tokenizer = self.model.tokenizer
        text = tokenizer.decode(completion, skip_special_tokens=True)
        experience = Experience(
            tokens=[*ids, *completion],
            prompt_length=len(ids),
            action_mask=None if mask is None else [bool(value) for value in mask],
            eid=ExperienceId(run=number),
            prompt_text=tokenizer.decode(ids, skip_special_tokens=False),
            response_text=text,
        )
        is_chat = not isinstance(prompt, str)
        experience.reward = asyncio.run(
            rewards(
                experience,
                prompts=[prompt],
                completions=[[{"role": "assistant", "content": text}] if is_chat else text],
                completion_ids=[completion],
                extra=row,
            )
        )
        return experience


def _completions(function: Callable[..., Any], output: Any, count: int) -> list[dict[str, Any]]:
    """Return the columns of each completion.

    Raises:
        WorkflowError: a column is missing or has another number of rows.
    """
    name = getattr(function, "__name__", repr(function))
    needed = ("prompt_ids", "completion_ids", "logprobs")
    if not isinstance(output, Mapping):
        raise WorkflowError(f"{name} returned {type(output).__name__}; a rollout_func returns a dict with {', '.join(needed)}.")
    if missing := [key for key in needed if key not in output]:
        raise WorkflowError(f"{name} returned a dict without {', '.join(missing)}; a rollout_func returns {', '.join(needed)}.")
    if wrong := [key for key, values in output.items() if len(values) != count]:
        raise WorkflowError(
            f"{name} returned {len(output[wrong[0]])} rows of {wrong[0]!r} for {count} prompts: return one for each prompt (the prompts of "
            "a group are repeated, and trainer.num_generations is 1)."
        )
    return [{key: values[row] for key, values in output.items()} for row in range(count)]


class TrlTrainer:
    """What a ``rollout_func`` can ask of its trainer: the policy behind the names of TRL's GRPOTrainer.

    Attributes:
        processing_class: the policy's tokenizer.
        args: ``max_completion_length``, ``temperature``, ``top_p``, ``top_k``, ``num_generations`` (1).
        state: ``global_step``, the version of the weights.
        model: ``training``, False in evaluations, and ``device``.
        vllm_generation: ``generate(prompts, images, num_generations)`` with token ids, whichever engine the run has.
        accelerator: ``device``, ``process_index`` (0), ``num_processes`` (1), ``is_main_process``.
    """

    def __init__(self, model: ModelWrapper, task: Task) -> None:
        gconfig = task.rollout_args
        device = torch.device("cpu")
        self.policy = model
        self.processing_class = model.tokenizer
        self.num_generations = self.num_generations_eval = 1
        self.max_completion_length, self.temperature = gconfig.max_new_tokens, gconfig.effective_temperature
        self.args = SimpleNamespace(
            num_generations=1,
            max_completion_length=gconfig.max_new_tokens,
            temperature=gconfig.effective_temperature,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k,
        )
        self.state = SimpleNamespace(global_step=model.model_version)
        self.model = SimpleNamespace(training=not task.is_eval, device=device)
        self.accelerator = SimpleNamespace(device=device, process_index=0, num_processes=1, is_main_process=True)
        self.vllm_generation = SimpleNamespace(generate=self._generate)

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(KeyError):
            return vars(self)[name]
        raise AttributeError(
            f"the rollout_func asked for trainer.{name}, which Rollwright's trainer does not have; it has {', '.join(vars(self))}. To sample, "
            "call rollwright.compat.trl_workflows.generate_rollout_completions(trainer, prompts)."
        )

    def _generate(
        self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        if images is not None and any(images):
            raise WorkflowError("a rollout_func sent images to trainer.vllm_generation.generate, which takes text only.")
        answers = self.policy.generate(prompts, n=1)
        ids = [answer.response_tokens.tolist() for answer in answers]
        logprobs = [[[value] for value in answer.logprobs.tolist()] for answer in answers]
        return prompts, ids, logprobs, [[[token] for token in each] for each in ids]


def generate_rollout_completions(
    trainer: TrlTrainer,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool = False,
) -> list[dict[str, Any]]:
    """Sample one completion for each prompt; takes the place of the function of that name in ``trl.experimental.openenv``.

    Args:
        trainer: the trainer that the ``rollout_func`` got.
        prompts: texts, messages, or token ids. The chat template is applied to messages.
        generation_overrides: generation arguments, such as ``temperature`` and ``max_tokens``.
        as_chat: not needed; messages are recognised.

    Returns:
        ``{"prompt_ids", "completion_ids", "logprobs", "text"}`` for each prompt.
    """
    from rollwright.data.chat_template import prompt_ids

    def is_chat(prompt: Any) -> bool:
        return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)

    tokenizer = trainer.processing_class
    given = [prompt_ids(tokenizer, prompt) if is_chat(prompt) else prompt for prompt in prompts]
    answers = trainer.policy.generate(given, n=1, **(generation_overrides or {}))
    return [
        {
            "prompt_ids": answer.prompt_tokens.tolist(),
            "completion_ids": answer.response_tokens.tolist(),
            "logprobs": answer.logprobs.tolist(),
            "text": answer.response_text,
        }
        for answer in answers
    ]
