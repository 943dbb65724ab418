"""Combinations of settings that cannot do what they say."""

import pytest

from rollwright import GRPOConfig, SFTConfig
from rollwright.config.loading import build_config
from rollwright.config.rules import validate
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError

REFUSED = [
    (
        "critic: {path: m}",
        "critic: is given, but actor.adv_estimator is normalised, which has no critic; set actor.recipe to ppo",
    ),
    ("actor: {recipe: ppo}\ncritic: {optimizer: null}", "critic.optimizer: is null, but the critic is trained"),
    ("actor: {recipe: ppo}\ncritic: {lora: {}}", "critic.lora: is set, but a critic is trained whole"),
    ("actor: {recipe: ppo}\ncritic: {shared: true, path: m}", "critic.path: is set, but not read: critic.shared is true"),
    ("actor: {recipe: ppo}\ncritic: {logits_chunk_mib: 2}", "critic.logits_chunk_mib: is set, but not read"),
    ("actor: {recipe: ppo}\ncritic: {ppo_n_minibatches: 9}\ntrain_dataset: {batch_size: 4}", "a batch has 4 groups"),
    (
        "actor: {recipe: ppo}\ncritic: {ppo_n_minibatches: 2}\ncluster: {processes: 2}",
        "critic.ppo_n_minibatches: is 2, but cluster.processes is 2",
    ),
    ("actor: {recipe: ppo, adv_norm: {eps: 0.1}}", "the estimator 'gae' does not read adv_norm"),
    ("actor: {adv_estimator_kwargs: {lam: 0.9}}", "adv_estimator is normalised, whose keys are in adv_norm"),
    ("actor: {kl_in: reward}", "actor.kl_in: is set, but not read: kl_ctl is 0"),
    ("actor: {optimizer: null}", "actor.optimizer: is null"),
    ("ref: {path: m}", "actor.kl_ctl is 0"),
    ("actor: {lora: {}, init_from_scratch: true}", "actor.init_from_scratch: is true, but with lora only the adapter is saved"),
    ("actor: {lora: {dropout: 0.1}}", "actor.lora.dropout: is 0.1, but a policy is compared with"),
    ("actor: {lora: {use_dora: true}}", "actor.lora.use_dora: is true, but builtin engines (rollout.backend), like the others"),
    (
        "actor: {lora: {}}\nrollout: {weight_dtype: bfloat16, backend: vllm}",
        "rollout.weight_dtype: is bfloat16, but actor.lora is set",
    ),
    (
        "actor: {lora: {}}\nrollout: {weight_update: xccl, backend: sglang}",
        "rollout.weight_update: is xccl, but actor.lora is set",
    ),
    (
        "actor: {lora: {}}\nrollout: {on_weight_update: keep}",
        "rollout.on_weight_update: is keep, but actor.lora is set",
    ),
    ("actor: {kl_ctl: 0.1}\nref: {path: m, lora: {}}", "ref.lora: is set, but not read: the reference is not trained"),
    ("actor: {ppo_n_minibatches: 9}\ngconfig: {n_samples: 2}\ntrain_dataset: {batch_size: 4}", "a batch has 4 groups"),
    ("rollout: {addresses: ['h:1']}", "rollout.addresses: names a server"),
    ("rollout: {api_key: k}", "rollout.api_key: names a server"),
    ("rollout: {servers: 2}", "rollout.servers: is 2, which the builtin engine does not have"),
    (
        "rollout: {tensor_parallel: 2, backend: builtin_process}",
        "rollout.tensor_parallel: is 2, which the builtin_process engine",
    ),
    ("rollout: {servers: 2, backend: vllm, addresses: ['h:1']}", "servers that are started here"),
    ("rollout: {accept_shifted_logprobs: true}", "set actor.recompute_logprob"),
    (
        "rollout: {accept_shifted_logprobs: true}\nactor: {use_decoupled_loss: true, prox_logp_method: interpolate}",
        "nothing puts the trainer's in their place",
    ),
    ("rollout: {context_length: 512}", "leaves no room for a prompt"),
    ("gconfig: {min_new_tokens: 9, max_new_tokens: 8}", "gconfig.min_new_tokens: is 9"),
    ("evaluator: {gconfig: {top_k: -2}}", "evaluator.gconfig.top_k"),
    ("evaluator: {gconfig: {temperature: 0.7}}", "greedy unless `greedy: false`"),
    ("evaluator: {every_steps: 5}", "there is no valid_dataset"),
    ("recover: {mode: 'off', every_steps: 5}", "mode is off"),
    ("train_dataset: {limit: 3, batch_size: 4}", "no batch would ever be full"),
    ("deterministic: true\nsaver: {every_seconds: 5}", "saver.every_seconds: goes by the clock"),
    ("deterministic: true\nrollout: {backend: vllm}\nvllm: {device: cpu}", "vllm.device: is cpu, where vLLM has no"),
    ("deterministic: true\nrollout: {over_sampling: 0.5}", "cuts the slowest samples"),
    ("actor: {adv_norm: {mean_level: none, leave_one_out: true}}", "actor.adv_norm.leave_one_out: says what"),
    ("mode: explore", "needs a store"),
    ("train_dataset: {path: x}\ntasksets: [{path: y}]", "beside tasksets"),
    ("workflow: x\ntasksets: [{path: y}]", "beside tasksets"),
]

REFUSED_SUPERVISED = [
    ("stop_accuracy: 0.5", "needs valid_dataset and workflow and an interval in evaluator"),
    ("stop_accuracy: 0.5\nvalid_dataset: {path: v}\nworkflow: w", "stop_accuracy: needs an interval in evaluator"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED_SUPERVISED)
def test_a_warm_up_that_stops_by_accuracy_needs_what_measures_it(text, message):
    with pytest.raises(ConfigError, match=message):
        build_config(parse_yaml(text), [], SFTConfig)


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused_with_key_and_line(text, message):
    with pytest.raises(ConfigError) as caught:
        build_config(parse_yaml(text, file="f.yaml"), [], GRPOConfig)
    assert message in str(caught.value)
    assert "f.yaml:" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ref: {path: m}\nactor: {kl_ctl: 0.1}",
        "rollout: {backend: sglang, accept_shifted_logprobs: true}\nactor: {recompute_logprob: true}",
        "rollout: {backend: sglang, addresses: ['h:1'], api_key: k}",
        "evaluator: {every_steps: 5}\nvalid_dataset: {path: v}",
        "deterministic: true\nsaver: {every_steps: 5}",
        "deterministic: true\nrollout: {backend: builtin_process, max_head_offpolicyness: 1}",
        "saver: {every_seconds: 60}",
        "mode: explore\nstore: {}",
    ],
)
def test_accepted(text):
    build_config(parse_yaml(text), [], GRPOConfig)


def test_configs_made_in_code_are_checked_alike():
    config = GRPOConfig()
    validate(config)
    validate(SFTConfig())
    config.gconfig.min_new_tokens = 1000
    config.actor.optimizer = None
    with pytest.raises(ConfigError, match="2 faults"):
        validate(config)
