"""``${…}`` in the values of a config, in OmegaConf's notation."""

import pytest

from rollwright import GRPOConfig, load_expr_config
from rollwright.config.interpolation import resolve
from rollwright.config.secrets import HIDDEN, Secret
from rollwright.config.source import Origins, parse_yaml, plain
from rollwright.errors import ConfigError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OUR_KEY", "sk-1")
    monkeypatch.setenv("OUR_LIST", "[1, {a: x}]")
    monkeypatch.setenv("OUR_TEXT", "${seed}")
    monkeypatch.delenv("OUR_NOTHING", raising=False)


def resolved(text):
    document = parse_yaml(text, file="f.yaml")
    return resolve(document.data, [], Origins(document))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it: ${a.b.2.c}\na: {b: [1, 2, {c: x}]}", "x"),
        ("it: 'pre-${a.b[2].c}-${a.n}'\na: {n: 1, b: [1, 2, {c: x}]}", "pre-x-1"),
        ("it: ${a}\na: {b: '${n}'}\nn: 5", {"b": 5}),
        ("it: ${x.y}\nx: ${z}\nz: {y: '${n}'}\nn: 5", 5),  # the way leads through an interpolation
        ("it: {x: 1, y: '${.x}', z: {w: '${..x}'}}", {"x": 1, "y": 1, "z": {"w": 1}}),
        ("it: ${${name}}\nname: n\nn: 5", 5),
        (r"it: 'a \${x} {b} it''s ${n}'" + "\nn: 5", "a ${x} {b} it's 5"),
        ("it: ${oc.env:OUR_KEY}/${n}\nn: 5", "sk-1/5"),
        ("it: \"${oc.env:OUR_NOTHING,'a, {b'}\"", "a, {b"),
        ("it: ${oc.env:OUR_NOTHING,}", ""),
        ("it: ${oc.env:OUR_NOTHING,null}", None),
        ("it: ${oc.env:OUR_NOTHING,${n}}\nn: 5", "5"),
        ("it: ${oc.env:OUR_TEXT}\nseed: 1", "${seed}"),  # what comes from outside is no notation
        ("it: ${oc.decode:${oc.env:OUR_LIST}}", [1, {"a": "x"}]),
        ("it: ${oc.decode:1e-3}", 1e-3),
        ("it: ${oc.decode:${oc.env:OUR_NOTHING,null}}", None),
        ("it: ${ n }\nn: 5", 5),
    ],
)
def test_values(text, value):
    assert resolved(text)["it"] == value


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("it: x-${oc.env:OUR_KEY}", "x-${oc.env:OUR_KEY}"),
        ("it: x-${a}\na: ${oc.env:OUR_KEY}", "x-${oc.env:OUR_KEY}"),
        ("it: \"${oc.env:${name},'a, b'}\"\nname: OUR_KEY", "${oc.env:OUR_KEY,'a, b'}"),
        ("it: ${oc.env:OUR_NOTHING,${a}}\na: b c", "${oc.env:OUR_NOTHING,'b c'}"),
        ("it: \"${oc.env:OUR_NOTHING,'a b ${oc.env:OUR_KEY}'}\"", "${oc.env:OUR_NOTHING,'a b ${oc.env:OUR_KEY}'}"),
        ("it: ${oc.env:OUR_NOTHING,${a.password}}\na: {password: sk-2}", HIDDEN),
        ("it: \"${oc.decode:'[${oc.env:OUR_KEY}]'}\"", [HIDDEN]),
        ("it: x-${a.password}\na: {password: sk-2}", HIDDEN),
        ("it: ${oc.decode:${oc.env:OUR_LIST}}", [1, {"a": HIDDEN}]),
    ],
)
def test_what_is_written_of_a_secret(text, written):
    value = resolved(text)["it"]
    assert plain(value) == written
    assert isinstance(value, Secret | list)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nit: ${nope.b}", r"f\.yaml:2: it: Interpolation key 'nope\.b' not found"),
        ("it: ${a.b}\na: 3", r"it: Interpolation key 'a\.b' not found"),
        ("it: ${a}\na: ???", r"it: Interpolation key 'a' has no value yet"),
        ("it: ${a}\na: {b: '${it}'}", "it: Interpolation of 'it' leads back to itself"),
        ("it: [1, '${it}']", r"it\.1: Interpolation of 'it\.1' leads back to itself"),
        ("it: ${HOME:-x}", "it: Interpolation type 'HOME' is not known; known: oc.decode, oc.env"),
        ("it: ${oc.env:OUR_NOTHING}", "it: Environment variable 'OUR_NOTHING' not found"),
        ("it: '${oc.env:OUR_NOTHING,a,b}'", "it: Interpolation oc.env has one default, not 2: quote one with commas"),
        ("it: '${a'", "it: Interpolation '${a' is not closed"),
        ("it: ${}", "it: Interpolation key '' not found"),
    ],
)
def test_messages(text, message):
    with pytest.raises(ConfigError, match=message.replace("${", r"\$\{")):
        resolved(text)


def test_a_number_of_the_environment_is_refused_with_how_to_read_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_SEED", "5")
    file = tmp_path / "run.yaml"
    file.write_text("experiment_name: x\nseed: ${oc.env:OUR_SEED}\n")
    with pytest.raises(ConfigError, match=r"seed: expected a whole number.*\$\{oc\.decode:\$\{oc\.env:NAME\}\} reads it"):
        load_expr_config(["--config", str(file)], GRPOConfig)
    config, _ = load_expr_config(["--config", str(file), "seed=${oc.decode:${oc.env:OUR_SEED}}"], GRPOConfig)
    assert config.seed == 5
