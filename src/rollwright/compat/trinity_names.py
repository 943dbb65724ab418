"""Names of Trinity-RFT's modules: its class decorators, and replacements for the names that this project does not have."""

from __future__ import annotations

from typing import TypeVar

Marked = TypeVar("Marked")


def Deprecated(marked: Marked) -> Marked:  # noqa: N802
    """Mark a class or function as deprecated, as in Trinity-RFT's files; no effect on behaviour."""
    marked._is_deprecated = True  # type: ignore[attr-defined]
    return marked


def Experimental(marked: Marked) -> Marked:  # noqa: N802
    """Mark a class or function as experimental, as in Trinity-RFT's files; no effect on behaviour."""
    marked._is_experimental = True  # type: ignore[attr-defined]
    return marked


_ONE_CLASS = "one class serves both: it may define run or run_async"
_REWARD = "name the reward function in the taskset (docs/rewards.md)"
_AGENT = "give the agent to OpenAIAgentWorkflow, or use AgentScopeReactMathWorkflow"
_TEACHER = "distillation from a teacher's log-probabilities is not supported; train on a teacher's texts with SFTConfig"
_CONFIG = "load_stages(file) reads such a file, and `rollwright run --config FILE` runs it"

#: Name -> what to use instead.
REPLACEMENTS: dict[str, str] = {
    "BaseSimpleWorkflow": f"write SimpleWorkflow: {_ONE_CLASS}",
    "AsyncSimpleWorkflow": f"write SimpleWorkflow: {_ONE_CLASS}",
    "AsyncMathWorkflow": f"write MathWorkflow: {_ONE_CLASS}",
    "FormatReward": f"format_reward is a reward function: {_REWARD}",
    "AccuracyReward": f"accuracy_reward is a reward function: {_REWARD}",
    "CountDownRewardFn": f"countdown_reward is a reward function: {_REWARD}",
    "MathDAPORewardFn": f"math_dapo_reward is a reward function: {_REWARD}",
    "AgentScopeWorkflowAdapter": _AGENT,
    "AgentScopeWorkflowAdapterV1": _AGENT,
    "AgentScopeReActWorkflow": _AGENT,
    "OnPolicyDistillWorkflow": _TEACHER,
    "OnPolicyDistillMathWorkflow": _TEACHER,
    "Config": _CONFIG,
    "load_config": _CONFIG,
    "InferenceModelConfig": _CONFIG,
}
