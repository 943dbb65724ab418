"""Registries of workflows and of the functions that they take; resolves a config's names to these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rollwright.environments.mcp_servers import McpServer
from rollwright.errors import WorkflowError
from rollwright.registry import Registry, why_not_called

WORKFLOWS: Registry[Any] = Registry(
    "workflow",
    WorkflowError,
    variable="WORKFLOWS",
    entry_points="rollwright.workflows",
    built_in={
        "rlvr": "rollwright.workflows.rlvr.RLVRWorkflow",
        "multi_turn": "rollwright.workflows.multi_turn.MultiTurnWorkflow",
        "vision_rlvr": "rollwright.workflows.vision_rlvr.VisionRLVRWorkflow",
        "parallel_generation": "rollwright.workflows.parallel_generation.ParallelGenerationWorkflow",
        "self_play": "rollwright.workflows.self_play.SelfPlayWorkflow",
        "kuhn_exploitability": "rollwright.workflows.kuhn_exploitability.KuhnExploitability",
        "search_agent": "rollwright.workflows.search_agent.SearchAgentWorkflow",
        "grouped_search_agent": "rollwright.workflows.search_agent.GroupedSearchAgentWorkflow",
        "tool_integrated": "rollwright.workflows.tool_integrated.ToolIntegratedWorkflow",
        "simple_workflow": "rollwright.workflows.simple.SimpleWorkflow",
        "math_workflow": "rollwright.workflows.simple.MathWorkflow",
        "math_boxed_workflow": "rollwright.workflows.simple.MathBoxedWorkflow",
        "on_policy_distill_workflow": "rollwright.workflows.simple.OnPolicyDistillWorkflow",
        "on_policy_distill_math_workflow": "rollwright.workflows.simple.OnPolicyDistillMathWorkflow",
        "webshop_workflow": "rollwright.workflows.webshop.WebShopWorkflow",
        "environment_workflow": "rollwright.workflows.environment.EnvironmentWorkflow",
        "trl_environment_workflow": "rollwright.compat.trl_workflows.TrlEnvironmentWorkflow",
        "trl_rollout_workflow": "rollwright.compat.trl_workflows.TrlRolloutWorkflow",
        "shell_workflow": "rollwright.workflows.shell.ShellWorkflow",
        "openai_agent": "rollwright.workflows.openai_agent.OpenAIAgentWorkflow",
        "command_agent": "rollwright.workflows.command_agent.CommandAgentWorkflow",
        "verifiers": "rollwright.workflows.verifiers.VerifiersWorkflow",
        "tool_calling_workflow": "rollwright.workflows.tool_calling.ToolCallingWorkflow",
        "agentscope_react_math_workflow": "rollwright.workflows.agentscope_react.AgentScopeReactMathWorkflow",
    },
)

#: Functions that workflows take by name: tools, feedback, prompts, filters, environments; and MCP servers, which are tools too. An import
#: path needs no registration.
FUNCTIONS: Registry[Any] = Registry(
    "function",
    WorkflowError,
    variable="FUNCTIONS",
    entry_points="rollwright.functions",
    built_in={
        "execute_python": "rollwright.workflows.tool_calling.execute_python",
        "gymnasium": "rollwright.environments.gymnasium_text.GymnasiumText",
        "openenv": "rollwright.environments.openenv.OpenEnv",
    },
    marks=("uses_sandbox",),
    accepts=lambda entry: callable(entry) or isinstance(entry, McpServer),
)


def resolve_function(function: Any, what: str, *others: type) -> Callable[..., Any]:
    """Resolve a function, its registered name or its import path to the function.

    Args:
        function: the function, name or path.
        what: its purpose, for messages.
        others: classes whose instances may stand in the place of a function.

    Raises:
        WorkflowError: the function cannot be found or is not callable.
    """
    if isinstance(function, str):
        try:
            function = FUNCTIONS.get(function)
        except WorkflowError as error:
            raise WorkflowError(f"{what}: {error}") from error
    if not callable(function) and not isinstance(function, others):
        raise WorkflowError(f"{what} is {function!r}, which cannot be called: give a function, its name or its import path.")
    return function


def resolve_workflow(workflow: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """Resolve a class, a factory, an instance, a registered name or an import path to a workflow instance.

    Args:
        workflow: the class, factory, instance, name or path.
        kwargs: arguments of the constructor; an instance takes none.

    Raises:
        WorkflowError: the workflow is not found, cannot be built from these arguments, or has no ``arun_episode``.
    """
    if isinstance(workflow, str):
        workflow = WORKFLOWS.get(workflow)
    has_episode = callable(getattr(workflow, "arun_episode", None))
    if inspect.isclass(workflow) and hasattr(workflow, "run") and not has_episode:
        raise _no_workflow(workflow)  # before its constructor asks for arguments that only a task runner has
    if inspect.isclass(workflow) or (callable(workflow) and not has_episode):
        if why := why_not_called(workflow, **(kwargs or {})):
            raise WorkflowError(
                f"{workflow.__module__}.{workflow.__qualname__} cannot be built from workflow_kwargs ({', '.join(kwargs or ()) or 'none'}): "
                f"{why}. Its signature is {workflow.__name__}{inspect.signature(workflow)}."
            )
        workflow = workflow(**(kwargs or {}))
    elif kwargs:
        raise WorkflowError(
            f"workflow_kwargs ({', '.join(kwargs)}) were given with an instance of {type(workflow).__name__}, which is built "
            "already: give the class, or leave them out."
        )
    if not callable(getattr(workflow, "arun_episode", None)):
        raise _no_workflow(type(workflow))
    function = inspect.unwrap(workflow.arun_episode)
    if (inspect.isfunction(function) or inspect.ismethod(function)) and not inspect.iscoroutinefunction(function):
        raise WorkflowError(
            f"{type(workflow).__name__}.arun_episode is not async: write 'async def arun_episode' and await the engine in it."
        )
    return workflow


def workflow_name(workflow: Any) -> str:
    """Return the name of a workflow for messages: the qualified name of its class, without the functions that enclose it."""
    return type(workflow).__qualname__.rsplit("<locals>.", 1)[-1]


def _no_workflow(kind: type) -> WorkflowError:
    instead = "Define 'async def arun_episode(self, engine, data)'."
    if hasattr(kind, "run"):
        instead = "It has run(): task-style workflows are run over a taskset that names them (tasksets, workflow; docs/task-workflows.md)."
    return WorkflowError(f"{kind.__name__} is no workflow: it has no method arun_episode(engine, data). {instead}")
