"""Programs whose conversation outgrows the context: the sample ends, and the run goes on."""

from __future__ import annotations

import json

import pytest
from client_cases import environment_of
from command_programs import CLAUDE, CODEX, MINI, OPENCODE, QWEN, SECONDS, TASK
from directed_model import CONTEXT, Directed, call_of, defaults

from rollwright.workflows.command_agent import CommandAgentWorkflow

#: The program, how it runs a command, the context, and whether it runs with --whole-programs only.
PROGRAMS = [
    (CLAUDE, "Bash", "command", {}, 10_000, False),
    (MINI, "bash", "command", {}, 10_000, False),
    (CODEX, "exec_command", "cmd", {}, CONTEXT, True),
    (QWEN, "run_shell_command", "command", {"is_background": False}, CONTEXT, True),
    (OPENCODE, "bash", "command", {"description": "print"}, CONTEXT, True),
]


async def half(*_, **columns):
    return 0.5


@pytest.mark.parametrize(
    ("program", "tool", "argument", "more", "context", "is_long"), PROGRAMS, ids=[program.preset for program, *_ in PROGRAMS]
)
async def test_a_program_that_outgrows_the_context_ends_its_sample_alone(
    world, request, program, tool, argument, more, context, is_long
):
    if is_long and not request.config.getoption("--whole-programs"):
        pytest.skip("runs with --whole-programs")
    engine = Directed(world.engine, [call_of(tool, json.dumps({argument: "seq 1 4000", **more}))] * 12)
    engine.context_length = context
    workflow = CommandAgentWorkflow(
        program.preset,
        world.engine.tokenizer,
        defaults(),
        reward_fn=half,
        programs=[str(environment_of(program.agent.program))],
        timeout=SECONDS,
        limits={"memory_bytes": 4 << 30},
    )
    try:
        rows = await workflow.arun_episode(engine, {"messages": [{"role": "user", "content": TASK}]})
    finally:
        workflow.front.close()
    assert rows
    assert all(row.truncated and row.reward == 0.5 for row in rows)
    assert sum(int(row.action_mask.sum()) for row in rows) > 0
    assert len(engine.requests) < 12, "the conversation ended"
