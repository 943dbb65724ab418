"""Runs of the tests: directories that hold what a run would have written, written by what a run writes with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollwright.experience.journal.records import (
    Begin,
    DurableResult,
    End,
    GroupEnd,
    ModelCall,
    Phase,
    Published,
    Row,
    Trained,
    pack_value,
)
from rollwright.experience.journal.writing import Journal
from rollwright.tracking.sinks import JSONLSink
from rollwright.viewer.collector import identity_of_task

GROUP = 4
SPECIAL = ["<|im_start|>", "<|im_end|>"]
GCONFIG = {"n_samples": GROUP, "max_new_tokens": 64, "temperature": 0.7}


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, so that any text can be what a model said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("x" * 100, normalized=False)])
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return tokenizer


def task_of(ordinal: int) -> dict:
    """The task with an ordinal: a sum."""
    left = ordinal % 10
    return {"messages": [{"role": "user", "content": f"What is {left} + 3?"}], "answer": str(left + 3)}


#: The addresses of the views of a run ``sums/first`` beside a run ``sums/second``.
RUN = "/run/sums~first"
VIEWS = {
    "runs": "/",
    "compare": "/compare?run=sums%2Ffirst&run=sums%2Fsecond",
    "run": RUN,
    "config": f"{RUN}/config",
    "steps": f"{RUN}/steps",
    "step": f"{RUN}/step/4",
    "group": f"{RUN}/group/10",
    "held-out": f"{RUN}/group/eval:2@v4",
    "sample": f"{RUN}/sample/10/1",
    "tokens": f"{RUN}/sample/10/1?view=tokens&overlay=advantage",
    "table": f"{RUN}/sample/10/1?view=table",
    "requests": f"{RUN}/sample/10/1?view=requests",
    "evaluations": f"{RUN}/evaluations",
    "task": f"{RUN}/task/%23{identity_of_task(task_of(2))[1:]}",
    "pair": "/pair?sample=sums/first+10/1&sample=sums/second+10/2&overlay=logprob",
    "again": f"{RUN}/again/10/1?call=1&token=2",
    "timeline": f"{RUN}/timeline",
    "weights": f"{RUN}/weights",
    "search": f"{RUN}/search?text=sum",
}


class WrittenRun:
    """A run of a task-solving agent with a tool, a step at a time.

    Args:
        path: its directory, ``<root>/<experiment>/<trial>``.
        said: text of a sample's last answer, from ordinal and index; None: a sum that is right more often as the run goes on.
    """

    def __init__(self, path: Path, said: Callable[[int, int], str | bytes] | None = None, lr: float = 1e-3) -> None:
        self.path, self._said = path, said
        path.mkdir(parents=True)
        self.tokenizer = byte_tokenizer()
        (path / "model").mkdir()
        self.tokenizer.save(str(path / "model" / "tokenizer.json"))
        config = {"experiment_name": path.parent.name, "trial_name": path.name, "total_train_steps": 8}
        config |= {"tokenizer_path": str(path / "model"), "actor": {"path": "model", "optimizer": {"lr": lr}}}
        marker = {"experiment": path.parent.name, "trial": path.name, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        (path / "run.json").write_text(json.dumps({**marker, "finished": False, "config": config}))
        self.journal = Journal(path / "journal")
        self.metrics = JSONLSink(path / "metrics.jsonl")
        self.step = self.ordinal = 0
        self.now = time.time() - 60.0

    def _ids(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, bytes):  # any bytes, also those that are no text
            byte_of = {byte: token for byte, token in zip(range(256), _byte_tokens(), strict=True)}
            return np.array([self.tokenizer.token_to_id(byte_of[byte]) for byte in text], dtype=np.int32)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def write_step(self, groups: int = 3) -> None:
        """Sample groups, train on them, publish and save."""
        self.step += 1
        rewards, rows = [], []
        generator = np.random.default_rng(self.step)
        for _ in range(groups):
            ordinal, self.ordinal = self.ordinal, self.ordinal + 1
            own = [self._episode(ordinal, index, generator) for index in range(GROUP)]
            is_dropped = ordinal % 7 == 5
            state, reason = ("dropped", "filter: all rewards are below 0.1") if is_dropped else ("delivered", "")
            self.journal.write(GroupEnd(ordinal, ordinal, False, state, reason, GROUP, self.now))
            if not is_dropped:
                rewards += [reward for reward, _ in own]
                mean = float(np.mean([reward for reward, _ in own]))
                rows += [(ordinal, index, reward, reward - mean, count) for index, (reward, count) in enumerate(own)]
        for ordinal, index, reward, advantage, count in rows:
            logprobs = (-generator.random(count) * 2).astype("<f4").tobytes()
            entropies = generator.random(count).astype("<f2").tobytes()
            values = generator.random(count).astype("<f4").tobytes()
            scores = {"logprobs": logprobs, "entropies": entropies, "values": values}
            trained = Trained(self.step, ordinal, index, reward, advantage, count, **scores)
            self.journal.write(trained)
        for name, seconds in (("generate", 0.8), ("train", 0.5), ("publish", 0.1)):
            self.journal.write(Phase(self.step, name, seconds, began=self.now))
            self.now += seconds
        audit = {"logprob_difference/mean": 1e-6, "logprob_difference/max": 4e-6}
        self.journal.write(
            Published(
                self.step, self.step, audit, self.now, way="shared memory", seconds=0.1, bytes=1 << 20, engines=["built-in"]
            )
        )
        if self.step % 2 == 0:
            self._evaluate()
        self.journal.checkpoint(self.step, self.ordinal)
        self.journal.flush()
        reward = float(np.mean(rewards))
        numbers = {
            "reward": reward,
            "reward/std": float(np.std(rewards)),
            "samples": float(len(rewards)),
            "response_tokens": 30.0,
        }
        numbers |= {
            "actor/entropy": 1.2 / self.step,
            "actor/logprob_difference/mean": 1e-6,
            "actor/groups_without_variance": 0.8,
            "tokens_per_second/generate": 900.0,
        }
        if self.step % 2 == 0:
            numbers["eval/reward"] = reward + 0.05
        self.metrics.write(self.step, {**numbers, "seconds/train": 0.5, "seconds/generate": 0.8})

    def _evaluate(self) -> None:
        for task in range(4):
            self._episode(task, 0, np.random.default_rng(task + self.step), is_eval=True)

    def _episode(self, ordinal: int, index: int, generator: np.random.Generator, is_eval: bool = False) -> tuple[float, int]:
        number, version = self.journal.next_episode(), self.step - (0 if is_eval else 1)
        began, left, right = self.now, ordinal % 10, 3
        task = task_of(ordinal)
        self.journal.write(
            Begin(number, ordinal, index, 0, is_eval, version, "worlds.sums.SumWorkflow", GROUP, pack_value(task), "", began)
        )
        gconfig = self.journal.arguments(GCONFIG)
        prompt = self._ids(f"<|im_start|>user\nWhat is {left} + {right}?<|im_end|>\n<|im_start|>assistant\n")
        asked = self._ids(
            f'<tool_call>\n{{"name": "add", "arguments": {{"numbers": [{left}, {right}]}}}}\n</tool_call><|im_end|>'
        )
        between = self._ids(f"\n<|im_start|>tool\n{left + right}<|im_end|>\n<|im_start|>assistant\n")
        is_right = generator.random() < 0.2 + 0.1 * self.step
        text = self._said(ordinal, index) if self._said else f"The sum is {left + right if is_right else left * right}."
        said = np.concatenate([self._ids(text), self._ids("<|im_end|>")])
        first = (number, 0, 0, 0, -1, 0, prompt.tobytes(), asked.tobytes())
        self.journal.write(
            ModelCall(*first, *self._answered(asked, generator, version), gconfig, began, began + 0.2, 0.2, 0.01)
        )
        self.journal.write(
            DurableResult(number, "add", 7, "recorded", pack_value(str(left + right)), None, None, began + 0.25, 0.05)
        )
        kept = len(prompt) + len(asked)
        versions: int | bytes = version
        if index == 1 and version:  # a weight update arrives in the middle
            half = np.where(np.arange(len(said)) < len(said) // 2, version - 1, version)
            versions = half.astype("<i4").tobytes()
        answered = self._answered(said, generator, versions)
        second = (number, 1, 0, 1, 0, kept, between.tobytes(), said.tobytes())
        self.journal.write(ModelCall(*second, *answered, gconfig, began + 0.25, began + 0.5, 0.25, 0.01))
        reward = float(is_right) if not index else round(float(is_right) * (0.5 + generator.random() / 2), 3)
        start = kept + len(between)
        mask = [len(prompt), kept, start, start + len(said)]
        row = Row(1, start + len(said), b"", mask, reward, False, bytes(16))
        is_failed = not is_eval and ordinal % 7 == 6 and index == 3
        if is_failed:
            traceback = (
                'Traceback (most recent call last):\n  File "sums.py", line 12, in reward\nValueError: no number <b>here</b>\n'
            )
            self.journal.write(End(number, "failed", "ValueError: no number <b>here</b>", [], began + 0.6, traceback=traceback))
            self.now = began + 0.01
            number = self.journal.next_episode()
            self.journal.write(
                Begin(
                    number,
                    ordinal,
                    index,
                    1,
                    is_eval,
                    version,
                    "worlds.sums.SumWorkflow",
                    GROUP,
                    pack_value(task),
                    "",
                    began + 0.6,
                )
            )
            self.journal.write(
                ModelCall(
                    number, *first[1:], *self._answered(asked, generator, version), gconfig, began + 0.6, began + 0.7, 0.1, 0.01
                )
            )
            self.journal.write(ModelCall(number, *second[1:], *answered, gconfig, began + 0.7, began + 0.8, 0.1, 0.01))
        figures = {
            "reward/right": float(is_right),
            "tool_calls": 1.0,
            "verdict": "it is right" if is_right else "a <b>product</b>",
        }
        self.journal.write(End(number, "accepted", "", [row], began + 0.9, figures=figures))
        self.now = began + 0.05
        return reward, len(asked) + len(said)

    def _answered(self, ids: np.ndarray, generator: np.random.Generator, versions: int | bytes) -> tuple:
        logprobs = (-generator.random(len(ids)) * 2).astype("<f4").tobytes()
        return logprobs, versions, 0.7, "stop", None, 11

    def close(self) -> None:
        """Finish the run."""
        self.metrics.close()
        self.journal.close()
        marker = json.loads((self.path / "run.json").read_text())
        (self.path / "run.json").write_text(json.dumps({**marker, "finished": True}))


def _byte_tokens() -> list[str]:
    legible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256))
    return [chr(byte) if byte in legible else chr(256 + next(others)) for byte in range(256)]
