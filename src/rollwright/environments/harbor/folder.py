"""Task folders: Harbor's layout, read to a ``TaskFolder`` that a box can carry out.

::

    task.toml  instruction.md  environment/[Dockerfile]  tests/test.sh  [solution/solve.sh]
    steps/NAME/{instruction.md, tests/, [workdir/[setup.sh]], [solution/solve.sh]}     # if task.toml has [[steps]]
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from rollwright.environments.harbor.dockerfile import SYSTEM, BoxFiles, Need, follow_dockerfile
from rollwright.environments.harbor.task_file import (
    Artifact,
    EnvironmentTable,
    Healthcheck,
    NetworkTable,
    StepTable,
    TaskFile,
    TomlTable,
    VerifierTable,
    artifacts_of,
    task_file_at,
    unsupported,
)
from rollwright.environments.harbor.toml_lines import Key, TomlFile
from rollwright.errors import DataError

WORKDIR = "/app"  #: Working directory of tasks that name none.
TESTS, SOLUTION, LOGS, TEMPORARY = "/tests", "/solution", "/logs", "/tmp"
#: Directories of a box that have a purpose of their own.
RESERVED = (TESTS, SOLUTION, LOGS, TEMPORARY)
_HOMES = ("/home/agent", "/home/user")
_NO_ENVIRONMENT = EnvironmentTable()
_TEMPLATE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")


class HarborOptions(TomlTable):
    """What a taskset says about its task folders (``kwargs``).

    Attributes:
        reward_key: key of ``reward.json`` that is the reward; the others are metrics.
        network: True lets tasks that ask for the network reach it; False runs them without. None refuses them.
        host_env: variables of this machine that a task may take into its box.
        host_images: patterns of image names, such as ``debian:*``, for which the system of a box without images stands in.
        verifier: ``separate`` or ``shared`` for tasks that do not say: tests run in a new box with a copy of the working directory, or
            in the agent's box.
        agent_timeout: seconds of an agent whose task sets no limit.
        sandbox: kind of box. None uses that of the run (``rollout.sandbox``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    reward_key: str = "reward"
    network: bool | None = None
    host_env: tuple[str, ...] = ()
    host_images: tuple[str, ...] = ()
    verifier: Literal["separate", "shared"] = "separate"
    agent_timeout: float = Field(default=600.0, gt=0)
    sandbox: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> HarborOptions:
        """Check the arguments of a taskset.

        Raises:
            DataError: an argument is unknown or has a wrong value.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise DataError(f"kwargs of task folders: {'; '.join(faults)}. They are {', '.join(cls.model_fields)}.") from None


@dataclass(frozen=True)
class TaskStep:
    """One instruction and its verifier; most tasks have one step.

    Attributes:
        name: name of the step; empty if the task is a single one.
        instruction: what the agent is asked.
        seconds: time of the agent.
        verifier: how the step is graded.
        tests: directories whose contents are copied to ``/tests``, later ones over earlier ones.
        script: the script that grades, relative to ``/tests``.
        solution: directory with the reference solution, or None.
        solve: its script, relative to ``/solution``.
        workdir: directory that is copied over the working directory before the step, or None; ``setup.sh`` in it is then run.
        healthchecks: commands that must succeed before the agent begins.
        verifier_network: a separate verifier's box reaches the network.
        artifacts: further paths of the agent's box that a separate verifier gets.
        min_reward: smallest reward by key; a smaller one ends the task.
    """

    name: str
    instruction: str
    seconds: float
    verifier: VerifierTable
    tests: tuple[Path, ...]
    script: str
    solution: Path | None = None
    solve: str = "solve.sh"
    workdir: Path | None = None
    healthchecks: tuple[Healthcheck, ...] = ()
    verifier_network: bool = False
    artifacts: tuple[Artifact, ...] = ()
    min_reward: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskFolder:
    """A task as its folder describes it.

    Attributes:
        name: name in messages and metrics.
        path: the folder.
        options: what the taskset says about its folders.
        steps: the steps, in order.
        environment: settings of the agent's box.
        files: what is in the box at first.
        network: the agent's box reaches the network.
        image: image of a container, or empty.
        context: directory with a Dockerfile from which an image can be built, or None.
        needs: what only a container can do.
        strategy: how the rewards of several steps become one: ``mean`` or ``final``.
        solution_env: variables of the reference solution.
        metadata: ``[metadata]`` and ``[task]`` of the file.
        exit_code_is_reward: the grading script writes no reward; it succeeds (1) or fails (0), as in Terminal-Bench.
    """

    name: str
    path: Path
    options: HarborOptions
    steps: tuple[TaskStep, ...]
    environment: EnvironmentTable = _NO_ENVIRONMENT
    files: BoxFiles = field(default_factory=BoxFiles)
    network: bool = False
    image: str = ""
    context: Path | None = None
    needs: tuple[Need, ...] = ()
    strategy: str = "mean"
    solution_env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    exit_code_is_reward: bool = False

    @property
    def workdir(self) -> str:
        """Working directory of the box."""
        return self.environment.workdir or self.files.workdir or WORKDIR

    @property
    def home(self) -> str:
        """Home directory of the box."""
        return next(home for home in _HOMES if not is_below(self.workdir, [home]))

    @property
    def directories(self) -> list[str]:
        """Further directories of the box that hold files of the task and that its programs may change."""
        known = [self.workdir, self.home, *RESERVED]
        for path in sorted(self.files.directories):
            if not is_below(path, known):
                known.append(path)
        return known[2 + len(RESERVED) :]


def read_harbor_folder(path: Path, options: HarborOptions) -> TaskFolder:
    """Read a folder that has a ``task.toml``.

    Raises:
        DataError: a file is missing, or a key is wrong or asks for what no box offers; each fault has its line.
    """
    file, task = task_file_at(path / "task.toml")
    faults = [f"{file.where(key)}: {'.'.join(map(str, key))} {why}." for key, why in unsupported(task)]
    faults += [f"{each}: prior conversations are not read; remove the file." for each in sorted(path.rglob("trajectory.json"))]
    for key, verifier in _verifiers(task):
        tests = path / "tests" if key == ("verifier",) else path / "steps" / task.steps[int(key[1])].name / "tests"
        if verifier.mode == "separate" and any((tests / name).is_file() for name in ("Dockerfile", "docker-compose.yaml")):
            faults.append(
                f"{tests}: an image of its own for the verifier is not built; remove its Dockerfile, or name a ready image "
                f"({'.'.join(map(str, key))}.environment.docker_image)."
            )
    faults += list(_refused_network(file, task, options)) + list(_refused_variables(file, task, options))
    faults += list(_refused_workdirs(file, task))
    if faults:
        raise DataError("\n  ".join(faults))
    context = path / "environment"
    files, needs = _box_files(file, task, context, options)
    return TaskFolder(
        name=task.task.name if task.task else path.name,
        path=path,
        options=options,
        steps=tuple(_steps(path, task, options)),
        environment=task.environment,
        files=files,
        network=_network(task.environment, task.agent) == "public" and options.network is True,
        image=task.environment.docker_image or "",
        context=context if (context / "Dockerfile").is_file() and not task.environment.docker_image else None,
        needs=tuple(needs),
        strategy=task.multi_step_reward_strategy,
        solution_env=task.solution.env,
        metadata=_metadata(task),
    )


def _metadata(task: TaskFile) -> dict[str, Any]:
    package = task.task.model_dump(mode="json", exclude_defaults=True) if task.task else {}
    source = {"source": task.source} if task.source else {}
    return {**source, **({"task": package} if package else {}), **task.metadata}


def _box_files(file: TomlFile, task: TaskFile, context: Path, options: HarborOptions) -> tuple[BoxFiles, list[Need]]:
    """Return what is in the box at first, and what only a container can do."""
    needs = [
        Need(str(each), "docker compose (several services)")
        for each in (context / "docker-compose.yaml", context / "docker-compose.yml")
        if each.exists()
    ]
    if task.environment.docker_image:
        needs.append(Need(file.where(("environment", "docker_image")), f"the image {task.environment.docker_image}"))
    for key, verifier in _verifiers(task):
        if verifier.environment is not None and (image := verifier.environment.docker_image):
            needs.append(Need(file.where((*key, "environment", "docker_image")), f"the image {image}"))
    if (context / "Dockerfile").is_file():
        files = follow_dockerfile(context / "Dockerfile", options.host_images)
        workdir = task.environment.workdir or files.workdir or WORKDIR
        if around := [path for path in files.directories if workdir.startswith(f"{path}/")]:
            needs.append(Need(str(context / "Dockerfile"), f"files in {around[0]}, around the working directory {workdir}"))
        return files, needs + files.needs
    files = BoxFiles()
    if context.is_dir() and not task.environment.docker_image:
        files.copies.append((context, task.environment.workdir or WORKDIR))
    return files, needs


def is_below(path: str, directories: Sequence[str]) -> bool:
    """Return whether a path is one of some directories, or in one."""
    return any(path == each or path.startswith(f"{each}/") for each in directories)


def _refused_workdirs(file: TomlFile, task: TaskFile) -> Iterator[str]:
    tables = [(("environment",), task.environment)]
    tables += [((*key, "environment"), each.environment) for key, each in _verifiers(task) if each.environment is not None]
    for key, table in tables:
        if table.workdir and (table.workdir == "/" or is_below(table.workdir, (*SYSTEM, *RESERVED))):
            yield f"{file.where((*key, 'workdir'))}: {'.'.join(map(str, key))}.workdir is a directory of the box's own."


def _network(environment: NetworkTable | EnvironmentTable, phase: NetworkTable) -> str | None:
    of_environment = environment.network if isinstance(environment, EnvironmentTable) else environment.network_mode
    return phase.network_mode or of_environment


def _verifiers(task: TaskFile) -> Iterator[tuple[Key, VerifierTable]]:
    yield ("verifier",), task.verifier
    for index, step in enumerate(task.steps):
        if step.verifier is not None:
            yield ("steps", index, "verifier"), step.verifier


def _networks(task: TaskFile) -> Iterator[tuple[Key, NetworkTable]]:
    yield ("environment",), task.environment
    yield ("agent",), task.agent
    for key, verifier in _verifiers(task):
        yield key, verifier
        if verifier.environment is not None:
            yield (*key, "environment"), verifier.environment


def _refused_network(file: TomlFile, task: TaskFile, options: HarborOptions) -> Iterator[str]:
    if options.network is not None:
        return
    for key, table in _networks(task):
        mode = table.network if isinstance(table, EnvironmentTable) else table.network_mode
        if mode == "public":
            name = "network_mode" if table.network_mode else "allow_internet"
            yield (
                f"{file.where((*key, name))}: {'.'.join(map(str, (*key, name)))} asks for the network, which untrusted programs "
                "get only if you say so: give the taskset kwargs: {network: true}, or {network: false} to run without it."
            )


def _variables(task: TaskFile) -> Iterator[tuple[Key, Mapping[str, str]]]:
    yield ("environment", "env"), task.environment.env
    yield ("solution", "env"), task.solution.env
    for key, verifier in _verifiers(task):
        yield (*key, "env"), verifier.env
        if verifier.environment is not None:
            yield (*key, "environment", "env"), verifier.environment.env


def _refused_variables(file: TomlFile, task: TaskFile, options: HarborOptions) -> Iterator[str]:
    for key, variables in _variables(task):
        for name, value in variables.items():
            for match in _TEMPLATE.finditer(value):
                if match[1] not in options.host_env and match[2] is None:
                    yield (
                        f"{file.where((*key, name))}: {'.'.join(map(str, key))}.{name} takes the variable {match[1]} from this "
                        f"machine; allow it with kwargs: {{host_env: [{match[1]}]}}."
                    )


def resolved(variables: Mapping[str, str], options: HarborOptions) -> dict[str, str]:
    """Fill ``${NAME}`` and ``${NAME:-default}`` from this machine, as far as the taskset allows it.

    Raises:
        DataError: an allowed variable is not set here and has no default.
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1]) if match[1] in options.host_env else None
        if found is None and match[2] is None:
            raise DataError(f"the task needs the variable {match[1]}, which is not set on this machine; set it.")
        return match[3] if found is None else found

    return {name: _TEMPLATE.sub(value, text) for name, text in variables.items()}


def _steps(path: Path, task: TaskFile, options: HarborOptions) -> Iterator[TaskStep]:
    if not task.steps:
        tests = path / "tests"
        yield TaskStep(
            name="",
            instruction=read_instruction(path / "instruction.md"),
            seconds=task.agent.timeout_sec or options.agent_timeout,
            verifier=task.verifier,
            tests=(tests,),
            script=_script([tests], tests / "test.sh"),
            solution=_directory(path / "solution"),
            healthchecks=_given(task.environment.healthcheck),
            verifier_network=_verifier_network(task, task.verifier, options),
            artifacts=tuple(artifacts_of(task.artifacts)),
        )
    for index, step in enumerate(task.steps):
        yield _step(path, task, step, index, options)


def _step(path: Path, task: TaskFile, step: StepTable, index: int, options: HarborOptions) -> TaskStep:
    own = path / "steps" / step.name
    tests = [each for each in (path / "tests", own / "tests") if each.is_dir()]
    first = _given(task.environment.healthcheck) if index == 0 else ()
    verifier = _merged(task.verifier, step.verifier)
    return TaskStep(
        name=step.name,
        instruction=read_instruction(own / "instruction.md"),
        seconds=step.agent.timeout_sec or task.agent.timeout_sec or options.agent_timeout,
        verifier=verifier,
        verifier_network=_verifier_network(task, verifier, options),
        tests=tuple(tests),
        script=_script(tests, own / "tests" / "test.sh"),
        solution=_directory(own / "solution"),
        workdir=_directory(own / "workdir"),
        healthchecks=(*first, *_given(step.healthcheck)),
        artifacts=(*artifacts_of(task.artifacts), *artifacts_of(step.artifacts)),
        min_reward=_thresholds(step.min_reward),
    )


def _given(healthcheck: Healthcheck | None) -> tuple[Healthcheck, ...]:
    return () if healthcheck is None else (healthcheck,)


def _verifier_network(task: TaskFile, verifier: VerifierTable, options: HarborOptions) -> bool:
    return options.network is True and _network(verifier.environment or task.environment, verifier) == "public"


def _merged(whole: VerifierTable, own: VerifierTable | None) -> VerifierTable:
    """Return a step's verifier: its own keys over those of the task; variables and hooks of both."""
    if own is None:
        return whole
    given = {name: getattr(own, name) for name in own.model_fields_set}
    return whole.model_copy(update={**given, "env": {**whole.env, **own.env}, "collect": (*whole.collect, *own.collect)})


def _thresholds(given: float | dict[str, float] | None) -> dict[str, float]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, dict) else {"reward": given}


def _script(tests: Sequence[Path], expected: Path) -> str:
    if not any((directory / "test.sh").is_file() for directory in tests):
        windows = " (test.bat is for Windows)" if any((each / "test.bat").is_file() for each in tests) else ""
        raise DataError(f"{expected}: there is no such file{windows}; it grades the task.")
    return "test.sh"


def _directory(path: Path) -> Path | None:
    return path if path.is_dir() else None


def read_instruction(path: Path) -> str:
    """Read what the agent is asked.

    Raises:
        DataError: the file is missing or empty.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not text:
        raise DataError(f"{path} is empty; it holds what the agent is asked.")
    return text
