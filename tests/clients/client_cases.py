"""What a client does in a case, how it is run as a process of its own, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from directed_model import Free

HERE = Path(__file__).resolve().parent
#: Where scripts/make_client_envs.sh puts the environments.
ENVIRONMENTS = Path(os.environ.get("ROLLWRIGHT_CLIENT_ENVS", HERE.parents[1]))
#: Programs whose clients pin openai 2.
_OF_OPENAI_2 = ("programs_dspy", "evaluators_verifiers")
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
    """

    client: str
    program: str
    name: str
    shown: str
    replies: list[str | Free] = field(hash=False)
    rows: int = 1
    why: str = ""

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
    """

    value: Any
    rows: list[Any]
    records: list[Any]
    requests: list[Any]


@dataclass
class World:
    """The engine, the front over it, and where the model is."""

    engine: Any
    front: Any
    path: Path

    def text(self, ids: Any) -> str:
        """Decoded, special tokens included."""
        return self.engine.tokenizer.decode(ids, skip_special_tokens=False)


def environment_of(program: str) -> Path:
    """The environment that a program's clients are in; the test is skipped where it is not there."""
    environment = ENVIRONMENTS / (".venv-clients-openai2" if program in _OF_OPENAI_2 else ".venv-clients")
    if not list(environment.glob(".complete-*")):
        pytest.skip(f"{environment} is not there or not complete: run scripts/make_client_envs.sh")
    return environment


def run_program(cases: list[Case], arguments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run cases of one program in the clients' environment; returns the clients' versions and the results by case."""
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
