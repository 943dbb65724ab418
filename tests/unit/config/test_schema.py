"""The JSON Schema says what loading does."""

import json

import pytest

from rollwright import GRPOConfig
from rollwright.config.loading import build_config, config_to_dict
from rollwright.config.schema import class_at, schema_of_class, schema_of_files
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError

jsonschema = pytest.importorskip("jsonschema")


def errors(schema, text):
    validator = jsonschema.Draft202012Validator(schema)
    return list(validator.iter_errors(parse_yaml(text).data))


def test_schemas_are_schemas_and_plain_json():
    for schema in (schema_of_class(GRPOConfig), schema_of_files()):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert json.loads(json.dumps(schema)) == schema


def test_every_default_fits():
    schema = schema_of_class(GRPOConfig)
    jsonschema.validate(json.loads(json.dumps(config_to_dict(GRPOConfig()))), schema)


@pytest.mark.parametrize(
    "text",
    [
        "seed: x",
        "sed: 1",
        "gconfig: {temperature: -1}",
        "rollout: {weight_update: x}",
        "stats_logger: {display: x}",
        "critic: 3",
    ],
)
def test_what_loading_refuses_the_schema_marks(text):
    with pytest.raises(ConfigError):
        build_config(parse_yaml(text), [], GRPOConfig)
    assert errors(schema_of_class(GRPOConfig), text)


@pytest.mark.parametrize(
    "text", ["seed: 5", "seed: ${other}", "gconfig: {stop: [x]}", "ref: null", "experiment_name: ${oc.env:X}"]
)
def test_what_loading_takes_the_schema_takes(text):
    assert not errors(schema_of_class(GRPOConfig), text)


def test_descriptions_ranges_and_defaults_are_there():
    schema = schema_of_class(GRPOConfig)
    temperature = schema["$defs"]["GenerationHyperparameters"]["properties"]["temperature"]
    assert temperature["description"].startswith("Softmax temperature")
    assert temperature["default"] == 1.0
    assert {"type": "number", "minimum": 0.0} in temperature["anyOf"]


def test_files_with_stages():
    schema = schema_of_files()
    good = "seed: 1\nstages:\n  - {kind: model, path: x}\n  - {kind: rl, actor: {path: y}}\n"
    assert not errors(schema, good)
    assert errors(schema, good.replace("kind: model", "kind: modl"))
    assert errors(schema, good.replace("path: x", "pth: x"))
    assert errors(schema, "seeed: 1\n")


def test_class_at():
    assert class_at("rollwright.GRPOConfig") is GRPOConfig
    assert class_at("GRPOConfig") is GRPOConfig
    for path in ("rollwright.Nope", "no.module.X", "rollwright.config.loading.to_yaml"):
        with pytest.raises(ConfigError):
            class_at(path)
