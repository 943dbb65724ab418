"""What a run cannot do is told before its model is loaded."""

import pytest

from rollwright import DatasetConfig, FormatConfig, GRPOConfig, load_stages
from rollwright.cli.main import main
from rollwright.config.loading import build_config
from rollwright.config.plan import describe
from rollwright.config.source import parse_yaml
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError
from rollwright.experience.normaliser import normalise
from rollwright.rewards.score import as_float
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.trainers.loops.rl import PPOTrainer

WORKFLOWS = """
class Nothing:
    pass


class Sync:
    def arun_episode(self, engine, data):
        return None


def of_one(completion):
    return 1.0


def of_a_column(prompt, completion, prompt_ids, completion_ids, solution):
    return 1.0
"""


@pytest.fixture
def run(tmp_path, tiny_model, monkeypatch, capsys):
    """What `rollwright run` says of a config that is refused; loading a model fails the test."""

    def loaded(*arguments, **keywords):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("rollwright.training.engine.load_model", loaded)
    monkeypatch.setattr("rollwright.rollout.engines.LocalRolloutEngine.make_client", loaded)
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    (tmp_path / "empty").mkdir()
    (tmp_path / "m").symlink_to(tiny_model)
    (tmp_path / "mistaken_workflows.py").write_text(WORKFLOWS)
    (tmp_path / "f.yaml").write_text(
        f"actor: {{path: {tiny_model}}}\ntrain_dataset: {{path: arithmetic}}\nworkflow: rlvr\nreward_fn: numeric_reward\n"
    )
    (tmp_path / "sft.yaml").write_text("kind: sft\nmodel: {path: bare}\ntrain_dataset: {path: arithmetic, type: sft}\n")
    (tmp_path / "eval.yaml").write_text(
        "kind: eval\npath: bare\ndataset: {path: arithmetic}\nworkflow: rlvr\nreward_fn: numeric_reward\n"
    )

    def told(*words):
        assert main(["run", *words]) == 1
        return " ".join(capsys.readouterr().err.split())

    return told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["f.yaml", "actor.path=bare"],
            "workflow is rlvr, and the tokenizer 'bare' has no chat template",
        ),
        (["sft.yaml"], "the rows are conversations, and the tokenizer 'bare' has no chat template"),
        (["eval.yaml"], "workflow is rlvr, and the tokenizer 'bare' has no chat template"),
        (
            ["f.yaml", "reward_fn=mistaken_workflows.of_one"],
            "of_one(completion) takes 1 positional arguments; reward functions are called",
        ),
        (["f.yaml", "reward_fn=mistaken_workflows.of_a_column"], "of_a_column needs solution, but the task has the columns"),
        (["eval.yaml", "path=m", "reward_fn=mistaken_workflows.of_one"], "of_one(completion) takes 1 positional arguments"),
        (["f.yaml", "actor.path=empty"], "actor.path: is empty, a directory that is empty"),
        (["f.yaml", "workflow=mistaken_workflows.Nothing"], "is no workflow: it has no method arun_episode(engine, data)"),
        (
            ["f.yaml", "workflow=mistaken_workflows.Sync"],
            "has an arun_episode that is not async: write 'async def arun_episode'",
        ),
    ],
)
def test_it_is_told_first(run, words, expected):
    assert expected in run(*words)


def test_a_dict_where_a_section_is_meant_is_told_with_what_to_write(tiny_model):
    with pytest.raises(ConfigError, match=r"format is a dict; give FormatConfig\(prompt_key='question'\)"):
        DatasetConfig(path="arithmetic", format={"prompt_key": "question"})
    assert DatasetConfig(path="arithmetic", format=FormatConfig(prompt_key="question")).columns.prompt_key == "question"
    config = GRPOConfig()
    config.actor.path = str(tiny_model)
    config.actor.optimizer = {"lr": 1e-5}
    config.gconfig = {"n_samples": 2}
    with pytest.raises(ConfigError, match=r"(?s)2 faults.*actor\.optimizer is a dict; give OptimizerConfig\(lr=1e-05\)"):
        PPOTrainer(config, [])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("learning_rate: 1e-5", "actor.optimizer.lr"),
        ("actor: {lr: 1e-5}", "actor.optimizer.lr"),
        ("batch_size: 4", "train_dataset.batch_size"),
        ("num_train_epochs: 4", "total_train_epochs"),
        ("max_tokens: 4", "gconfig.max_new_tokens"),
        ("num_generations: 4", "gconfig.n_samples"),
        ("model_name_or_path: m", "actor.path"),
        ("actor: {beta: 0.1}", "actor.kl_ctl"),
        ("output_dir: out", "cluster.fileroot"),
        ("kind: sft\nlearning_rate: 1e-5", "model.optimizer.lr"),
        (
            "learning_rate: 1e-5\nstages: [{kind: sft, model: {path: m}, train_dataset: {path: arithmetic}}]",
            "model.optimizer.lr",
        ),
    ],
)
def test_a_key_of_another_system_is_told_where_it_is_here(tmp_path, text, place):
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_stages(file)
    assert f"it is {place} here" in str(refused.value)


def test_every_place_that_is_named_exists():
    from rollwright.compat.foreign_keys import PLACES
    from rollwright.config.experiment import STAGE_CLASSES
    from rollwright.config.validation import _has_place

    for places in PLACES.values():
        for place in places:
            assert any(_has_place(cls, place.split(".")) for cls in STAGE_CLASSES.values()), place


def test_the_banner_says_a_tasksets_own_limit(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(
        "actor: {path: m}\ntasksets:\n  - {name: a, path: arithmetic, workflow: w, gconfig: {max_new_tokens: 77, temperature: 0.5}}\n"
    )
    assert "(temperature 0.5, at most 77 tokens)" in describe(load_stages(file))
    with file.open("a") as more:
        more.write("  - {name: b, path: arithmetic, workflow: w}\n")
    said = describe(load_stages(file))
    assert "a: temperature 0.5, at most 77 tokens; b: temperature 1, at most 512 tokens" in said
    config = build_config(parse_yaml("{}"), [], GRPOConfig)
    assert config.gconfig.max_new_tokens == 512


async def _score() -> float:
    return 1.0


def test_a_forgotten_await_is_called_that():
    row = {"input_ids": [1], "output_ids": [2]}
    for result, key in (({**row, "reward": _score()}, "reward"), (_score(), "result"), ([_score()], "result")):
        with pytest.raises(
            Exception, match=rf"key '{key}': it is a call of _score.* that was not awaited; write await before it"
        ):
            normalise(result, None)
    with pytest.raises(TypeError, match="it returned a call of _score that was not awaited"):
        as_float(_score())


async def test_a_reward_function_that_returns_a_call_says_so():
    async def nested(prompt, completion, prompt_ids, completion_ids):
        return _score()

    with pytest.raises(Exception, match="it returned a call of _score that was not awaited: write await before it"):
        await AsyncRewardWrapper(nested, max_retries=0)("p", "c", [], [])


FORGETFUL = """
from rollwright import ModelRequest, RolloutWorkflow


class NoResponse(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        answer = engine.agenerate(ModelRequest(input_ids=[10]))
        return {"input_ids": [10], "output_ids": answer.output_tokens, "reward": 1.0}


class NoReward(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        return {"input_ids": [10], "output_ids": [11], "reward": self.score()}

    async def score(self):
        return 1.0
"""


@pytest.mark.parametrize(
    ("name", "line", "said"), [("NoResponse", 8, "write await before it"), ("NoReward", 13, "NoReward.score")]
)
def test_it_is_told_with_its_line(tmp_path, tiny_model, monkeypatch, capsys, name, line, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"forgetful_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(FORGETFUL)
    (tmp_path / "f.yaml").write_text(
        f"actor: {{path: {tiny_model}}}\ntrain_dataset: {{path: arithmetic, batch_size: 2}}\nworkflow: {module}.{name}\n"
        "gconfig: {n_samples: 2, max_new_tokens: 4}\ntotal_train_steps: 1\nrollout: {max_failed_share: 0.0}\nstats_logger: {display: none}\n"
    )
    assert main(["run", "f.yaml"]) == 1
    told = capsys.readouterr().err
    assert f"{module}.py:{line}" in told
    assert "was not awaited" in told
    assert said in told
