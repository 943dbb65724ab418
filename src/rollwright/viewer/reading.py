"""Read one sample from the journal: its calls and messages, and the values that engine and trainer recorded for each token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwright.errors import JournalError
from rollwright.experience.journal.episodes import RecordedCall, RecordedEpisode
from rollwright.experience.journal.records import (
    AnyRecord,
    Arguments,
    Begin,
    DurableResult,
    End,
    ModelCall,
    Row,
    Trained,
    tokens_in,
    unpack_value,
)
from rollwright.inference.front.side_conversations import SIDE_CONVERSATION, SUB_AGENT
from rollwright.viewer.collector import REWARD_CALLS
from rollwright.viewer.index import PLACE_BITS, Index, unpack_places


@dataclass
class RowTokens:
    """A row of tokens; arrays are ``[L]``, with nan and -1 for missing values.

    Attributes:
        logprobs: log-probabilities at sampling, including those of sampled tokens that are not trained.
        versions: version of the weights that sampled each token.
        advantages, trainer_logprobs, entropies, teacher_logprobs: None if the row was not trained or the run did not record them.
        advantages, trainer_logprobs, entropies, values: None if the row was not trained or the run did not record them.
        branches, positions: branch numbers and position ids; None without isolated branches.
    """

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    truncated: bool
    advantages: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    entropies: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    branches: np.ndarray | None = None
    positions: np.ndarray | None = None
    step: int | None = None

    def take(self, trained: Trained) -> None:
        """Add the values that the trainer recorded for this row."""
        count = int(self.mask.sum())
        self.step = trained.step
        if trained.tokens != count:
            return  # an operator changed the row before training
        given = trained.advantage
        self.advantages = self._spread(np.frombuffer(given, "<f4") if isinstance(given, bytes) else np.full(count, given))
        if len(trained.logprobs) == 4 * count:
            self.trainer_logprobs = self._spread(np.frombuffer(trained.logprobs, "<f4"))
        if len(trained.entropies) == 2 * count:
            self.entropies = self._spread(np.frombuffer(trained.entropies, "<f2"))
        if len(trained.teacher_logprobs) == 4 * count:
            self.teacher_logprobs = self._spread(np.frombuffer(trained.teacher_logprobs, "<f4"))
        if len(trained.values) == 4 * count:
            self.values = self._spread(np.frombuffer(trained.values, "<f4"))

    def _spread(self, values: np.ndarray) -> np.ndarray:
        whole = np.full(len(self.ids), np.nan)
        whole[self.mask] = values
        return whole

    def plain(self) -> dict[str, Any]:
        """Convert the row to lists and numbers, with None in place of nan."""
        arrays = {
            "logprobs": self.logprobs,
            "advantages": self.advantages,
            "trainer_logprobs": self.trainer_logprobs,
            "entropies": self.entropies,
            "teacher_logprobs": self.teacher_logprobs,
            "values": self.values,
        }
        numbers = {
            "ids": self.ids,
            "mask": self.mask,
            "versions": self.versions,
            "branches": self.branches,
            "positions": self.positions,
        }
        return {
            **{name: None if each is None else each.tolist() for name, each in numbers.items()},
            **{name: None if each is None else plain_floats(each) for name, each in arrays.items()},
            "reward": self.reward,
            "truncated": self.truncated,
            "step": self.step,
        }


def plain_floats(values: np.ndarray) -> list[float | None]:
    """Round to seven significant digits, float32's precision; values that are not finite become None."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values.tolist()]


def read_episode(index: Index, places: bytes) -> RecordedEpisode:
    """Read the episode whose records are at these places. If some are lost (``is_damaged`` in lists), return the rest.

    Raises:
        JournalError: a file of the journal is missing or was changed.
    """
    records = index.records(places)
    if not records or not isinstance(records[0], Begin):
        raise JournalError(f"{index.journal}: the beginning of this sample is not in the journal any more.")
    (file,) = index.rows("SELECT writer FROM files WHERE id = ?", unpack_places(places)[0] >> PLACE_BITS)
    episode = RecordedEpisode(records[0], writer=file["writer"])
    for record in records[1:]:
        if isinstance(record, ModelCall):
            if record.index == len(episode.calls):  # otherwise a call that this one extends is lost
                episode.add(record, _arguments(index, episode.writer, record.arguments))
        elif isinstance(record, DurableResult):
            episode.results.append(record)
        elif isinstance(record, End):
            episode.end = record
    if episode.end is not None:  # rows of lost calls cannot be rebuilt
        episode.end.rows = [row for row in episode.end.rows if row.base < len(episode.calls)]
    return episode


def _arguments(index: Index, writer: int, number: int) -> dict[str, Any]:
    found = index.rows("SELECT place FROM arguments WHERE writer = ? AND number = ?", writer, number)
    record: AnyRecord | None = index.record(found[0]["place"]) if found else None
    return record.gconfig if isinstance(record, Arguments) else {}


def read_trained(index: Index, places: bytes | None) -> list[Trained]:
    """Read the trainer's records of a sample's rows, in order."""
    return [record for record in map(index.record, unpack_places(places)) if isinstance(record, Trained)]


def rows_of(episode: RecordedEpisode, trained: Sequence[Trained] = ()) -> list[RowTokens]:
    """Return the rows of an episode; without rows, one per conversation, built from the conversation's last request and answer."""
    known = _known_tokens(episode)
    if episode.end is not None and episode.end.rows:
        rows = [_row(episode, row, known) for row in episode.end.rows]
        for row, record in zip(rows, trained, strict=False):
            row.take(record)
        return rows
    last = {each.call.conversation: place for place, each in enumerate(episode.calls)}
    return [_conversation(episode.calls[place], *known[place]) for place in last.values()]


def _known_tokens(episode: RecordedEpisode) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each call's log-probabilities and versions of prompt and output tokens; nan and -1 for tokens that no call sampled."""
    known: list[tuple[np.ndarray, np.ndarray]] = []
    for each in episode.calls:
        base, kept = each.call.base, each.call.kept
        before = known[base] if base >= 0 else (np.empty(0), np.empty(0, np.int32))
        fresh = len(each.prompt) - (kept if base >= 0 else 0)
        logprobs = np.concatenate([before[0][:kept], np.full(fresh, np.nan), each.logprobs])
        versions = np.concatenate([before[1][:kept], np.full(fresh, -1, np.int32), each.versions])
        known.append((logprobs, versions))
    return known


def _row(episode: RecordedEpisode, row: Row, known: list[tuple[np.ndarray, np.ndarray]]) -> RowTokens:
    ids, mask = episode.row_ids(row), episode.row_mask(row)
    logprobs, versions = np.full(len(ids), np.nan), np.full(len(ids), -1, np.int32)
    branches = positions = None
    if row.base >= 0:
        logprobs[: row.kept], versions[: row.kept] = (part[: row.kept] for part in known[row.base])
        branches, positions = _layout(episode.calls[row.base], len(ids), row.kept)
    _fill_by_content(episode, ids, mask, logprobs, versions)
    return RowTokens(ids, mask, logprobs, versions, row.reward, row.truncated, branches=branches, positions=positions)


def _conversation(call: RecordedCall, logprobs: np.ndarray, versions: np.ndarray) -> RowTokens:
    ids = np.concatenate([call.prompt, call.output])
    branches, positions = _layout(call, len(ids), len(ids))
    no_mask = np.zeros(len(ids), dtype=bool)
    truncated = call.call.stop_reason == "length"
    return RowTokens(ids, no_mask, logprobs, versions, math.nan, truncated, branches=branches, positions=positions)


def _layout(call: RecordedCall, length: int, kept: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return branches and positions of a row that ends with ``call``; tokens after the recorded layout continue the trunk."""
    if call.call.layout is None:
        return None, None
    said_positions, said_branches = (np.array(part, dtype=np.int64) for part in call.call.layout)
    count = min(len(said_positions), kept, length)
    branches, positions = np.zeros(length, np.int64), np.zeros(length, np.int64)
    branches[: min(count, len(said_branches))] = said_branches[:count]
    positions[:count] = said_positions[:count]
    begin = int(positions[:count].max(initial=-1)) + 1
    positions[count:] = np.arange(begin, begin + length - count)
    return branches, positions


def _fill_by_content(
    episode: RecordedEpisode, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray
) -> None:
    """Fill in values of trained tokens outside the prefix of the row's call, from the call with the same output, such as a branch's."""
    unknown = mask & np.isnan(logprobs)
    if not unknown.any():
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unknown.view(np.int8), [0]])))
    unused = list(episode.calls)
    for start, stop in edges.reshape(-1, 2).tolist():
        for call in list(unused):
            count = min(len(call.output), stop - start)
            if count and np.array_equal(call.output[:count], ids[start : start + count]):
                logprobs[start : start + count] = call.logprobs[:count]
                versions[start : start + count] = call.versions[:count]
                unused.remove(call)
                start += count
                if start == stop:
                    break


def plain_call(each: RecordedCall) -> dict[str, Any]:
    """Convert a model request and its answer to plain values."""
    call = each.call
    same = (
        "index",
        "conversation",
        "turn",
        "base",
        "kept",
        "started",
        "latency",
        "ttft",
        "stop_reason",
        "stop_match",
        "refused",
    )
    return {
        **{name: getattr(call, name) for name in same},
        "seed": call.seed,
        **_beside(call),
        "temperature": call.temperature,
        "server": call.server,
        "seconds": call.finished - call.started,
        "gconfig": each.gconfig,
        "prompt_tokens": len(each.prompt),
        "prompt": each.prompt.tolist(),
        "output": each.output.tolist(),
        "logprobs": plain_floats(each.logprobs),
        "versions": each.versions.tolist(),
    }


def _beside(call: ModelCall) -> dict[str, str]:
    """Return the names of the side conversation, which is not trained, and of the sub-agent that a call belongs to; empty for none."""
    metadata = {} if call.metadata is None else unpack_value(call.metadata)
    return {key: metadata.get(key, "") for key in (SIDE_CONVERSATION, SUB_AGENT)}


def plain_result(result: DurableResult) -> dict[str, Any]:
    """Convert a durable call to plain values."""
    error = None if result.error is None else {"class": result.error[0].replace(":", "."), "message": result.error[1]}
    return {
        "name": result.name.removeprefix(REWARD_CALLS),
        "is_reward": result.name.startswith(REWARD_CALLS),
        "kind": result.kind,
        "value": None if result.value is None else plain_value(unpack_value(result.value)),
        "error": error,
        "time": result.time,
        "seconds": result.seconds,
        "key": f"{result.key & (2**64 - 1):016x}",
    }


def plain_value(value: Any) -> Any:
    """Convert a value to types that JSON can represent; other types become strings."""
    if isinstance(value, dict):
        return {str(name): plain_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else repr(value)


# -- as a chat ----------------------------------------------------------------------------------------------------------

#: Openings of messages in chat templates. A ``role`` group matches the role; the content reaches to the next opening.
_OPENINGS = re.compile(
    r"<\|im_start\|>(?P<role>\w+)\n?"  # ChatML: Qwen and others
    r"|<\|start_header_id\|>(?P<role2>\w+)<\|end_header_id\|>\n*"  # Llama 3
    r"|<start_of_turn>(?P<role3>\w+)\n?"  # Gemma
    r"|<\|(?P<role4>system|user|assistant|tool|observation)\|>\n?"  # Phi, GLM, and the tokenizers made here
)
CLOSINGS = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>|</s>)\s*$")
_ROLES = {"model": "assistant", "observation": "tool", "ipython": "tool"}


def chat_of(episode: RecordedEpisode, text: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return the messages of an episode in chronological order, including tool results and rewards.

    Returns:
        Dicts of ``role`` (system, user, assistant, tool, reward or refused; ``given`` if unknown), ``text``, ``call`` (index of the call
        that produced it, None for input) and ``lane`` (place in ``lanes_of``); for a tool or reward also ``result`` (see
        ``plain_result``), and for a message of a side conversation or a sub-agent its name, as ``side_conversation`` or ``sub_agent``.
        A message that a later prompt of its lane repeats is there once.
    """
    steps: list[tuple[float, int, Any]] = [(each.call.started, 1, each) for each in episode.calls]
    steps += [(result.time - result.seconds, 0, result) for result in episode.results]
    steps.sort(key=lambda step: step[:2])
    messages: list[dict[str, Any]] = []
    lanes = _lane_of_calls(episode)
    answered: list[tuple[float, int]] = []  # end of each request so far, and its lane
    seen: dict[int, set[tuple[str, str]]] = {}  # lane -> role and text of its messages so far
    for _, _, step in steps:
        if isinstance(step, DurableResult):
            result = plain_result(step)
            shown = result["error"]["message"] if result["error"] else result["value"]
            role = "reward" if result["is_reward"] else "tool"
            began = result["time"] - result["seconds"]
            before = [each for each in answered if each[0] <= began + _CLOCK_NOISE] or answered[-1:]
            lane = max(before)[1] if before else 0
            told = shown if isinstance(shown, str) else repr(shown)
            messages.append({"role": role, "text": told, "call": None, "result": result, "lane": lane})
            continue
        call: ModelCall = step.call
        lane = lanes[call.index]
        answered.append((call.finished, lane))
        known = seen.setdefault(lane, set())
        goes_on = call.base >= 0 and lanes[call.base] == lane and call.kept == _length(episode.calls[call.base])
        given = step.prompt[call.kept if goes_on else 0 :]
        new = [each for each in messages_in(text(given.tolist())) if goes_on or _gist(each) not in known]
        if call.refused is not None:
            new.append({"role": "refused", "text": call.refused, "call": call.index})
        else:
            said = CLOSINGS.sub("", text(step.output.tolist()))
            new.append({"role": "assistant", "text": said, "call": call.index})
        known.update(map(_gist, new))
        beside = {key: name for key, name in _beside(call).items() if name}
        messages += [{**each, "lane": lane, **beside} for each in new]
    return messages


_CLOCK_NOISE = 1e-3  # seconds
_REASONING = re.compile(r"\A.*?</think(?:ing)?>", re.DOTALL)


def _length(call: RecordedCall) -> int:
    return len(call.prompt) + tokens_in(call.call.output)


def _gist(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is equal for a message and its repetition in a later prompt, which may lack its reasoning."""
    text = message["text"]
    return message["role"], "".join((_REASONING.sub("", text, count=1) if "</think" in text else text).split())


def lanes_of(episode: RecordedEpisode) -> list[dict[str, Any]]:
    """Return the lanes of an episode: ``name`` and ``about``. A lane is one agent's conversation, a branch of one, or a side conversation."""
    lanes, of_call, agents = [], _lane_of_calls(episode), _agents(episode)
    for number in range(max(of_call, default=0) + 1):
        own = [each for each, lane in zip(episode.calls, of_call, strict=True) if lane == number]
        first = own[0].call if own else None
        agent = agents.get(first.conversation, "") if first is not None else ""
        side = "" if first is None else next(filter(None, _beside(first).values()), "")
        about = ""
        if first is not None and first.base >= 0 and first.kept and of_call[first.base] != number:
            about = f"shares {first.kept:,} tokens with request {first.base + 1}"
        lanes.append({"name": agent or side or f"conversation {number + 1}", "about": about})
    names = [lane["name"] for lane in lanes]
    for number, lane in enumerate(lanes):  # an agent may begin a new conversation
        if names.count(lane["name"]) > 1:
            lane["name"] += f" {names[: number + 1].count(lane['name'])}"
    return lanes


def _lane_of_calls(episode: RecordedEpisode) -> list[int]:
    """Return the lane of each call: its conversation, in order of first appearance; side conversations of one name share a lane."""
    numbers: dict[Any, int] = {}
    keys = [_beside(each.call)[SIDE_CONVERSATION] or each.call.conversation for each in episode.calls]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _agents(episode: RecordedEpisode) -> dict[int, str]:
    """Return the agent (and role) of each conversation, from the tags of its calls or of the row that ends with it."""
    found: dict[int, str] = {}
    for each in episode.calls:
        tags = {} if each.call.metadata is None else unpack_value(each.call.metadata)
        if tagged := _tagged(tags.get("agent"), tags.get("role")):
            found.setdefault(each.call.conversation, tagged)
    for row in [] if episode.end is None else episode.end.rows:
        if row.base >= 0 and (tagged := _tagged(row.agent, row.role)):
            found.setdefault(episode.calls[row.base].call.conversation, tagged)
    return found


def _tagged(agent: Any, role: Any) -> str:
    return f"{agent} ({role})" if agent and role else str(agent or role or "")


def messages_in(text: str) -> list[dict[str, Any]]:
    """Split the new part of a call's prompt into messages. Empty ones, such as the opening of the answer, are left out."""
    openings = list(_OPENINGS.finditer(text))
    parts = [("given", text[: openings[0].start()] if openings else text)]
    for number, opening in enumerate(openings):
        stop = openings[number + 1].start() if number + 1 < len(openings) else len(text)
        role = next(each for each in opening.groups() if each)
        parts.append((_ROLES.get(role, role), text[opening.end() : stop]))
    shown = [(role, CLOSINGS.sub("", part).strip("\n")) for role, part in parts]
    return [{"role": role, "text": part, "call": None} for role, part in shown if part.strip()]
