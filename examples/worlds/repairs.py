"""Small Python files with one wrong line, which mini-swe-agent repairs: tasks, scripted transcripts of repairs, and their score.

repairs("train")                       # the dataset repairs: a request, the broken file, and calls with the results that they should have
repairs("train", 4000, worked=True)    # transcripts of a scripted repairer, for supervised training
repaired(...)                          # the reward: 1 if all calls of the repaired file give their results

A file has three functions of two lines. The request says what one of them should return, not what is wrong, nor where::

    shop.py: total is price plus tax

The scripted repairer looks for the function's line, and writes it anew. One in a hurry takes line 2 without looking, which is the right
one in a third of the files. The messages are those of ``SYSTEM`` and of mini-swe-agent, configured as in ``command_agent.yaml``.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import check_split, split_of
from rollwright.errors import DataError
from rollwright.processes.sandbox import run_python
from rollwright.rewards.registry import REWARD_FUNCTIONS

SYSTEM = "Repair the file."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FILES = ("shop", "bank", "trip", "game", "farm", "post")
FUNCTIONS = ("total", "share", "score", "limit", "level", "delay", "width", "stock", "rent", "fare", "gain", "rank")
NAMES = ("price", "tax", "count", "days", "rate", "load", "speed", "size", "age", "cost", "fee", "goal", "time", "seats")
#: Words of a request -> operator, what it calculates, and the operators that a broken line may have in its place.
OPERATORS: dict[str, tuple[str, Callable[[int, int], int], Sequence[str]]] = {
    "plus": ("+", operator.add, "-*"),
    "minus": ("-", operator.sub, "+*"),
    "times": ("*", operator.mul, "+-"),
    "above": (">", operator.gt, ("<", ">=", "<=")),
    "below": ("<", operator.lt, (">", "<=", ">=")),
    "at least": (">=", operator.ge, (">", "<", "<=")),
}
CALLS = ((7, 3), (3, 7), (5, 5), (4, 2))


@dataclass(frozen=True)
class Function:
    """A function of two parameters, which compares them or calculates with them."""

    name: str
    first: str
    second: str
    words: str

    @property
    def body(self) -> str:
        """Its second line."""
        return f"    return {self.first} {OPERATORS[self.words][0]} {self.second}"

    def text(self, body: str | None = None) -> str:
        """Its two lines, with another body if one is given."""
        return f"def {self.name}({self.first}, {self.second}):\n{body or self.body}\n"

    def broken(self, draw: random.Random) -> str:
        """Its second line with one of five bugs."""
        right, _, others = OPERATORS[self.words]
        wrong = draw.choice(others)
        bodies = [
            f"return {self.first} {wrong} {self.second}",  # another operator
            f"return {self.second} {wrong if self.words in ('plus', 'times') else right} {self.first}",  # the wrong way round
            f"return {self.first} {right} {self.first}",  # one name twice
            f"return {self.second}",  # half of it
            f"{self.first} {right} {self.second}",  # nothing is returned
        ]
        return f"    {draw.choice(bodies)}"

    @property
    def request(self) -> str:
        """What it should return, in words."""
        return f"{self.name} is {self.first} {self.words} {self.second}"


@dataclass(frozen=True)
class Repair:
    """A broken file, and how it is repaired."""

    file: str
    functions: tuple[Function, ...]
    place: int  # of the broken function
    broken: str  # its second line

    @property
    def request(self) -> str:
        """What the agent is asked."""
        return f"{self.file}: {self.functions[self.place].request}"

    @property
    def text(self) -> str:
        """The broken file."""
        return "".join(each.text(self.broken if at == self.place else None) for at, each in enumerate(self.functions))

    @property
    def look(self) -> str:
        """The command that shows the broken function with its line numbers, and what it prints."""
        return f"grep -nA1 {self.functions[self.place].name} {self.file}"

    @property
    def seen(self) -> str:
        """What ``look`` prints."""
        line = 2 * self.place + 1
        head = self.functions[self.place].text().split("\n")[0]
        return f"{line}:{head}\n{line + 1}-{self.broken}\n"

    def write(self, line: int) -> str:
        """The command that writes the body into a line, and submits."""
        return f"sed -i '{line}s/.*/{self.functions[self.place].body}/' {self.file} && {SUBMIT}"

    @property
    def calls(self) -> list[list[Any]]:
        """Calls of all functions: expression, result."""
        return [[f"{each.name}{call}", OPERATORS[each.words][1](*call)] for each in self.functions for call in CALLS]


def all_requests() -> list[tuple[str, Function]]:
    """Return each file's name with each function, once."""
    functions = [
        Function(name, first, second, words)
        for name in FUNCTIONS
        for first, second in itertools.permutations(NAMES, 2)
        for words in OPERATORS
    ]
    return [(f"{file}.py", function) for file in FILES for function in functions]


def repairs_of(split: str, size: int, seed: int = 1) -> list[Repair]:
    """Return repairs of a split in a random order; no two splits share a request, and none repeats one.

    Raises:
        DataError: there is no such split, or it has fewer requests.
    """
    check_split("repairs", split)
    draw = random.Random(f"{split} {seed}")
    found = [each for each in all_requests() if split_of(f"{each[0]}: {each[1].request}") == split]
    if size > len(found):
        raise DataError(f"repairs: {size} were asked for, split {split!r} has {len(found)}.")
    return [_repair(file, function, draw) for file, function in draw.sample(found, size)]


def _repair(file: str, function: Function, draw: random.Random) -> Repair:
    """Put a function between two others, and break it."""
    others = [
        Function(name, *draw.sample(NAMES, 2), draw.choice(list(OPERATORS)))
        for name in draw.sample([name for name in FUNCTIONS if name != function.name], 2)
    ]
    place = draw.randrange(3)
    functions = (*others[:place], function, *others[place:])
    return Repair(file, functions, place, function.broken(draw))


@DATASET_REGISTRY.register("repairs")
def repairs(
    split: str = "train", size: int = 400, worked: bool = False, hurried: float = 0.5, seed: int = 1
) -> list[dict[str, Any]]:
    """Tasks for ``command_agent``, or transcripts for supervised training.

    Args:
        split: train, valid or test.
        size: number of rows.
        worked: transcripts, as ``messages``.
        hurried: share of the transcripts in which the repairer takes line 2 without looking.
        seed: which repairs, in which order.
    """
    draw = random.Random(f"worked {split} {seed}")
    rows = []
    for repair in repairs_of(split, size, seed):
        row: dict[str, Any] = {"query_id": repair.request, "answer": repair.write(2 * repair.place + 2)}
        if worked:
            turns = (repair.write(2),) if draw.random() < hurried else (repair.look, repair.seen, row["answer"])
            messages = [SYSTEM, repair.request, *turns]
            roles = ["system", *itertools.islice(itertools.cycle(("user", "assistant")), len(messages) - 1)]
            row["messages"] = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]
        else:
            row["messages"] = [{"role": "user", "content": repair.request}]
            row |= {"files": {repair.file: repair.text}, "calls": repair.calls}
        rows.append(row)
    return rows


@REWARD_FUNCTIONS.register_module("repaired", uses_sandbox=True)
async def repaired(
    prompt: str,
    completion: str,
    prompt_ids: Any,
    completion_ids: Any,
    workdir: Path,
    files: dict[str, str],
    calls: list[list[Any]],
    **_: Any,
) -> float:
    """Score a working directory: 1 if all calls of its file give their results, in a sandbox of their own."""
    (name,) = files
    path = Path(workdir) / name
    if not path.is_file():
        return 0.0
    check = f"\nimport json\nprint(json.dumps([{', '.join(expression for expression, _ in calls)}]))\n"
    result = await run_python(path.read_text(encoding="utf-8", errors="replace") + check, timeout=10)
    return float(result.ok and _last(result.stdout, json.loads) == [value for _, value in calls])


def _last(output: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
