"""What a client does in a case, how it is run as a process of its own, and what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command_programs import NOTE, PROGRAMS, form_of, run_in_box
from directed_model import Reply

HERE = Path(__file__).resolve().parent
#: Where scripts/make_client_envs.sh puts the environments.
ENVIRONMENTS = Path(os.environ.get("ROLLWRIGHT_CLIENT_ENVS", HERE.parents[1]))
#: Programs whose clients pin openai 2.
_OF_OPENAI_2 = ("programs_dspy", "evaluators_verifiers", "mini")
#: A process runs all cases of a client, on a machine that may be busy.
SECONDS = 600


@dataclass(frozen=True)
class Case:
    """One thing that a client does, and what has to be recorded of it.

    Attributes:
        client: name of its distribution.
        program: module of ``programs`` that uses it.
        name: function of the program.
        shown: what it shows, for the table.
        replies: of the model, one for each call.
        rows: that the calls become.
        why: there is more than one row.
        is_long: runs with --whole-programs only.
        aside: text in the prompt of a side conversation, and the reply to it.
        beside: text in the prompts of a sub-agent that runs at the same time, and the replies to it.
        sub_agent: name that the second row has, which is a sub-agent's.
        lost: how the first answers are lost after the model has given them; ``error`` or ``closed``.
    """

    client: str
    program: str
    name: str
    shown: str
    replies: Sequence[Reply] = field(hash=False)
    rows: int = 1
    why: str = ""
    is_long: bool = False
    aside: tuple[str, str] | None = None
    beside: tuple[str, Sequence[Reply]] | None = field(default=None, hash=False)
    sub_agent: str = ""
    lost: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.client}-{self.name}"


@dataclass
class Played:
    """What came of a case.

    Attributes:
        value: that the function returned.
        rows: of the record, checked.
        records: of the calls.
        requests: that the engine was asked.
        refused: method, path and status of the requests that the front did not answer.
        side_calls: number of calls that are not trained.
        retries: number of requests that were answered again.
    """

    value: Any
    rows: list[Any]
    records: list[Any]
    requests: list[Any]
    refused: list[tuple[str, str, int]]
    side_calls: int
    retries: int


@dataclass
class World:
    """The engine, the front over it, where the model is, and by key the requests that were refused and the answers to lose."""

    engine: Any
    front: Any
    path: Path
    refused: dict[str, list[tuple[str, str, int]]]
    losses: dict[str, list[str]]

    def text(self, ids: Any) -> str:
        """Decoded, special tokens included."""
        return self.engine.tokenizer.decode(ids, skip_special_tokens=False)


def environment_of(program: str) -> Path:
    """The environment that a program's clients are in; the test is skipped where it is not there."""
    name = (
        ".venv-clients-openai2" if program in _OF_OPENAI_2 else ".venv-clients-node" if is_of_node(program) else ".venv-clients"
    )
    environment = ENVIRONMENTS / name
    if not list(environment.glob(".complete-*")):
        pytest.skip(f"{environment} is not there or not complete: run scripts/make_client_envs.sh")
    binaries = PROGRAMS[program].binaries if program in PROGRAMS else ""
    if binaries and not list((environment / "node_modules").glob(binaries)):
        pytest.skip(f"npm has no binary of {program} for this machine")
    return environment


def is_of_node(program: str) -> bool:
    """Whether a program's clients are npm's."""
    return program.endswith("_node") or (program in PROGRAMS and PROGRAMS[program].is_of_node)


def run_node(cases: list[Case], arguments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same as ``run_program`` for a program in JavaScript."""
    environment, program = environment_of(cases[0].program), cases[0].program
    with tempfile.TemporaryDirectory(prefix="program-") as directory:
        for script in (HERE / "programs").glob("*.mjs"):
            shutil.copy(script, directory)
        Path(directory, "node_modules").symlink_to(environment.resolve() / "node_modules")
        Path(directory, "note.txt").write_text(NOTE + "\n")
        done = subprocess.run(
            [str(environment / "node_modules" / ".bin" / "node"), "run.mjs", program],
            input=json.dumps({"clients": sorted({case.client for case in cases}), "cases": arguments}),
            env={"PATH": os.environ["PATH"], "HOME": directory},
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)


def run_commands(cases: list[Case], arguments: dict[str, dict[str, Any]], socket: Path) -> dict[str, Any]:
    """The same as ``run_program`` for a program that is a command; it runs in a box that reaches the front's socket alone."""
    program, environment = PROGRAMS[cases[0].program], environment_of(cases[0].program)
    results: dict[str, Any] = {}
    for case in cases:
        agent, key = form_of(program, case.name), arguments[case.name]["api_key"]
        try:
            results[case.name] = {"value": asyncio.run(run_in_box(program, agent, environment, socket, key))}
        except Exception as error:
            results[case.name] = {"error": str(error)}
    if program.is_of_node:
        version = json.loads((environment / "node_modules" / program.name / "package.json").read_text())["version"]
    else:
        (found,) = environment.glob(f"lib/python*/site-packages/{program.name.replace('-', '_')}-*.dist-info")
        version = found.name.removesuffix(".dist-info").rpartition("-")[2]
    return {"versions": {program.name: version}, "results": results}


def run_program(cases: list[Case], arguments: dict[str, dict[str, Any]], socket: Path) -> dict[str, Any]:
    """Run cases of one program in the clients' environment; returns the clients' versions and the results by case."""
    if cases[0].program in PROGRAMS:
        return run_commands(cases, arguments, socket)
    if is_of_node(cases[0].program):
        return run_node(cases, arguments)
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    program = cases[0].program
    done = subprocess.run(
        [str(environment_of(program) / "bin" / "python"), str(HERE / "programs" / "run.py"), program],
        input=json.dumps({"clients": sorted({case.client for case in cases}), "cases": arguments}),
        env={**keep, **settings},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)
