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
    "DPOConfig": "rollwright.config.experiment",
    "SFTConfig": "rollwright.config.experiment",
    "SGLangConfig": "rollwright.config.servers",
    "VLLMConfig": "rollwright.config.servers",
    "RolloutConfig": "rollwright.config.sections",
    "PPOActorConfig": "rollwright.config.sections",
    "Recipe": "rollwright.config.recipes",
    "RECIPES": "rollwright.config.recipes",
    "POLICY_LOSSES": "rollwright.config.recipes",
    "ADVANTAGE_ESTIMATORS": "rollwright.config.recipes",
    "KL_ESTIMATORS": "rollwright.config.recipes",
    "load_expr_config": "rollwright.config.loading",
    "DatasetConfig": "rollwright.config.tasksets",
    "FormatConfig": "rollwright.config.tasksets",
    "AllocationMode": "rollwright.config.allocation",
    "load_stages": "rollwright.config.loading",
    "to_yaml": "rollwright.config.loading",
    # tracking
    "MetricsTracker": "rollwright.tracking.metrics",
    "get_tracker": "rollwright.tracking.metrics",
    "SINKS": "rollwright.tracking.sinks",
    # data
    "DATASET_REGISTRY": "rollwright.data.datasets",
    "Example": "rollwright.data.formats",
    "get_dataset": "rollwright.data.datasets",
    "build_character_tokenizer": "rollwright.data.tokenizer",
    "build_word_tokenizer": "rollwright.data.tokenizer",
    "load_tokenizer": "rollwright.data.tokenizer",
    "TaskLoader": "rollwright.data.loader",
    # experience
    "Experience": "rollwright.experience.experience",
    "ExperienceOperator": "rollwright.experience.operators",
    "OPERATORS": "rollwright.experience.operators",
    "concat_padded_tensors": "rollwright.experience.trajectory",
    "tensor_container_to": "rollwright.experience.trajectory",
    # store
    "ExperienceStore": "rollwright.store",
    # rewards
    "REWARD_FUNCTIONS": "rollwright.rewards.registry",
    "AsyncRewardWrapper": "rollwright.rewards.wrapper",
    # inference
    "WeightUpdateMeta": "rollwright.inference.weights",
    "find_free_ports": "rollwright.inference.network",
    "InferenceEngine": "rollwright.inference.engine",
    "RemoteClient": "rollwright.inference.weights.publication",
    "BACKENDS": "rollwright.inference.backends",
    "ServerLaunch": "rollwright.inference.backends",
    "ParameterTable": "rollwright.inference.parameters",
    "Wire": "rollwright.inference.parameters",
    "SGLangClient": "rollwright.inference.backends.sglang",
    "VLLMClient": "rollwright.inference.backends.vllm",
    "Launcher": "rollwright.inference.launcher",
    "LocalServerConfig": "rollwright.config.servers",
    "BuiltinEngine": "rollwright.inference.backends.builtin.engine",
    "ModelRequest": "rollwright.inference.request",
    "ModelResponse": "rollwright.inference.request",
    # workflows
    "VisionRLVRWorkflow": "rollwright.workflows.vision_rlvr",
    "ParallelGenerationWorkflow": "rollwright.workflows.parallel_generation",
    "ModelWrapper": "rollwright.workflows.model_wrapper",
    "Task": "rollwright.workflows.task",
    "Workflow": "rollwright.workflows.task",
    "SimpleWorkflow": "rollwright.workflows.simple",
    "MathWorkflow": "rollwright.workflows.simple",
    "WebShopWorkflow": "rollwright.workflows.webshop",
    "ToolCallingWorkflow": "rollwright.workflows.tool_calling",
    "AgentScopeReactMathWorkflow": "rollwright.workflows.agentscope_react",
    "RolloutWorkflow": "rollwright.workflows.base",
    "WORKFLOWS": "rollwright.workflows.registry",
    "RLVRWorkflow": "rollwright.workflows.rlvr",
    "MultiTurnWorkflow": "rollwright.workflows.multi_turn",
    # rollout
    "RolloutEngine": "rollwright.rollout.engines",
    "RolloutExecutor": "rollwright.rollout.executor",
    "OpenAIFront": "rollwright.rollout.openai_front",
    "OpenAIAgentWorkflow": "rollwright.rollout.openai_agent",
    "LocalRolloutEngine": "rollwright.rollout.engines",
    "RemoteSGLangEngine": "rollwright.rollout.engines",
    "RemoteVLLMEngine": "rollwright.rollout.engines",
    "SearchAgentWorkflow": "rollwright.workflows.search_agent",
    "GroupedSearchAgentWorkflow": "rollwright.workflows.search_agent",
    # algorithms
    "PolicyLoss": "rollwright.algorithms.losses",
    # training
    "FSDPPPOActor": "rollwright.training.actor",
    "TrainEngine": "rollwright.training.engine",
    "load_model": "rollwright.training.model",
    "new_model": "rollwright.training.model",
    # trainers
    "PPOTrainer": "rollwright.trainers.rl",
    "DPOTrainer": "rollwright.trainers.supervised",
    "SFTTrainer": "rollwright.trainers.supervised",
    # sequence processing
    "SequenceProcessor": "rollwright.sequence_processing",
    "GenerationConfig": "rollwright.sequence_processing",
    "BatchedSequences": "rollwright.sequence_processing",
    "LogprobResults": "rollwright.sequence_processing",
    "StopAfterAnswer": "rollwright.sequence_processing",
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
