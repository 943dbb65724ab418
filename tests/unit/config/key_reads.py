"""Notes which keys of a config a run reads. Copying a section, comparing, printing and checking it is not reading."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollwright.config import experiment, generation, modes, sections, servers, tasksets, teachers

KeyPath = tuple[str | int, ...]

CLASSES = {
    each: frozenset(field.name for field in dataclasses.fields(each))
    for module in (experiment, generation, modes, sections, servers, tasksets, teachers)
    for each in vars(module).values()
    if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == module.__name__
}
#: Attribute of a section: where it is in the config, and the keys that a copy of it was given anew.
PLACE = "_place"
#: Modules that only check, copy or write a config; and those that are looked through to who called them.
CHECKS = frozenset(
    [
        *(f"rollwright.config.{name}" for name in ("faults", "loading", "plan", "recipes", "rules", "schema", "secrets")),
        *(
            f"rollwright.config.{name}"
            for name in ("source", "keys_without_effect", "adapter_rules", "cluster_rules", "teacher_rules", "validation")
        ),
        *(
            "rollwright.tracking.learning_signs",
            "rollwright.trainers.checks.missing_inputs",
            "rollwright.trainers.checks.unknown_names",
            "dataclasses",
        ),
    ]
)
LOOKED_THROUGH = frozenset(["rollwright.config.generation", "rollwright.config.tasksets", __name__])


def place(config: Any, path: KeyPath = ()) -> None:
    """Tell every section of a config where it is."""
    vars(config)[PLACE] = path, frozenset()
    for field in dataclasses.fields(config):
        value = vars(config)[field.name]
        for each, inner in (
            [(value, (field.name,))] if not isinstance(value, list) else [(v, (field.name, i)) for i, v in enumerate(value)]
        ):
            if dataclasses.is_dataclass(each):
                place(each, (*path, *inner))


def keys_of(config: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, dataclasses.Field[Any]]]:
    """Every key that holds a value rather than a section: its path, the section and the field."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, (*path, field.name))
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for index, each in enumerate(value):
                yield from keys_of(each, (*path, field.name, index))
        else:
            yield (*path, field.name), config, field


@contextmanager
def noted() -> Iterator[set[KeyPath]]:
    """The keys that are read from here on, of configs that were given to ``place``."""
    read: set[KeyPath] = set()
    replace, new = dataclasses.replace, generation.GenerationHyperparameters.new

    def getter(own: frozenset[str]) -> Any:
        def get(self: Any, name: str) -> Any:
            if name in own:
                path, given = object.__getattribute__(self, "__dict__").get(PLACE, (None, ()))
                if path is not None and name not in given and (*path, name) not in read and _is_read(sys._getframe(1)):
                    read.add((*path, name))
            return object.__getattribute__(self, name)

        return get

    def placed(made: Any, source: Any, changes: dict[str, Any]) -> Any:
        if (at := getattr(source, "__dict__", {}).get(PLACE)) is not None:
            vars(made)[PLACE] = at[0], at[1] | changes.keys()
        return made

    for cls, own in CLASSES.items():
        cls.__getattribute__ = getter(own)  # type: ignore[method-assign]

    def replaced(source: Any, /, **changes: Any) -> Any:
        return placed(replace(source, **changes), source, changes)

    _exchange(replace, replaced)
    generation.GenerationHyperparameters.new = lambda self, **changes: placed(new(self, **changes), self, changes)  # type: ignore[method-assign]
    try:
        yield read
    finally:
        _exchange(replaced, replace)
        generation.GenerationHyperparameters.new = new
        for cls in CLASSES:
            if "__getattribute__" in vars(cls):
                del cls.__getattribute__


def _exchange(old: Any, new: Any) -> None:
    """Put ``new`` in the place of ``dataclasses.replace``, in the modules that imported it by name too, whenever that was."""
    for name, module in list(sys.modules.items()):
        if (name == "dataclasses" or name.startswith("rollwright")) and vars(module).get("replace") is old:
            module.replace = new  # type: ignore[attr-defined]


def _is_read(frame: Any) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module not in LOOKED_THROUGH:
            return module not in CHECKS
        frame = frame.f_back
    return False
