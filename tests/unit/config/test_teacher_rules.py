"""Combinations with teachers that cannot work, or would not be read, are refused with both settings and the reason."""

from __future__ import annotations

import pytest

from rollwright import DPOConfig, GRPOConfig, SFTConfig
from rollwright.config.loading import build_stages
from rollwright.config.plan import in_words
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError

RL = "workflow: rlvr\nreward_fn: numeric_reward\ntrain_dataset: {path: arithmetic, batch_size: 2}\ngconfig: {n_samples: 2}\n"
SFT = "kind: sft\ntrain_dataset: {path: arithmetic, batch_size: 2}\nmodel: {path: m}\n"
DISTILL = RL + "actor: {path: m, recipe: distill}\n"
ONE = "teachers: [{path: t}]\n"


def refusal(text):
    """The message that refuses a file."""
    with pytest.raises(ConfigError) as refused:
        build_stages(parse_yaml(text), [])
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (DISTILL, "actor.distillation.loss", "no teachers"),
        (RL + "actor: {path: m}\n" + ONE, "teachers", "distillation.loss is none"),
        (DISTILL + ONE + "mode: explore\nstore: {}\n", "teachers", "mode is explore"),
        (DISTILL + "teachers: [{path: t}, {path: u}]\n", "teachers", "its own name"),
        (DISTILL + "teachers: [{}]\n", "teachers.0", "none of path, addresses and policy"),
        (DISTILL + "teachers: [{path: t, policy: true, context: x}]\n", "teachers.0", "path and policy"),
        (DISTILL + "teachers: [{policy: true}]\n", "teachers.0.policy", "set context"),
        (DISTILL + "teachers: [{addresses: ['h:1']}]\n", "teachers.0.tokenizer_path", "tokenizer"),
        (DISTILL + "teachers: [{path: t, api_key: k}]\n", "teachers.0.api_key", "no addresses"),
        (DISTILL + "teachers: [{addresses: ['h:1'], tokenizer_path: t, dtype: float32}]\n", "teachers.0.dtype", "no path"),
        (DISTILL + "teachers: [{path: t, weight: 2.0}]\n", "teachers.0.weight", "there is one"),
        (DISTILL + ONE + "cluster: {kind: ray}\nrollout: {backend: builtin_process}\n", "teachers", "serve-model"),
        (
            DISTILL.replace("n_samples: 2", "n_samples: 2, temperature: 0.7")
            + "teachers: [{addresses: ['h:1'], tokenizer_path: t, backend: vllm}]\n",
            "teachers",
            "vLLM, which scores prompts at temperature 1, and samples have gconfig.temperature 0.7",
        ),
        (
            DISTILL.replace("distill}", "distill, distillation: {top_k: 4}}") + ONE,
            "actor.distillation.top_k",
            "loss is advantage",
        ),
        (DISTILL.replace("distill}", "distill, reward_scaling: 2.0}") + ONE, "actor.reward_scaling", "rewards do not train"),
        (
            DISTILL.replace("distill}", "distill, eps_clip: 0.3, distillation: {loss: jsd}}") + ONE,
            "actor.eps_clip",
            "needs no advantages",
        ),
        (RL + "actor: {path: m, distillation: {weight: 2.0}}\n", "actor.distillation.weight", "loss is none"),
        (
            DISTILL.replace("distill}", "distill, distillation: {loss: jsd}}")
            + "teachers: [{name: a, path: t}, {name: b, path: u}]\n",
            "teachers",
            "cannot mix",
        ),
        (DISTILL + ONE + "rollout: {dynamic_filter: no_variance}\n", "rollout.dynamic_filter", "rewards do not train"),
        (SFT + "distillation: {loss: k1}\n" + ONE, "distillation.loss", "use forward_kl or jsd"),
        (SFT + ONE, "teachers", "distillation.loss is none"),
        (SFT + "distillation: {loss: jsd}\nteachers: [{policy: true, context: x}]\n", "teachers", "kind rl"),
        (SFT + "distillation: {loss: forward_kl, jsd_alpha: 0.3}\n" + ONE, "distillation.jsd_alpha", "forward_kl"),
        (
            SFT.replace("sft", "dpo", 1).replace("batch_size", "type: preference, batch_size") + ONE,
            "teachers",
            "kind sft or rl",
        ),
    ],
)
def test_what_cannot_work_is_refused(text, key, said):
    lines = [line for line in refusal(text).splitlines() if f" {key}: " in line]
    assert [line for line in lines if said in line], lines


@pytest.mark.parametrize(
    "text",
    [
        DISTILL + ONE,
        RL + "actor: {path: m, recipe: dapo, distillation: {loss: k1, weight: 0.1}}\n" + ONE,
        DISTILL + "teachers: [{name: a, path: t, weight: 2.0}, {name: b, addresses: ['h:1'], tokenizer_path: t}]\n",
        SFT + "distillation: {loss: forward_kl, reward_weight: 0.0}\n" + ONE,
    ],
)
def test_what_works_is_accepted(text):
    build_stages(parse_yaml(text), [])


def test_a_reverse_kl_over_top_tokens_is_refused_with_the_reason():
    text = DISTILL.replace("distill}", "distill, distillation: {loss: reverse_kl_top_k}}") + ONE
    assert "drives the policy away from the teacher" in refusal(text)


def test_the_plan_names_the_teacher_and_its_memory(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * (3 << 20))
    (stage,) = build_stages(parse_yaml(DISTILL + f"teachers: [{{path: {tmp_path}}}]\n"), [])
    assert f"Taught by teacher ({tmp_path}; this process holds 3 MiB of weights" in in_words(stage)
    assert "1 × advantage, rewards do not train" in in_words(stage)


def test_configs_made_in_python_have_the_sections():
    assert GRPOConfig().actor.distillation.loss == SFTConfig().distillation.loss == DPOConfig().distillation.loss == "none"
