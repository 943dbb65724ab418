"""Faults of a config, and the tables of rules that find them.

A ``Rule`` is one line of a table: the keys that it checks, when it applies, and how it finds faults. ``faults_in`` applies a table to a
config, ``refuse_faults`` to the stages of a run. ``rules.RULES`` holds the rules that need no torch; the tables that check names and
files are in ``trainers.checks.unknown_names`` and ``trainers.checks.missing_inputs``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Protocol

from rollwright.config.recipes import defaults_of
from rollwright.config.source import KeyPath, Origins, dotted, undotted
from rollwright.errors import ConfigError, RollwrightError

Fault = tuple[KeyPath, str]


class Unread(str):
    """Message about a key that is set but not read. If stages share the key, another stage may read it."""


@dataclass
class Faults:
    """Collects the faults of one config.

    Attributes:
        origins: where the config's keys were written.
        found: line (0 if the key is in no file), key and message of each fault.
        unread: keys that are set but not read.
        root: class of the config.
    """

    origins: Origins
    found: list[tuple[int, KeyPath, str]] = field(default_factory=list)
    unread: set[KeyPath] = field(default_factory=set)
    root: type | None = None

    def add(self, path: KeyPath, message: str) -> None:
        """Add a fault about the value at ``path``."""
        place, name = self.origins.of(path), f"{self.origins.name(path)}: " if path else ""
        line = place.rpartition(":")[2]
        self.found.append((int(line) if line.isdigit() else 0, path, f"{place}: {name}{message}"))
        if isinstance(message, Unread):
            self.unread.add(path)

    @property
    def messages(self) -> list[str]:
        """All messages, ordered by line."""
        return [message for _, _, message in sorted(self.found, key=lambda fault: fault[0])]


@dataclass(frozen=True)
class Look:
    """The key of a section that a rule checks.

    Attributes:
        section: the config or section.
        path: the key, relative to the section.
        value: value of the key.
        earlier: configs of the stages that run before this one.
    """

    section: Any
    path: KeyPath
    value: Any
    earlier: Sequence[Any] = ()


@dataclass(frozen=True)
class Rule:
    """One line of a table of rules.

    Attributes:
        of: class of the configs or sections that have the keys.
        keys: dotted names relative to the section; ``*`` matches each element of a list, and an empty name the section itself.
        find: yields the faults at one key, with paths relative to the section.
        when: whether the rule applies to a section.
        only_set: check only keys that the user has set; the name of a section then stands for all its keys.
    """

    of: type | UnionType
    keys: tuple[str, ...]
    find: Callable[[Look], Iterable[Fault]]
    when: Callable[[Any], object] = lambda section: True
    only_set: bool = False


Message = str | Callable[[Any], str]


def refuse(of: type | UnionType, key: str, when: Callable[[Any], object], message: Message) -> Rule:
    """Make a rule that rejects ``key`` if ``when(section)`` is true.

    ``message`` is a template in which ``{value}`` is the key's value and ``{config}`` the section, or a function of the section.
    """
    return Rule(of, (key,), lambda look: [(look.path, _written_out(message, look))], when)


def refuse_set(of: type | UnionType, keys: Iterable[str], when: Callable[[Any], object], message: Message) -> Rule:
    """Make a rule like that of ``refuse`` for each of the keys that the user has set."""
    return Rule(of, tuple(keys), lambda look: [(look.path, _written_out(message, look))], when, only_set=True)


def unread(of: type | UnionType, keys: Iterable[str], when: Callable[[Any], object], why: Message) -> Rule:
    """Make a rule that rejects keys that are set, although they are not read if ``when(section)`` is true."""

    def find(look: Look) -> Iterator[Fault]:
        yield look.path, Unread(f"is set, but not read: {_written_out(why, look)}; take it out, or change that")

    return Rule(of, tuple(keys), find, when, only_set=True)


def must_be_found(
    of: type | UnionType,
    keys: Iterable[str],
    look_up: Callable[[Any, Any], object],
    when: Callable[[Any], object] = lambda section: True,
) -> Rule:
    """Make a rule that calls ``look_up(section, value)`` for each key whose value is not None; a ``RollwrightError`` is a fault."""

    def find(look: Look) -> Iterator[Fault]:
        if look.value is not None:
            yield from found_or_fault(look.path, lambda: look_up(look.section, look.value))

    return Rule(of, tuple(keys), find, when)


def found_or_fault(path: KeyPath, look_up: Callable[[], Any]) -> Generator[Fault, None, Any]:
    """Return ``look_up()``; if it raises a ``RollwrightError``, yield that as the fault at ``path`` and return None."""
    try:
        return look_up()
    except RollwrightError as error:
        yield path, str(error)


def faults_in(config: Any, rules: Sequence[Rule], earlier: Sequence[Any] = ()) -> Iterator[Fault]:
    """Yield the key and message of every fault that the rules find in a config, inner sections first.

    A key that is not read for several reasons is reported once, with the first reason.
    """
    unread_before: set[KeyPath] = set()
    for path, section in sections_of(config):
        for rule in rules:
            for key, value in _keys_of(rule, section) if isinstance(section, rule.of) else ():
                for below, message in rule.find(Look(section, key, value, earlier)) if rule.when(section) else ():
                    place = (*path, *below)
                    if not isinstance(message, Unread) or place not in unread_before:
                        yield place, message
                    if isinstance(message, Unread):
                        unread_before.add(place)


class LoadedStage(Protocol):
    """A stage of a run: its config, and where its keys were written."""

    config: Any
    origins: Origins


def refuse_faults(stages: Sequence[LoadedStage], rules: Sequence[Rule]) -> None:
    """Check all stages of a run against a table of rules.

    Raises:
        ConfigError: lists every fault of every stage with its key, file and line.
    """
    messages: list[str] = []
    for index, stage in enumerate(stages):
        faults = Faults(stage.origins)
        for path, message in faults_in(stage.config, rules, [before.config for before in stages[:index]]):
            faults.add(path, message)
        messages += faults.messages
    if messages:
        raise ConfigError.of(messages)


def has_key(config: Any, path: KeyPath) -> bool:
    """Return True if a config has a key, which may be inside a list; False if a section above it is None."""
    return any(True for _ in _matches(config, None, path))


def reset(config: Any, path: KeyPath) -> None:
    """Set a key to its default, in place."""
    ((_, section, default),) = _matches(config, None, path[:-1])
    name = str(path[-1])
    setattr(section, name, copy.deepcopy(getattr(_unchanged(type(section)) if default is None else default, name)))


def sections_of(config: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every section of a config, and the config itself, each with its path; inner sections come first."""
    if is_dataclass(config):
        for each in fields(config):
            yield from sections_of(getattr(config, each.name), (*path, each.name))
        yield path, config
    elif isinstance(config, list):
        for index, each in enumerate(config):
            yield from sections_of(each, (*path, index))


def _keys_of(rule: Rule, section: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the keys of a section that a rule checks, with their values, except keys below a section that is None."""
    for key in rule.keys:
        for path, value, default in _matches(section, None, undotted(key) if key else ()):
            if not rule.only_set:
                yield path, value
                continue
            for leaf, set_value in _leaves(value, default, path):
                filled_in = defaults_of(section)
                if dotted(leaf) not in filled_in or filled_in[dotted(leaf)] != set_value:
                    yield leaf, set_value


def _matches(value: Any, default: Any, key: KeyPath, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield path, value and default of everything that a key matches."""
    if not key:
        yield path, value, default
        return
    name, below = str(key[0]), key[1:]
    if isinstance(value, list):
        for index, each in enumerate(value):
            if name in ("*", str(index)):
                yield from _matches(each, None, below, (*path, index))
    elif hasattr(value, name):
        default = _unchanged(type(value)) if default is None else default
        yield from _matches(getattr(value, name), getattr(default, name), below, (*path, name))


@functools.cache
def _unchanged(cls: type) -> Any:
    """Return a section with every key at its default."""
    return cls()


def _leaves(value: Any, default: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the keys at or below a path whose value is not the default."""
    if is_dataclass(value) and isinstance(value, type(default)):
        for each in fields(value):
            yield from _leaves(getattr(value, each.name), getattr(default, each.name), (*path, each.name))
    elif value != default:
        yield path, value


def _written_out(message: Message, look: Look) -> str:
    return message.format(value=look.value, config=look.section) if isinstance(message, str) else message(look.section)
