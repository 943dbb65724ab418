"""Rollwright: reinforcement learning for language-model agents, where the unit is the workflow.

Every public name is importable from here and resolved on first use: ``import rollwright`` loads neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that holds it (the name itself where the module is the export).
_EXPORTS: dict[str, str] = {
    # config
    "GenerationHyperparameters": "rollwright.config.generation",
    "FinetuneSpec": "rollwright.config.experiment",
    "BaseExperimentConfig": "rollwright.config.experiment",
    "PPOConfig": "rollwright.config.experiment",
    "GRPOConfig": "rollwright.config.experiment",
    "SFTConfig": "rollwright.config.experiment",
    "SGLangConfig": "rollwright.config.sections",
    "VLLMConfig": "rollwright.config.sections",
    "RolloutConfig": "rollwright.config.sections",
    "PPOActorConfig": "rollwright.config.sections",
    "load_expr_config": "rollwright.config.loading",
    # tracking
    "MetricsTracker": "rollwright.tracking.metrics",
    "get_tracker": "rollwright.tracking.metrics",
    # experience
    "Experience": "rollwright.experience.experience",
    "concat_padded_tensors": "rollwright.experience.trajectory",
    "tensor_container_to": "rollwright.experience.trajectory",
    # rewards
    "AsyncRewardWrapper": "rollwright.rewards.wrapper",
    # inference
    "InferenceEngine": "rollwright.inference.engine",
    "BuiltinEngine": "rollwright.inference.builtin.engine",
    "ModelRequest": "rollwright.inference.request",
    "ModelResponse": "rollwright.inference.request",
    # workflows
    "RolloutWorkflow": "rollwright.workflows.base",
    "WORKFLOWS": "rollwright.workflows.registry",
    "RLVRWorkflow": "rollwright.workflows.rlvr",
    "MultiTurnWorkflow": "rollwright.workflows.multi_turn",
    # rollout
    "RolloutEngine": "rollwright.rollout.engines",
    "RolloutExecutor": "rollwright.rollout.executor",
    "LocalRolloutEngine": "rollwright.rollout.engines",
    "RemoteSGLangEngine": "rollwright.rollout.engines",
    "RemoteVLLMEngine": "rollwright.rollout.engines",
    "SearchAgentWorkflow": "rollwright.workflows.search_agent",
    "GroupedSearchAgentWorkflow": "rollwright.workflows.search_agent",
    # training
    "FSDPPPOActor": "rollwright.training.actor",
    "TrainEngine": "rollwright.training.engine",
    "load_model": "rollwright.training.model",
    "new_model": "rollwright.training.model",
}

__all__ = [*_EXPORTS, "logging"]


def __getattr__(name: str) -> Any:
    if name == "logging":
        return importlib.import_module("rollwright.tracking.logging")
    module = _EXPORTS.get(name)
    if module is None:
        try:
            return importlib.import_module(f"rollwright.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"rollwright.{name}":
                raise
        raise AttributeError(f"module 'rollwright' has no name {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
