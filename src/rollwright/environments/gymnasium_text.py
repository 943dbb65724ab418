"""Gymnasium environments in text: observations become messages, and replies become actions.

    environment = GymnasiumText(17, "FrozenLake-v1", {"is_slippery": False, "render_mode": "ansi"},
                                action_names=["left", "down", "right", "up"])
    environment.observation()   # '[S]FFF\\nFHFH\\nFFFH\\nHFFG'
    environment.step("down")    # StepResult(observation, reward, done, info)

Needs the extra ``gymnasium``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollwright.environments.text_environment import StepResult
from rollwright.errors import ConfigError, WorkflowError
from rollwright.registry import import_path

#: ``(observation, environment) -> text``.
ObservationFunction = Callable[[Any, Any], str]
#: ``(reply, environment) -> action``; raises ``ValueError`` with the reason, in words for the model, if the reply holds none.
ActionFunction = Callable[[str, Any], Any]

_COLOURED = re.compile(r"\x1b\[((?:\d+;?)+)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.])")


class GymnasiumText:
    """One episode of a Gymnasium environment.

    Args:
        seed: seed of the reset. None leaves the episode to chance.
        id: what ``gymnasium.make`` makes; ``module:Name-v0`` imports the module first.
        kwargs: arguments of the environment, such as ``render_mode`` and ``max_episode_steps``.
        action_names: words for the actions of a ``Discrete`` space, in order. Without them, the model writes their numbers.
        observation: ``(observation, environment) -> text``, or its import path. Default: the rendering if ``render_mode`` is ``ansi``;
            otherwise texts and numbers, if the space consists of them.
        action: ``(reply, environment) -> action``, or its import path; raises ``ValueError`` for an invalid reply. Default: the last name
            or number of a reply if the space is ``Discrete``, and the reply itself if it is ``Text``.

    Attributes:
        environment: the Gymnasium environment, with its wrappers.
        instructions: what the model has to write, as text for a system prompt.

    Raises:
        ConfigError: gymnasium is not installed or does not know the id, or there is no default for one of the spaces.
    """

    def __init__(
        self,
        seed: int | None,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        action_names: Sequence[str] | None = None,
        observation: ObservationFunction | str | None = None,
        action: ActionFunction | str | None = None,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError(f"gymnasium cannot be imported ({error}): pip install 'rollwright[gymnasium]'.") from error
        try:
            self.environment: Any = gymnasium.make(id, **(kwargs or {}))
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"gymnasium.make({id!r}, …) failed: {type(error).__name__}: {error}") from error
        self._show = _resolved(observation, "observation") or _default_observation(self.environment, id)
        self._read, self.instructions = _reader(self.environment, id, action_names, _resolved(action, "action"))
        self._done = False
        self._observed, self._info = self.environment.reset(seed=seed)

    def observation(self) -> str:
        """Return the current observation as text.

        Raises:
            WorkflowError: the function of observations returned something else.
        """
        text = self._show(self._observed, self.environment)
        if not isinstance(text, str):
            raise WorkflowError(
                f"the observation of {self.environment} became {text!r:.80}, a {type(text).__name__}: return a text."
            )
        return text

    def step(self, action: str) -> StepResult:
        """Perform the action in a reply; ``info`` has Gymnasium's, ``valid``, and ``truncated`` if the time limit ended the episode."""
        if self._done:
            return self._invalid("The episode is over.")
        try:
            chosen = self._read(action, self.environment)
        except ValueError as error:
            return self._invalid(str(error))
        mask = self._info.get("action_mask")
        if mask is not None and not mask[chosen]:
            return self._invalid("This action is not possible now.")
        self._observed, reward, terminated, truncated, self._info = self.environment.step(chosen)
        self._done = bool(terminated or truncated)
        info = {**self._info, "valid": True, "truncated": bool(truncated and not terminated)}
        return StepResult(self.observation(), float(reward), self._done, info)

    def snapshot(self) -> Any:
        """Return a copy of the environment.

        Raises:
            WorkflowError: it cannot be copied.
        """
        return self._copied((self.environment, self._observed, self._info, self._done))

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot."""
        self.environment, self._observed, self._info, self._done = self._copied(snapshot)

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()

    def _copied(self, state: Any) -> Any:
        try:
            return copy.deepcopy(state)
        except Exception as error:  # an environment may hold anything, and its __deepcopy__ raise anything
            raise WorkflowError(
                f"{self.environment} cannot be copied ({type(error).__name__}: {error}), so it has no snapshots: give its class a "
                "__deepcopy__, or begin its episodes anew."
            ) from error

    def _invalid(self, reason: str) -> StepResult:
        return StepResult(self.observation(), 0.0, self._done, {"valid": False, "reason": reason})


def _resolved(function: Any, what: str) -> Any:
    return import_path(function, what) if isinstance(function, str) else function


# -- observations ------------------------------------------------------------------------------------------------------


def plain_rendering(rendered: str) -> str:
    """Return an ``ansi`` rendering without colours: ``[x]`` for text on a coloured ground, ``(x)`` for coloured text."""

    def marked(found: re.Match[str]) -> str:
        on_ground = any(40 <= int(code) <= 47 for code in found[1].split(";") if code)
        return f"[{found[2]}]" if on_ground else f"({found[2]})"

    return _ESCAPE.sub("", _COLOURED.sub(marked, rendered)).strip("\n")


def _rendering(_: Any, environment: Any) -> str:
    return plain_rendering(environment.render())


def _values(observation: Any, _: Any) -> str:
    if isinstance(observation, Mapping):
        return ", ".join(f"{name}: {_values(value, _)}" for name, value in observation.items())
    if isinstance(observation, tuple | list):
        return ", ".join(_values(value, _) for value in observation)
    return ", ".join(map(str, observation.ravel().tolist())) if hasattr(observation, "ravel") else str(observation)


def _default_observation(environment: Any, id: str) -> ObservationFunction:
    if environment.render_mode == "ansi":
        return _rendering
    if _is_readable(environment.observation_space):
        return _values
    raise ConfigError(
        f"{id} observes {environment.observation_space}, for which there is no default text: give 'observation', a function from the "
        "observation and the environment to the text, or kwargs {render_mode: ansi} if the environment has it."
    )


def _is_readable(space: Any) -> bool:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return all(map(_is_readable, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_readable, space.spaces))
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text)


# -- actions -----------------------------------------------------------------------------------------------------------


def _reader(environment: Any, id: str, names: Sequence[str] | None, own: ActionFunction | None) -> tuple[ActionFunction, str]:
    """Return the function that reads a reply, and the instructions for the model."""
    from gymnasium import spaces

    space = environment.action_space
    if names is not None and (own is not None or not isinstance(space, spaces.Discrete) or len(names) != space.n):
        raise ConfigError(
            f"{id}: action_names has {len(names)} names ({', '.join(names)}), and the action space is {space}: give one name for each action "
            "of a Discrete space, and no 'action'."
        )
    if own is not None:
        return own, ""
    if isinstance(space, spaces.Discrete):
        return _discrete_reader(int(space.start), int(space.n), names)
    if isinstance(space, spaces.Text):
        return _text_reader(space)
    raise ConfigError(
        f"{id} takes actions of {space}, for which there is no default reading: give 'action', a function from the reply and the "
        "environment to the action."
    )


def _discrete_reader(start: int, count: int, names: Sequence[str] | None) -> tuple[ActionFunction, str]:
    if names is None:
        instructions = f"Answer with a number from {start} to {start + count - 1}."

        def read_number(reply: str, _: Any) -> int:
            found = _NUMBER.findall(reply)
            if not found or not start <= int(found[-1][:9]) < start + count:
                raise ValueError(instructions)
            return int(found[-1])

        return read_number, instructions
    numbers = {name.lower(): number for number, name in enumerate(names, start)}
    longest_first = sorted(map(re.escape, numbers), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)({'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
    instructions = f"Answer with one of: {', '.join(names)}."

    def read_name(reply: str, _: Any) -> int:
        found = pattern.findall(reply)
        if not found:
            raise ValueError(instructions)
        return numbers[found[-1].lower()]

    return read_name, instructions


def _text_reader(space: Any) -> tuple[ActionFunction, str]:
    instructions = f"Answer with {space.min_length} to {space.max_length} characters."
    if len(space.characters) <= 40:
        instructions = f"{instructions[:-1]} of {space.characters!r}."

    def read_text(reply: str, _: Any) -> str:
        text = reply.strip()
        if not space.contains(text):
            raise ValueError(instructions)
        return text

    return read_text, instructions
