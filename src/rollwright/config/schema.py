"""The JSON Schema of config files, which lets editors complete keys and show their help."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from rollwright.config.experiment import STAGE_CLASSES
from rollwright.config.validation import adapter_of, is_section
from rollwright.errors import ConfigError
from rollwright.registry import import_path

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _JsonSchema(GenerateJsonSchema):
    """Generates schemas in which a number or boolean may also be an interpolation."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        made = super().generate_inner(schema)
        if schema["type"] not in ("int", "float", "bool"):
            return made
        return {"anyOf": [made, {"type": "string", "pattern": r"\$\{.+\}"}]}


def class_at(path: str) -> type:
    """Return the config dataclass at an import path, or with that name in ``rollwright``.

    Raises:
        ConfigError: there is no such module or name, or it is not a dataclass.
    """
    cls = import_path(path if "." in path or ":" in path else f"rollwright.{path}", "config class")
    if not is_section(cls):
        raise ConfigError(f"{path} is {cls!r}, not a dataclass. Give one's full path, such as rollwright.GRPOConfig.")
    return cls


def schema_of_class(cls: type) -> dict[str, Any]:
    """Return the schema of files that are loaded as ``cls``."""
    return {"$schema": DIALECT, **adapter_of(cls).json_schema(schema_generator=_JsonSchema)}


def schema_of_files() -> dict[str, Any]:
    """Return the schema of every file that ``rollwright run`` takes: one stage, or several under ``stages``."""
    inputs = [(kind, "validation", adapter_of(cls)) for kind, cls in STAGE_CLASSES.items()]
    _, whole = pydantic.TypeAdapter.json_schemas(inputs, schema_generator=_JsonSchema)  # type: ignore[arg-type]
    definitions, shared, branches = whole["$defs"], {}, []
    for kind, cls in STAGE_CLASSES.items():
        keys = {  # a key that is left out has the shared value, not the class's default
            name: {word: value for word, value in schema.items() if word != "default"}
            for name, schema in definitions[cls.__name__]["properties"].items()
        }
        own = {"kind": {"const": kind}, "name": {"type": "string", "description": "Name of the stage."}}
        stage = {**definitions[cls.__name__], "properties": {**own, **keys}, "required": ["kind"]}
        definitions[f"{kind}_stage"] = stage
        branches.append({"if": {"properties": {"kind": {"const": kind}}}, "then": {"$ref": f"#/$defs/{kind}_stage"}})
        for name, value in keys.items():
            if value not in shared.setdefault(name, []):
                shared[name].append(value)
    described = "What a stage does; of the whole file if it lists no stages."
    kinds_of_stage = {"enum": list(STAGE_CLASSES), "description": described}
    properties = {name: either[0] if len(either) == 1 else {"anyOf": either} for name, either in shared.items()}
    properties["kind"] = {**kinds_of_stage, "default": "rl"}
    properties["stages"] = {
        "description": "The stages in their order; keys beside them are shared by those that have them.",
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "properties": {"kind": kinds_of_stage}, "required": ["kind"], "allOf": branches},
    }
    return {
        "$schema": DIALECT,
        "title": "Rollwright config",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }
