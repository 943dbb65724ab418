"""A table of mistakes, and the exact message of each: its key, what was expected, what was given, and the nearest right one."""

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from rollwright import GRPOConfig
from rollwright.config.loading import build_config
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class A:
    x: int = 1
    kind: str = "a"


@dataclass
class B:
    y: int = 1
    kind: str = "b"


@dataclass
class Many(GRPOConfig):
    """A user's config: a plain dataclass with every kind of annotation."""

    colour: Colour = Colour.RED
    choice: Literal["a", "b"] = "a"
    where: Path = Path("x")
    pair: tuple[int, str] = (1, "x")
    table: dict[str, int] = field(default_factory=dict)
    either: int | str | None = None
    inners: list[A] = field(default_factory=list)
    ab: A | B = field(default_factory=A)
    named: dict[str, A] = field(default_factory=dict)
    share: float = field(default=0.5, metadata={"ge": 0.0, "le": 1.0})
    inner: A = field(default_factory=lambda: A(x=7))
    many: list[list[int]] = field(default_factory=list)
    anything: Any = None


#: A line of a file, and the message after "f.yaml:1: ".
IN_A_FILE = [
    ("seed: true", "seed: expected a whole number, got True (true/false)"),
    ("seed: 1.5", "seed: expected a whole number, got 1.5 (number)"),
    ("seed: null", "seed: expected a whole number, got nothing (null); leave the key out to have its default"),
    ("seed: '3'", "seed: expected a whole number, got '3' (text)"),
    ("seed: ???", "seed: is mandatory (???): give it a value"),
    ("deterministic: yes", "deterministic: expected true or false, got 'yes' (text); write true or false"),
    ("deterministic: 1", "deterministic: expected true or false, got 1 (whole number); write true or false"),
    ("experiment_name: 7", "experiment_name: expected text, got 7 (whole number); put it in quotes"),
    ("experiment_name: null", "experiment_name: expected text, got nothing (null); leave the key out to have its default"),
    ("experiment_name: [a]", "experiment_name: expected text, got ['a'] (list)"),
    ("cluster: {threads: 100000}", "cluster.threads: must be at most 1024, got 100000"),
    ("actor: 3", "actor: expected a mapping of PPOActorConfig's keys, got 3 (whole number)"),
    ("actor: null", "actor: expected a mapping of PPOActorConfig's keys, got nothing (null)"),
    ("actor: {optimizer: {lr: 0}}", "actor.optimizer.lr: must be greater than 0.0, got 0"),
    ("actor: {optimizer: {lr: x}}", "actor.optimizer.lr: expected a number, got 'x' (text)"),
    ("share: 2", "share: must be at most 1.0, got 2"),
    ("share: -1", "share: must be at least 0.0, got -1"),
    ("share: .nan", "share: must be a finite number, got nan"),
    ("share: .inf", "share: must be a finite number, got inf"),
    ("colour: green", "colour: must be one of RED, BLUE, got 'green' (text)"),
    ("choice: c", "choice: must be one of a, b, got 'c' (text)"),
    ("where: 3", "where: expected a path, got 3 (whole number)"),
    ("pair: [1]", "pair: expected 2 values, got 1"),
    ("pair: [1, x, 2]", "pair: expected 2 values, got 3"),
    ("pair: [x, x]", "pair.0: expected a whole number, got 'x' (text)"),
    ("pair: 3", "pair: expected a list, got 3 (whole number)"),
    ("table: {k: x}", "table.k: expected a whole number, got 'x' (text)"),
    ("table: {1: 2}", "table.1: the key 1 is a whole number; put it in quotes"),
    ("table: 3", "table: expected a mapping, got 3 (whole number)"),
    ("either: [1]", "either: expected whole number or text, got [1] (list)"),
    ("either: 1.5", "either: expected whole number or text, got 1.5 (number)"),
    ("either: {a: 1}", "either: expected whole number or text, got {'a': 1} (mapping)"),
    ("inners: [{z: 1}]", "inners.0.z: A has no key 'z'; known: kind, x."),
    ("inners: {x: 1}", "inners: expected a list, got {'x': 1} (mapping); write [{'x': 1}]"),
    ("inners: [3]", "inners.0: expected a mapping of A's keys, got 3 (whole number)"),
    ("inners: [{x: y}]", "inners.0.x: expected a whole number, got 'y' (text)"),
    ("ab: {y: z}", "ab.y: expected a whole number, got 'z' (text)"),
    ("ab: 3", "ab: expected A or B, got 3 (whole number)"),
    ("ab: {x: 2, y: 1}", "ab.y: A has no key 'y'; known: kind, x."),
    ("named: {q: {x: z}}", "named.q.x: expected a whole number, got 'z' (text)"),
    ("named: {q: {zz: 1}}", "named.q.zz: A has no key 'zz'; known: kind, x."),
    ("named: {q: 3}", "named.q: expected a mapping of A's keys, got 3 (whole number)"),
    ("inner: {kind: 3}", "inner.kind: expected text, got 3 (whole number); put it in quotes"),
    ("many: [[1],[x]]", "many.1.0: expected a whole number, got 'x' (text)"),
    (
        "rollout: {backend: sgl}",
        "rollout.backend: must be one of builtin, builtin_process, sglang, vllm, or an import path, got 'sgl' (text); did you mean 'sglang'?",
    ),
    ("rollout: {backend: 3}", "rollout.backend: expected text, got 3 (whole number); put it in quotes"),
    ("rollout: {addresses: a:1}", "rollout.addresses: expected a list, got 'a:1' (text); write [a:1]"),
    ("rollout: {addresses: [1]}", "rollout.addresses.0: expected text, got 1 (whole number); put it in quotes"),
    (
        "stats_logger: {sinks: tensorboard}",
        "stats_logger.sinks: expected a list, got 'tensorboard' (text); write [tensorboard]",
    ),
    ("gconfig: {n: 1, n_samples: 2}", "gconfig.n (here gconfig.n_samples): says again what 'n_samples' says; keep one"),
    ("gconfig: {n: 0}", "gconfig.n (here gconfig.n_samples): must be at least 1, got 0"),
    ("gconfig: {max_tokens: x}", "gconfig.max_tokens (here gconfig.max_new_tokens): expected a whole number, got 'x' (text)"),
    ("gconfig: {stop: a}", "gconfig.stop: expected a list, got 'a' (text); write [a]"),
    ("gconfig: {stop: [1]}", "gconfig.stop.0: expected text, got 1 (whole number); put it in quotes"),
    ("saver: {freq_steps: 0}", "saver.freq_steps (here saver.every_steps): must be at least 1, got 0"),
    ("saver: {freq_steps: x}", "saver.freq_steps (here saver.every_steps): expected a whole number, got 'x' (text)"),
    (
        "evaluator: {gconfig: {temperature: 1}}",
        "evaluator.gconfig.temperature: says how to sample, but this is greedy unless `greedy: false` stands beside it",
    ),
    ("evaluator: {gconfig: {greedy: false, temperature: -1}}", "evaluator.gconfig.temperature: must be at least 0.0, got -1"),
    ("valid_dataset: {limit: 0}", "valid_dataset.limit: must be at least 1, got 0"),
    (
        "valid_dataset: {gconfig: {n: 2}}",
        "valid_dataset.gconfig: is read in tasksets, not in a dataset, which takes it from the run's own keys; take it out",
    ),
    (
        "tasksets: [{rollout_args: {n: x}}]",
        "tasksets.0.gconfig.n (here tasksets.0.gconfig.n_samples): expected a whole number, got 'x' (text)",
    ),
    (
        "tasksets: [{format: {prompt_typ: messages}}]",
        "tasksets.0.format.prompt_typ: FormatConfig has no key 'prompt_typ'; did you mean 'prompt_type'?",
    ),
    ("tasksets: [{format: 3}]", "tasksets.0.format: expected FormatConfig or text, got 3 (whole number)"),
    (
        "tasksets: [{format: {prompt_type: mesages}}]",
        "tasksets.0.format.prompt_type: must be one of plaintext, messages, got 'mesages' (text); did you mean 'messages'?",
    ),
    ("tasksets: {path: x}", "tasksets: expected a list, got {'path': 'x'} (mapping); write [{'path': 'x'}]"),
    ("store: {order: last}", "store.order: must be one of fifo, freshest, priority, uniform, got 'last' (text)"),
    ("store: 3", "store: expected a mapping of StoreConfig's keys, got 3 (whole number)"),
    (
        "store: {uses: null}",
        "store.uses: is not used in mode both, which trains on each group once, in order, from memory; take it out, or run mode explore beside mode train",
    ),
    ("store: {operators: [{nme: x}]}", "store.operators.0.nme: OperatorConfig has no key 'nme'; did you mean 'name'?"),
    ("ref: {path: 3}", "ref.path: expected text, got 3 (whole number); put it in quotes"),
    ("workflow_kwargs: 3", "workflow_kwargs: expected a mapping, got 3 (whole number)"),
    ("workflow_kwargs: {a: ???}", "this is not YAML: did not find expected node content."),
    ("sgl: {}", "sgl: Many has no key 'sgl'; did you mean 'sglang'?"),
    ("sglang: {mem_fraction_static: 1}", "sglang.mem_fraction_static: must be less than 1.0, got 1"),
    (
        "actor: {adv_norm: {mean_level: grp}}",
        "actor.adv_norm.mean_level: must be one of group, batch, none, got 'grp' (text); did you mean 'group'?",
    ),
    ("workflow: 3", "workflow: expected text, got 3 (whole number); put it in quotes"),
    ("rollout: {sample_timeout: 0}", "rollout.sample_timeout: must be greater than 0.0, got 0"),
    ("rollout: {sample_timeout: x}", "rollout.sample_timeout: expected a number, got 'x' (text)"),
    ("rollout: {dynamic_filter: x}", "rollout.dynamic_filter: must be one of no_variance, got 'x' (text)"),
]

#: An argument of the command line, and the message after it.
OVERRIDES = [
    ("seed=x", "seed: expected a whole number, got 'x' (text)"),
    ("trial_name=null", "trial_name: expected text, got nothing (null); leave the key out to have its default"),
    ("gconfig.stop=x", "gconfig.stop: expected a list, got 'x' (text); write [x]"),
    ("gconfig.stop=[1]", "gconfig.stop.0: expected text, got 1 (whole number); put it in quotes"),
    ("actor=3", "actor: expected a mapping of PPOActorConfig's keys, got 3 (whole number)"),
    ("actor.optimizer.lr=abc", "actor.optimizer.lr: expected a number, got 'abc' (text)"),
    ("gconfig={n_samples: x}", "gconfig.n_samples: expected a whole number, got 'x' (text)"),
]


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(parse_yaml(text, file="f.yaml"), overrides, Many)
    return str(caught.value)


@pytest.mark.parametrize(("text", "expected"), IN_A_FILE)
def test_a_mistake_in_a_file(text, expected):
    assert message(text) == f"f.yaml:1: {expected}"


@pytest.mark.parametrize(("override", "expected"), OVERRIDES)
def test_a_mistake_on_the_command_line(override, expected):
    text = "rollout: {addresses: [a], backend: vllm}"
    assert message(text, override) == f"override {override!r}: {expected}"


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("share: 1", "share", 1.0),
        ("colour: RED", "colour", Colour.RED),
        ("ab: {y: 2}", "ab", B(2)),
        ("ab: {x: 2}", "ab", A(2)),
        ("inner: {kind: q}", "inner", A(7, "q")),
        ("named: {q: {x: 2}}", "named", {"q": A(2)}),
        ("either: 1", "either", 1),
        ("either: '1'", "either", "1"),
        ("anything: {a: [1, null]}", "anything", {"a": [1, None]}),
    ],
)
def test_no_mistake(text, attribute, value):
    found = getattr(build_config(parse_yaml(text), [], Many), attribute)
    assert (found, type(found)) == (value, type(value))


def test_faults_are_told_by_line():
    with pytest.raises(ConfigError) as error:
        build_config(parse_yaml("seed: x\nactr: {}\ntotal_train_epochs: 0\nsgl: {}\n", "f.yaml"), ["rollot=1"], GRPOConfig)
    places = [line.split(": ")[0] for line in str(error.value).splitlines()[1:]]
    assert [place.strip() for place in places] == ["override 'rollot=1'", "f.yaml:1", "f.yaml:2", "f.yaml:3", "f.yaml:4"]
