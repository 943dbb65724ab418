"""From a file and a command line to a config, or to every fault of it."""

import dataclasses
import enum
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright import GRPOConfig, SFTConfig, load_expr_config
from rollwright.config.loading import build_config, config_to_dict, to_yaml
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError


@dataclass
class AgentConfig(GRPOConfig):
    max_turns: int = field(default=128, metadata={"help": "Most turns of an episode."})
    words: list[str] = field(default_factory=list)
    plain: float = 1.0


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Inner:
    size: int = 3
    name: str = "inner"


@dataclass
class Many:
    needed: str
    colour: Colour = Colour.RED
    choice: Literal["a", "b"] = "a"
    where: Path = Path("x")
    pair: tuple[int, str] = (1, "x")
    table: dict[str, int] = field(default_factory=dict)
    either: int | str | None = None
    inners: list[Inner] = field(default_factory=list)
    anything: Any = None
    share: float = field(default=0.5, metadata={"ge": 0.0, "le": 1.0})
    sinks: list[str] = field(default_factory=list, metadata={"item_choices": ["a", "b"]})


def build(text, cls=AgentConfig, *overrides):
    return build_config(parse_yaml(text, file="f.yaml"), overrides, cls)


def faults(text, cls=AgentConfig, *overrides):
    with pytest.raises(ConfigError) as caught:
        build(text, cls, *overrides)
    return str(caught.value)


def test_a_subclass_with_fields_of_its_own_loads_from_either_form_of_the_command_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("experiment_name: search\nmax_turns: 7\nactor: {path: some/model}\n")
    for argv in (["--config", str(file)], [str(file)], [f"--config={file}"]):
        config, path = load_expr_config([*argv, "plain=2", "actor.optimizer.lr=1e-4"], AgentConfig)
        assert isinstance(config, AgentConfig)
        assert path == str(file)
        assert (config.max_turns, config.plain, config.actor.optimizer.lr) == (7, 2.0, 1e-4)


@pytest.mark.parametrize("argv", [[], ["a=1"], ["x.yaml", "y.yaml"], ["--config"]])
def test_exactly_one_file(argv):
    with pytest.raises(ConfigError, match="one config file"):
        load_expr_config(argv, GRPOConfig)


def test_interpolation_reaches_keys_defaults_environment_and_the_run_directory(monkeypatch):
    monkeypatch.setenv("ROLLWRIGHT_TEST_NAME", "seven")
    config = build(
        "experiment_name: ${oc.env:ROLLWRIGHT_TEST_NAME}\n"
        "trial_name: ${oc.env:ROLLWRIGHT_UNSET,first}\n"
        "actor: {path: '${run_dir}/model'}\n"
        "tokenizer_path: ${actor.path}\n"
        "plain: ${actor.optimizer.lr}\n"
        "max_turns: ${gconfig.n_samples}\n"
        "gconfig: {n_samples: 4}\n"
    )
    assert config.tokenizer_path == "runs/seven/first/model"
    assert config.plain == pytest.approx(1e-5)  # a default of the class
    assert config.max_turns == 4


def test_faults_are_gathered_with_key_file_and_line_or_the_override():
    message = faults(
        "actor:\n  optimiser: {lr: 1}\n  optimizer: {lr: -1}\ngconfig:\n  temperature: hot\nmax_turn: 3\n",
        AgentConfig,
        "seed=x",
        "rollout.backend=sgl",
    )
    assert message.startswith("6 faults:")
    for expected in (
        "f.yaml:2: actor.optimiser: PPOActorConfig has no key 'optimiser'; did you mean 'optimizer'?",
        "f.yaml:3: actor.optimizer.lr: must be greater than 0.0, got -1",
        "f.yaml:5: gconfig.temperature: expected a number, got 'hot' (text)",
        "f.yaml:6: max_turn: AgentConfig has no key 'max_turn'; did you mean 'max_turns'?",
        "override 'seed=x': seed: expected a whole number, got 'x' (text)",
        "override 'rollout.backend=sgl': rollout.backend: must be one of builtin, builtin_process, sglang, vllm",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: true", "expected a whole number, got True (true/false)"),
        ("seed: 1.5", "expected a whole number"),
        ("seed: null", "leave the key out"),
        ("deterministic: yes", "write true or false"),
        ("experiment_name: 7", "put it in quotes"),
        ("actor: 3", "expected a mapping of PPOActorConfig's keys"),
        ("words: one", "expected a list"),
        ("plain: .inf", "must be a finite number"),
        ("seed: ???", "is mandatory"),
        ("seed: ${nope}", "f.yaml:1: seed: Interpolation key 'nope' not found"),
        ("seed: ${oc.env:ROLLWRIGHT_UNSET}", "f.yaml:1: seed: "),
        ("seed: ${seed}", "seed"),
        ("stats_logger: {display: fancy}", "f.yaml:1: stats_logger.display: must be one of auto, live"),
        ("gconfig: {n: 4, n_samples: 4}", "says again what 'n_samples' says"),
    ],
)
def test_one_fault_is_one_line(text, expected):
    message = faults(text)
    assert expected in message
    assert "\n" not in message


def test_whole_floats_are_whole_numbers_and_numbers_are_floats():
    config = build("max_turns: 1e3\nplain: 2\n")
    assert config.max_turns == 1000
    assert type(config.max_turns) is int
    assert type(config.plain) is float


def test_text_given_on_the_command_line_needs_no_quotes():
    config = build("", AgentConfig, "trial_name=0130", "experiment_name=7", "tokenizer_path=", "reward_fn=null")
    assert (config.trial_name, config.experiment_name, config.tokenizer_path, config.reward_fn) == ("0130", "7", "", None)


def test_overrides_merge_mappings_replace_lists_and_enter_lists_by_position():
    config = build(
        "gconfig: {stop: [a, b], temperature: 0.5}\nworkflow_kwargs: {x: {y: 1}}\n",
        AgentConfig,
        "gconfig={n_samples: 3}",
        "gconfig.stop.1=c",
        "workflow_kwargs.x.z=2",
        "words=[u, v]",
    )
    assert (config.gconfig.temperature, config.gconfig.n_samples, config.gconfig.stop) == (0.5, 3, ["a", "c"])
    assert config.workflow_kwargs == {"x": {"y": 1, "z": 2}}
    assert config.words == ["u", "v"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gconfig.stop.5=x", "positions count from 0"),
        ("gconfig.stop.x=y", "has no element 'x'"),
        ("seed.x=1", "seed is 3 and holds no keys"),
        ("actr.path=x", "did you mean 'actor'?"),
    ],
)
def test_overrides_that_lead_nowhere(override, expected):
    assert expected in faults("seed: 3\ngconfig: {stop: [a]}\n", AgentConfig, override)


def test_a_section_given_in_part_keeps_its_parents_default_for_the_rest():
    config = build("valid_dataset: {path: x}\nevaluator: {gconfig: {max_new_tokens: 9}}\n")
    assert config.evaluator.gconfig.greedy  # the evaluator's default, not the class's
    assert not build("gconfig: {max_new_tokens: 9}\n").gconfig.greedy
    assert build("train_dataset: {path: x}", SFTConfig).train_dataset.type == "sft"


def test_second_names_are_read_and_legacy_names_too_with_a_warning(caplog):
    with caplog.at_level("WARNING", logger="rollwright.config"):
        import logging

        logging.getLogger("rollwright").propagate = True
        config = build("gconfig: {n: 4, max_tokens: 8}\nsaver:\n  freq_steps: 5\n")
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens, config.saver.every_steps) == (4, 8, 5)
    assert "saver.freq_steps is called 'every_steps' here" in caplog.text
    assert "f.yaml:3" in caplog.text
    assert "max_tokens" not in caplog.text


def test_tasksets_have_second_names_for_their_keys():
    (taskset,) = build(
        "tasksets:\n"
        "  - {path: a, default_workflow_type: w, default_reward_fn_type: r, rollout_args: {n: 2}, repeat_times: 3, subset_name: s}\n"
    ).tasksets
    assert (taskset.workflow, taskset.reward_fn, taskset.group_size, taskset.subset) == ("w", "r", 3, "s")
    assert taskset.gconfig is not None
    assert taskset.gconfig.n_samples == 2


def test_a_fault_under_a_second_name_is_told_by_that_name_and_its_line():
    with pytest.raises(
        ConfigError, match=r"f.yaml:3: tasksets.0.repeat_times \(here tasksets.0.group_size\): must be at least 1"
    ):
        build("tasksets:\n  - path: a\n    repeat_times: 0\n")


def test_a_config_written_as_yaml_loads_to_itself():
    config = build(
        "experiment_name: x\ngconfig: {stop: ['</answer>', 'yes', '0130']}\nactor: {path: m, kl_ctl: 0.1}\n"
        "ref: {path: m}\nvalid_dataset: {path: v, kwargs: {digits: 2}}\n"
    )
    assert build(to_yaml(config)) == config
    assert yaml.safe_load(to_yaml(config)) == config_to_dict(config)


@settings(deadline=None, max_examples=30)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "experiment_name": st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Z")), min_size=1),
            "seed": st.integers(-(2**40), 2**40),
            "plain": st.floats(allow_nan=False, allow_infinity=False),
            "words": st.lists(st.sampled_from(["yes", "1", "null", "a b", "1e5", "~", "#", "x: y", "0x1", "é", "- a"])),
            "deterministic": st.booleans(),
            "workflow_kwargs": st.dictionaries(st.sampled_from(["a", "b"]), st.none() | st.integers() | st.booleans()),
        },
    )
)
def test_any_values_survive_the_round_trip(values):
    if "$" in values.get("experiment_name", "") or values.get("experiment_name") == "???":
        return
    config = dataclasses.replace(AgentConfig(), **values)
    assert build(to_yaml(config)) == config


def test_every_kind_of_annotation_that_users_write():
    config = build(
        "needed: n\ncolour: blue\nchoice: b\nwhere: a/b\npair: [2, y]\ntable: {k: 1}\neither: 5\n"
        "inners: [{size: 1}, {name: two}]\nanything: {x: [1]}\n",
        Many,
    )
    assert config == Many("n", Colour.BLUE, "b", Path("a/b"), (2, "y"), {"k": 1}, 5, [Inner(1), Inner(3, "two")], {"x": [1]})
    message = faults(
        "colour: green\nchoice: c\npair: [1]\ntable: {k: x}\neither: [1]\ninners: [{siz: 1}]\nshare: 2\nsinks: [c]\n", Many
    )
    assert message.startswith("9 faults")
    assert "needed: is required" in message
    assert "inners.0.siz: Inner has no key 'siz'; did you mean 'size'?" in message


def test_other_types_are_left_to_pydantic():
    import datetime

    @dataclass
    class Dated:
        day: datetime.date = datetime.date(2026, 1, 1)

    Dated.__annotations__["day"] = datetime.date
    assert build("day: 2026-11-21", Dated).day == datetime.date(2026, 11, 21)
    assert "f.yaml:1: day" in faults("day: soon", Dated)


def test_a_file_with_stages_says_how_to_load_it(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\nstages: [{kind: rl}]\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2: this file has stages"):
        load_expr_config([str(file)], GRPOConfig)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A directory with a config's plugin; it notes its import in the environment."""
    monkeypatch.setenv("ROLLWRIGHT_PLUGIN_PATH", "")
    monkeypatch.setenv("ROLLWRIGHT_TEST_IMPORTS", "")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"noted_{tmp_path.name}.py").write_text(
        "import os\nos.environ['ROLLWRIGHT_TEST_IMPORTS'] += 'imported '\n"
    )
    return tmp_path / "mine"


def test_plugins_are_imported_relative_to_the_file_that_names_them(plugin, tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("plugins: [mine, json]\n")
    config, _ = load_expr_config([str(file)], GRPOConfig)
    assert config.plugins == [str(plugin), "json"]
    assert os.environ["ROLLWRIGHT_TEST_IMPORTS"] == "imported "
    assert os.environ["ROLLWRIGHT_PLUGIN_PATH"] == f"{plugin}:json"  # for processes that are started later
    assert build(to_yaml(config)) == dataclasses.replace(AgentConfig(), plugins=config.plugins)
    assert load_expr_config([str(file)], GRPOConfig)[0] == config
    assert os.environ["ROLLWRIGHT_TEST_IMPORTS"] == "imported "
    monkeypatch.chdir(plugin)
    (single,) = plugin.glob("*.py")
    assert build("", AgentConfig, f"plugins=[{single.name}]").plugins == [str(single)]  # of an override: where the user is
    assert "f.yaml:1: plugins.1: plugin 'nowhere': " in faults("plugins: [json, nowhere]\n")
    assert "f.yaml:1: plugins: expected a list" in faults("plugins: mine\n")
    (plugin / "broken.py").write_text("1 / 0\n")
    assert "plugins.0: plugin " in (message := faults(f"plugins: ['{plugin}']\n"))
    assert "broken.py cannot be imported: ZeroDivisionError: division by zero." in message
