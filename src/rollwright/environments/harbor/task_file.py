"""What a Harbor ``task.toml`` may hold: every key up to schema 1.4, checked, with faults named by line.

Keys that no box can honour are refused in ``unsupported``.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollwright.environments.harbor.toml_lines import Key, TomlFile
from rollwright.errors import DataError
from rollwright.registry import nearest

#: The service of a compose file that the agent works in.
MAIN = "main"
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


class TomlTable(BaseModel):
    """A table of the file; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NetworkTable(TomlTable):
    """Which hosts a phase may reach."""

    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _hosts_need_the_mode(self) -> Self:
        if self.allowed_hosts and self.network_mode not in (None, "allowlist"):
            raise ValueError(f"allowed_hosts is given, but network_mode is {self.network_mode!r}; it must be 'allowlist'")
        return self


class Healthcheck(TomlTable):
    """A command that is repeated until it exits with 0."""

    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


class McpServerTable(TomlTable):
    """An MCP server that is offered to the agent."""

    name: str
    transport: Literal["sse", "streamable-http", "http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport!r} needs {needed}")
        return self


class EnvironmentTable(NetworkTable):
    """The box of the agent, or a separate one of the verifier."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: tuple[str, ...] | None = None
    tpu: dict[str, Any] | None = None
    allow_internet: bool | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    mcp_servers: tuple[McpServerTable, ...] = ()

    @field_validator("memory", "storage")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        _megabytes(value)
        return value

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        for old, new in (("memory", self.memory_mb), ("storage", self.storage_mb)):
            size = getattr(self, old)
            if size is not None and new is not None and _megabytes(size) != new:
                raise ValueError(f"{old} is {size!r} and {old}_mb is {new}; keep {old}_mb")
        return self

    @field_validator("workdir")
    @classmethod
    def _is_absolute(cls, value: str | None) -> str | None:
        return None if value is None else _absolute(value)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the box; None if the file does not say."""
        return _bytes(self.memory_mb, self.memory)

    @property
    def storage_bytes(self) -> int | None:
        """Room for files; None if the file does not say."""
        return _bytes(self.storage_mb, self.storage)

    @property
    def network(self) -> str | None:
        """``public``, ``no-network`` or ``allowlist``; None if the file does not say."""
        if self.allowed_hosts:
            return "allowlist"
        if self.network_mode is None and self.allow_internet is not None:
            return "public" if self.allow_internet else "no-network"
        return self.network_mode


class AgentTable(NetworkTable):
    """The agent's phase."""

    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class CollectHook(TomlTable):
    """A command that saves something before the verifier runs."""

    command: str
    service: str = MAIN
    timeout_sec: float = Field(default=60.0, gt=0)
    user: str | int | None = None


class VerifierTable(NetworkTable):
    """The verifier's phase."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[CollectHook, ...] = ()

    @property
    def mode(self) -> str | None:
        """``shared`` or ``separate``; None if the file does not say."""
        return "separate" if self.environment is not None else self.environment_mode

    @model_validator(mode="after")
    def _its_own_environment_is_separate(self) -> Self:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError("environment_mode is 'shared', but the verifier has an environment of its own")
        return self


class SolutionTable(TomlTable):
    """The reference solution."""

    env: dict[str, str] = {}


class Artifact(TomlTable):
    """A file or directory of the agent's box that a separate verifier gets, at the same path.

    ``destination`` names a place in the results of Harbor's own runner, and changes nothing here.
    """

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _source_is_inside(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError(f"{value!r} must be a path of the box, without '..'")
        return value

    @field_validator("destination")
    @classmethod
    def _destination_is_inside(cls, value: str | None) -> str | None:
        if value is not None and (posixpath.isabs(value) or ".." in value.split("/")):
            raise ValueError(f"{value!r} must be a path below the directory of artifacts")
        return value


class StepTable(TomlTable):
    """One step of several."""

    name: str = Field(pattern=r"^[^/\\]+$")
    agent: AgentTable = AgentTable()
    verifier: VerifierTable | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()
    min_reward: float | dict[str, float] | None = None


class Author(TomlTable):
    """An author of the task."""

    name: str
    email: str | None = None


class PackageTable(TomlTable):
    """Name and description of the task."""

    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class TaskFile(TomlTable):
    """The whole file."""

    schema_version: str = "1.4"
    source: str | None = None
    artifacts: tuple[str | Artifact, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    task: PackageTable | None = None
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    environment: EnvironmentTable = EnvironmentTable()
    steps: tuple[StepTable, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _version_is_the_old_name(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "version" in data and "schema_version" not in data:
            data = {**data, "schema_version": data["version"]}
            del data["version"]
        return data

    @field_validator("steps")
    @classmethod
    def _names_differ(cls, steps: tuple[StepTable, ...]) -> tuple[StepTable, ...]:
        names = [step.name.casefold() for step in steps]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two steps are called {repeated[0]!r}")
        return steps

    @field_validator("schema_version")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value.split(".")[0] != "1":
            raise ValueError(f"{value!r} is not read; 1.0 to 1.4 are")
        return value


def artifacts_of(entries: tuple[str | Artifact, ...]) -> list[Artifact]:
    """Return the entries of ``artifacts``, of which some may be bare paths."""
    return [Artifact(source=entry) if isinstance(entry, str) else entry for entry in entries]


def read_task_file(file: TomlFile) -> TaskFile:
    """Check a ``task.toml``.

    Raises:
        DataError: names each fault with its line.
    """
    try:
        return TaskFile.model_validate(file.data)
    except ValidationError as error:
        faults = dict.fromkeys(_fault(file, each) for each in error.errors())
        raise DataError("\n  ".join(faults)) from None


def _fault(file: TomlFile, error: Any) -> str:
    key: Key = error["loc"]
    name = ".".join(map(str, key))
    if error["type"] == "extra_forbidden":
        return (
            f"{file.path and file.where(key)}: there is no key {name!r} in a task.toml (schema 1.4); "
            f"{nearest(str(key[-1]), _names_beside(key))} Free notes belong into [metadata]."
        )
    message = error["msg"].removeprefix("Value error, ")
    return f"{file.where(key)}: {name or 'the file'}: {message}."


def _names_beside(key: Key) -> list[str]:
    """Return the names that the table of a key may have."""
    table: Any = TaskFile
    for part in key[:-1]:
        if isinstance(part, str) and (field := table.model_fields.get(part)):
            found = [each for each in _tables_in(field.annotation)]
            table = found[0] if found else table
    return list(table.model_fields)


def _tables_in(annotation: Any) -> Iterator[type[TomlTable]]:
    if isinstance(annotation, type) and issubclass(annotation, TomlTable):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _tables_in(part)


def unsupported(task: TaskFile) -> Iterator[tuple[Key, str]]:
    """Yield each key that asks for something that no box offers, with the reason and what to do instead."""
    yield from _of_environment(task.environment, ("environment",))
    yield from _of_phase(task.agent, ("agent",))
    yield from _of_verifier(task.verifier, ("verifier",))
    for key, entries in [(("artifacts",), task.artifacts)] + [
        (("steps", index, "artifacts"), step.artifacts) for index, step in enumerate(task.steps)
    ]:
        for number, entry in enumerate(entries):
            if isinstance(entry, Artifact) and entry.service not in (None, MAIN):
                yield (
                    (*key, number, "service"),
                    f"collects from the service {entry.service!r}, and a box is one service; {_ALONE}",
                )
    for index, step in enumerate(task.steps):
        yield from _of_phase(step.agent, ("steps", index, "agent"))
        if step.agent.network_mode not in (None, "allowlist", task.agent.network_mode or task.environment.network):
            yield ("steps", index, "agent", "network_mode"), "differs between steps, and one box serves all; set it in [agent]"
        if step.verifier is not None:
            yield from _of_verifier(step.verifier, ("steps", index, "verifier"))


_ALONE = f"put what it needs into the box of {MAIN!r}"


def _of_environment(table: EnvironmentTable, key: Key) -> Iterator[tuple[Key, str]]:
    if table.os != "linux":
        yield (*key, "os"), f"is {table.os!r}, and boxes run Linux"
    if table.gpus:
        yield (*key, "gpus"), f"asks for {table.gpus}, and boxes get no GPUs; set it to 0 if the task works without"
    if table.gpu_types:
        yield (*key, "gpu_types"), "asks for a GPU, and boxes get none; remove it if the task works without"
    if table.tpu:
        yield (*key, "tpu"), "asks for a TPU, and boxes get none; remove it if the task works without"
    if table.skills_dir is not None:
        yield (
            (*key, "skills_dir"),
            "is not handed to agents; put the files into environment/ and name their directory in the instruction",
        )
    if table.mcp_servers:
        yield (
            (*key, "mcp_servers"),
            "are not handed to agents from a task; configure them as tools of the workflow",
        )
    if table.network == "allowlist":
        yield _allowlist(key, table)


def _allowlist(key: Key, table: NetworkTable) -> tuple[Key, str]:
    name = "allowed_hosts" if table.allowed_hosts else "network_mode"
    return (*key, name), "allows some hosts, and a box has the whole network or none; use 'no-network' or 'public'"


def _of_phase(table: AgentTable | VerifierTable, key: Key) -> Iterator[tuple[Key, str]]:
    if table.network_mode == "allowlist" or table.allowed_hosts:
        yield _allowlist(key, table)
    if not _is_root(table.user):
        yield (*key, "user"), f"is {table.user!r}, and a box has one user, who owns its files; remove it"


def _of_verifier(table: VerifierTable, key: Key) -> Iterator[tuple[Key, str]]:
    yield from _of_phase(table, key)
    if table.environment is not None:
        yield from _of_environment(table.environment, (*key, "environment"))
    for index, hook in enumerate(table.collect):
        if hook.service != MAIN:
            yield (*key, "collect", index, "service"), f"is {hook.service!r}, and a box is one service; {_ALONE}"
        if not _is_root(hook.user):
            yield (*key, "collect", index, "user"), f"is {hook.user!r}, and a box has one user; remove it"


def _is_root(user: str | int | None) -> bool:
    return user in (None, "root", "0", 0)


def _absolute(path: str) -> str:
    if not posixpath.isabs(path) or ".." in path.split("/"):
        raise ValueError(f"{path!r} must be an absolute path of the box, without '..'")
    return posixpath.normpath(path)


def _megabytes(size: str) -> int:
    number, unit = size.strip()[:-1], size.strip()[-1:].upper()
    try:
        value = float(number) * _SIZES[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{size!r} is no size; write 512M or 2G")
    return int(value)


def _bytes(megabytes: int | None, size: str | None) -> int | None:
    if size is not None and megabytes is None:
        megabytes = _megabytes(size)
    return None if megabytes is None else megabytes * 2**20


def task_file_at(path: Path) -> tuple[TomlFile, TaskFile]:
    """Read and check a ``task.toml``; see ``read_task_file``."""
    file = TomlFile(path)
    return file, read_task_file(file)
