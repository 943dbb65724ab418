"""Opens the teachers that a config names: models in this process, or clients of servers that run elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rollwright.algorithms.teachers import find_teacher_loss
from rollwright.config.sections import RolloutConfig
from rollwright.config.teachers import DistillationConfig, TeacherConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.rollout.teachers import Teacher, Teachers, refuse_other_tokenizer


def open_teachers(
    teachers: list[TeacherConfig],
    distillation: DistillationConfig,
    tokenizer: Any,
    *,
    deterministic: bool = False,
) -> Teachers | None:
    """Open the teachers of a run; None if there are none.

    Args:
        teachers: their sections.
        distillation: the loss, which decides what is asked of them.
        tokenizer: the policy's tokenizer.
        deterministic: see docs/determinism.md.

    Raises:
        ConfigError: a teacher has another tokenizer, or is not deterministic.
        EngineError: a server does not answer.
    """
    if not teachers:
        return None
    top_k = distillation.top_k if find_teacher_loss(distillation.loss).kind == "top" else 0
    with ExitStack() as opened:
        made = [Teacher(each, _engine(each, tokenizer, deterministic, opened), tokenizer) for each in teachers]
        kept = opened.pop_all()
    return Teachers(made, top_k=top_k, skip_tokens=distillation.skip_tokens, opened=kept)


def _engine(teacher: TeacherConfig, tokenizer: Any, deterministic: bool, opened: ExitStack) -> InferenceEngine | None:
    """Open a teacher's engine; None if the policy is the teacher."""
    if teacher.policy:
        return None
    own_tokenizer = load_tokenizer(teacher.tokenizer_path or teacher.path, teacher.trust_remote_code)
    refuse_other_tokenizer(tokenizer, own_tokenizer, teacher.name)
    engine = _server_client(teacher) if teacher.addresses else _engine_in_this_process(teacher, own_tokenizer, deterministic)
    opened.callback(engine.destroy)
    engine.initialize()
    if deterministic and not engine.is_batch_invariant:
        raise ConfigError(
            f"deterministic: the scores of the servers of teacher {teacher.name!r} may depend on what else they compute, so the run would "
            "not repeat. Start them in their batch-invariant mode (rollwright serve-model --batch-invariant), or give a path."
        )
    return engine


def _server_client(teacher: TeacherConfig) -> InferenceEngine:
    backend = servers_of(teacher.backend)
    if backend is None:
        raise ConfigError(
            f"teacher {teacher.name!r} has addresses, and its backend {teacher.backend!r} has no servers: give sglang or vllm."
        )
    section = RolloutConfig(
        backend=teacher.backend,
        addresses=list(teacher.addresses),
        api_key=teacher.api_key,
        request_timeout=teacher.request_timeout,
        setup_timeout=teacher.setup_timeout,
    )
    return RemoteInferenceEngine(backend, section, takes_weights=False)


def _engine_in_this_process(teacher: TeacherConfig, tokenizer: Any, deterministic: bool) -> InferenceEngine:
    from rollwright.inference.backends.builtin.engine import BuiltinEngine

    return BuiltinEngine(
        teacher.path,
        tokenizer,
        max_running_requests=teacher.max_running_requests,
        context_length=teacher.context_length,
        device=teacher.device,
        dtype=teacher.dtype,
        batch_invariant=deterministic,
        trust_remote_code=teacher.trust_remote_code,
    )
