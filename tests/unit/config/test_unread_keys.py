"""Keys that are set and that nothing would read are refused, however a config is loaded."""

import pytest

from rollwright import GRPOConfig, load_expr_config, load_stages
from rollwright.cli.main import main
from rollwright.config.loading import build_config
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError

RL = "actor: {path: m}\ntrain_dataset: {path: arithmetic}\nworkflow: rlvr\nreward_fn: numeric_reward\n"

#: What is set, the key that is refused, and why.
UNREAD = [
    (
        "actor.policy_loss=topr actor.recompute_logprob=true",
        "actor.recompute_logprob",
        "compares with the log-probabilities at sampling",
    ),
    ("actor.recipe=opmd actor.recompute_logprob=true", "actor.recompute_logprob", "the loss 'opmd'"),
    ("actor.policy_loss=reinforce actor.recompute_logprob=true", "actor.recompute_logprob", "the loss 'reinforce'"),
    ("actor.use_decoupled_loss=true actor.prox_logp_method=interpolate", "actor.prox_logp_method", "ppo_n_minibatches is 1"),
    ("actor.gradient_checkpointing_every=2", "actor.gradient_checkpointing_every", "gradient_checkpointing is false"),
    ("rollout.backend=vllm rollout.addresses=[h:1] rollout.prefix_cache=false", "rollout.prefix_cache", "run already"),
    ("gconfig.greedy=true gconfig.temperature=0.7", "gconfig.temperature", "greedy is true"),
    ("gconfig.greedy=true gconfig.top_p=0.9", "gconfig.top_p", "greedy is true"),
    ("gconfig.temperature=0 gconfig.top_k=5", "gconfig.top_k", "temperature is 0"),
    (
        "tasksets=[{path:\u00a0x,gconfig:\u00a0{greedy:\u00a0true,seed:\u00a03}}]",
        None,
        "tasksets.0.gconfig.seed: is set, but not read",
    ),
    (
        "evaluator.gconfig.top_p=0.9 evaluator.gconfig.greedy=false",
        "evaluator.gconfig.top_p",
        "nothing is evaluated without valid_dataset",
    ),
    ("evaluator.limit=5", "evaluator.limit", "nothing is evaluated"),
    ("saver.keep=2", "saver.keep", "saver has no interval"),
    ("rollout.openai_front=true", "rollout.openai_front", "only task-style workflows"),
    ("rollout.setup_timeout=5", "rollout.setup_timeout", "gets no HTTP requests"),
    ("sglang.implementation=builtin sglang.mem_fraction_static=0.5", "sglang.mem_fraction_static", "implementation is builtin"),
    ("train_dataset.subset=main", "train_dataset.subset", "is not a Hugging Face dataset"),
    ("actor.kl_ctl=0.1 ref={path:\u00a0m,max_bad_steps:\u00a09}", "ref.max_bad_steps", "the reference is not trained"),
]


@pytest.mark.parametrize(("words", "key", "why"), UNREAD)
def test_it_is_refused_by_every_way_to_load_a_config(tmp_path, capsys, words, key, why):
    file, overrides = tmp_path / "f.yaml", [word.replace("\u00a0", " ") for word in words.split(" ")]
    file.write_text(RL)
    assert main(["config", "check", str(file), *overrides]) == 1
    told = capsys.readouterr().err
    assert why in told
    assert key is None or f"{key}: is set, but not read" in told or f"{key}: is set, but the loss" in told
    with pytest.raises(ConfigError) as refused:
        load_expr_config([str(file), *overrides], GRPOConfig)
    assert str(refused.value) in told


def test_what_it_belongs_to_makes_it_readable(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(RL)
    for words in (
        "actor.gradient_checkpointing=true actor.gradient_checkpointing_every=2",
        "actor.use_decoupled_loss=true actor.prox_logp_method=interpolate actor.ppo_n_minibatches=2",
        "rollout.backend=vllm rollout.prefix_cache=false",
        "actor.policy_loss=topr actor.recompute_logprob=true rollout.backend=sglang rollout.accept_shifted_logprobs=true",
        "actor.use_decoupled_loss=true actor.recompute_logprob=true",
        "gconfig.greedy=true gconfig.frequency_penalty=0.5",
        "gconfig.top_k=-1 gconfig.temperature=0",
    ):
        load_expr_config([str(file), *words.split(" ")], GRPOConfig)


@pytest.mark.parametrize(
    "words", ["actor.adv_norm=null actor.adv_norm.eps=1e-3", "actor.adv_norm.eps=1e-3 actor.adv_norm=null"]
)
def test_a_section_that_is_taken_out_has_no_keys(words):
    with pytest.raises(
        ConfigError, match=r"adv_norm\.eps=1e-3': sets a key of actor\.adv_norm, which override .* takes out; keep one"
    ):
        build_config(parse_yaml(RL), words.split(), GRPOConfig)


STAGES = """\
experiment_name: two
workflow: rlvr
reward_fn: numeric_reward
gconfig: {n_samples: 4, temperature: 0.7}
stages:
  - {kind: sft, name: warm, model: {path: m}, train_dataset: {path: arithmetic}}
  - {kind: rl, name: grpo, actor: {path: m}, train_dataset: {path: arithmetic}}
  - {kind: eval, name: after, path: m, dataset: {path: arithmetic}}
"""


def test_a_shared_key_passes_if_one_stage_reads_it(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(STAGES)
    warm, grpo, after = (stage.config for stage in load_stages(file))
    assert (warm.workflow, grpo.workflow, grpo.gconfig.temperature) == (None, "rlvr", 0.7)
    assert (after.gconfig.temperature, after.gconfig.n_samples) == (1.0, 1)  # of a greedy evaluation, which reads neither
    assert load_stages(file, ["stages.after.samples=2"])[2].config.gconfig.temperature == 0.7


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.after.gconfig.temperature=0.5", "gconfig.temperature: is set, but not read: completions are greedy"),
        ("stages.warm.rollout.max_running_requests=4", "rollout.max_running_requests: is set, but not read: episodes run only"),
        ("rollout.setup_timeout=5", "rollout.setup_timeout: is set, but not read"),  # no stage reads it
    ],
)
def test_a_stage_is_refused_what_it_alone_is_given(tmp_path, override, told):
    file = tmp_path / "f.yaml"
    file.write_text(STAGES)
    with pytest.raises(ConfigError) as refused:
        load_stages(file, [override])
    assert str(refused.value).count("is set, but not read") == 1
    assert f"override {override!r}: {told}" in str(refused.value)


def test_a_shared_key_in_a_list_is_refused_where_no_stage_reads_it(tmp_path):
    file = tmp_path / "f.yaml"
    tasks = "path: arithmetic, workflow: math_workflow"
    file.write_text(
        f"actor: {{path: m}}\ntasksets: [{{{tasks}}}]\neval_tasksets: [{{{tasks}, ratio: 2.0}}]\n"
        "stages: [{kind: rl, name: one}, {kind: rl, name: two}]\n"
    )
    with pytest.raises(ConfigError, match=r"f.yaml:3: eval_tasksets.0.ratio: is set, but not read: each task is evaluated"):
        load_stages(file)


def test_a_shared_key_of_the_algorithm_passes_if_one_stage_reads_it(tmp_path):
    file = tmp_path / "f.yaml"
    stages = "stages: [{kind: rl, name: one}, {kind: rl, name: two, actor: {kl_ctl: 0.1}}]\n"
    file.write_text(RL.replace("path: m}", "path: m, kl_estimator: k1}") + stages)
    assert [stage.config.actor.kl_estimator for stage in load_stages(file)] == ["k3", "k1"]
    with pytest.raises(ConfigError, match=r"f.yaml:1: actor.kl_estimator: is set, but not read: kl_ctl is 0"):
        load_stages(file, ["stages.two.actor.kl_ctl=0"])
