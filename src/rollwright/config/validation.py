"""Builds a config's dataclasses from plain containers with pydantic, and reports every fault with its key and location.

Keys come first: aliases and names of other systems are replaced by field names, unknown keys are rejected, and a section that is
given only in part keeps the rest of its parent's default (``evaluator.gconfig.top_p=0.9`` leaves the evaluator's ``greedy`` unchanged).
Then pydantic checks the values. Only ``_typed`` converts a field's metadata to pydantic's constraints.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import pydantic
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from rollwright.config.faults import Faults
from rollwright.config.generation import ALIASES, GenerationHyperparameters
from rollwright.config.secrets import HIDDEN, Secret
from rollwright.config.source import KeyPath, Written, default_of, dialects, dotted, plain
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import Registry, import_path, nearest, suggestion

logger = logging.getLogger("rollwright.config")


def validated(cls: type, data: Any, faults: Faults) -> Any:
    """Build an instance of the dataclass ``cls`` from a mapping of its keys; the result is unusable if faults were found.

    Raises:
        ConfigError: a field has a type that a config cannot hold.
    """
    faults.root = cls
    named = _named(cls, data, (), None, faults)
    reported = {path for _, path, _ in faults.found}
    try:
        return adapter_of(cls).validate_python(named)
    except pydantic.ValidationError as error:
        for problem in error.errors():
            path = tuple(part for part in problem["loc"] if part != "[key]")
            if path not in reported:
                faults.add(path, _words(problem))
    return None


def refuse_wrong_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    """Check keyword arguments against a function's annotations. Arguments without a usable annotation are not checked.

    Args:
        function: function that takes the arguments.
        arguments: the arguments by name.
        key: config key of the arguments, for messages.

    Raises:
        ConfigError: an argument does not have the annotated type, or is out of range.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        adapters = {name: pydantic.TypeAdapter(hints[name]) for name in arguments.keys() & hints.keys()}
    except (NameError, TypeError, pydantic.PydanticUserError):
        return
    for name, adapter in adapters.items():
        try:
            adapter.validate_python(arguments[name], strict=True)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{key}.{name}: {_words(error.errors()[0])}.") from None


# --- keys -------------------------------------------------------------------------------------------------------------


class _Section(dict):
    """The given keys of a section, renamed to field names."""

    def __init__(self, cls: type, default: Any) -> None:
        super().__init__()
        self.cls = cls
        self.default = default  # an instance that provides the keys that are not given, or None
        self.lacks_keys = False


def names_besides(cls: type) -> dict[Any, tuple[str, bool]]:
    """Return other names of a dataclass's keys, each with its field and whether to warn."""
    tables = [
        *((each.renamed, True) for each in dialects()),
        *((each.second_names, False) for each in dialects()),
        ({GenerationHyperparameters.__name__: ALIASES}, False),
    ]
    return {
        old: (new, warn) for base in cls.__mro__ for table, warn in tables for old, new in table.get(base.__name__, {}).items()
    }


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the resolved type of each field.

    Raises:
        ConfigError: an annotation names a type that cannot be found.
    """
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"{cls.__name__}: a field's type cannot be resolved ({error}). Define the types that it names at module level, "
            "or leave out 'from __future__ import annotations' in that file."
        ) from error


def _named(kind: Any, value: Any, path: KeyPath, default: Any, faults: Faults) -> Any:
    """Replace each mapping in ``value`` that describes a dataclass with a ``_Section``."""
    if value == "???":
        faults.add(path, "is mandatory (???): give it a value")
        return value
    if value == HIDDEN:
        faults.add(path, "is ***, which stands for a secret that was not written; give it again, best as ${oc.env:NAME}")
        return value
    choices = choices_of(kind)
    sections = [choice for choice in choices if is_section(choice)]
    if value is None and sections and types.NoneType not in choices and faults.origins.raw(path) is not None:
        value = {}  # an override that removes the section set in the file
    if isinstance(value, dict) and sections:
        cls = max(sections, key=lambda each: (len(value.keys() & annotations_of(each).keys()), isinstance(default, each)))
        return _named_section(cls, value, path, default if isinstance(default, cls) else None, faults)
    if isinstance(value, (dict, list, tuple)):
        for choice in choices:
            arguments = typing.get_args(choice)
            if isinstance(value, dict) and typing.get_origin(choice) is dict:
                return {key: _named(arguments[1], item, (*path, key), None, faults) for key, item in value.items()}
            if not isinstance(value, dict) and (typing.get_origin(choice) is list or Ellipsis in arguments):
                return [_named(arguments[0], item, (*path, index), None, faults) for index, item in enumerate(value)]
    elif set(choices) in ({str}, {str, types.NoneType}) and not isinstance(value, str):
        raw = faults.origins.raw(path)  # strings on the command line need no quotes
        if raw is not None and (value is not None or (not raw and len(choices) == 1)):
            return raw
    return value


def _named_section(cls: type, data: dict[Any, Any], path: KeyPath, default: Any, faults: Faults) -> _Section:
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints, others = annotations_of(cls), names_besides(cls)
    section, origins = _Section(cls, default), faults.origins
    for key, value in data.items():
        name, warn = (key, False) if key in fields else others.get(key, (key, False))
        if name != key:
            written = Written(dotted((*path, key)), origins.of((*path, key)))
            origins.renamed[*path, name] = written
            if warn:
                logger.warning("%s: %s is called %r here; reading it as such.", written.place, written.key, name)
        if name not in fields:
            faults.add(
                (*path, key), f"{cls.__name__} has no key {key!r}; {elsewhere(faults.root, key) or nearest(key, fields)}"
            )
        elif name in section:
            faults.add((*path, key), f"says again what {name!r} says; keep one")
        else:
            own = default_of(fields[name]) if default is None else getattr(default, name)
            section[name] = _named(hints[name], value, (*path, name), own, faults)
    for name, field in fields.items():
        if name not in section and default is None and default_of(field) is dataclasses.MISSING:
            section.lacks_keys = True
            faults.add((*path, name), f"is required: {field.metadata.get('help', 'give it a value')}")
    if isinstance(default, GenerationHyperparameters) and default.greedy and "greedy" not in section:
        for name in section.keys() & {"temperature", "top_k", "top_p"}:
            faults.add((*path, name), "says how to sample, but this is greedy unless `greedy: false` stands beside it")
    return section


def elsewhere(root: Any, key: object) -> str:
    """Return a hint for a key that other systems have under this name; empty for other keys."""
    if root is None:
        return ""
    places = import_path("rollwright.compat.foreign_keys:PLACES", "table").get(key, ())
    return next((f"it is {place} here" for place in places if _has_place(root, place.split("."))), "")


def _has_place(cls: type, path: list[str]) -> bool:
    hints = annotations_of(cls)
    if path[0] not in hints:
        return False
    if len(path) == 1:
        return not any(is_section(choice) for choice in choices_of(hints[path[0]]))
    return any(is_section(choice) and _has_place(choice, path[1:]) for choice in choices_of(hints[path[0]]))


def choices_of(kind: Any) -> list[Any]:
    """Return the members of a union; for any other type, the type alone."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else [kind]
    return [typing.get_args(each)[0] if typing.get_origin(each) is Annotated else each for each in kinds]


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


# --- values -----------------------------------------------------------------------------------------------------------


@functools.cache
def adapter_of(cls: type) -> pydantic.TypeAdapter:
    """Return the adapter that validates a mapping of a dataclass's keys, builds the instance, and provides the schema."""
    try:
        return pydantic.TypeAdapter(_typed(cls, {}))
    except (pydantic.PydanticUserError, TypeError) as error:
        raise ConfigError(f"a config cannot hold all fields of {cls.__name__}: {error}") from error


@functools.cache
def _mapping_of(cls: type) -> Any:
    """Return the ``TypedDict`` of a dataclass's keys. No key is required, because ``_named_section`` reports missing ones."""
    hints, keys = annotations_of(cls), {}
    for field in dataclasses.fields(cls):
        if field.init:
            default, extra = default_of(field), {}
            if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
                extra["default"] = plain(default)
            described = pydantic.Field(description=field.metadata.get("help"), json_schema_extra=extra)
            keys[field.name] = Annotated[_typed(hints[field.name], field.metadata), described]
    mapping: Any = TypedDict(cls.__name__, keys, total=False)  # type: ignore[operator]
    mapping.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("):
        mapping.__doc__ = " ".join(cls.__doc__.split("\n\n")[0].split())
    return mapping


def _typed(kind: Any, metadata: Mapping[str, Any]) -> Any:
    """Convert a field's type and metadata (``ge``, ``gt``, ``le``, ``lt``, ``choices``, ``item_choices``, ``registry``) for pydantic."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_section(kind):
        return Annotated[_mapping_of(kind), pydantic.WrapValidator(functools.partial(_made, kind))]
    if origin is Annotated:
        return Annotated[_typed(arguments[0], metadata), *arguments[1:]]
    if origin in (typing.Union, types.UnionType):
        union = typing.Union[tuple(_typed(each, metadata) for each in arguments)]  # noqa: UP007
        several = [each for each in arguments if each is not types.NoneType]
        return Annotated[union, pydantic.WrapValidator(functools.partial(_one_of, several))] if len(several) > 1 else union
    if origin in (list, tuple, dict):
        choices = {"choices": metadata["item_choices"]} if metadata.get("item_choices") else {}
        generic: Any = origin
        items = generic[tuple(each if each is Ellipsis else _typed(each, choices) for each in arguments)]
        fixed = origin is tuple and Ellipsis not in arguments
        return Annotated[items, pydantic.BeforeValidator(functools.partial(_as_long, len(arguments)))] if fixed else items
    if origin is typing.Literal:
        return Annotated[kind, pydantic.BeforeValidator(functools.partial(_chosen, arguments))]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return Annotated[kind, pydantic.BeforeValidator(functools.partial(_member, kind))]
    if kind not in (int, float, bool, str):
        return kind
    marks: list[Any] = [pydantic.Strict()]
    if kind in (int, float):
        limits: dict[str, Any] = {name: metadata[name] for name in ("ge", "gt", "le", "lt") if metadata.get(name) is not None}
        marks.append(pydantic.Field(**limits, allow_inf_nan=False if kind is float else None))
    if kind is int:
        marks.append(pydantic.BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n))
    if choices := metadata.get("choices"):
        marks += [
            pydantic.AfterValidator(functools.partial(_chosen, choices)),
            pydantic.Field(json_schema_extra={"enum": [*choices]}),
        ]
    if kind is str:
        marks.append(pydantic.WrapValidator(functools.partial(_text, metadata)))
    if (registry := metadata.get("registry")) is not None:
        marks.append(pydantic.AfterValidator(functools.partial(_registered, registry)))
        marks.append(pydantic.Field(json_schema_extra={"examples": list(registry.built_in)}))
    return Annotated[kind, *marks]


def _made(cls: type, value: Any, handler: Callable[[Any], Any]) -> Any:
    """Build the dataclass from a section's keys."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        raise _refusal(f"expected a mapping of {cls.__name__}'s keys, got {_shown(value)}")
    values, default = handler(value), getattr(value, "default", None)
    if getattr(value, "lacks_keys", False):
        return None
    try:
        return cls(**values) if default is None else dataclasses.replace(default, **values)
    except (ConfigError, ValueError, TypeError) as error:  # raised by a __post_init__
        raise _refusal(str(error)) from error


def _one_of(kinds: list[Any], value: Any, handler: Callable[[Any], Any]) -> Any:
    """Validate a value of a union type. A section reports its own faults; any other mismatch is a single fault."""
    if isinstance(value, _Section):
        return adapter_of(value.cls).validate_python(value)
    try:
        return handler(value)
    except pydantic.ValidationError as error:
        raise _refusal(f"expected {' or '.join(map(_type_name, kinds))}, got {_shown(value)}") from error


def _as_long(length: int, value: Any) -> Any:
    if isinstance(value, (list, tuple)) and len(value) != length:
        raise _refusal(f"expected {length} values, got {len(value)}")
    return value


def _text(metadata: Mapping[str, Any], value: Any, handler: Callable[[Any], str]) -> str:
    """Validate a string; a ``Secret`` remains one."""
    text = handler(value)
    if not metadata.keys().isdisjoint(("public", "choices", "registry")):
        return text
    if isinstance(value, Secret):
        return value
    return Secret(text) if metadata.get("secret") else text


def _chosen(choices: Iterable[Any], value: Any) -> Any:
    if value in choices:
        return value
    known = [str(choice) for choice in choices]
    raise _refusal(f"must be one of {', '.join(known)}, got {_shown(value)}{suggestion(value, known)}")


def _member(kind: type[enum.Enum], value: Any) -> enum.Enum:
    found = next((member for member in kind if value in (member, member.name, member.value)), None)
    return found if found is not None else _chosen([member.name for member in kind], value)


def _registered(registry: Registry[Any], name: str) -> str:
    """Validate a registered name, or an import path that the registry accepts."""
    if name in registry:
        return name
    if "." not in name and ":" not in name and name not in registry.refused:
        known = registry.names()
        raise _refusal(f"must be one of {', '.join(known)}, or an import path, got {_shown(name)}; {nearest(name, known)}")
    try:
        registry.get(name)
    except RollwrightError as error:
        raise _refusal(str(error)) from error
    return name


# --- words ------------------------------------------------------------------------------------------------------------


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


#: Kind of a pydantic error -> expected value in words.
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}
_LIMITS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "greater than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
}


def _words(problem: Any) -> str:
    """Return our message for a pydantic error."""
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind].format(**context)}, got {value}"
    if kind == "string_type" and problem["loc"][-1] == "[key]":
        return f"the key {value!r} is a {_type_name(type(value))}; put it in quotes"
    expected = _EXPECTED.get(kind.partition("_")[0])
    if expected is None or not kind.endswith(("_type", "_parsing", "_from_float")):
        return problem["msg"]
    hint = "; write true or false" if kind == "bool_type" else ""
    if value is None:
        hint = "; leave the key out to have its default"
    elif kind == "list_type":
        hint = f"; write [{value}]"
    elif kind == "string_type" and isinstance(value, (int, float)):
        hint = "; put it in quotes"
    elif isinstance(value, Secret) and value.written.startswith("${oc.env:"):
        hint = "; what comes from the environment is text, and ${oc.decode:${oc.env:NAME}} reads it as YAML"
    return f"expected {expected}, got {_shown(value)}{hint}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({_type_name(type(value))})"


def _type_name(kind: Any) -> str:
    names: dict[Any, str] = {
        str: "text",
        Secret: "text",
        int: "whole number",
        float: "number",
        bool: "true/false",
        dict: "mapping",
    }
    return names.get(kind) or getattr(kind, "__name__", str(kind))
