"""Views of one sample for pages and the terminal: as chat, as exact tokens with an overlay, as a table, and by request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.tracking.readable import as_json, as_text, clipped, number, seconds, signed, visible, without_noise
from rollwright.viewer.pictures import lanes_of_sample, shade, signed_shade
from rollwright.viewer.transcript import beside_of

#: Tokens and table lines that a page shows before "Show all".
TOKENS_SHOWN, LINES_SHOWN = 2000, 500

VIEWS = {"chat": "Transcript", "tokens": "Tokens", "table": "Table", "requests": "Requests"}

#: Overlay -> its title, and the meaning of its colours.
OVERLAYS = {
    "trained": ("Trained", "Underlined: sampled by the policy and trained."),
    "advantage": ("Advantage", "How much better (blue, underlined) or worse (orange, dotted) than the group."),
    "logprob": ("Engine log-prob", "Darker: less likely when it was sampled."),
    "trainer": ("Trainer log-prob", "Darker: less likely to the weights that were trained."),
    "difference": ("Difference", "Engine minus trainer: blue where the engine found it more likely, orange where less."),
    "entropy": ("Entropy", "Darker: the trainer's distribution was wider."),
    "teacher": ("Teacher log-prob", "Darker: less likely to the teacher."),
    "value": ("Value", "The critic's value before the token: blue above 0, orange below."),
    "version": ("Version", "Marks show where a weight update arrived; darker: newer weights."),
    "reward": ("Reward", "Reward by token: blue above 0, orange below."),
}


# -- tokens ------------------------------------------------------------------------------------------------------------


def left(parts: Mapping[str, Any]) -> str:
    """Describe the better samples from which a sample diverges."""
    if parts["compared"] == parts["better"]:
        return "every better sample of its task"
    return f"{parts['compared']} of the {parts['better']} better samples of its task, those that were compared"


def tokens(
    row: Mapping[str, Any], overlay: str, limit: int | None = TOKENS_SHOWN, parts_at: int | None = None
) -> dict[str, Any]:
    """Prepare a row's tokens with the classes, values and marks of an overlay, and the facts about each token.

    ``parts_at`` is the index of the token at which the row diverges from better samples.
    """
    length = len(row["ids"])
    end = length if limit is None else min(length, limit)
    columns = _columns(row)
    values, mask = columns.get(overlay, [None] * length), row["mask"]
    classes, scale = _shades(overlay, values, mask)
    shown, version = [], None
    for index in range(end):
        shade_of = f" {classes[index]}" if classes[index] else ""
        if row["special"][index]:
            shade_of += " special"
        if index == parts_at:
            shade_of += " parts"
        now = columns["version"][index] if "version" in columns else None
        is_new = now is not None and now != version
        mark = now if is_new and (version is not None or overlay == "version") else None
        version = now if is_new else version
        value = values[index] if overlay in columns and overlay != "trained" else None
        shown.append({"text": token_text(row["texts"][index]), "shade": shade_of, "value": _short(value), "from": mark})
    facts = [["id", row["ids"][:end]], ["text", [visible(text) for text in row["texts"][:end]]]]
    facts += [[_NAMES[name], [_fact(value) for value in column[:end]]] for name, column in columns.items()]
    return {
        "tokens": shown,
        "facts": facts,
        "ids": row["ids"][:end],
        "length": length,
        "key": OVERLAYS[overlay][1],
        "scale": scale,
    }


_NAMES = {name: text.lower() for name, (text, _) in OVERLAYS.items()} | {"branch": "branch", "position": "position"}


def _columns(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return overlay -> value of each token, for the overlays that the run recorded."""
    mask = row["mask"]

    engine, trainer, advantages = row.get("logprobs"), row.get("trainer_logprobs"), row.get("advantages")
    largest = max((abs(value) for value in advantages or () if value is not None), default=0.0)
    versions = [None if version < 0 else version for version in row.get("versions") or []]
    difference = None
    if engine and trainer:
        difference = [None if a is None or b is None else a - b for a, b in zip(engine, trainer, strict=True)]
    found = {
        "trained": [int(is_sampled) for is_sampled in mask],
        "advantage": advantages and [without_noise(value, largest) for value in advantages],
        "logprob": engine,
        "trainer": trainer,
        "difference": difference,
        "entropy": row.get("entropies"),
        "teacher": row.get("teacher_logprobs"),
        "value": row.get("values"),
        "version": versions,
        "reward": row.get("token_rewards"),
        "branch": row.get("branches"),
        "position": row.get("positions"),
    }
    return {name: values for name, values in found.items() if values and any(value is not None for value in values)}


def overlays_of(row: Mapping[str, Any]) -> list[str]:
    """List the overlays for which a row has values."""
    columns = _columns(row)
    return [name for name in OVERLAYS if name in columns]


def _shades(overlay: str, values: Sequence[Any], mask: Sequence[bool]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the CSS class of each token, and the examples for the key of colours."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if overlay == "trained":
        return ["trained" if is_sampled else "" for is_sampled in mask], []
    if not known:
        return [""] * len(mask), []
    if overlay in ("advantage", "difference", "reward", "value"):
        largest = max(abs(value) for value in known)
        classes = [
            "" if value is None else f"{signed_shade(value, largest)} {'plus' if value > 0 else 'minus' if value < 0 else ''}"
            for value in values
        ]
        return classes, [("n5", signed(-largest)), ("", "0"), ("p5", signed(largest))] if largest else []
    low, high = min(known), max(known)
    if overlay in ("logprob", "trainer", "teacher"):  # unlikely tokens are dark; those below −8 get the darkest class
        floor = max(low, -8.0)
        return ["" if value is None else shade(-value, 0.0, -floor) for value in values], [("", "0"), ("q6", number(floor))]
    low = min(low, 0.0) if overlay == "entropy" else low
    return ["" if value is None else shade(value, low, high) for value in values], [("q1", number(low)), ("q6", number(high))]


def token_text(text: str) -> str:
    """Return the text of a token with its spaces, newlines and invisible characters shown."""
    if text and not text.strip(" "):
        return "␣" * len(text)
    return visible(text).replace("\n", "↵\n").replace("\t", "⇥\t") or "·"


def _short(value: Any) -> str:
    if value is None:
        return ""
    return number(value)


def _fact(value: Any) -> Any:
    """Format a number of the line about a token; None, which is not shown, if it is not finite."""
    return (number(value) if math.isfinite(value) else None) if isinstance(value, float) else value


def table(row: Mapping[str, Any], limit: int | None = LINES_SHOWN) -> dict[str, Any]:
    """Convert a row to a table, readable without colour: a line for each token, a column for each recorded value."""
    columns = _columns(row)
    names = ["#", "id", "text", *(_NAMES[name] for name in columns)]
    end = len(row["ids"]) if limit is None else min(limit, len(row["ids"]))
    lines = [
        [index, row["ids"][index], token_text(row["texts"][index]), *(_cell(column[index]) for column in columns.values())]
        for index in range(end)
    ]
    return {"names": names, "lines": lines}


def _cell(value: Any) -> str:
    return "" if value is None else number(value)


# -- requests, facts ---------------------------------------------------------------------------------------------------


def requests(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe the model requests, each with its arguments and duration."""
    shown = []
    for call in sample["calls"]:
        about = f"conversation {call['conversation']}, turn {call['turn']}"
        if beside := beside_of(call):
            about += f" · {beside}"
        facts = [
            ("took", seconds(call["seconds"])),
            ("first token after", seconds(call["ttft"]) if call["ttft"] else None),
            ("ended by", call["stop_reason"]),
            ("stop", call["stop_match"]),
            ("temperature", number(call["temperature"])),
            ("seed", call["seed"]),
            ("server", call.get("server")),
            ("prompt", f"{call['kept']:,} tokens of request {call['base'] + 1}, then new ones" if call["base"] >= 0 else None),
            ("arguments", as_json(call["gconfig"], indent=None)),
        ]
        ids = {"prompt_ids": clipped(str(call["prompt"])), "output_ids": clipped(str(call["output"]))}
        shown.append({**call, "about": about, "facts": facts, **ids})
    return shown


def results(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe the durable calls: tools, rewards, clocks."""
    shown = []
    for result in sample["results"]:
        error = result["error"]
        text = clipped(as_text(result["value"])) if result["value"] is not None else ""
        told = f"{error['class']}: {error['message']}" if error else ""
        shown.append({"name": result["name"], "about": seconds(result["seconds"]), "text": text, "error": told})
    return shown


def lanes(sample: Mapping[str, Any]) -> dict[str, Any] | None:
    """Draw when the sample's requests and calls ran."""
    spans = [
        (
            "generate",
            call["started"],
            call["started"] + call["seconds"],
            f"request {call['index'] + 1}, {seconds(call['seconds'])}",
        )
        for call in sample["calls"]
    ]
    spans += [
        (
            "reward" if result["is_reward"] else "tool",
            result["time"] - result["seconds"],
            result["time"],
            f"{result['name']}, {seconds(result['seconds'])}",
        )
        for result in sample["results"]
    ]
    if not spans or sample["began"] is None:
        return None
    ended = max(sample["ended"] or 0.0, *(end for _, _, end, _ in spans))
    return lanes_of_sample(sample["began"], ended, spans)


def facts(sample: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List names and values of the facts about a sample."""
    versions = sample["version"]
    if versions is not None:
        versions = f"v{versions[0]}" if versions[0] == versions[1] else f"v{versions[0]} to v{versions[1]}"
    duration = sample["ended"] - sample["began"] if sample["ended"] and sample["began"] else None
    return [
        ("answer", sample.get("answer")),
        ("expected", sample.get("expected")),
        ("workflow", (sample.get("workflow") or "").rpartition(".")[2]),
        ("reason", sample["reason"]),
        ("weights", versions),
        ("prompt", f"{sample['prompt_tokens']:,} tokens" if sample["prompt_tokens"] is not None else None),
        ("sampled", f"{sample['tokens']:,} tokens" if sample["tokens"] is not None else None),
        ("rows", sample["rows"] if isinstance(sample["rows"], int) else len(sample["rows"])),
        ("requests", len(sample["calls"]) if isinstance(sample["calls"], list) else sample["calls"]),
        ("tools", ", ".join(sample["tool_names"]) if sample.get("tool_names") else None),
        ("took", seconds(duration) if duration is not None else None),
        ("of it, model", seconds(sample["model_seconds"]) if sample.get("model_seconds") else None),
        ("of it, tools", seconds(sample["tool_seconds"]) if sample.get("tool_seconds") else None),
        ("attempt", sample["attempt"] + 1),
    ]
