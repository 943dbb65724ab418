"""Sweeps: overrides that list several values, and the single runs that they stand for.

``actor.optimizer.lr=1e-4,3e-4`` is two runs. A value is such a list if it has commas without spaces around them, is not quoted or in
brackets, and its key takes a single value. ``gconfig.stop=[a,b]`` stays one run with a list, and ``key='"a,b"'`` one run with a text.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.config.experiment import STAGE_CLASSES
from rollwright.config.overrides import parse_override
from rollwright.config.secrets import is_secret_name
from rollwright.config.source import KeyPath, Override, dotted
from rollwright.errors import ConfigError

_SEED = ("seed",)


@dataclass(frozen=True)
class SweepMember:
    """One run of a sweep.

    Attributes:
        setting: the swept values except the seed, as ``lr=1e-4 eps_clip=0.2``; empty if only seeds are swept.
        seed: the seed, if seeds are swept.
        overrides: the overrides of the run, without lists.
        label: text that tells the run from the others in file names.
    """

    setting: str
    seed: str | None
    overrides: tuple[str, ...]
    label: str

    @property
    def name(self) -> str:
        """Setting and seed, for messages."""
        return " ".join([*([self.setting] if self.setting else []), *([f"seed={self.seed}"] if self.seed else [])])


def members_of(overrides: Sequence[str], seeds: str | None = None) -> list[SweepMember]:
    """Return the runs that overrides with lists stand for: every combination, the seeds of a setting one after another.

    Args:
        overrides: ``key=value`` arguments.
        seeds: comma-separated seeds; the value of ``--seeds``.

    Returns:
        The runs; empty if no override lists several values and ``seeds`` is None.

    Raises:
        ConfigError: seeds are not whole numbers or are given twice, or a list names a value twice.
    """
    parsed = [parse_override(text) for text in overrides]
    if seeds is not None:
        if given := [override.text for override in parsed if override.path == _SEED]:
            raise ConfigError(f"--seeds {seeds} and {given[-1]} both set the seed: give one of them.")
        parsed.append(parse_override(f"seed={_whole_numbers(seeds)}"))
    lists = [_listed(override) for override in parsed]
    if seeds is not None:
        lists[-1] = parsed[-1].raw.split(",")
    swept = [override.path for override, values in zip(parsed, lists, strict=True) if len(values) > 1 or override.path == _SEED]
    if not any(len(values) > 1 for values in lists) and seeds is None:
        return []
    for override, values in zip(parsed, lists, strict=True):
        if twice := [value for value in values if values.count(value) > 1]:
            given = f"--seeds {seeds}" if seeds is not None and override.path == _SEED else f"override {override.text!r}"
            raise ConfigError(f"{given}: {twice[0]} is listed twice.")
    names = _short_names([path for path in swept if path != _SEED])
    order = sorted(range(len(parsed)), key=lambda index: parsed[index].path == _SEED)  # the seed changes fastest
    chosen = [dict(zip(order, values, strict=True)) for values in itertools.product(*(lists[index] or [""] for index in order))]
    members = [_member(parsed, values, lists, names) for values in chosen]
    return _distinct(members)


def _whole_numbers(seeds: str) -> str:
    parts = [part.strip() for part in seeds.split(",")]
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ConfigError(f"--seeds {seeds}: give whole numbers with commas between them, such as --seeds 1,2,3.")
    return ",".join(parts)


def _member(
    parsed: Sequence[Override], values: dict[int, str], lists: Sequence[list[str]], names: dict[KeyPath, str]
) -> SweepMember:
    texts, setting, seed = [], [], None
    for index, override in enumerate(parsed):
        is_listed = len(lists[index]) > 0
        texts.append(f"{dotted(override.path)}={values[index]}" if is_listed else _argument(override))
        if override.path == _SEED:
            seed = values[index] if is_listed else override.raw
        elif len(lists[index]) > 1:
            setting.append((names[override.path], values[index]))
    parts = [*setting, *([("seed", seed)] if seed is not None else [])]
    label = "-".join(f"{name}={_for_files(value)}" for name, value in parts)
    return SweepMember(" ".join(f"{name}={value}" for name, value in setting), seed, tuple(texts), label)


def _argument(override: Override) -> str:
    """Return an override as an argument again; its text may hide a secret."""
    return f"{dotted(override.path)}={override.raw}"


def _for_files(value: str) -> str:
    last = value.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.+@]+", "-", last).strip("-") or "value"


def _distinct(members: list[SweepMember]) -> list[SweepMember]:
    """Number labels that several members would share."""
    counts: dict[str, int] = {}
    result = []
    for member in members:
        counts[member.label] = number = counts.get(member.label, 0) + 1
        result.append(member if number == 1 else dataclasses.replace(member, label=f"{member.label}-{number}"))
    return result


def _short_names(paths: Sequence[KeyPath]) -> dict[KeyPath, str]:
    """Return the shortest end of each dotted key that no other swept key has."""

    def end(path: KeyPath, length: int) -> str:
        return dotted(path[-length:])

    names = {}
    for path in paths:
        lengths = range(1, len(path) + 1)
        others = [other for other in paths if other != path]
        names[path] = next(
            end(path, n) for n in lengths if all(end(path, n) != end(other, n) for other in others) or n == len(path)
        )
    return names


def _listed(override: Override) -> list[str]:
    """Return the values that an override lists; empty if it has one value."""
    raw = override.raw
    parts = raw.split(",")
    is_one = len(parts) == 1 or override.value != raw or "${" in raw  # YAML reads a list, a mapping or quotes as another value
    if is_one or any(not part or part != part.strip() for part in parts):
        return []
    if is_secret_name(str(override.path[-1])) or takes_several(override.path):
        return []
    return parts


def takes_several(path: KeyPath) -> bool:
    """Return True if a key takes a list or a mapping in any kind of stage."""
    path = path[2:] if path[0] == "stages" else path
    return any(_is_container(kind) for stage in STAGE_CLASSES.values() for kind in _types_at(stage, path))


def _types_at(kind: Any, path: KeyPath) -> Iterator[Any]:
    """Yield the declared types of a key; none if it is below a mapping without declared keys."""
    for each in _alternatives(kind):
        if not path:
            yield each
        elif dataclasses.is_dataclass(each) and isinstance(each, type):
            hints = typing.get_type_hints(each)
            if path[0] in hints:
                yield from _types_at(hints[str(path[0])], path[1:])
        elif typing.get_origin(each) is list:
            yield from _types_at(typing.get_args(each)[0], path[1:])


def _alternatives(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return tuple(each for each in typing.get_args(kind) if each is not type(None)) if is_union else (kind,)


def _is_container(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and (issubclass(origin, list | tuple | set | dict) or dataclasses.is_dataclass(origin))
