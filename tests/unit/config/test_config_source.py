"""YAML with lines."""

from pathlib import Path

import pytest

from rollwright.config.overrides import parse_override
from rollwright.config.source import Document, Origins, parse_value, parse_yaml, read_yaml
from rollwright.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-1E3", -1000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x1f", 31),
        ("true", True),
        ("null", None),
        ("", None),
        ("[a, 1]", ["a", 1]),
        ("{a: {b: 2}}", {"a": {"b": 2}}),
        # what YAML 1.1 would have made a number, a date or a truth value
        ("0130", "0130"),
        ("12:30", "12:30"),
        ("2026-11-21", "2026-11-21"),
        ("yes", "yes"),
        ("on", "on"),
        ("a: b: c", "a: b: c"),
        ("*x", "*x"),
    ],
)
def test_values_are_read_as_people_mean_them(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_lines_of_keys_lists_and_flow_mappings():
    document = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - {d: 2}\n", file="f.yaml")
    assert document.data == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert document.lines[("a",)] == 1
    assert document.lines[("b", "c")] == 3
    assert document.lines[("b", "c", 1, "d")] == 5


def test_merge_keys_are_flattened_and_own_keys_win():
    document = parse_yaml("base: &base {x: 1, y: 2}\nuse:\n  <<: *base\n  y: 3\n")
    assert document.data["use"] == {"x": 1, "y": 3}


def test_a_key_that_stands_twice_is_refused_with_both_lines():
    with pytest.raises(ConfigError, match=r"f\.yaml:3: a\.b stands twice \(first on line 2\)"):
        parse_yaml("a:\n  b: 1\n  b: 2\n", file="f.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", r"f\.yaml:2: this is not YAML"),
        ("- 1", r"f\.yaml:1: .* is a sequence"),
        ("? [a]\n: 1", "a key is a word"),
    ],
)
def test_what_is_no_config_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, file="f.yaml")


def test_an_empty_file_is_an_empty_config():
    assert parse_yaml("# nothing\n").data == {}


def test_origins_name_the_line_of_the_nearest_key_above():
    document = parse_yaml("a:\n  b: 1\n", file="f.yaml")
    origins = Origins(document, [parse_override("x.y.z=3")])
    assert origins.of(("a", "b")) == "f.yaml:2"
    assert origins.of(("a", "missing")) == "f.yaml:1"
    assert origins.of(("x", "y", "z")) == "override 'x.y.z=3'"
    assert origins.of(("x", "y")) == "override 'x.y.z=3'"


def test_a_stage_looks_up_its_own_lines_first():
    document = Document({}, {("seed",): 1, ("stages", 0, "seed"): 7}, "f.yaml")
    assert Origins(document, prefixes=(("stages", 0), ())).of(("seed",)) == "f.yaml:7"
    assert Origins(document, prefixes=(("stages", 1), ())).of(("seed",)) == "f.yaml:1"


def test_an_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match=rf"there is no config file none\.yaml in {Path.cwd()}: give the path"):
        read_yaml("none.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: give the path of a YAML file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x\n  b: *x\n", r"f\.yaml:2: a\.b is an alias of what it stands in, which never ends; write it out"),
        ("a: &x\n  - 1\n  - {c: *x}\n", r"f\.yaml:3: a\.1\.c is an alias of what it stands in"),
    ],
)
def test_an_alias_of_what_it_stands_in_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, file="f.yaml")


def test_an_alias_that_ends_is_read():
    assert parse_yaml("a: &x {b: 1}\nc: [*x, *x]\n").data == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}
    assert parse_value("&x [*x]") == "&x [*x]"
    assert parse_yaml("a: &x {<<: *x, b: 1}\n").data == {"a": {"b": 1}}
