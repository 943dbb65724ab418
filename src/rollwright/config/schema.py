"""JSON Schema of configs: for editors that complete keys, show help and mark what is out of range."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import types
import typing
from typing import Any

from rollwright.config.loading import STAGE_CLASSES
from rollwright.config.source import plain
from rollwright.config.validation import annotations_of
from rollwright.errors import ConfigError

DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: Any value may be an interpolation instead.
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def class_at(path: str) -> type:
    """The config dataclass at an import path.

    Raises:
        ConfigError: there is no such module or name, or it is no dataclass.
    """
    module_name, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name or "rollwright"), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot import {path}: {error}. Give a dataclass's full path, such as rollwright.GRPOConfig."
        ) from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{path} is {cls!r}, not a dataclass.")
    return cls


def schema_of_class(cls: type) -> dict[str, Any]:
    """The schema of files that are loaded as ``cls``."""
    definitions: dict[str, Any] = {}
    root = _object(cls, definitions)
    return {"$schema": DIALECT, "title": cls.__name__, **root, "$defs": definitions}


def schema_of_files() -> dict[str, Any]:
    """The schema of every file that ``rollwright run`` takes: one stage, or several under ``stages``."""
    definitions: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    branches = []
    for kind, cls in STAGE_CLASSES.items():
        body = _object(cls, definitions)
        own = {"kind": {"const": kind}, "name": {"type": "string", "description": "Name of the stage."}}
        definitions[f"{kind}_stage"] = {
            **body,
            "properties": {**own, **_without_defaults(body["properties"])},
            "required": ["kind"],
        }
        branches.append({"if": {"properties": {"kind": {"const": kind}}}, "then": {"$ref": f"#/$defs/{kind}_stage"}})
        for name, value in body["properties"].items():
            shared.setdefault(name, []).append(_without_default(value))
    properties = {name: _either(schemas) for name, schemas in shared.items()}
    kinds = {"enum": list(STAGE_CLASSES), "description": "What a stage does; of the whole file where it lists no stages."}
    properties["kind"] = {**kinds, "default": "rl"}
    properties["stages"] = {
        "description": "The stages in their order; keys beside them are shared by those that have them.",
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"kind": kinds},
            "required": ["kind"],
            "allOf": branches,
        },
    }
    return {
        "$schema": DIALECT,
        "title": "Rollwright config",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = annotations_of(cls)
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        value = _described(_typed(hints[field.name], definitions), field, definitions)
        properties[field.name] = value
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    body = {"type": "object", "properties": properties, "additionalProperties": False}
    if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("):
        body["description"] = " ".join(cls.__doc__.split("\n\n")[0].split())
    return {**body, "required": required} if required else body


def _described(schema: dict[str, Any], field: dataclasses.Field, definitions: dict[str, Any]) -> dict[str, Any]:
    metadata = field.metadata
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") in ("integer", "number"):
            branch.update({_LIMITS[name]: metadata[name] for name in _LIMITS if metadata.get(name) is not None})
        if metadata.get("choices") and branch.get("type") == "string" and "pattern" not in branch:
            branch["enum"] = list(metadata["choices"])
        if metadata.get("registry") is not None and branch.get("type") == "string":
            branch["examples"] = list(metadata["registry"].built_in)
        if metadata.get("item_choices") and branch.get("type") == "array":
            branch["items"] = {"enum": list(metadata["item_choices"])}
    described = dict(schema)
    if metadata.get("help"):
        described["description"] = metadata["help"]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
        described["default"] = plain(default)
    return described


def _typed(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SCALARS:
        own = {"type": _SCALARS[annotation]}
        return own if annotation is str else {"anyOf": [own, dict(_INTERPOLATION)]}
    if origin in (typing.Union, types.UnionType):
        branches: list[dict[str, Any]] = []
        for argument in arguments:
            schema: dict[str, Any] = {"type": "null"} if argument is type(None) else _typed(argument, definitions)
            branches.extend(branch for branch in schema.get("anyOf", [schema]) if branch not in branches)
        return {"anyOf": branches}
    if origin is typing.Annotated:
        return _typed(arguments[0], definitions)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        name = annotation.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object(annotation, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin in (list, tuple) or annotation in (list, tuple):
        item = arguments[0] if arguments and arguments[0] is not Any else None
        return {"type": "array", **({"items": _typed(item, definitions)} if item else {})}
    if origin is dict or annotation is dict:
        return {"type": "object"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": [member.name for member in annotation]}
    return {}


def _without_defaults(properties: dict[str, Any]) -> dict[str, Any]:
    """In a stage, a key that is left out has the shared value, not the class's default."""
    return {name: _without_default(schema) for name, schema in properties.items()}


def _without_default(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "default"}


def _either(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    distinct = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
