"""Runs a task's tests in a box and reads the rewards that they write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.environments.harbor.folder import LOGS, TESTS, TaskStep
from rollwright.errors import VerifierError
from rollwright.processes.box import Box

_OUTPUT = f"{LOGS}/verifier/test-stdout.txt"
_FILE_SECONDS = 30.0  # for a command that only touches files
#: Runs ``$1`` whatever its mode, with its output in ``$2``.
_RUN = 'chmod +x "$1" 2>/dev/null; "$1" > "$2" 2>&1'


async def run_tests(box: Box, step: TaskStep, environment: Mapping[str, str], *, exit_code_is_reward: bool) -> dict[str, float]:
    """Copy the tests into a box, run them in its working directory, and return the rewards by name.

    Args:
        box: a box with what the agent left.
        step: the step to grade.
        environment: variables of the tests.
        exit_code_is_reward: the tests write no reward; they succeed or fail.

    Raises:
        VerifierError: the tests took too long, or left no usable reward.
    """
    await _emptied(box, TESTS, f"{LOGS}/verifier")
    for source in step.tests:
        await box.upload(source, TESTS if source.is_dir() else f"{TESTS}/{source.name}")
    seconds = step.verifier.timeout_sec
    command = ["sh", "-c", _RUN, "sh", f"{TESTS}/{step.script}", _OUTPUT]
    result = await box.exec(command, timeout=seconds, env=environment)
    if result.exit_code is None:
        raise VerifierError(f"the tests were ended by a limit ({result.excess or 'time'}; verifier.timeout_sec={seconds:g}).")
    if exit_code_is_reward:
        return {"reward": float(result.exit_code == 0)}
    texts = {name: await _content(box, f"{LOGS}/verifier/{name}") for name in ("reward.json", "reward.txt")}
    try:
        return rewards_of(texts["reward.json"], texts["reward.txt"])
    except VerifierError as error:
        said = (await _content(box, _OUTPUT, last=2000) or "").strip()
        raise VerifierError(
            f"{error} The tests ended with exit code {result.exit_code} and said: {said or 'nothing'}"
        ) from None


def rewards_of(json_text: str | None, plain_text: str | None) -> dict[str, float]:
    """Return the rewards of ``reward.json``, else of ``reward.txt``; a ``reward`` that the first lacks is taken from the second.

    Args:
        json_text: content of ``reward.json``; None if there is none.
        plain_text: content of ``reward.txt``; None if there is none.

    Raises:
        VerifierError: neither file exists, or a reward is no finite number.
    """
    if json_text is None and plain_text is None:
        raise VerifierError(f"the tests wrote neither {LOGS}/verifier/reward.json nor reward.txt.")
    rewards: dict[str, Any] = {}
    if json_text is not None:
        try:
            content = json.loads(json_text)
        except ValueError as error:
            raise VerifierError(f"reward.json is not JSON ({error}): {json_text[:80]!r}.") from None
        if not isinstance(content, dict):
            raise VerifierError(f"reward.json must hold an object of names and numbers, not {json_text[:80]!r}.")
        rewards = {
            name: value for name, value in content.items() if isinstance(value, int | float) and not isinstance(value, bool)
        }
    if "reward" not in rewards and plain_text is not None:
        try:
            rewards["reward"] = float(plain_text)
        except ValueError:
            if json_text is None:
                raise VerifierError(f"reward.txt must hold a number, not {plain_text[:80]!r}.") from None
    if wrong := {name: value for name, value in rewards.items() if not math.isfinite(value)}:
        raise VerifierError(f"the tests wrote a reward that is no finite number: {wrong}.")
    return {name: float(value) for name, value in rewards.items()}


def combined(rewards: Sequence[Mapping[str, float]], strategy: str) -> dict[str, float]:
    """Combine the rewards of several steps: those of the last one, or the mean of each, where a missing one counts as 0."""
    if strategy == "final" or len(rewards) == 1:
        return dict(rewards[-1])
    names = dict.fromkeys(name for each in rewards for name in each)
    return {name: sum(each.get(name, 0.0) for each in rewards) / len(rewards) for name in names}


def falls_short(rewards: Mapping[str, float], least: Mapping[str, float]) -> bool:
    """Return whether a reward is missing or below its threshold."""
    return any(rewards.get(name, -math.inf) < threshold for name, threshold in least.items())


async def _emptied(box: Box, *directories: str) -> None:
    """Make directories of a box that hold nothing, whatever the agent put there."""
    script = 'for each; do mkdir -p "$each" && find "$each" -mindepth 1 -delete || exit 1; done'
    result = await box.exec(["sh", "-c", script, "sh", *directories], timeout=_FILE_SECONDS)
    if not result.ok:
        raise VerifierError(f"{', '.join(directories)} cannot be emptied before the tests: {result.stderr.strip()}")


async def _content(box: Box, path: str, last: int | None = None) -> str | None:
    """Return the text of a file of a box, or only its last bytes; None if there is no such file."""
    command = ["cat", path] if last is None else ["tail", "-c", str(last), path]
    result = await box.exec(command, timeout=_FILE_SECONDS)
    return result.stdout if result.ok else None
