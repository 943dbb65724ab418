"""A sample as its transcript: numbered turns, each tool call with its arguments, result and duration as one card, lanes for agents and branches.

Models write tool calls in many formats, the journal has the results, and the next prompt repeats them. A transcript shows each once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollwright.inference.server.tool_calls import tool_convention
from rollwright.tracking.readable import as_text, clipped, counted, seconds

#: Turns and characters that are open when a page loads; longer transcripts are folded in the middle.
OPEN_TURNS = 12
_IMAGE = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=\s]+")
_REASONING = re.compile(r"^\s*<(?P<tag>think|thinking|reasoning)>(?P<text>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL)
_ENDED_REASONING = re.compile(r"\A(?P<text>.*?)</(?:think|thinking|reasoning)>", re.DOTALL)  # the prompt has the opening
#: What a reply ends with where the workflow itself reads the call: a tag, or a block of code.
_LAST_BLOCK = re.compile(r"(?:<(?P<tag>\w+)>(?P<body>[^<]*)</(?P=tag)>|```\w*\n(?P<code>.*?)```)\s*\Z", re.DOTALL)
_KINDS = ("system", "user", "assistant", "tool", "reward")
_PREFIXES = ("tool ", "reward ")


def transcript(sample: Mapping[str, Any], href_of_tokens: str = "", lane: int | None = None) -> dict[str, Any]:
    """Prepare a sample's transcript.

    Args:
        sample: a result of ``Run.sample``.
        href_of_tokens: address of the token view; empty for no links.
        lane: number of the only lane to show; None shows all.

    Returns:
        ``turns``, each with ``number`` (0 if nothing was answered), ``lane``, ``lane_number``, ``about``, ``is_open`` and
        ``messages``; and ``lanes``, each with ``name``, ``number``, ``about`` and ``turns`` (one lane, if there are no others).
        A message has ``role``, ``kind``, ``text``, ``reasoning``, ``images``, ``about``, ``is_error``, ``tokens_href``, ``call`` (index of
        its request) and ``cards``: its tool calls, each with ``name``, ``arguments``, ``result``, ``seen`` (what the model was shown, if
        that is different), ``about`` and ``is_error``.
    """
    made = _Transcript(sample, href_of_tokens)
    for each in sample["messages"]:
        made.add(each)
    made.end()
    turns = [turn for turn in made.turns if lane is None or turn["lane_number"] == lane]
    last = len(turns) - OPEN_TURNS // 2
    for place, turn in enumerate(turns):
        turn["is_open"] = len(turns) <= OPEN_TURNS or place < OPEN_TURNS // 2 or place >= last
    counts = [
        sum(turn["number"] > 0 and turn["lane_number"] == number for turn in made.turns) for number in range(len(made.lanes))
    ]
    lanes = [
        {**each, "number": number, "turns": counts[number], "chosen": number == lane} for number, each in enumerate(made.lanes)
    ]
    return {"turns": turns, "lanes": lanes}


def chat(sample: Mapping[str, Any], href_of_tokens: str = "") -> list[dict[str, Any]]:
    """Return the messages of all turns; see ``transcript``."""
    return [message for turn in transcript(sample, href_of_tokens)["turns"] for message in turn["messages"]]


class _Transcript:
    def __init__(self, sample: Mapping[str, Any], href_of_tokens: str) -> None:
        self.turns: list[dict[str, Any]] = []
        self.lanes: list[dict[str, Any]] = sample.get("lanes") or [{"name": "", "about": ""}]
        self._href = href_of_tokens
        self._calls = {call["index"]: call for call in sample["calls"]}
        self._open_cards: dict[int, list[dict[str, Any]]] = {}  # lane -> cards of its last reply
        self._images = list(_images(sample.get("task")))
        self._numbers = 0
        self._asked: dict[int, list[dict[str, Any]]] = {}  # lane -> messages that its next reply answers

    def add(self, each: Mapping[str, Any]) -> None:
        """Add a message of ``Run.sample``."""
        lane, result = each.get("lane", 0), each.get("result")
        if result is not None and not result["is_reward"]:
            self._add_result(lane, result)
        elif result is not None:
            about = seconds(result["seconds"]) if result["seconds"] >= 1e-3 else ""
            message = _message(
                "reward", _text_of(result), about=about, name=_short(result["name"]), is_error=bool(result["error"])
            )
            self._turn(lane)["messages"].append(message)
        elif each["role"] in ("assistant", "refused"):
            self._add_reply(lane, each)
        elif not self._is_shown(lane, each["text"]):
            message = _message(each["role"], each["text"], about=beside_of(each))
            if self._images and each["role"] != "system":
                message["images"], self._images = self._images, []
            self._asked.setdefault(lane, []).append(message)

    def end(self) -> None:
        """Add the messages that no reply answers."""
        for lane, asked in self._asked.items():
            if asked:
                self._turn(lane)["messages"] += asked
        self._asked.clear()

    def _turn(self, lane: int) -> dict[str, Any]:
        """Return a lane's last turn."""
        for turn in reversed(self.turns):
            if turn["lane_number"] == lane:
                return turn
        self.turns.append(self._new_turn(lane, 0))
        return self.turns[-1]

    def _new_turn(self, lane: int, number: int) -> dict[str, Any]:
        name = self.lanes[lane]["name"] if len(self.lanes) > 1 else ""
        return {"number": number, "lane": name, "lane_number": lane, "about": "", "messages": []}

    def _add_reply(self, lane: int, each: Mapping[str, Any]) -> None:
        call = self._calls.get(each["call"])
        self._numbers += 1
        turn = self._new_turn(lane, self._numbers)
        turn["messages"] += self._asked.pop(lane, [])
        self.turns.append(turn)
        parts = (
            _parts_of_reply(each["text"])
            if each["role"] == "assistant"
            else {"text": each["text"], "reasoning": "", "cards": []}
        )
        about = ""
        if call is not None and each["role"] == "assistant":
            about = f"{counted(len(call['output']), 'token')} · {seconds(call['seconds'])} · {call['stop_reason'] or 'runs'}"
        turn["about"] = about
        message = _message(each["role"], parts["text"], about=" · ".join(filter(None, [beside_of(each), about])))
        message |= {"reasoning": clipped(parts["reasoning"]), "cards": parts["cards"], "call": each["call"]}
        message["is_error"] = each["role"] == "refused"
        message["tokens_href"] = self._href if call is not None and self._href else None
        turn["messages"].append(message)
        self._open_cards[lane] = parts["cards"]

    def _add_result(self, lane: int, result: Mapping[str, Any]) -> None:
        """Put a tool's result on the card of its call, or on a card of its own."""
        name, waiting = _short(result["name"]), [card for card in self._open_cards.get(lane, []) if card["result"] is None]
        card = next((card for card in waiting if card["name"] == name), waiting[0] if waiting else None)
        if card is None:
            card = _card(name, self._arguments_in_reply(lane))
            turn = self._turn(lane)
            replies = [message for message in turn["messages"] if message["kind"] == "assistant"]
            if not replies:
                turn["messages"].append(_message("tool", ""))
                replies = turn["messages"][-1:]
            self._open_cards[lane] = replies[-1]["cards"]
            self._open_cards[lane].append(card)
        card |= {"result": clipped(_text_of(result)), "about": seconds(result["seconds"]), "is_error": bool(result["error"])}
        card["leaves"] = [leaf for leaf in _leaves(result["value"]) if len(leaf) > 1] or [_text_of(result)]

    def _arguments_in_reply(self, lane: int) -> str:
        """Return the part at the end of a lane's last reply that asked for a tool, and take it from the reply's text."""
        for turn in reversed(self.turns):
            if turn["lane_number"] != lane:
                continue
            for message in reversed(turn["messages"]):
                if message["kind"] == "assistant" and message["call"] is not None:
                    match = None if message["cards"] else _LAST_BLOCK.search(message["text"])
                    if match is None:
                        return ""
                    message["text"] = message["text"][: match.start()].rstrip()
                    return (match["body"] or match["code"] or "").strip()
        return ""

    def _is_shown(self, lane: int, text: str) -> bool:
        """Return True if a message of the prompt only repeats a tool's result; the card then says what the model was shown."""
        for card in self._open_cards.get(lane, []):
            if card["seen"] or card["is_seen"]:
                continue
            if card["result"] is None:  # the call was not recorded, so this is its result
                card["result"], card["is_seen"] = clipped(text.strip()), True
                return True
            leaves = card["leaves"]
            if text.strip() == card["result"].strip():
                card["is_seen"] = True
                return True
            if any(leaf.strip() and (leaf.strip() in text or text.strip() in leaf) for leaf in leaves):
                card["seen"] = clipped(text.strip())
                return True
        return False


def _message(role: str, text: str, *, about: str = "", name: str = "", is_error: bool = False) -> dict[str, Any]:
    return {
        "role": "prompt" if role == "given" else role,
        "kind": role if role in _KINDS else "user",
        "name": name,
        "text": clipped(text),
        "reasoning": "",
        "about": about,
        "is_error": is_error,
        "tokens_href": None,
        "images": [],
        "cards": [],
        "call": None,
    }


def _card(name: str, arguments: str) -> dict[str, Any]:
    told = {"name": name, "arguments": clipped(arguments), "result": None, "seen": "", "about": "", "is_error": False}
    return {**told, "is_seen": False, "leaves": []}


def _parts_of_reply(text: str) -> dict[str, Any]:
    """Divide a reply into reasoning, text and tool calls."""
    reasoning, match = "", _REASONING.match(text) or _ENDED_REASONING.match(text)
    if match is not None:
        reasoning, text = match["text"].strip(), text[match.end() :]
    cards: list[dict[str, Any]] = []
    convention = tool_convention(text)
    if convention.is_known and (reply := convention.parse(text)).calls:
        text, cards = reply.text, [_card(asked.name, asked.arguments) for asked in reply.calls]
    return {"text": text.strip("\n"), "reasoning": reasoning, "cards": cards}


def _text_of(result: Mapping[str, Any]) -> str:
    error, value = result["error"], result["value"]
    if error:
        return f"{error['class']}: {error['message']}"
    return as_text(value["reward"] if isinstance(value, dict) and value.keys() == {"reward", "parts", "notes"} else value)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)


def _short(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def beside_of(call: Mapping[str, Any]) -> str:
    """Return what a call or message belongs to besides the main conversation."""
    if side := call.get("side_conversation"):
        return f"side conversation ({side}), not trained"
    return f"sub-agent ({call['sub_agent']})" if call.get("sub_agent") else ""


def _images(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the pictures in a task that are ``data:`` URLs; no others are loaded."""
    if isinstance(value, str):
        if _IMAGE.fullmatch(value):
            yield value
    elif depth < 6 and isinstance(value, Mapping):
        for item in value.values():
            yield from _images(item, depth + 1)
    elif depth < 6 and isinstance(value, Sequence):
        for item in value:
            yield from _images(item, depth + 1)
