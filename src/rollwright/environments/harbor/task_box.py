"""An episode on a task folder: the agent's box with the task's files, its steps, and the verifier after each.

Any workflow can use it::

    async with TaskBox(folder_of(data)) as task:
        async for attempt in task.steps():              # one for most tasks; the step is graded when the loop goes on
            await agent(attempt.instruction, task)      # works in the box: task.run(command), or task.box
    reward = task.reward
"""

from __future__ import annotations

import asyncio
import posixpath
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from rollwright.environments.harbor.folder import LOGS, RESERVED, SOLUTION, TaskFolder, TaskStep, is_below, resolved
from rollwright.environments.harbor.images import box_kind, image_files
from rollwright.environments.harbor.score import combined, falls_short, run_tests
from rollwright.environments.harbor.task_file import EnvironmentTable, Healthcheck
from rollwright.errors import SandboxError, VerifierError
from rollwright.experience.durable import durable
from rollwright.processes.box import Box, BoxLimits, BoxSpec, ExecResult
from rollwright.processes.boxes import make_box
from rollwright.processes.sandbox import sandbox_name

#: Puts the content of the archive ``$1`` in the place of what ``$2`` holds.
_UNPACK = (
    'if [ -d "$2" ]; then find "$2" -mindepth 1 -delete; fi; tar -x -f "$1" -C / --no-same-owner --no-overwrite-dir && rm "$1"'
)
_FILE_SECONDS = 120.0  # for packing and unpacking the agent's files


@dataclass
class Attempt:
    """The agent's work on one step.

    Attributes:
        step: the step.
        timed_out: set by the workflow if the agent used up its time; it is graded all the same.
    """

    step: TaskStep
    timed_out: bool = False

    @property
    def instruction(self) -> str:
        """What the agent is asked."""
        return self.step.instruction

    @property
    def seconds(self) -> float:
        """Time of the agent, which the workflow has to keep."""
        return self.step.seconds


class TaskBox:
    """The box of one episode on a task folder; see the module.

    Preparation, commands and grading are durable calls of kind ``restart``: a replay answers them from the journal without a box, and a
    resumed run starts the episode over.

    Args:
        folder: the task.
        sandbox: kind of box, as in ``rollout.sandbox``. None uses that of the taskset, else of the episode.
        ports: port in the box -> Unix socket of this machine that it leads to.
        readable: path in the box -> file or directory of this machine.
        environment: further variables of every command in the agent's box.
        recorded: False for a workflow whose agent is a program that runs again when its episode is replayed: preparation and grading
            then run again, too.

    Attributes:
        rewards: rewards of each graded step, by name.
    """

    def __init__(
        self,
        folder: TaskFolder,
        sandbox: str | None = None,
        *,
        ports: Mapping[int, Path] | None = None,
        readable: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
        recorded: bool = True,
    ) -> None:
        self.folder = folder
        self.rewards: list[dict[str, float]] = []
        self._sandbox = sandbox or folder.options.sandbox or sandbox_name()
        self._given = {"ports": dict(ports or {}), "readable": dict(readable or {})}
        self._environment = dict(environment or {})
        self._recorded = recorded
        self._box: Box | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End the box. Idempotent."""
        box, self._box = self._box, None
        if box is not None:
            await box.stop()

    @property
    def box(self) -> Box:
        """The agent's box, from the first step on.

        Raises:
            SandboxError: it does not run: no step has begun, or the episode is a replay.
        """
        if self._box is None:
            raise SandboxError(f"{self.folder.name}: the box runs only within a step of steps(), and not in a replay.")
        return self._box

    @property
    def reward(self) -> float:
        """Reward of the task: that of the taskset's ``reward_key``.

        Raises:
            VerifierError: no step was graded, or the tests wrote no reward of that name.
        """
        key, rewards = self.folder.options.reward_key, self.all_rewards
        if key not in rewards:
            raise VerifierError(
                f"{self.folder.name}: the tests wrote no reward {key!r}; they wrote {', '.join(rewards) or 'none'}. Choose one "
                "with kwargs: {reward_key: …}."
            )
        return rewards[key]

    @property
    def all_rewards(self) -> dict[str, float]:
        """Rewards of the task by name, those of several steps combined as the task says."""
        return combined(self.rewards, self.folder.strategy) if self.rewards else {}

    # -- the agent -----------------------------------------------------------------------------------------------------

    async def steps(self) -> AsyncIterator[Attempt]:
        """Yield each step when its box is ready, and grade it when the loop goes on; ends at a step that fell short.

        Raises:
            SandboxError: the box does not start, or is not made ready.
            VerifierError: a step could not be graded.
        """
        for number, step in enumerate(self.folder.steps):
            await self._call("task step", self._prepare, number)
            attempt = Attempt(step)
            yield attempt
            rewards = await self._call("task verifier", self._grade, number)
            self.rewards.append(rewards)
            if falls_short(rewards, step.min_reward):
                return

    async def run(self, command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run a command of the agent in the box; see ``Box.exec``."""

        async def run(command: Sequence[str]) -> list[Any]:
            return list(astuple(await self.box.exec(command, timeout=timeout, env=env)))

        return ExecResult(*await self._call("task command", run, list(command)))

    async def run_solution(self, attempt: Attempt) -> ExecResult:
        """Run the reference solution in place of an agent.

        Raises:
            SandboxError: the task has none.
        """
        step = attempt.step
        if step.solution is None or (step.solution.is_dir() and not (step.solution / step.solve).is_file()):
            raise SandboxError(f"{self.folder.name}: the task has no {step.solve}.")
        target = SOLUTION if step.solution.is_dir() else f"{SOLUTION}/{step.solve}"
        await self.box.upload(step.solution, target)
        script = 'chmod +x "$1" 2>/dev/null; exec "$1"'
        return await self.box.exec(
            ["sh", "-c", script, "sh", f"{SOLUTION}/{step.solve}"],
            timeout=step.seconds,
            env=resolved(self.folder.solution_env, self.folder.options),
        )

    async def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self._recorded:
            return await function(*arguments)
        return await durable(name, kind="restart").awaited(function, *arguments)

    # -- making the box ready ------------------------------------------------------------------------------------------

    async def _prepare(self, number: int) -> None:
        step = self.folder.steps[number]
        if self._box is None:
            await self._start()
        if step.workdir is not None:
            await self.box.upload(step.workdir, self.box.workdir)
            if (step.workdir / "setup.sh").is_file():
                seconds = self.folder.environment.build_timeout_sec
                result = await self.box.exec(["bash", "setup.sh"], timeout=seconds)
                if not result.ok:
                    raise SandboxError(f"{step.workdir}/setup.sh failed: {(result.stderr or result.stdout).strip()[-500:]}")
        for healthcheck in step.healthchecks:
            await until_healthy(self.box, healthcheck, self.folder.name)

    async def _start(self) -> None:
        table = self.folder.environment
        self._box = await self._started(table, self.folder.network, variables={**self._variables(table), **self._environment})

    def _variables(self, table: EnvironmentTable) -> dict[str, str]:
        return {**self.folder.files.environment, **resolved(table.env, self.folder.options)}

    async def _started(
        self, table: EnvironmentTable, network: bool, *, variables: Mapping[str, str], is_verifier: bool = False
    ) -> Box:
        """Start a box that holds the task's files."""
        folder = self.folder
        kind, image = await box_kind(folder, self._sandbox, table.docker_image if is_verifier else None)
        workdir = table.workdir or folder.workdir
        others = [path for path in (folder.workdir, *folder.directories) if not is_below(path, [workdir])]
        box = make_box(
            kind,
            BoxSpec(
                limits=_limits(table),
                writable=(workdir, folder.home, *RESERVED, *others),
                environment=variables,
                network=network,
                image=image,
                **({} if is_verifier else self._given),
            ),
        )
        await box.start()
        try:
            copies = await image_files(kind, image, [workdir, *others]) if image else folder.files.copies
            for source, target in copies:
                await box.upload(source, target)
        except BaseException:
            await box.stop()
            raise
        return box

    # -- grading -------------------------------------------------------------------------------------------------------

    async def _grade(self, number: int) -> dict[str, float]:
        """Grade what the agent left, in a box of the verifier's own unless the task or the taskset wants it in the agent's."""
        step, folder = self.folder.steps[number], self.folder
        for hook in step.verifier.collect:
            await self.box.exec(["sh", "-c", hook.command], timeout=hook.timeout_sec)
        mode = step.verifier.mode or folder.options.verifier
        environment = resolved(step.verifier.env, folder.options)
        try:
            if mode == "shared":
                return await run_tests(self.box, step, environment, exit_code_is_reward=folder.exit_code_is_reward)
            return await self._graded_apart(step, environment)
        except VerifierError as error:
            where = f"{folder.name}, step {step.name}" if step.name else folder.name
            raise VerifierError(f"{where}: {error}") from None

    async def _graded_apart(self, step: TaskStep, environment: Mapping[str, str]) -> dict[str, float]:
        table = step.verifier.environment or self.folder.environment
        box = await self._started(table, step.verifier_network, variables=self._variables(table), is_verifier=True)
        try:
            for path, excluded in self._handed_over(step):
                await carry(self.box, box, path, excluded)
            return await run_tests(box, step, environment, exit_code_is_reward=self.folder.exit_code_is_reward)
        finally:
            await box.stop()

    def _handed_over(self, step: TaskStep) -> list[tuple[str, Sequence[str]]]:
        """Return the paths of the agent's box that a separate verifier gets: its artifacts, and the rest of its work unless the task
        itself asks for a separate verifier."""
        paths: list[tuple[str, Sequence[str]]] = [(f"{LOGS}/artifacts", ()), (f"{LOGS}/agent", ())]
        if step.verifier.mode is None:
            paths += [(path, ()) for path in (self.folder.workdir, *self.folder.directories)]
        return paths + [(posixpath.join(self.folder.workdir, each.source), each.exclude) for each in step.artifacts]


def _limits(table: EnvironmentTable) -> BoxLimits:
    asked = {"memory_bytes": table.memory_bytes, "disk_bytes": table.storage_bytes}
    return BoxLimits(**{name: value for name, value in asked.items() if value is not None})


async def until_healthy(box: Box, check: Healthcheck, name: str) -> None:
    """Repeat a health check until it succeeds.

    Raises:
        SandboxError: it failed ``retries`` times after its start period.
    """
    started, failures = time.monotonic(), 0
    while True:
        result = await box.exec(["sh", "-c", check.command], timeout=check.timeout_sec)
        if result.ok:
            return
        is_starting = time.monotonic() - started < check.start_period_sec
        failures += not is_starting
        if failures >= check.retries:
            said = (result.stderr or result.stdout).strip()[-500:] or result.excess or f"exit code {result.exit_code}"
            raise SandboxError(f"{name}: the health check {check.command!r} failed {failures} times: {said}")
        await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)


async def carry(source: Box, target: Box, path: str, excluded: Sequence[str] = ()) -> None:
    """Copy a path of one box to the same path of another, where it replaces what is there.

    It is packed and unpacked inside the boxes, because the agent wrote it. A path that does not exist is left out.

    Raises:
        VerifierError: it cannot be copied.
    """
    relative = path.lstrip("/")
    if not (await source.exec(["test", "-e", path], timeout=_FILE_SECONDS)).ok:
        return
    with tempfile.TemporaryDirectory(prefix="carried-") as directory:
        archive = Path(directory) / "carried.tar"
        options = [f"--exclude={pattern}" for pattern in excluded]
        packing = await source.open(["tar", "-c", "-f", "-", *options, "-C", "/", relative])
        room = source.spec.limits.disk_bytes + 2**20
        with archive.open("wb") as file:
            while (data := await packing.read()) and file.tell() <= room:
                file.write(data)
        if await packing.end() != 0:
            raise VerifierError(f"{path} cannot be copied out of the agent's box.")
        await asyncio.to_thread(_refuse_other_names, archive, relative)
        packed = f"/tmp/{posixpath.basename(directory)}.tar"
        await target.upload(archive, packed)
    result = await target.exec(["sh", "-c", _UNPACK, "sh", packed, path], timeout=_FILE_SECONDS)
    if not result.ok:
        raise VerifierError(f"{path} cannot be copied into the verifier's box: {result.stderr.strip()[-500:]}")


def _refuse_other_names(archive: Path, path: str) -> None:
    with tarfile.open(archive, "r:") as tar:
        for member in tar:
            if not is_below(posixpath.normpath(member.name), [path]):
                raise VerifierError(f"the agent's box packed {member.name!r} instead of {path!r}.")
