"""Strict construction of dataclasses from plain containers: every fault is found, named and placed.

A nested section that is given in part keeps the rest of its parent's default for it, so ``evaluator.gconfig.top_p=0.9``
leaves the evaluator's ``greedy`` as it was.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import types
import typing
from pathlib import Path
from typing import Any

from rollwright.config.generation import ALIASES, GenerationHyperparameters
from rollwright.config.source import DIALECTS, KeyPath, Origins, Written, dotted
from rollwright.config.tasksets import TASKSET_NAMES, TasksetConfig
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import Registry, nearest

logger = logging.getLogger("rollwright.config")

#: Second names of keys that are as good as the first: no warning.
SECOND_NAMES: dict[type, dict[str, str]] = {GenerationHyperparameters: ALIASES, TasksetConfig: TASKSET_NAMES}

_FAULT = object()


def annotations_of(cls: type) -> dict[str, Any]:
    """The resolved type of each field.

    Raises:
        ConfigError: an annotation names a type that cannot be found.
    """
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"{cls.__name__}: a field's type cannot be resolved ({error}). Define the types that it names at module level, "
            "or leave out 'from __future__ import annotations' in that file."
        ) from error


@dataclasses.dataclass
class Builder:
    """Builds one config and gathers every fault on the way.

    Attributes:
        origins: where each value was written.
        faults: messages, one for each fault, in the order in which they were found.
    """

    origins: Origins
    faults: list[str] = dataclasses.field(default_factory=list)

    def build(self, cls: type, data: Any, path: KeyPath = (), default: Any = None) -> Any:
        """An instance of the dataclass ``cls``; where there were faults, ``faults`` holds them and the result is no use.

        Args:
            cls: the dataclass.
            data: mapping of its keys.
            path: where the mapping stands in the document.
            default: an instance whose fields stand in for the keys that are not given.
        """
        if not isinstance(data, dict):
            self.fault(path, f"expected a mapping of {cls.__name__}'s keys, got {_shown(data)}")
            return _FAULT
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        hints = annotations_of(cls)
        given = self._known_names(cls, data, path, fields)
        values: dict[str, Any] = {}
        for name, value in given.items():
            field_default = _default_of(fields[name]) if default is None else getattr(default, name)
            if field_default is dataclasses.MISSING:
                field_default = None
            values[name] = self._value(hints[name], value, (*path, name), field_default, fields[name].metadata)
        for name, field in fields.items():
            if name not in values and default is None and _default_of(field) is dataclasses.MISSING:
                self.fault((*path, name), f"is required{_help_of(field)}")
                values[name] = _FAULT
        if isinstance(default, GenerationHyperparameters) and default.greedy and "greedy" not in values:
            for name in values.keys() & {"temperature", "top_k", "top_p"}:
                self.fault((*path, name), "says how to sample, but this is greedy unless `greedy: false` stands beside it")
        if any(value is _FAULT for value in values.values()):
            return _FAULT
        try:
            return cls(**values) if default is None else dataclasses.replace(default, **values)
        except (ConfigError, ValueError, TypeError) as error:
            self.fault(path, str(error))
            return _FAULT

    def fault(self, path: KeyPath, message: str) -> None:
        """Note one fault of the value at ``path``."""
        name = f"{self.origins.name(path)}: " if path else ""
        self.faults.append(f"{self.origins.of(path)}: {name}{message}")

    def raise_faults(self) -> None:
        """Raise one ``ConfigError`` with every fault that was noted; return where there is none."""
        if not self.faults:
            return
        if len(self.faults) == 1:
            raise ConfigError(self.faults[0])
        raise ConfigError(f"{len(self.faults)} faults:\n" + "\n".join(f"  {fault}" for fault in self.faults))

    def _known_names(self, cls: type, data: dict[Any, Any], path: KeyPath, fields: dict[str, Any]) -> dict[str, Any]:
        """``data`` under the fields' own names: second names translated, legacy names with a warning, others refused."""
        second_names = _table_of(cls, SECOND_NAMES)
        legacy = _legacy_names(cls)
        given: dict[str, Any] = {}
        for key, value in data.items():
            name = second_names.get(key, key)
            if name not in fields and key in legacy:
                name = legacy[key]
                logger.warning(
                    "%s: %s is called %r here; reading it as such.", self.origins.of((*path, key)), dotted((*path, key)), name
                )
            if name != key:
                self.origins.renamed[*path, name] = Written(dotted((*path, key)), self.origins.of((*path, key)))
            if name not in fields:
                self.fault((*path, key), f"{cls.__name__} has no key {key!r}; {nearest(key, fields)}")
            elif name in given:
                self.fault((*path, key), f"says again what {name!r} says; keep one")
            else:
                given[name] = value
        return given

    def _value(self, annotation: Any, value: Any, path: KeyPath, default: Any, metadata: Any) -> Any:
        before = len(self.faults)
        result = self._typed(annotation, value, path, default)
        if len(self.faults) == before:
            self._check_limits(result, path, metadata)
        return result if len(self.faults) == before else _FAULT

    def _typed(self, annotation: Any, value: Any, path: KeyPath, default: Any = None) -> Any:
        if value == "???":
            self.fault(path, "is mandatory (???): give it a value")
            return _FAULT
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return self._typed(arguments[0], value, path, default)
        if annotation is Any or annotation is object:
            return value
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, value, path, default)
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            suited = default if isinstance(default, annotation) else None
            return self.build(annotation, value, path, suited)
        if origin is list or annotation is list:
            return self._list(arguments[0] if arguments else Any, value, path)
        if origin is tuple or annotation is tuple:
            return self._tuple(arguments, value, path)
        if origin is dict or annotation is dict:
            return self._dict(arguments or (Any, Any), value, path)
        if origin is typing.Literal:
            if value not in arguments:
                self.fault(path, f"must be one of {', '.join(map(str, arguments))}, got {_shown(value)}")
            return value
        if annotation in _SCALARS:
            return self._scalar(annotation, value, path)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self._enum(annotation, value, path)
        return self._any_other(annotation, value, path)

    def _union(self, choices: tuple[Any, ...], value: Any, path: KeyPath, default: Any) -> Any:
        if value is None and type(None) in choices:
            return None
        choices = tuple(choice for choice in choices if choice is not type(None))
        if len(choices) == 1:
            return self._typed(choices[0], value, path, default)
        exact = sorted(choices, key=lambda choice: choice is not type(value))
        attempts = []
        for choice in exact:
            attempt = Builder(self.origins)
            result = attempt._typed(choice, value, path, default)
            if not attempt.faults:
                return result
            attempts.append(attempt.faults)
        if isinstance(value, dict) and any(dataclasses.is_dataclass(choice) for choice in choices):
            self.faults.extend(min(attempts, key=len))
        else:
            self.fault(path, f"expected {' or '.join(_type_name(choice) for choice in choices)}, got {_shown(value)}")
        return _FAULT

    def _list(self, item: Any, value: Any, path: KeyPath) -> Any:
        if not isinstance(value, (list, tuple)):
            self.fault(path, f"expected a list, got {_shown(value)}; write [{value if value is not None else ''}]")
            return _FAULT
        return [self._typed(item, element, (*path, index)) for index, element in enumerate(value)]

    def _tuple(self, arguments: tuple[Any, ...], value: Any, path: KeyPath) -> Any:
        if not isinstance(value, (list, tuple)):
            self.fault(path, f"expected a list, got {_shown(value)}")
            return _FAULT
        if not arguments or (len(arguments) == 2 and arguments[1] is Ellipsis):
            item = arguments[0] if arguments else Any
            return tuple(self._list(item, value, path))
        if len(arguments) != len(value):
            self.fault(path, f"expected {len(arguments)} values, got {len(value)}")
            return _FAULT
        return tuple(
            self._typed(kind, element, (*path, i)) for i, (kind, element) in enumerate(zip(arguments, value, strict=True))
        )

    def _dict(self, arguments: tuple[Any, ...], value: Any, path: KeyPath) -> Any:
        if not isinstance(value, dict):
            self.fault(path, f"expected a mapping, got {_shown(value)}")
            return _FAULT
        result = {}
        for key, element in value.items():
            if arguments[0] is str and not isinstance(key, str):
                self.fault((*path, key), f"the key {key!r} is a {_type_name(type(key))}; put it in quotes")
            result[key] = self._typed(arguments[1], element, (*path, key))
        return result

    def _scalar(self, annotation: type, value: Any, path: KeyPath) -> Any:
        hint = ""
        if annotation is str:
            if isinstance(value, str):
                return value
            raw = self.origins.raw(path)
            if raw is not None and not isinstance(value, (dict, list)) and (value is not None or not raw):
                return raw
            hint = "; put it in quotes" if isinstance(value, (int, float)) else ""
        elif annotation is Path:
            if isinstance(value, (str, Path)):
                return Path(value)
        elif annotation is bool:
            if isinstance(value, bool):
                return value
            hint = "; write true or false"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if annotation is float:
                return float(value)
            if float(value).is_integer():
                return int(value)
        if value is None:
            hint = "; leave the key out to have its default"
        self.fault(path, f"expected {_SCALARS[annotation]}, got {_shown(value)}{hint}")
        return _FAULT

    def _enum(self, annotation: type[enum.Enum], value: Any, path: KeyPath) -> Any:
        for member in annotation:
            if value in (member, member.name, member.value):
                return member
        self.fault(path, f"must be one of {', '.join(member.name for member in annotation)}, got {_shown(value)}")
        return _FAULT

    def _any_other(self, annotation: Any, value: Any, path: KeyPath) -> Any:
        """A type of the user's that has no rule here is left to pydantic."""
        import pydantic

        try:
            return pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True)).validate_python(
                value
            )
        except pydantic.ValidationError as error:
            for problem in error.errors():
                self.fault((*path, *problem["loc"]), problem["msg"])
        except (pydantic.PydanticUserError, TypeError) as error:
            self.fault(path, f"a config cannot hold a {_type_name(annotation)}: {error}")
        return _FAULT

    def _check_limits(self, value: Any, path: KeyPath, metadata: Any) -> None:
        if value is None:
            return
        if isinstance(value, float) and not math.isfinite(value):
            self.fault(path, f"must be a finite number, got {value}")
            return
        for name, (fits, words) in _LIMITS.items():
            limit = metadata.get(name)
            if limit is not None and isinstance(value, (int, float)) and not fits(value, limit):
                self.fault(path, f"must be {words} {limit}, got {value}")
        choices = metadata.get("choices")
        if choices and value not in choices:
            self.fault(path, f"must be one of {', '.join(map(str, choices))}, got {_shown(value)}; {nearest(value, choices)}")
        registry = metadata.get("registry")
        if registry is not None and value not in registry:
            self._check_import_path(registry, value, path)
        item_choices = metadata.get("item_choices")
        for index, item in enumerate(value if item_choices and isinstance(value, (list, tuple)) else ()):
            if item not in item_choices:
                self.fault((*path, index), f"must be one of {', '.join(map(str, item_choices))}, got {_shown(item)}")

    def _check_import_path(self, registry: Registry[Any], value: str, path: KeyPath) -> None:
        """``value`` is no name of the registry: it has to be an import path."""
        if "." not in value and ":" not in value:
            names = registry.names()
            self.fault(
                path, f"must be one of {', '.join(names)}, or an import path, got {_shown(value)}; {nearest(value, names)}"
            )
            return
        try:
            registry.get(value)
        except RollwrightError as error:
            self.fault(path, str(error))


_SCALARS: dict[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_LIMITS = {
    "ge": (lambda value, limit: value >= limit, "at least"),
    "gt": (lambda value, limit: value > limit, "greater than"),
    "le": (lambda value, limit: value <= limit, "at most"),
    "lt": (lambda value, limit: value < limit, "less than"),
}


def names_besides(cls: type) -> dict[str, str]:
    """Second and legacy names of a dataclass's keys, and the field each means."""
    return {**_legacy_names(cls), **_table_of(cls, SECOND_NAMES)}


def _default_of(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _table_of(cls: type, table: dict[type, dict[str, str]]) -> dict[str, str]:
    return {old: new for base in reversed(cls.__mro__) for old, new in table.get(base, {}).items()}


def _legacy_names(cls: type) -> dict[str, str]:
    """Keys that users bring from other systems' files, and the field of ``cls`` that each means."""
    tables = [DIALECTS.get(name).renamed for name in DIALECTS.built_in]
    return {old: new for base in cls.__mro__ for table in tables for old, new in table.get(base.__name__, {}).items()}


def _help_of(field: dataclasses.Field) -> str:
    text = field.metadata.get("help")
    return f": {text}" if text else ""


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({_type_name(type(value))})"


def _type_name(annotation: Any) -> str:
    names = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true/false",
        dict: "mapping",
        list: "list",
        type(None): "null",
    }
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))
