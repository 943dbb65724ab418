"""Logs that Inspect reads (``inspect view``, ``read_eval_log``): one of a stage's training samples, one of each evaluation.

A log is a zip archive of JSON files: ``header.json``, ``summaries.json`` and a file for each sample. It is written one sample at a time,
and without the package ``inspect_ai``; ``tests/clients`` reads it back with that package. The format is Inspect's, version 2:
https://inspect.aisi.org.uk/eval-logs.html and ``inspect_ai/log/_log.py``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from rollwright.inference.server.tool_calls import tool_convention
from rollwright.tracking.readable import counted
from rollwright.viewer.exports import Exported, metric_records, sample_records
from rollwright.viewer.reading import CLOSINGS, messages_in
from rollwright.viewer.run import Run
from rollwright.viewer.samples import parse_key
from rollwright.viewer.words import whole_answer_of_task

_FORMAT = 2
_SCORER = "reward"
_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
_LONG = 100  # characters from which on a text that several requests share is stored once
_SUMMARY = 200  # characters of the prompt in lists


def write_inspect(run: Run, directory: Path) -> Exported:
    """Write a log of the training samples, and one of each version that was evaluated, of one stage or process."""
    logs = [_Log(run, is_eval, of) for is_eval, of in _logs(run)]
    files = [log.write(directory) for log in logs]
    total = sum(log.count for log in logs)
    lines = sum(1 for _ in metric_records(run))
    left_out = [counted(lines, "line") + " of metrics.jsonl"] if lines else []
    left_out += ["records of groups, publications, phases and checkpoints"] if run.has_journal else []
    said = f"{counted(total, 'sample')} in {counted(len(logs), 'log')}" if logs else "no log, as no samples were recorded"
    return Exported(run.path, files, said, " and ".join(left_out))


def _logs(run: Run) -> list[tuple[bool, int | None]]:
    """Return whether each log is of an evaluation, and of which version."""
    if not run.has_journal:
        return []
    found = {(bool(row["is_eval"]), row["version"]) for row in run.index.rows("SELECT DISTINCT is_eval, version FROM samples")}
    found |= {(each["is_eval"], parse_key(each["group"]).version) for each in run.samples.running(undone=True)}
    training = [(False, None)] if any(not is_eval for is_eval, _ in found) else []
    return [*training, *sorted((is_eval, of) for is_eval, of in found if is_eval)]


class _Log:
    """One log.

    Args:
        run: the run.
        is_eval: True for an evaluation, False for the training samples.
        of: version of the evaluated weights; None for the training samples.
    """

    def __init__(self, run: Run, is_eval: bool, of: int | None) -> None:
        self.count = 0
        self._run, self._is_eval, self._of = run, is_eval, of
        config = run.config
        model = str(config.get("actor.path") or config.get("model") or "policy").rstrip("/").rpartition("/")[2]
        self._model = f"rollwright/{model}" + ("" if of is None else f"@v{of}")
        self._task = f"{run.name}/{'held-out' if is_eval else 'train'}"
        self._names: set[tuple[str, int]] = set()
        self._usage: dict[str, dict[str, int]] = {}
        self._rewards: dict[int, list[float]] = defaultdict(list)
        self._unfinished = 0
        self._times: list[float] = []

    def write(self, directory: Path) -> Path:
        """Write the log into a directory; return its path, which begins with the time as Inspect's own do."""
        draft = directory / ".log"
        summaries = []
        with ZipFile(draft, "w", ZIP_DEFLATED, compresslevel=6) as archive:
            for record in sample_records(self._run, self._is_eval, self._of):
                sample = self._sample(record)
                archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", _as_json(sample))
                summaries.append(_summary(sample))
            header = self._header([summary["id"] for summary in summaries])
            start = {name: header[name] for name in ("version", "eval", "plan")}
            archive.writestr("_journal/start.json", _as_json(start))
            archive.writestr("summaries.json", _as_json(summaries))
            archive.writestr("header.json", _as_json(header))
        self.count = len(summaries)
        spec = header["eval"]
        named = f"{spec['created'].replace(':', '-')}_{re.sub(r'[^A-Za-z0-9]+', '-', self._task)}_{spec['task_id']}.eval"
        return draft.rename(directory / named)

    def _header(self, ids: Sequence[str]) -> dict[str, Any]:
        run, digest = self._run, _digest(str(self._run.path), self._task, str(self._of))
        began = min(self._times, default=run.info()["began"] or 0.0)
        ended = max(self._times, default=began)
        rewards = [reward for rewards in self._rewards.values() for reward in rewards]
        tasks = [mean(rewards) for rewards in self._rewards.values()]
        metrics = {"mean": mean(rewards)} if rewards else {}
        metrics |= {"stderr": stdev(tasks) / math.sqrt(len(tasks))} if len(tasks) > 1 else {}
        state, ending = run.state, run.ending() or {}
        is_whole = state == "finished" or (self._is_eval and not self._unfinished)
        failed = not is_whole and ending.get("cause")
        return {
            "version": _FORMAT,
            "status": "success" if is_whole else "started" if state == "running" else "error" if failed else "cancelled",
            "eval": {
                "eval_id": digest,
                "run_id": _digest(str(run.path)),
                "created": _time(began),
                "task": self._task,
                "task_id": digest,
                "dataset": {"name": self._task, "samples": len(set(ids)), "sample_ids": list(dict.fromkeys(ids))},
                "model": self._model,
                "config": {"epochs": max((epoch for _, epoch in self._names), default=1)},
                "packages": {"rollwright": version("rollwright")},
                "metadata": {"run": str(run.path), "kind": run.kind, "config": run.config},
            },
            "plan": {"name": "rollwright", "steps": []},
            "results": {
                "total_samples": len(ids),
                "completed_samples": len(ids) - self._unfinished,
                "scores": [
                    {
                        "name": _SCORER,
                        "scorer": _SCORER,
                        "scored_samples": len(rewards),
                        "unscored_samples": len(ids) - len(rewards),
                        "metrics": {name: {"name": name, "value": value} for name, value in metrics.items()},
                    }
                ],
            },
            "stats": {"started_at": _time(began), "completed_at": _time(ended), "model_usage": self._usage},
            "error": _error(ending["cause"], ending["traceback"]) if failed else None,
        }

    # -- one sample ----------------------------------------------------------------------------------------------------------

    def _sample(self, record: Mapping[str, Any]) -> dict[str, Any]:
        calls = record.get("calls", [])
        attachments: dict[str, str] = {}
        requests = list(self._requests(calls, attachments))
        messages = requests[-1]["messages"] if requests else []
        usage = {
            name: sum(each["usage"][name] for each in requests) for name in ("input_tokens", "output_tokens", "total_tokens")
        }
        if requests:
            whole = self._usage.setdefault(self._model, dict.fromkeys(usage, 0))
            for name, tokens in usage.items():
                whole[name] += tokens
        name, epoch = self._name(record)
        self._times += [when for when in (record["began"], record["ended"]) if when]
        self._unfinished += record["ended"] is None
        reward, answer = record["reward"], requests[-1]["answer"] if requests else ""
        if reward is not None and not record["is_undone"]:
            self._rewards[record["ordinal"]].append(reward)
        score = {"value": reward, "answer": answer, "metadata": {"rewards": record["rewards"]}}
        task = record.get("task")
        asked = list(takewhile(lambda message: message["role"] != "assistant", messages))
        events = [*self._model_events(record, requests), *_tool_events(record)]
        kept = ("calls", "rows", "messages", "results", "task", "traceback", "tool_names")
        return {
            "id": name,
            "epoch": epoch,
            "input": asked or _as_text(task),
            "target": whole_answer_of_task(task) if isinstance(task, Mapping) else "",
            "messages": messages,
            "output": _without_details(requests[-1]["output"]) if requests else {"model": self._model, "choices": []},
            "scores": {_SCORER: score} if reward is not None else None,
            "metadata": {key: value for key, value in record.items() if key not in kept},
            "store": {
                "task": task,
                "rows": record.get("rows", []),
                "results": record.get("results", []),
                "calls": [{key: value for key, value in call.items() if key != "gconfig"} for call in calls],
            },
            "events": sorted(events, key=lambda event: event["timestamp"]),
            "model_usage": {self._model: usage} if requests else {},
            "started_at": _time(record["began"]),
            "completed_at": _time(record["ended"]),
            "total_time": record["ended"] - record["began"] if record["ended"] and record["began"] else None,
            "working_time": (record["model_seconds"] or 0.0) + (record["tool_seconds"] or 0.0),
            "uuid": _digest(str(self._run.path), name, str(epoch), self._task, str(self._of)),
            "error": _error(record["reason"], record.get("traceback", "")) if record["status"] == "failed" else None,
            "attachments": attachments,
        }

    def _name(self, record: Mapping[str, Any]) -> tuple[str, int]:
        """Return the id and epoch of a sample: its task, with the process and attempt where the run has several, and its index."""
        name = re.sub(r"eval:|/\d+|@v\d+", "", record["key"])
        while (name, record["index"] + 1) in self._names:  # evaluated again
            name += "+"
        self._names.add((name, record["index"] + 1))
        return name, record["index"] + 1

    def _requests(self, calls: Sequence[Mapping[str, Any]], attachments: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the messages, the output and the usage of each request; long texts are in ``attachments``, as several requests share them."""

        def stored(text: str) -> str:
            if len(text) <= _LONG:
                return text
            key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
            attachments[key] = text
            return f"attachment://{key}"

        known: list[list[dict[str, Any]]] = []  # the messages of each request and its answer
        for call in calls:
            base = calls[call["base"]] if call["base"] >= 0 else None
            is_longer = base is not None and call["kept"] == len(base["prompt"]) + len(base["output"])
            before = known[call["base"]] if is_longer else []
            new = messages_in(self._run.text(call["prompt"][call["kept"] if is_longer else 0 :]))
            said = CLOSINGS.sub("", self._run.text(call["output"]))
            answer: dict[str, Any] = {"role": "assistant", "source": "generate", "model": self._model, "content": stored(said)}
            convention = tool_convention(said)
            if convention.is_known and (reply := convention.parse(said)).calls:
                answer["content"] = stored(reply.text)
                answer["tool_calls"] = [
                    {"id": each.id or f"call-{call['index']}-{number}", "function": each.name, **_arguments(each.arguments)}
                    for number, each in enumerate(reply.calls)
                ]
            asked = [*before, *({"role": _role(each["role"]), "content": stored(each["text"])} for each in new)]
            known.append([*asked, answer] if call["refused"] is None else asked)
            yield {
                "call": call,
                "asked": asked,
                "messages": known[-1],
                "answer": said,
                **self._output(call, answer, said),
            }

    def _output(self, call: Mapping[str, Any], answer: Mapping[str, Any], said: str) -> dict[str, Any]:
        asked, sampled = len(call["prompt"]), len(call["output"])
        usage = {"input_tokens": asked, "output_tokens": sampled, "total_tokens": asked + sampled}
        logprobs = None
        if sampled and all(value is not None for value in call["logprobs"]):
            texts = self._run.texts(call["output"])
            pairs = zip(texts, call["logprobs"], strict=True)
            logprobs = {"content": [{"token": token, "logprob": value} for token, value in pairs]}
        choice = {"message": answer, "stop_reason": _STOPS.get(call["stop_reason"], "unknown"), "logprobs": logprobs}
        output = {
            "model": self._model,
            "choices": [choice] if call["refused"] is None else [],
            "completion": said if len(said) <= _LONG else "",  # Inspect takes it from the message
            "usage": usage,
            "time": call["seconds"],
            "error": call["refused"],
        }
        return {"usage": usage, "output": output}

    def _model_events(self, record: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for each in requests:
            call = each["call"]
            yield {
                "event": "model",
                "timestamp": _time(call["started"]),
                "completed": _time(call["started"] + call["seconds"]),
                "working_start": max(0.0, call["started"] - (record["began"] or call["started"])),
                "working_time": call["seconds"],
                "model": self._model,
                "input": each["asked"],
                "tools": [],
                "tool_choice": "auto",
                "config": _generate_config(call),
                "output": each["output"],
                "error": call["refused"],
                "metadata": {"conversation": call["conversation"], "turn": call["turn"], "request": call["index"]},
            }


def _tool_events(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, result in enumerate(record.get("results", [])):
        error, began = result["error"], result["time"] - result["seconds"]
        yield {
            "event": "tool",
            "id": f"result-{number}",
            "function": result["name"],
            "arguments": {},
            "result": _as_text(result["value"]),
            "error": {"type": "unknown", "message": f"{error['class']}: {error['message']}"} if error else None,
            "timestamp": _time(began),
            "completed": _time(result["time"]),
            "working_start": max(0.0, began - (record["began"] or began)),
            "working_time": result["seconds"],
            "metadata": {"is_reward": result["is_reward"], "key": result["key"]},
        }


def _generate_config(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a request that Inspect has, too; the sample's metadata has all."""
    config = call["gconfig"]
    found = {
        "max_tokens": config.get("max_new_tokens"),
        "temperature": call["temperature"],
        "top_p": config.get("top_p"),
        "top_k": config.get("top_k"),
        "seed": call["seed"],
        "extra_body": config or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Inspect's lists show of a sample."""
    same = (
        "id",
        "epoch",
        "target",
        "scores",
        "model_usage",
        "started_at",
        "completed_at",
        "total_time",
        "working_time",
        "uuid",
    )
    asked = sample["input"]
    texts = [asked] if isinstance(asked, str) else [message["content"] for message in asked if message["role"] != "system"]
    shown = [sample["attachments"].get(text.removeprefix("attachment://"), text) for text in texts]
    return {
        **{name: sample[name] for name in same},
        "input": "\n".join(shown)[:_SUMMARY],
        "metadata": {name: sample["metadata"][name] for name in ("key", "status", "step", "advantage")},
        "error": sample["error"]["message"] if sample["error"] else None,
        "completed": sample["completed_at"] is not None,
        "message_count": len(sample["messages"]),
    }


def _without_details(output: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the log-probabilities of a sample's last output, which its event has."""
    return {**output, "choices": [{**choice, "logprobs": None} for choice in output["choices"]]}


def _role(role: str) -> str:
    return role if role in ("system", "user", "assistant", "tool") else "user"


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        return {"arguments": {"text": text}, "parse_error": str(error)}
    return {"arguments": found if isinstance(found, dict) else {"value": found}}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _error(message: str, traceback: str) -> dict[str, str]:
    return {"message": message, "traceback": traceback, "traceback_ansi": traceback}


def _time(when: float | None) -> str | None:
    return None if when is None else datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:22]


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _as_json(value: Any) -> str:
    return json.dumps(_finite(value), default=str).encode("utf-8", "replace").decode()
