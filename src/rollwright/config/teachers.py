"""Sections about teachers: the models whose log-probabilities the policy learns from, and the loss that it learns with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollwright.config import key, key_from
from rollwright.config.recipes import TEACHER_LOSSES
from rollwright.config.servers import BACKENDS


@dataclass
class TeacherConfig:
    """A model that scores the tokens of samples: a model directory, servers, or the policy itself with more context."""

    name: str = key("teacher", "Name in metrics and messages.")
    path: str = key(
        "", "Model directory or Hugging Face name; the built-in engine computes it in the run's process.", public=True
    )
    addresses: list[str] = key_from(list, "host:port of running servers that hold the model, in place of path.")
    backend: str = key(
        "sglang",
        "Protocol of the servers: sglang (SGLang or rollwright serve-model), vllm, or a registered name.",
        registry=BACKENDS,
    )
    tokenizer_path: str = key(
        "", "Tokenizer of the servers' model, to compare it with the policy's; default: path.", public=True
    )
    policy: bool = key(
        False,
        "The teacher is the policy with its current weights (self-distillation); it sees context, which the policy does not.",
    )
    context: str = key(
        "",
        "Text that the teacher sees before the prompt, with fields of the task in braces, such as 'The answer is {answer}.' and the "
        "special tokens that the model expects.",
    )
    weight: float = key(1.0, "Weight in the mixture of the teachers that score the same sample: log Σ wᵢ pᵢ.", gt=0.0)
    loss_weight: float = key(1.0, "Multiplies distillation.weight in the samples that it scores.", gt=0.0)
    tasks: dict[str, Any] = key_from(
        dict,
        "Tasks that it teaches: fields of the task and their value, or a list of values, such as {taskset: [math, code]}. Default: all.",
    )
    api_key: str | None = key(None, "Key for the servers. ${oc.env:NAME} keeps it out of the file.", secret=True)
    device: str = key("auto", "Device of the model at path.")
    dtype: str = key("auto", "Its compute type.", choices=["auto", "float32", "bfloat16", "float16"])
    trust_remote_code: bool = key(False, "Run code that comes with the model at path. Off unless asked for.")
    max_running_requests: int = key(64, "Sequences that are scored together.", ge=1)
    context_length: int | None = key(None, "Maximum number of tokens of a scored row. Default: the model's.", ge=2)
    request_timeout: float = key(600.0, "Seconds that one request to a server may take.", gt=0.0)
    setup_timeout: float = key(300.0, "Seconds to wait until a server is healthy.", gt=0.0)


@dataclass
class DistillationConfig:
    """The loss that moves the policy towards its teachers."""

    loss: str = key(
        "none",
        "none; advantage (reverse KL as an advantage of each token); k1, k2 or k3 (the same KL as a loss); forward_kl or jsd (on the "
        "teacher's top_k tokens and a bin for the rest); or a registered name or import path (docs/algorithms.md).",
        registry=TEACHER_LOSSES,
    )
    weight: float = key(1.0, "Weight of this loss.", gt=0.0)
    reward_weight: float = key(1.0, "Weight of the advantages that come from rewards; 0 learns from the teacher alone.", ge=0.0)
    top_k: int = key(16, "Tokens of the teacher's distribution that forward_kl and jsd compare one by one.", ge=1)
    jsd_alpha: float = key(0.5, "Share of the teacher in the mixture of jsd.", gt=0.0, lt=1.0)
    skip_tokens: int = key(
        0, "Trained tokens at the beginning of each row that the teacher does not teach (SDFT skips 3).", ge=0
    )
