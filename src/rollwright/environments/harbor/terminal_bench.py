"""Task folders of Terminal-Bench's first version: ``task.yaml``, ``run-tests.sh``, ``solution.sh``, ``Dockerfile`` and a compose file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from rollwright.environments.harbor.dockerfile import BoxFiles, Need, follow_dockerfile
from rollwright.environments.harbor.folder import HarborOptions, TaskFolder, TaskStep
from rollwright.environments.harbor.task_file import TomlTable, VerifierTable
from rollwright.errors import DataError

FILE = "task.yaml"
_COMPOSE = "docker-compose.yaml"
#: Keys of a service that only say how Terminal-Bench itself starts the container.
_OF_THE_HARNESS = ("image", "container_name", "command", "expose")
_USUAL_VOLUMES = ("${T_BENCH_TASK_LOGS_PATH}:", "${T_BENCH_TASK_AGENT_LOGS_PATH}:")


class TerminalBenchFile(TomlTable, extra="ignore"):
    """The keys of ``task.yaml`` that matter here. The others describe the task, or tell its own harness how to show the tests."""

    instruction: str
    max_agent_timeout_sec: float = Field(default=360.0, gt=0)
    max_test_timeout_sec: float = Field(default=60.0, gt=0)
    difficulty: str | None = None
    category: str | None = None
    tags: tuple[str, ...] = ()


def read_terminal_bench_folder(path: Path, options: HarborOptions) -> TaskFolder:
    """Read a folder that has a ``task.yaml``. Its tests succeed (reward 1) or fail (0).

    Raises:
        DataError: a file is missing or wrong.
    """
    task = _read(path / FILE)
    script, solution = path / "run-tests.sh", path / "solution.sh"
    if not script.is_file():
        raise DataError(f"{script}: there is no such file; it grades the task.")
    if not solution.is_file() and (path / "solution.yaml").exists():
        raise DataError(f"{path / 'solution.yaml'}: keystrokes are not played; write the solution as solution.sh.")
    files, context = _box_files(path, options)
    step = TaskStep(
        name="",
        instruction=task.instruction.strip(),
        seconds=task.max_agent_timeout_sec,
        verifier=VerifierTable(timeout_sec=task.max_test_timeout_sec, env={"TEST_DIR": "/tests"}),
        tests=(*([path / "tests"] if (path / "tests").is_dir() else []), script),
        script=script.name,
        solution=solution if solution.is_file() else None,
        solve=solution.name,
        verifier_network=options.network is True,
    )
    return TaskFolder(
        name=path.name,
        path=path,
        options=options,
        steps=(step,),
        files=files,
        network=options.network is True,
        context=context,
        needs=tuple(files.needs),
        metadata=task.model_dump(mode="json", include={"difficulty", "category", "tags"}, exclude_none=True),
        exit_code_is_reward=True,
    )


def _read(path: Path) -> TerminalBenchFile:
    data, lines = _yaml(path)
    try:
        return TerminalBenchFile.model_validate(data)
    except ValidationError as error:
        faults = []
        for each in error.errors():
            line = lines.get(str(each["loc"][0]), 1) if each["loc"] else 1
            faults.append(f"{path}:{line}: {'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}.")
        raise DataError("\n  ".join(faults)) from None


def _yaml(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the content of a file, and the line of each key at its top."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value} if isinstance(node, yaml.MappingNode) else {}
        return yaml.safe_load(text), lines
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error


def _box_files(path: Path, options: HarborOptions) -> tuple[BoxFiles, Path | None]:
    """Return what the container's Dockerfile and its service in the compose file put into the box, and the directory of the Dockerfile."""
    service, where = _service(path / _COMPOSE)
    context = path / _context_of(service)
    has_dockerfile = (context / "Dockerfile").is_file()
    files = follow_dockerfile(context / "Dockerfile", options.host_images) if has_dockerfile else BoxFiles()
    if service is None:
        files.needs.append(Need(where, "docker compose (several services)"))
        service = {}
    given = service.get("environment") or []
    pairs = given.items() if isinstance(given, dict) else (str(each).partition("=")[::2] for each in given)
    files.environment.update({str(name): str(value) for name, value in pairs if "${T_BENCH" not in str(value)})
    if "working_dir" in service:
        files.workdir = str(service["working_dir"])
    unusual = [each for each in service.get("volumes") or [] if not str(each).startswith(_USUAL_VOLUMES)]
    known = (*_OF_THE_HARNESS, "build", "environment", "working_dir", *([] if unusual else ["volumes"]))
    files.needs += [Need(where, f"docker compose ({name})") for name in service if name not in known]
    return files, context if has_dockerfile else None


def _service(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the one service of a compose file (None if it has several) and its place; without a file, an empty one."""
    if not path.is_file():
        return {}, str(path)
    content, lines = _yaml(path)
    services = content.get("services") if isinstance(content, dict) else None
    where = f"{path}:{lines.get('services', 1)}"
    if not isinstance(services, dict) or len(services) != 1:
        return None, where
    (service,) = services.values()
    return dict(service or {}), where


def _context_of(service: dict[str, Any] | None) -> str:
    build = (service or {}).get("build") or "."
    return str(build.get("context", ".")) if isinstance(build, dict) else str(build)
