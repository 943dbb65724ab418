"""What a model is shown of a script that it wrote and that was run."""

from __future__ import annotations

from rollwright.processes.sandbox import SandboxResult


def script_output(result: SandboxResult, timeout: float, max_characters: int) -> str:
    """What a script printed, then why it failed where it did: the last line of its traceback, or its time.

    Args:
        result: of the run.
        timeout: seconds that the script was allowed.
        max_characters: see :func:`shortened`.
    """
    text = result.stdout.strip()
    if result.timed_out:
        text = f"{text}\nThe script was stopped after {timeout:g} seconds.".strip()
    elif not result.ok:
        last_line = (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
        text = f"{text}\n{last_line}".strip()
    return shortened(text or "The script printed nothing.", max_characters)


def shortened(text: str, max_characters: int) -> str:
    """The text; of a longer one the first and the last half of ``max_characters``, with ``...`` on a line between."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n...\n{text[len(text) - half :]}"
