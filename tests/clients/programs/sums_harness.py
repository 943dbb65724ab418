"""An agent that adds, as a harness of verifiers: its program runs in this interpreter's environment."""

from __future__ import annotations

import sys
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["SumsHarness"]


class SumsHarnessConfig(vf.HarnessConfig):
    """Nothing to set."""


class SumsHarness(vf.Harness[SumsHarnessConfig]):
    """Starts ``sums_agent.py``."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        _, prompt = self.resolve_prompt(data)
        program = str(Path(__file__).with_name("sums_agent.py"))
        return await runtime.run_program([sys.executable, program, endpoint, secret, ctx.model, str(prompt)], {})
