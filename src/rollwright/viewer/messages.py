"""A sample as a chat: its messages where the text has marks of roles that are known, else what was given and what was said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.records import DurableResult, ModelCall, tokens_in
from rollwright.viewer.reading import plain_result

#: How chat templates open a message; group ``role`` is its role, and what follows up to the next is its text.
_OPENINGS = re.compile(
    r"<\|im_start\|>(?P<role>\w+)\n?"  # ChatML: Qwen and others
    r"|<\|start_header_id\|>(?P<role2>\w+)<\|end_header_id\|>\n*"  # Llama 3
    r"|<start_of_turn>(?P<role3>\w+)\n?"  # Gemma
    r"|<\|(?P<role4>system|user|assistant|tool|observation)\|>\n?"  # Phi, GLM, and the tokenizers made here
)
_CLOSINGS = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>|</s>)\s*$")
_ROLES = {"model": "assistant", "observation": "tool", "ipython": "tool"}


def chat_of(episode: RecordedEpisode, text: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The messages of an episode in the order in which they came about, its tools' results among them.

    Returns:
        Dicts of ``role`` (system, user, assistant or tool; ``given`` where the text does not say), ``text``, ``call`` (index of the call
        that said it; None: it was given) and, of a tool, ``result`` (see ``plain_result``).
    """
    steps: list[tuple[float, int, Any]] = [(each.call.started, 1, each) for each in episode.calls]
    steps += [(result.time - result.seconds, 0, result) for result in episode.results]
    steps.sort(key=lambda step: step[:2])
    messages: list[dict[str, Any]] = []
    for _, _, step in steps:
        if isinstance(step, DurableResult):
            result = plain_result(step)
            shown = result["error"]["message"] if result["error"] else result["value"]
            role = "reward" if result["is_reward"] else "tool"
            messages.append(
                {"role": role, "text": shown if isinstance(shown, str) else repr(shown), "call": None, "result": result}
            )
            continue
        call: ModelCall = step.call
        given = step.prompt[len(step.prompt) - tokens_in(call.added) :]
        messages += _given(text(given.tolist()))
        if call.refused is not None:
            messages.append({"role": "refused", "text": call.refused, "call": call.index})
        else:
            said = _CLOSINGS.sub("", text(step.output.tolist()))
            messages.append({"role": "assistant", "text": said, "call": call.index})
    return messages


def _given(text: str) -> list[dict[str, Any]]:
    """The messages in what a call was given beside what came before; its last, empty one is the answer's opening."""
    openings = list(_OPENINGS.finditer(text))
    parts = [("given", text[: openings[0].start()] if openings else text)]
    for number, opening in enumerate(openings):
        stop = openings[number + 1].start() if number + 1 < len(openings) else len(text)
        role = next(each for each in opening.groups() if each)
        parts.append((_ROLES.get(role, role), text[opening.end() : stop]))
    shown = [(role, _CLOSINGS.sub("", part).strip("\n")) for role, part in parts]
    return [{"role": role, "text": part, "call": None} for role, part in shown if part.strip()]
