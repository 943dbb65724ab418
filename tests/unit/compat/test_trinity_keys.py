"""Keys of Trinity-shaped files that decide something together, and those that are refused."""

import pytest

from rollwright.compat.dialects import Trinity
from rollwright.config.loading import build_stages
from rollwright.config.source import Origins, parse_yaml
from rollwright.errors import ConfigError

FILE = """
mode: {mode}
model: {{model_path: /models/tiny, max_response_tokens: 64}}
algorithm: {{algorithm_type: grpo, repeat_times: 8}}
buffer:
  batch_size: 4
  total_steps: 10
  explorer_input:
    default_workflow_type: math_workflow
    taskset: {{path: tasks.jsonl, format: {{prompt_key: question}}}}
"""


def translated(more="", mode="both", file=FILE):
    document = parse_yaml(file.format(mode=mode) + more, "trinity.yaml")
    return Trinity().translate(document.data, Origins(document))


def built(more="", mode="both", file=FILE):
    (stage,) = build_stages(translated(more, mode, file), [])
    return stage.config


def refusal(more, mode="both", file=FILE):
    with pytest.raises(ConfigError) as error:
        built(more, mode, file)
    return str(error.value)


def test_every_taskset_gets_the_defaults_of_its_section():
    assert built().tasksets[0].workflow == "math_workflow"


def test_operators_stand_between_explorer_and_trainer():
    operators = "data_processor: {operators: [{name: reward_filter, args: {threshold: 0.1}}, {name: no_variance_filter}]}\n"
    config = built(operators)
    assert [(each.name, each.args) for each in config.store.operators] == [
        ("reward_filter", {"threshold": 0.1}),
        ("no_variance_filter", {}),
    ]
    nested = "data_processor: {experience_pipeline: {operators: [{name: pass_rate_calculator}]}}\n"
    assert built(nested).store.operators[0].name == "pass_rate_calculator"


def test_the_store_of_two_processes():
    buffer = """  trainer_input:
    experience_buffer:
      name: experiences
      storage_type: sql
      path: sqlite:///x.db
      replay_buffer: {enable: true, priority_fn: linear_decay, priority_fn_args: {decay: 0.5}}
"""
    config = built(buffer + "  train_batch_size: 16\n", mode="train")
    assert (config.store.type, config.store.url, config.store.train_batch_size) == ("sql", "sqlite:///x.db", 16)
    assert (config.store.order, config.store.priority_fn_args) == ("priority", {"decay": 0.5})
    assert "(here store.order): is not used in mode both" in refusal(buffer)


def test_mode_both_needs_no_storage_and_says_so():
    translation = translated("  trainer_input: {experience_buffer: {storage_type: queue, path: sqlite:///x.db}}\n")
    assert "store" not in translation.data
    assert any("mode both keeps experiences in memory" in note for note in translation.notes)


def test_the_batch_of_mode_both_is_what_it_explored():
    assert built("  train_batch_size: 32\n").gconfig.n_samples == 8
    assert "buffer.train_batch_size is 16" in refusal("  train_batch_size: 16\n")


def test_n_of_a_taskset_is_its_group_where_nothing_else_says_it():
    file = FILE.replace("algorithm_type: grpo, repeat_times: 8", "algorithm_type: grpo")
    file = file.replace("format: {{prompt_key: question}}", "rollout_args: {{n: 5}}")
    assert built(file=file).tasksets[0].group_size == 5


def test_prompt_and_response_together_bound_the_context():
    file = FILE.replace("max_response_tokens: 64", "max_response_tokens: 64, max_prompt_tokens: 100")
    assert built(file=file).rollout.context_length == 164


def test_sections_of_other_systems_are_refused_once_and_by_name():
    message = refusal(
        "trainer: {trainer_type: verl, trainer_config: {actor_rollout_ref: {a: 1, b: 2}}}\nservice: {data_juicer: {auto_start: true}}\n"
    )
    assert message.count("trainer.trainer_config") == 1
    assert "veRL" in message
    assert "service starts services" in message


def test_an_unknown_algorithm_is_refused_with_the_list():
    message = refusal("", file=FILE.replace("algorithm_type: grpo", "algorithm_type: mix"))
    assert "mix" in message
    assert "grpo" in message


def test_weights_move_every_so_many_steps_and_the_bound_on_age_follows():
    config = built("synchronizer: {sync_interval: 4, sync_offset: 2, sync_style: fixed}\n")
    assert (config.rollout.weight_update_every_steps, config.rollout.max_head_offpolicyness) == (4, 5)
    assert built("synchronizer: {sync_interval: 3}\n").rollout.max_head_offpolicyness == 2
    assert built("synchronizer: {sync_offset: 1}\n").rollout.max_head_offpolicyness == 1
    assert any("3 steps old" in note for note in translated("synchronizer: {sync_interval: 4}\n").notes)
    assert "sync_offset is -1; it is a whole number" in refusal("synchronizer: {sync_offset: -1}\n")


def test_auxiliary_models_keep_what_they_say_or_are_refused():
    config = built("explorer: {auxiliary_models: [{model_path: /models/judge, max_model_len: 512, engine_num: 1}]}\n")
    assert (config.auxiliary_models[0].model_path, config.auxiliary_models[0].context_length) == ("/models/judge", 512)
    assert "engine_num: 2" in refusal("explorer: {auxiliary_models: [{model_path: /models/judge, engine_num: 2}]}\n")


def test_the_engine_that_a_file_names_is_used():
    config = built("explorer: {rollout_model: {engine_type: vllm_async, gpu_memory_utilization: 0.5}}\n")
    assert (config.rollout.backend, config.vllm.gpu_memory_utilization) == ("vllm", 0.5)


def part(file=FILE, **algorithm):
    """The actor of a file whose algorithm section has these keys."""
    keys = ", ".join(f"{key}: {value}" for key, value in {"algorithm_type": "grpo", "repeat_times": 8, **algorithm}.items())
    return built(file=file.replace("algorithm_type: grpo, repeat_times: 8", keys.replace("{", "{{").replace("}", "}}"))).actor


def test_advantage_and_loss_are_those_that_the_file_names():
    """They used to be taken for the algorithm's own, whichever it was."""
    actor = part(algorithm_type="opmd", advantage_fn="grpo", policy_loss_fn="ppo")
    assert (actor.adv_norm.mean_level, actor.adv_norm.std_level, actor.adv_norm.leave_one_out) == ("group", "group", False)
    assert actor.policy_loss == "clip"
    own = part(algorithm_type="rloo")
    assert (own.adv_norm.std_level, own.adv_norm.leave_one_out, own.policy_loss) == ("none", True, "clip")
    assert part(advantage_fn="reinforceplusplus").adv_norm.mean_level == "batch"
    assert part(policy_loss_fn="cispo").policy_loss == "cispo"
    gspo = part(algorithm_type="gspo", advantage_fn="grpo", policy_loss_fn="gspo")
    assert gspo == part(algorithm_type="gspo")
    with pytest.raises(ConfigError, match="advantage_fn is 'remax'; here there are grpo"):
        part(advantage_fn="remax")
    assert part(algorithm_type="ppo", advantage_fn="grpo").adv_estimator == "normalised"


def test_a_kl_has_the_weight_that_the_file_means():
    assert part().kl_ctl == 0.0
    named = part(kl_loss_fn="k2")
    assert (named.kl_estimator, named.kl_ctl) == ("k2", 0.001)
    weighed = part(kl_loss_fn="k3", kl_loss_fn_args="{adaptive: false, kl_coef: 0.02}")
    assert (weighed.kl_estimator, weighed.kl_ctl) == ("k3", 0.02)
    assert part(kl_loss_fn="none", kl_loss_fn_args="{kl_coef: 0.02}").kl_ctl == 0.0
    with pytest.raises(ConfigError, match="kl_loss_fn is 'abs'; here there are k1, k2, k3 and none"):
        part(kl_loss_fn="abs")


def test_no_entropy_loss_has_no_weight():
    assert part(entropy_loss_fn="default", entropy_loss_fn_args="{entropy_coef: 0.1}").entropy_coef == 0.1
    assert part(entropy_loss_fn="none", entropy_loss_fn_args="{entropy_coef: 0.1}").entropy_coef == 0.0
    with pytest.raises(ConfigError, match="entropy_loss_fn is 'mix'"):
        part(entropy_loss_fn="mix")


REPLAY = """  trainer_input:
    experience_buffer:
      storage_type: queue
      replay_buffer: {enable: %s, priority_fn: linear_decay, reuse_cooldown_time: %s, priority_fn_args: {decay: 0.5}}
"""


def test_replay_uses_experiences_again_where_they_cool_down():
    store = built(REPLAY % ("true", "1.5"), mode="train").store
    assert (store.type, store.order, store.uses, store.cooldown_seconds) == ("sql", "priority", None, 1.5)
    assert store.priority_fn_args == {"decay": 0.5}
    once = built(REPLAY % ("true", "null"), mode="train").store
    assert (once.type, once.order, once.uses) == ("sql", "priority", 1)
    off = built(REPLAY % ("false", "1.5"), mode="train").store
    assert (off.type, off.order, off.uses, off.cooldown_seconds) == ("queue", "fifo", 1, 0.0)


def test_tasks_stand_in_one_place():
    message = refusal("    tasksets: [{path: b.jsonl}]\n")
    assert "taskset (trinity.yaml:" in message
    assert "tasksets (trinity.yaml:" in message
    assert "keep one" in message


def test_evaluation_has_a_workflow_of_its_own_by_default():
    more = "    default_eval_workflow_type: math_boxed_workflow\n    eval_tasksets: [{path: b.jsonl}]\n"
    config = built(more)
    assert config.tasksets[0].workflow == "math_workflow"
    assert config.eval_tasksets[0].workflow == "math_boxed_workflow"


def test_several_engines_are_several_servers():
    more = "explorer: {rollout_model: {engine_type: vllm, engine_num: 2, tensor_parallel_size: 4}}\n"
    assert (built(more).rollout.servers, built(more).rollout.tensor_parallel) == (2, 4)
    assert "set rollout.backend to sglang or vllm" in refusal("explorer: {rollout_model: {engine_num: 2}}\n")


def test_the_engine_s_cache_and_the_older_name_of_the_clip_are_read():
    config = built("explorer: {rollout_model: {enable_prefix_caching: false}}\ntrainer: {actor_grad_clip: 0.5}\n")
    assert config.rollout.prefix_cache is False
    assert config.actor.optimizer.gradient_clipping == 0.5


def test_ppo_has_a_critic():
    config = built(
        file=FILE.replace(
            "algorithm_type: grpo, repeat_times: 8",
            "algorithm_type: ppo, repeat_times: 1, advantage_fn: ppo, advantage_fn_args: {{gamma: 0.99, lam: 0.95}}",
        ).replace("model: {{", "model: {{critic_model_path: other, ")
    )
    assert (config.actor.recipe, config.actor.adv_estimator) == ("ppo", "gae")
    assert config.actor.adv_estimator_kwargs == {"gamma": 0.99, "lam": 0.95}
    assert config.critic.path == "other"
    assert config.gconfig.n_samples == 1
