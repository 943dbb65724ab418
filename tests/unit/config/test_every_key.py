"""Every key of every kind of run is read by a run that accepts it, or refused.

Small runs note the keys that they read (``key_reads``). Whether a key is read does not depend on its own value before it is read for the
first time, so that one run tells of all keys: a key that it did not read would not be read if it were set, and has to be refused.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from key_reads import KeyPath, keys_of, noted, place

from rollwright.config.experiment import NewVisionConfig
from rollwright.config.faults import faults_in
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.loading import Stage, build_stages
from rollwright.config.modes import AuxiliaryModelConfig, StoreConfig
from rollwright.config.rules import faults_of
from rollwright.config.sections import ClusterConfig, CriticConfig, LoraConfig, RolloutConfig, SlurmConfig, TrainEngineConfig
from rollwright.config.servers import SGLangConfig, VLLMConfig
from rollwright.config.source import dotted, parse_yaml
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.config.teachers import TeacherConfig
from rollwright.inference.backends import BACKENDS, ServerLaunch
from rollwright.placement.slurm import job_script
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.checks.unknown_names import NAMES
from rollwright.trainers.modes import serve
from rollwright.trainers.stages import run_config

REPOSITORY = Path(__file__).resolve().parents[3]
TABLE = REPOSITORY / "docs" / "keys.md"

SUMS = "path: arithmetic, kwargs: {digits: 1}"
RUN = f"train_dataset: {{{SUMS}, batch_size: 2}}\ntotal_train_steps: 1\n"
POLICY = "workflow: rlvr\nreward_fn: numeric_reward\n"
RL = RUN + POLICY + "actor: {path: MODEL}\ngconfig: {n_samples: 2, max_new_tokens: 4}\n"
VALID = f"valid_dataset: {{{SUMS}, split: valid, limit: 1}}\nevaluator: {{every_steps: 1, gconfig: {{max_new_tokens: 4}}}}\n"
TASKS = RL.replace(POLICY, "").replace(f"{SUMS}, ", "") + f"tasksets: [{{{SUMS}, workflow: math_workflow}}]\n"
HELD_OUT = f"eval_tasksets: [{{{SUMS}, limit: 1, workflow: math_workflow}}]\nevaluator: {{every_steps: 1}}\n"
PAIRS = "path: PAIRS, type: preference, batch_size: 2"

#: Runs by name; those of one line of the table read one file, such as the processes of a run in several modes.
RUNS = {
    "rl": RL,
    "rl evaluated": RL + VALID,
    "rl with a reference": RL.replace("actor: {", "actor: {kl_ctl: 0.1, ") + "ref: {path: MODEL}\n",
    "rl decoupled": RL.replace("actor: {", "actor: {use_decoupled_loss: true, ppo_n_minibatches: 2, "),
    "rl with an adapter": RL.replace("actor: {", "actor: {lora: {}, "),
    "rl with a teacher": RL.replace("actor: {", "actor: {recipe: distill, ") + "teachers: [{path: MODEL}]\n",
    "rl with a critic": RL.replace("actor: {", "actor: {recipe: vapo, ") + "critic: {}\n",
    "rl with a shared critic": RL.replace("actor: {", "actor: {recipe: ppo, ") + "critic: {shared: true}\n",
    "rl tasksets": TASKS + HELD_OUT,
    "explore": "mode: explore\nstore: {}\n" + RL + VALID.replace("every_steps: 1", "every_steps: 1, at_start: true"),
    "train": "mode: train\nstore: {}\n" + RL + VALID,
    "bench": "mode: bench\nbench: {samples: 1, checkpoints: [MODEL]}\n" + RL + VALID,
    "serve": "mode: serve\nstore: {}\n" + RL,
    "sft with an adapter": "kind: sft\nmodel: {path: MODEL, lora: {dropout: 0.1}}\n" + RUN,
    "sft": "kind: sft\nmodel: {path: MODEL}\n" + RUN,
    "sft with a teacher": "kind: sft\nmodel: {path: MODEL}\ndistillation: {loss: jsd}\nteachers: [{path: MODEL}]\n" + RUN,
    "sft evaluated": "kind: sft\nmodel: {path: MODEL}\n" + RUN + POLICY + VALID,
    "dpo": f"kind: dpo\nmodel: {{path: MODEL}}\ntrain_dataset: {{{PAIRS}}}\ntotal_train_steps: 1\n",
    "eval": f"kind: eval\npath: MODEL\n{POLICY}dataset: {{{SUMS}, limit: 1}}\ngconfig: {{max_new_tokens: 4}}\n",
    "model": "kind: model\npath: NEW\nhidden_size: 8\nheads: 1\nlayers: 1\n",
}
#: One file tells all processes of a run in several modes, so that a key may be of another of them.
SAME_FILE = {
    "explore": ("explore", "train", "bench", "serve"),
    "train": ("explore", "train", "bench", "serve"),
    "serve": ("explore", "train", "bench", "serve"),
    "bench": ("explore", "train", "bench", "serve", "rl evaluated"),
}

#: Keys that no run here reads and that are accepted, by patterns: the run of the name (empty: any), and why.
ACCEPTED: dict[str, tuple[str, str]] = {
    r"plugins|actor\.recipe": ("", "read while the file is loaded"),
    r".*\bmax_sample_retries|.*\bmax_bad_steps|journal\.on_divergence|recover\.if_damaged": (
        "",
        "read when something fails, or after a resume",
    ),
    r".*\bshard_size|cluster\.processes": ("", "read if several processes train; torchrun may have started them"),
    r"(sglang|vllm|cluster\.slurm|bench|service)\..*": (
        "",
        "read by the mode or backend that the section is named after; accepted in all other runs",
    ),
    r"(valid_dataset|dataset)\.(batch_size|shuffle|drop_last)": (
        "",
        "no effect, because each task is evaluated once in any order; accepted because files of other systems have these keys",
    ),
    r"stats_logger\.display": ("eval", "no effect, because an evaluation shows its own progress bar"),
}


@dataclasses.dataclass
class Outcome:
    stage: Stage
    read: set[KeyPath]


@pytest.fixture(scope="module")
def outcomes(tiny_model, tmp_path_factory) -> dict[str, Outcome]:
    """Every run, and what it read."""
    work = tmp_path_factory.mktemp("keys")
    pairs = work / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 2)
    made = {}
    for name, text in RUNS.items():
        root = work / ("modes" if name in SAME_FILE else re.sub(r"\W+", "-", name))
        common = (
            "" if "kind: model" in text else f"cluster: {{fileroot: {root}, threads: 1}}\nstats_logger: {{display: none}}\n"
        )
        for word, path in {"MODEL": tiny_model, "PAIRS": pairs, "NEW": work / "new"}.items():
            text = text.replace(word, str(path))
        (stage,) = build_stages(parse_yaml(common + text), [])
        place(stage.config)
        with noted() as read:
            _carry_out(name, stage, root)
        made[name] = Outcome(stage, read)
    return made


def _carry_out(name: str, stage: Stage, root: Path) -> None:
    if name == "serve":
        serve.serve(stage.config, RunDirectory(root, "served", "one").claim({}, "off"), is_over=lambda: True)
    elif name == "model":
        from rollwright.trainers.stages import make_model

        make_model(stage.config)
    else:
        assert run_config([stage]) == 0


def other(value: Any, field: dataclasses.Field[Any]) -> Any:
    """A value other than the present one that the key may have."""
    limits, kind = field.metadata, str(field.type)
    if sections := [
        each
        for each in (
            TasksetConfig,
            AuxiliaryModelConfig,
            TeacherConfig,
            StoreConfig,
            TrainEngineConfig,
            NewVisionConfig,
            LoraConfig,
            CriticConfig,
        )
        if each.__name__ in kind
    ]:
        return [sections[0]()] if kind.startswith("list") else sections[0]()
    if "DatasetConfig" in kind or "FormatConfig" in kind or "GenerationHyperparameters" in kind:
        return {"D": TasksetConfig, "F": FormatConfig, "G": GenerationHyperparameters}[kind[0]]()
    if choices := limits.get("choices"):
        return next(each for each in choices if each != value)
    if isinstance(value, bool) or kind == "bool":
        return not value
    if isinstance(value, dict) or kind.startswith("dict"):
        return {"a": 1}
    if isinstance(value, list) or kind.startswith("list"):
        return ["a"]
    if isinstance(value, int) or kind.startswith("int"):
        return (value or 0) + 3
    if isinstance(value, float) or kind.startswith("float"):
        return 0.5 if value != 0.5 else 0.25
    assert kind.startswith("str"), kind
    return "something"


def faults_with(stage: Stage, path: KeyPath, field: dataclasses.Field[Any]) -> list[KeyPath]:
    """What is refused if one key is set."""
    config = copy.deepcopy(stage.config)
    *above, name = path
    holder: Any = config
    for part in above:
        holder = holder[part] if isinstance(part, int) else getattr(holder, part)
    setattr(holder, str(name), other(getattr(holder, str(name)), field))
    found = [where for where, _ in faults_of(config)]
    return found or [where for where, _ in faults_in(config, NAMES)]


def unread(name: str, outcomes: dict[str, Outcome]) -> list[str]:
    """Keys that a run accepts, does not read, and that no exception names."""
    outcome = outcomes[name]
    read = set().union(*(outcomes[each].read for each in SAME_FILE.get(name, (name,))))
    found = []
    for path, _, field in keys_of(outcome.stage.config):
        key = dotted(path)
        is_accepted = any(re.fullmatch(pattern, key) and run in ("", name) for pattern, (run, _) in ACCEPTED.items())
        if path in read or is_accepted:
            continue
        refused = faults_with(outcome.stage, path, field)
        if not any(path[: len(where)] == where for where in refused):
            found.append(key)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_accepts_it_reads(outcomes, name):
    assert unread(name, outcomes) == []


def commands(section: str) -> tuple[Any, Callable[[Any], object]]:
    """A section that makes a command or a script, and what makes it."""
    slurm = ClusterConfig(kind="slurm", slurm=SlurmConfig(time="1:00:00"))
    rollout = RolloutConfig(backend=section)
    return {
        "sglang": (SGLangConfig(), lambda each: BACKENDS.get("sglang").command(_launch(rollout, sglang=each))),
        "vllm": (VLLMConfig(), lambda each: BACKENDS.get("vllm").command(_launch(rollout, vllm=each))),
        "cluster.slurm": (slurm, lambda each: (job_script(each, Path("run"), ["run", "f.yaml"]), each.slurm.poll_seconds)),
    }[section]


def _launch(rollout: RolloutConfig, **sections: Any) -> ServerLaunch:
    return ServerLaunch("127.0.0.1", 30000, rollout, "m", sections=sections)


@pytest.mark.parametrize("section", ["sglang", "vllm", "cluster.slurm"])
def test_a_section_of_one_backend_is_read_whole(section):
    config, make = commands(section)
    place(config)
    with noted() as read:
        make(config)
    below = "slurm" if section == "cluster.slurm" else ""
    assert {path for path, _, _ in keys_of(config) if not below or path[0] == below} <= read


@pytest.mark.parametrize("backend", ["builtin_process", "sglang", "vllm"])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            {"prefix_cache": False},
            {"sglang": "--disable-radix-cache", "vllm": "--no-enable-prefix-caching", "": "--no-prefix-cache"},
        ),
        ({"context_length": 77}, {"": "77"}),
        ({"dtype": "float16"}, {"": "float16"}),
    ],
    ids=str,
)
def test_servers_that_are_started_get_the_settings_of_rollout(backend, setting, expected):
    plain, changed = (BACKENDS.get(backend).command(_launch(RolloutConfig(backend=backend, **each))) for each in ({}, setting))
    word = expected.get(backend, expected[""])
    assert word in changed
    assert word not in plain


def table(outcomes: dict[str, Outcome]) -> str:
    """Which run reads which key, as a page of the docs."""
    readers: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        for path, _, _ in keys_of(outcome.stage.config):
            key = dotted(path).replace(".0.", ".N.")
            readers.setdefault(key, []).extend([name] if path in outcome.read else [])
    reasons = [(re.compile(pattern), why) for pattern, (_, why) in ACCEPTED.items()]
    lines = []
    for key, names in readers.items():
        why = next((why for pattern, why in reasons if pattern.fullmatch(key.replace(".N.", ".0."))), "with other settings")
        lines.append(f"| `{key}` | {', '.join(names) or f'*{why}*'} |")
    return "\n".join(lines)


def test_the_table_of_the_docs_is_what_was_read(outcomes, request):
    begin, end = "<!-- made by tests/unit/config/test_every_key.py -->\n", "\n<!-- end -->"
    text = TABLE.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    expected = head + begin + "| key | read in |\n|---|---|\n" + table(outcomes) + end + rest.partition(end)[2]
    if request.config.getoption("--write-key-table"):
        TABLE.write_text(expected, encoding="utf-8")
    assert text == expected or request.config.getoption("--write-key-table")
