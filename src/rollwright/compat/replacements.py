"""Names of other systems that Rollwright does not provide, and what to write instead. Names that it provides are public."""

from __future__ import annotations

_AGENT = "give the agent (a function, or a class with `async def run(self, data, **extra_kwargs)`) to OpenAIAgentWorkflow"
_PLACES = (
    "processes are placed by the config (cluster, allocation_mode) and started by `rollwright run`: leave the scheduler out"
)
_SERVICE = "`rollwright run` with mode: serve answers agents of other processes (docs/modes.md)"
_REMOTE = "engines and workers exchange plain tensors: leave it out"
_SANDBOX = "name a sandbox in rollout.sandbox (docs/sandbox.md); Daytona's is not one of them"
_ONE_CLASS = "one class serves both: it may define run or run_async"
_REWARD = "name the reward function in the taskset (docs/rewards.md)"
_AGENT_CLASS = "give the agent to OpenAIAgentWorkflow, or use AgentScopeReactMathWorkflow"
_TEACHER = "use MathWorkflow, and name the teacher in the config (teachers, with actor.recipe: distill; docs/algorithms.md)"
_CONFIG = "load_stages(file) reads such a file, and `rollwright run --config FILE` runs it"

#: AReaL's name -> advice.
AREAL: dict[str, str] = {
    "OpenAIProxyWorkflow": _AGENT,
    "OpenAIProxyClient": f"{_AGENT}; it rewards by what it returns, or by POST to base_url + '/rewards'",
    "AReaLOpenAICompatibleModel": (
        "CAMEL's own OpenAICompatibleModel(model_type='default', url=client.base_url, api_key=client.api_key) asks the policy of "
        "client = ArealOpenAI(…)"
    ),
    "InteractionCache": "the calls of an ArealOpenAI are in client.episode.recorder; export_interactions() gives them",
    "MathAgent": f"it is 30 lines to copy into your project; {_AGENT}",
    "MathToolAgent": f"it is 40 lines to copy into your project; {_AGENT}",
    "process_tool_calls": "tool calls are parsed by the form that the chat template shows; `message.tool_calls` has them",
    "ModelAllocation": "AllocationMode.from_str(text): gen_backend, gen_tp_size, gen_dp_size",
    "LocalScheduler": _PLACES,
    "RayScheduler": _PLACES,
    "SlurmScheduler": _PLACES,
    "RTensor": _REMOTE,
    "serialize_value": _REMOTE,
    "deserialize_value": _REMOTE,
    "AsyncTaskRunner": "RolloutExecutor runs samples; asyncio.TaskGroup runs other coroutines",
    "AgentController": _SERVICE,
    "AgentConfig": _SERVICE,
    "AgentRequest": _SERVICE,
    "AgentResponse": _SERVICE,
    "EventEmitter": _SERVICE,
    "RolloutControllerV2": _SERVICE,
    "DaytonaRunner": _SANDBOX,
    "DaytonaClientManager": _SANDBOX,
    "RWTrainer": "reward models are not trained here; DPOTrainer learns from the same pairs",
    "RWConfig": "reward models are not trained here; DPOConfig takes the same pairs",
    "dataclass": "Python's own: from dataclasses import dataclass",
    "field": "Python's own: from dataclasses import field",
    "get_model_path": "pass the directory or the Hugging Face name directly (actor.path, load_tokenizer)",
    "seeding": "trainers seed their process from the config's `seed`; elsewhere call torch.manual_seed",
    "set_random_seed": "trainers seed their process from the config's `seed`; elsewhere call torch.manual_seed",
    "create_dataloader": "TaskLoader(dataset, batch_size=…), or the trainer's own",
    "tabulate_stats": "the run's display shows the metrics; stats_tracker.export_all() returns them",
    "StatsLogger": "metrics go to the sinks of the config's stats_logger",
    "network": "from rollwright import find_free_ports",
    "gethostip": "socket.gethostbyname(socket.gethostname())",
    "name_resolve": "servers are found in the config, or in AREAL_LLM_SERVER_ADDRS",
    "names": "servers are found in the config, or in AREAL_LLM_SERVER_ADDRS",
    "NameResolveConfig": "servers are found in the config, or in AREAL_LLM_SERVER_ADDRS",
    "kill_process_tree": "processes of a run end with it; elsewhere psutil does it",
    "is_single_controller": "there is always one controller: leave the check out",
}

#: Trinity-RFT's name -> advice.
TRINITY: dict[str, str] = {
    "BaseSimpleWorkflow": f"write SimpleWorkflow: {_ONE_CLASS}",
    "AsyncSimpleWorkflow": f"write SimpleWorkflow: {_ONE_CLASS}",
    "AsyncMathWorkflow": f"write MathWorkflow: {_ONE_CLASS}",
    "FormatReward": f"format_reward is a reward function: {_REWARD}",
    "AccuracyReward": f"accuracy_reward is a reward function: {_REWARD}",
    "CountDownRewardFn": f"countdown_reward is a reward function: {_REWARD}",
    "MathDAPORewardFn": f"math_dapo_reward is a reward function: {_REWARD}",
    "AgentScopeWorkflowAdapter": _AGENT_CLASS,
    "AgentScopeWorkflowAdapterV1": _AGENT_CLASS,
    "AgentScopeReActWorkflow": _AGENT_CLASS,
    "OnPolicyDistillWorkflow": _TEACHER,
    "OnPolicyDistillMathWorkflow": _TEACHER,
    "Config": _CONFIG,
    "load_config": _CONFIG,
    "InferenceModelConfig": _CONFIG,
}


def replacement(name: str) -> str:
    """Return the end of a message about a missing name, ``which SYSTEM has: ADVICE``; empty for other names."""
    systems = {"AReaL": AREAL, "Trinity-RFT": TRINITY}
    return next((f"which {system} has: {table[name]}" for system, table in systems.items() if name in table), "")
