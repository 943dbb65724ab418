"""Trains on what a command-line agent does: the program runs unmodified in a box, and its calls to the model are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.environments.harbor.task_box import TaskBox
from rollwright.environments.harbor.tasks import COLUMN, folder_of
from rollwright.errors import ConfigError, RefusedFilesError, RewardError, WorkflowError
from rollwright.experience.durable import durable
from rollwright.inference.front.openai_front import OpenAIEpisode, OpenAIFront
from rollwright.processes.box import Box, BoxLimits, BoxSpec, ExecResult
from rollwright.processes.boxes import Programs, box_limits, make_box, programs_in
from rollwright.processes.sandbox import sandbox_name
from rollwright.processes.warm_boxes import WarmBoxes
from rollwright.rewards.wrapper import REWARD_CALLS, AsyncRewardWrapper
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.command_presets import KEY_OF, CommandAgent
from rollwright.workflows.openai_agent import FrontWorkflow
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.turns import fill

logger = getLogger("agents")

#: Starts an agent's program with arguments, ``timeout``, ``stdin`` and ``env``; see ``WarmBox.exec``.
Start = Callable[..., Awaitable[ExecResult]]

TESTS_OF_TASK = "task"  #: Value of ``verifier`` for tasks that are folders with tests of their own.
#: Port of the box's loopback at which the front answers; the tasks' own servers rarely use it.
FRONT_PORT = 18123
WORKDIR, HOME = "/app", "/home/agent"
_LOOK_SECONDS = 0.2  # between looks at whether the conversation has outgrown the context
_TOLD = 2000  # characters of a program's output in messages


@WORKFLOWS.register_module("command_agent")
class CommandAgentWorkflow(FrontWorkflow):
    """Runs a command-line agent, such as Claude Code or mini-swe-agent, in a box, and trains on its calls to the model.

    Each episode has a box of its own (``rollout.sandbox``), with an empty home directory and a working directory that holds the task's
    files. The box has no network: the program reaches only the ``OpenAIFront`` that answers with the policy and records each call, in the
    program's own dialect. Whatever the program started ends with the box. If the agent names ``imports``, boxes are reset and used
    again, except those of task folders.

    A row of the dataset has the task's prompt, and may have these columns: ``files`` (path -> text), which are written into the working
    directory, and ``workdir`` (a directory of this machine), which is copied there.

    A program that fails or runs out of time is scored like any other. A working directory that cannot be copied out of the box, for
    example because a link leads out of it, scores 0. A conversation that exceeds the context ends the program after
    ``overflow_seconds``, and its rows are marked as truncated.

    Args:
        agent: a preset (``mini-swe-agent``, ``claude-code``, ``codex``, ``qwen-code``, ``opencode``, or one that you registered), a
            ``CommandAgent`` or its import path, or a mapping of its fields (``command``, ``environment``, ``files``, …).
        tokenizer: the policy's tokenizer, or its path.
        gconfig: defaults of the generation arguments.
        reward_fn: scores the episode; function, name, import path or URL. Its completion is the model's last reply. It may take these
            keywords besides the task's columns: ``workdir`` (a copy of the working directory), ``transcript`` (the messages of the
            first conversation), ``conversations`` (all of them), ``stdout``, ``stderr`` and ``exit_code`` (None if a limit ended the
            program).
        reward_timeout: time limit of the reward function or the verifier, in seconds.
        verifier: script of this machine, or a directory with ``test.sh``, that scores the episode in place of ``reward_fn``. It runs in
            a box of its own, in a copy of the working directory, with its files and the row (``task.json``) in ``/tests``. Exit code
            0 scores the number in its last line of output, or 1; exit code 1, and a limit, score 0; other exit codes are errors.
            ``task``: the tests of the task folder (``kind: harbor``), which also has the time limit and the limits of the box.
        programs: directories of this machine that contain programs, which the box can read: virtual environments, directories with
            ``node_modules``, or others, which are put into ``PATH`` themselves.
        timeout: time limit of the program, in seconds.
        limits: other limits: fields of ``BoxLimits``.
        image: image of a docker or podman box.
        model_name: name of the model for the program.
        front: an ``OpenAIFront`` to share. None creates one that ends with the workflow.
        overflow_reward: reward of an episode whose first prompt or reward failed because the conversation exceeded the context.
        overflow_seconds: time that a program gets to end after its conversation has exceeded the context.
        opponents, pool: models that are not trained; see ``FrontWorkflow``. ``{api_key:NAME}`` in the agent's texts is the key of one.
        boxes: number of boxes that an agent with ``imports`` has at most, each with a process that holds them. Further episodes wait.
    """

    def __init__(
        self,
        agent: CommandAgent | Mapping[str, Any] | str,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None = None,
        reward_fn: Callable[..., Any] | str | None = None,
        reward_timeout: float = 60.0,
        verifier: str = "",
        programs: Sequence[str] | str = (),
        timeout: float = 600.0,
        limits: BoxLimits | Mapping[str, int] | None = None,
        image: str = "",
        model_name: str = "policy",
        front: OpenAIFront | None = None,
        overflow_reward: float = 0.0,
        overflow_seconds: float = 10.0,
        boxes: int = 2 * (os.cpu_count() or 1),
        opponents: Mapping[str, str] | None = None,
        pool: Mapping[str, Any] | None = None,
    ) -> None:
        if boxes < 1:
            raise ConfigError(f"CommandAgentWorkflow: boxes is {boxes}; it is at least 1.")
        if timeout <= 0 or reward_timeout <= 0 or overflow_seconds < 0:
            raise ConfigError("CommandAgentWorkflow: timeout and reward_timeout are above 0, overflow_seconds is at least 0.")
        if (reward_fn is None) == (not verifier):
            raise ConfigError(
                "CommandAgentWorkflow: set reward_fn or workflow_kwargs.verifier, one of them; "
                + ("neither is set." if reward_fn is None else "both are set.")
            )
        if verifier == TESTS_OF_TASK and (limits or image):
            raise ConfigError(
                "CommandAgentWorkflow: verifier is 'task', so limits and image are those of the task's folder; leave them out."
            )
        self.agent = CommandAgent.of(agent)
        self.reward_fn = None if reward_fn is None else AsyncRewardWrapper(reward_fn, reward_timeout)
        self.reward_timeout = reward_timeout
        self.graded_by_task = verifier == TESTS_OF_TASK
        self.verifier = _existing(verifier, "verifier").resolve() if verifier and not self.graded_by_task else None
        self.programs = programs_in(programs, own=(WORKDIR, HOME))
        self.timeout = timeout
        self.limits = box_limits(limits)
        self.image = image
        self.boxes = boxes
        self._warm: dict[str, WarmBoxes] = {}  # by the name of the sandbox
        self.overflow_seconds = overflow_seconds
        super().__init__(tokenizer, gconfig, model_name, front, overflow_reward, opponents, pool)
        self.agent.refuse_unknown_keys(self.opponents.keys)
        self.episode_settings = {
            "side_conversations": self.agent.side_conversations,
            "resamples_equal": False,  # such programs retry, and do not sample a prompt twice
        }

    @staticmethod
    def box_image(arguments: Mapping[str, Any]) -> str | None:
        """Return the image of the boxes: empty for the default one, None for that of each task folder."""
        return None if arguments.get("verifier") == TESTS_OF_TASK else arguments.get("image") or ""

    async def run_agent(self, episode: OpenAIEpisode, data: dict[str, Any]) -> float | None:
        """Run the program in a box of its own, and score what it did."""
        if self.graded_by_task:
            return await self._work_on_folder(episode, data)
        if COLUMN in data:
            raise WorkflowError(
                f"the task is a folder with tests of its own: set workflow_kwargs.verifier to {TESTS_OF_TASK!r}."
            )
        task = task_text(data)
        async with temporary_directory() as work:
            async with self._agents_box() as (box, start):
                await upload_files(box, data)
                ended = await self._run(box, episode, task, start=start)
                check_calls(episode, self.agent, ended)
                if not episode.calls:
                    return None  # the first prompt exceeded the context
                try:
                    await box.download(box.workdir, work)
                except RefusedFilesError as error:
                    logger.warning("an episode's working directory cannot be scored: %s", error)
                    return 0.0
            if self.verifier is not None:
                return await durable(f"{REWARD_CALLS}verifier").awaited(self._verify, self.verifier, work, data)
            return await self._score(episode, task, data, work, ended)

    async def _work_on_folder(self, episode: OpenAIEpisode, data: dict[str, Any]) -> float | None:
        """Run the program on each step of a task folder, whose tests score it."""
        ports = {FRONT_PORT: self.front.socket}
        async with TaskBox(folder_of(data), ports=ports, readable=self.programs.readable, recorded=False) as task:
            async for attempt in task.steps():
                ended = await self._run(task.box, episode, attempt.instruction, min(self.timeout, attempt.seconds))
                attempt.timed_out = ended.excess == "time"
                check_calls(episode, self.agent, ended)
                if not episode.calls:
                    return None  # the first prompt exceeded the context
            others = {f"verifier_{name}": value for name, value in task.all_rewards.items()}
            get_tracker("rollout").scalar(**others)
            return task.reward

    @contextlib.asynccontextmanager
    async def _agents_box(self) -> AsyncIterator[tuple[Box, Start | None]]:
        """Lend a box for an episode's program, and the way to start it there if its imports are done."""
        ports = {FRONT_PORT: self.front.socket}
        if not self.agent.imports:
            async with self._box(ports) as box:
                yield box, None
            return
        kind, agent = sandbox_name(), self.agent
        if kind not in self._warm:
            self._warm[kind] = WarmBoxes(
                lambda: make_box(kind, self._spec({FRONT_PORT: self.front.socket})),
                self.programs.on_path,
                agent.program,
                agent.imports,
                agent.fixed_variables,
                self.boxes,
            )
        async with self._warm[kind].lent() as warm:
            yield warm.box, warm.exec

    @contextlib.asynccontextmanager
    async def _box(self, ports: Mapping[int, Path]) -> AsyncIterator[Box]:
        box = make_box(sandbox_name(), self._spec(ports))
        await box.start()
        try:
            yield box
        finally:
            await box.stop()

    def _spec(self, ports: Mapping[int, Path]) -> BoxSpec:
        return BoxSpec(
            limits=self.limits,
            ports=ports,
            readable=self.programs.readable,
            writable=(WORKDIR, HOME, "/tmp", "/logs", "/tests"),
            image=self.image,
        )

    async def _run(
        self, box: Box, episode: OpenAIEpisode, task: str, timeout: float | None = None, start: Start | None = None
    ) -> ExecResult:
        """Run the program until it ends or exceeds a limit: its own, or the context."""
        root_url = box.url(FRONT_PORT)
        values = {"base_url": f"{root_url}/v1", "root_url": root_url, "api_key": episode.api_key}
        values |= {"model": self.front.model_name, "task": task, "home": box.home}
        values |= {f"{KEY_OF}{name}": opponent.api_key for name, opponent in episode.opponents.items()}
        started = asyncio.get_running_loop().time()
        running = asyncio.ensure_future(run_command(box, self.agent, values, self.programs, timeout or self.timeout, start))
        try:
            left = self.overflow_seconds
            while not running.done() and left >= 0:
                await asyncio.wait({running}, timeout=_LOOK_SECONDS)
                left -= _LOOK_SECONDS if episode.recorder.outgrew_context else 0.0
            if running.done():
                return await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return ExecResult("", "", None, asyncio.get_running_loop().time() - started, "context")

    async def _score(self, episode: OpenAIEpisode, task: str, data: dict[str, Any], work: Path, ended: ExecResult) -> float:
        """Call the reward function."""
        assert self.reward_fn is not None
        conversations, records = episode.conversations, episode.records
        transcript = conversations[0] if conversations else []
        replies = [message["content"] for message in transcript if message["role"] == "assistant"]
        columns = {
            "workdir": work,
            "transcript": transcript,
            "conversations": conversations,
            "stdout": ended.stdout,
            "stderr": ended.stderr,
            "exit_code": ended.exit_code,
        }
        completion_ids = next(record.output_ids for record in reversed(records) if record.rid == records[0].rid)
        return await self.reward_fn(
            task, replies[-1] if replies else "", records[0].prompt_ids, completion_ids, **{**data, **columns}
        )

    async def _verify(self, verifier: Path, work: Path, data: dict[str, Any]) -> float:
        """Run the verifier in a box of its own."""
        is_directory = _is_directory(verifier)
        script = f"/tests/{'test.sh' if is_directory else verifier.name}"
        async with self._box({}) as box:
            await box.upload(work, box.workdir)
            await box.upload(verifier, "/tests" if is_directory else script)
            async with temporary_directory() as made:
                write_files(made, {"task.json": json.dumps(data, default=repr)})
                await box.upload(made, "/tests")
            command = self.programs.on_path([*_interpreter(script), script])
            result = await box.exec(command, timeout=self.reward_timeout)
        return _verdict(result, verifier)


# -- what goes into a box, and how the program is run --------------------------------------------------------------------


async def run_command(
    box: Box,
    agent: CommandAgent,
    values: Mapping[str, str],
    programs: Programs,
    timeout: float,
    start: Start | None = None,
) -> ExecResult:
    """Write an agent's files into the home directory of a box, and run it in the working directory.

    Args:
        box: a started box, which the program's ports and files are known to.
        agent: the agent.
        values: values of the ``PLACEHOLDERS``.
        programs: what is put into ``PATH``.
        timeout: time limit in seconds.
        start: starts the program with its imports done. None starts it as a command.
    """
    async with temporary_directory() as made:
        if write_files(made, agent.home_files(values)):
            await box.upload(made, box.home)
    command, stdin, env = agent.command_line(values), fill(agent.stdin, **values), agent.variables(values)
    if start is not None:
        return await start(command[1:], timeout=timeout, stdin=stdin, env=env)
    return await box.exec(programs.on_path(command), timeout=timeout, stdin=stdin, env=env)


async def upload_files(box: Box, data: Mapping[str, Any]) -> None:
    """Copy the files of a task, its columns ``workdir`` and ``files``, into the working directory of a box.

    Raises:
        WorkflowError: a column holds something else.
    """
    if data.get("workdir"):
        await box.upload(_directory(data["workdir"]), box.workdir)
    files = data.get("files") or {}
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise WorkflowError(f"the task's column 'files' holds {files!r:.100}; it has to map paths to texts.")
    async with temporary_directory() as made:
        if write_files(made, files):
            await box.upload(made, box.workdir)


def write_files(directory: Path, files: Mapping[str, str]) -> bool:
    """Write files below a directory, and return whether there were any.

    Raises:
        WorkflowError: a path leads out of the directory.
    """
    for name, content in files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise WorkflowError(f"the file {name!r} would be outside of its directory: give a relative path without '..'.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return bool(files)


@contextlib.asynccontextmanager
async def temporary_directory() -> AsyncIterator[Path]:
    """Make a directory that is removed at the end of the block."""
    directory = _new_directory()
    try:
        yield directory
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="rollwright-agent-")).resolve()


def _directory(path: str) -> Path:
    found = Path(path).expanduser().resolve()
    if not found.is_dir():
        raise WorkflowError(f"the task's column 'workdir' names {path!r}, which is no directory of this machine.")
    return found


def _is_directory(path: Path) -> bool:
    return path.is_dir()


def task_text(data: Mapping[str, Any]) -> str:
    """Return the text that an agent is asked: that of the task's messages.

    Raises:
        WorkflowError: the task has none.
    """
    contents = [message.get("content") for message in data.get("messages") or ()]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part if isinstance(part, str) else part.get("text") for part in parts if part]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise WorkflowError(
            "the task's prompt is no text, which is all that a command line can be given: put images and other files into the column "
            "'files' or 'workdir', and name the column of the prompt in the dataset's format."
        )
    return "\n\n".join(texts)


def _existing(path: str, what: str) -> Path:
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise ConfigError(f"CommandAgentWorkflow: {what} names {path!r}, and there is no {found} on this machine.")
    return found


# -- what came of it -----------------------------------------------------------------------------------------------------


def check_calls(episode: OpenAIEpisode, agent: CommandAgent, ended: ExecResult) -> None:
    """Report how a program ended.

    Raises:
        WorkflowError: it made no call to the model, which says more about its installation than about the policy.
    """
    failed = ended.exit_code not in (0, None)
    get_tracker("rollout").scalar(
        command_seconds=ended.seconds, command_failed=float(failed), command_cut=float(ended.exit_code is None)
    )
    how = f"was ended by a limit ({ended.excess})" if ended.exit_code is None else f"ended with exit code {ended.exit_code}"
    said = (ended.stderr.strip() or ended.stdout.strip())[-_TOLD:] or "nothing"
    refused = ""
    if episode.refusals:
        refused = f" The front refused {len(episode.refusals)} of its calls, the last because: {episode.refusals[-1]}"
    if not episode.calls and not episode.recorder.outgrew_context:
        install = (
            f" If it is not installed there: {agent.install}, and name its directory in workflow_kwargs.programs."
            if agent.install
            else ""
        )
        raise WorkflowError(
            f"{agent.program} {how} in its box before its first answered call to the model.{refused}{install} It said: {said}"
        )
    if failed or episode.refusals:
        logger.info("%s %s after %d calls.%s It said: %s", agent.program, how, len(episode.calls), refused, said)


def _interpreter(script: str) -> list[str]:
    """Return the program that runs a script, which need not be executable."""
    return {".py": ["python3"], ".sh": ["sh"]}.get(Path(script).suffix, [])


def _verdict(result: ExecResult, verifier: Path) -> float:
    """Return the reward of a verifier's result.

    Raises:
        RewardError: the verifier failed.
    """
    if result.exit_code in (1, None):  # a limit ends it if it runs a program of the agent's that never ends
        return 0.0
    if result.exit_code != 0:
        raise RewardError(
            f"the verifier {verifier} ended with exit code {result.exit_code}; 0 is a success and 1 a failure. It said: "
            f"{(result.stderr or result.stdout).strip()[-_TOLD:] or 'nothing'}"
        )
    lines = result.stdout.strip().splitlines()
    with contextlib.suppress(ValueError):
        reward = float(lines[-1]) if lines else 1.0
        if not math.isfinite(reward):
            raise RewardError(
                f"the verifier {verifier} printed {lines[-1]!r}; its last line has to be a finite number, or no number."
            )
        return reward
    return 1.0
