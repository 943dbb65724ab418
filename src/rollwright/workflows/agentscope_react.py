"""Mathematics with AgentScope's ReAct agent, trained without changes to the agent.

The agent calls the run's OpenAI front, which records its calls; it does not know that it is trained. Only a few settings differ: no
streaming and no retries (the record would hold calls twice), no clock time in prompts (they must be equal within a group), and no
permission requests for tools.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pydantic import BaseModel, Field

from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import Task, TaskReward, Workflow, with_reward
from rollwright.workflows.tool_calling import ToolCallingWorkflow
from rollwright.workflows.tools import Tool, Tools

MAX_ITERATIONS = 8
#: Larger than any model's context, so that AgentScope never compresses the history, which would change sampled tokens. The engine
#: refuses a prompt that is too long.
CONTEXT_SIZE = 1 << 24

SYSTEM_PROMPT = "You solve mathematical problems. Work step by step and use your tools where they help. Put the final result into \\boxed{}."


# The agent's structured output. A docstring would become part of the schema that the model reads.
class MathResult(BaseModel, title="Result"):
    result: str = Field(description="The final result, in the form that the problem asks for.")


@WORKFLOWS.register_module("agentscope_react_math_workflow")
class AgentScopeReactMathWorkflow(Workflow):
    """Runs one AgentScope ``Agent`` for each task; repeatable.

    Needs the extra ``agentscope`` and ``rollout.openai_front: true``. The reward function (default ``math_boxed_reward``) scores
    the agent's result, or empty text if the agent returns none. ``workflow_args`` may hold:

    * ``tools``: functions and MCP servers, as :class:`Tools` takes them; by default ``execute_python``;
    * ``structured`` (true): the agent returns its result through AgentScope's tool for structured output. With false, its last text is
      the result;
    * ``max_iters`` (8): maximum number of rounds of reasoning and acting;
    * ``tool_timeout`` (30): time limit of a tool call in seconds;
    * ``system_prompt``: replaces the module's and the format's.
    """

    repeatable = True
    default_reward_fn = "math_boxed_reward"
    uses_sandbox = staticmethod(ToolCallingWorkflow.uses_sandbox)

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments = task.arguments(
            tools=["execute_python"], tool_timeout=30.0, structured=True, max_iters=MAX_ITERATIONS, system_prompt=None
        )
        self.tools = Tools(self.arguments["tools"], self.arguments["tool_timeout"])
        self.reward = TaskReward(task, "AgentScopeReactMathWorkflow", self.default_reward_fn)

    async def run_async(self) -> list[Experience]:
        """Let the agent reply to the task's question, and score its result."""
        *before, question = self.task.messages()
        system_prompt = self.arguments["system_prompt"] or (before[0]["content"] if before else SYSTEM_PROMPT)
        if len(before) > 1 or question["role"] != "user":
            raise WorkflowError(
                f"task {self.task.task_id!r} holds a conversation; AgentScopeReactMathWorkflow answers one question. Use a "
                "taskset with prompt_type plaintext."
            )
        await asyncio.to_thread(_require_agentscope)  # the import takes seconds, during which other samples must continue
        async with self.tools:
            result, completed = await self._reply(system_prompt, question["content"])
        experiences = self.model.extract_experience_from_history()
        if not experiences:
            raise WorkflowError(f"the agent ended on task {self.task.task_id!r} without asking the model.")
        reward = await self.reward(experiences[-1], response=result or "")
        episode = self.model.openai_episode
        calls = len(episode.calls)
        get_tracker("rollout").scalar(
            agent_model_calls=calls, agent_completed=completed, malformed_tool_calls=episode.malformed_tool_calls
        )
        return with_reward(experiences, reward, model_calls=calls, completed=float(completed))

    async def _reply(self, system_prompt: str, question: str) -> tuple[str | None, bool]:
        """Let the agent answer a question.

        Returns:
            The agent's result, and whether it finished by itself.
        """
        import openai
        from agentscope.agent import Agent, InjectionConfig, ReActConfig
        from agentscope.credential import OpenAICredential
        from agentscope.message import UserMsg
        from agentscope.model import OpenAIChatModel
        from agentscope.tool import Toolkit

        episode = self.model.openai_episode  # applies the task's generation arguments, which the agent does not send
        model = OpenAIChatModel(
            credential=OpenAICredential(api_key=episode.api_key, base_url=episode.base_url),
            model=episode.model_name,
            stream=False,
            max_retries=0,
            context_size=CONTEXT_SIZE,
            client_kwargs={
                "max_retries": 0,
                "timeout": None,  # only the sample has a time limit
                "http_client": openai.DefaultAsyncHttpxClient(verify=False, trust_env=False, timeout=None),
            },
        )
        agent = Agent(
            "solver",
            system_prompt,
            model,
            toolkit=Toolkit(tools=[self._agentscope_tool(tool) for tool in self.tools.offered]),
            react_config=ReActConfig(max_iters=self.arguments["max_iters"], interruption_raise_cancelled_error=True),
            injection_config=InjectionConfig(inject_runtime_state=False),
        )
        schema = {"structured_schema": MathResult} if self.arguments["structured"] else {}
        try:
            reply = await agent.reply(UserMsg(name="user", content=question), **schema)
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return None, False  # the conversation exceeded the context
        finally:
            await model.client.close()
        completed = str(getattr(reply.finished_reason, "value", reply.finished_reason)) == "completed"
        if not self.arguments["structured"]:
            return "".join(block.text for block in reply.content if block.type == "text"), completed
        return (reply.structured_output or {}).get("result"), completed

    def _agentscope_tool(self, tool: Tool) -> Any:
        """Return a tool in AgentScope's form."""
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool

        async def call(**arguments: Any) -> str:
            return (await self.tools.call(tool.name, arguments)).text

        function, called = tool.schema["function"], cast(Any, call)  # AgentScope accepts text, and does not say so
        return FunctionTool(
            called,
            name=tool.name,
            description=function["description"],
            input_schema=function["parameters"],
            permission=PermissionDecision(behavior=PermissionBehavior.ALLOW, message="a tool of the task"),
        )


def _require_agentscope() -> None:
    """Import AgentScope 2.

    Raises:
        ConfigError: it is not installed, or has another major version.
    """
    try:
        import agentscope.model
        import agentscope.tool  # noqa: F401
        import openai  # noqa: F401
        from agentscope.agent import InjectionConfig  # noqa: F401
        from agentscope.permission import PermissionDecision  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"agentscope_react_math_workflow needs AgentScope 2.0.9 or later ({error}): pip install 'rollwright[agentscope]'."
        ) from error
