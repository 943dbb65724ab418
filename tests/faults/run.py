"""A run under faults: its parts are kept going until it is complete, whatever the plan does to them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from warm import Warm

from .left import left_behind, shared_memory_of
from .parts import LIMIT, Part
from .plan import Fault, plan
from .proof import Proof, damage_checkpoint, damage_tail
from .proxy import Proxy

#: What every run begins with; a topology adds its own keys.
CONFIG = """
experiment_name: faults
trial_name: trial
cluster: {{fileroot: {root}/runs, threads: 1}}
actor: {{path: {model}, dtype: float32, device: cpu, optimizer: {{lr: 1.0e-3}}}}
gconfig: {{n_samples: 2, max_new_tokens: 12, temperature: 0.7}}
train_dataset: {{path: arithmetic, split: train, batch_size: 4, kwargs: {{digits: 1}}}}
workflow: parts_of_faults.{workflow}
workflow_kwargs: {arguments}
total_train_steps: {steps}
recover: {{every_steps: 2, keep: 3}}
stats_logger: {{display: none, dump_rollouts: -1}}
"""
BATCH, SAMPLES = 4, 2  # as above
KILLS_OF_A_RUN = 12
WITHOUT_JOURNALS = frozenset(("recover", "checkpoints", "logs", "rollouts", "__pycache__"))

PARTS = '''
"""The workflow of the runs: two or three turns with a tool between them."""

import asyncio
import uuid

from rollwright import ModelRequest, RolloutWorkflow, durable


@durable
async def look_up(port, text):
    """What a tool in another process says of a text; it is asked until it answers."""
    for _ in range(400):
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 5)
            try:
                writer.write(text.encode().hex().encode() + b"\\n")
                answer = await asyncio.wait_for(reader.readline(), 5)
            finally:
                writer.close()
            if answer.endswith(b"\\n"):
                return answer.decode().strip()
        except (OSError, asyncio.TimeoutError):
            pass
        await asyncio.sleep(0.05)
    raise RuntimeError("the tool does not answer")


class AskedTwice(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, port):
        self.gconfig, self.tokenizer, self.port = gconfig, tokenizer, port

    async def arun_episode(self, engine, data):
        rid = uuid.uuid4().hex  # of the one conversation
        ids = list(self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True))
        mask, sampled, turns, turn = [0] * len(ids), [], 2, 0
        while turn < turns:
            request = ModelRequest(input_ids=ids, gconfig=self.gconfig.new(n_samples=1), rid=rid)
            response = await engine.agenerate(request)
            ids, mask = ids + response.output_tokens, mask + [1] * response.output_len
            sampled += response.output_tokens
            turn += 1
            if turn == 1:
                turns = 2 + sum(sampled) % 2
            if turn < turns:
                said = self.tokenizer.encode(await look_up(self.port, str(sampled)), add_special_tokens=False)
                ids, mask = ids + said, mask + [0] * len(said)
        text = self.tokenizer.decode(sampled)
        reward = sum(character.isdigit() for character in text) / max(1, len(text))
        return {"input_ids": ids, "loss_mask": mask, "rewards": reward}
'''


class Tool:
    """What the workflow asks between its turns, over a proxy: a few digits that depend on the question alone."""

    def __init__(self) -> None:
        class Answer(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                question = self.rfile.readline()
                self.wfile.write(f"{sum(question) % 997}\n".encode())

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="tool", daemon=True).start()
        self.proxy = Proxy(self._server.server_address[1])

    def close(self) -> None:
        """End it."""
        self.proxy.close()
        self._server.shutdown()
        self._server.server_close()


class Run(ABC):
    """One run of a topology.

    Args:
        warm: starts its parts.
        root: directory of its own.
        model: directory of a tiny model.
        seed: of what is drawn here; the run's own seed is always the same.
    """

    kinds: tuple[str, ...] = ("kill", "early", "tail", "stop", "disk", "drop", "delay")
    step_bytes = 8_000.0  # that a step adds to the journals

    def __init__(self, warm: Warm, root: Path, model: Path, seed: int) -> None:
        self.warm, self.root, self.model = warm, root, model
        root.mkdir(parents=True)
        self.generator = random.Random(seed)
        self.counts: Counter[str] = Counter()  # faults that happened, by kind
        self.torn_tokens = 0
        self.shared: set[str] = set()
        self._excused: set[Part] = set()  # may end with an error: something happened to them
        self.recovered: list[
            tuple[str, float]
        ] = []  # what was killed, and the seconds until the next step, where that is measured
        self.said: Callable[[str], object] = lambda line: None
        self.parts: list[Part] = []
        self.proxies: list[Proxy] = []

    # -- what a topology says ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, opened: contextlib.ExitStack, warm: Warm, root: Path, model: Path) -> dict[str, Any]:
        """Carry out what comes before the runs of a campaign; options of all of them."""
        return {}

    @abstractmethod
    def open(self) -> None:
        """Write the config, and fill ``parts`` and ``proxies``."""

    @abstractmethod
    def prove(self) -> Proof:
        """What the run that is over has to show."""

    def close(self) -> None:
        """End what ``open`` began, but the parts."""
        for proxy in self.proxies:
            proxy.close()

    @abstractmethod
    def directory_of(self, part: Part) -> Path:
        """The run directory of a part as it was started last."""

    def write_config(
        self, steps: int, arguments: str, more: str = "", *, workflow: str = "AskedTwice", parts: str = PARTS
    ) -> None:
        """Write ``config.yaml``, with keys of the topology, and the module that has its workflow."""
        config = CONFIG.format(root=self.root, model=self.model, steps=steps, workflow=workflow, arguments=arguments)
        (self.root / "config.yaml").write_text(config + more)
        (self.root / "parts_of_faults.py").write_text(parts)

    def plan(self, generator: random.Random, kills: int) -> list[Fault]:
        """What happens to it: ``kills`` kills at most."""
        return plan(generator, min(kills, KILLS_OF_A_RUN), self.kinds)

    def is_over(self) -> bool:
        """True where no part has anything left to do."""
        return all(part.starts and (part.poll() == 0 or self._has_finished(part)) for part in self.parts)

    def _has_finished(self, part: Part) -> bool:
        """True where it wrote down that it had finished, and was killed in the moment that it still had."""
        if part.runs:
            return False
        marker = self.directory_of(part) / "run.json"
        return marker.exists() and bool(json.loads(marker.read_text()).get("finished"))

    # -- the run -------------------------------------------------------------------------------------------------------

    def carry_out(self, faults: Sequence[Fault]) -> Proof:
        """Start the parts, do to them what is planned, and let them end; then prove what has to hold."""
        self.open()
        try:
            for part in self.parts:
                part.start()
            for fault in faults:
                if not self._wait_for(fault):
                    break
                self._make(fault)
            self._wait_until(self.is_over, "the run is complete")
            proof = self.prove()
            proof.lost_tokens += self.torn_tokens
            proof.in_flight_tokens += self.torn_tokens
        finally:
            for part in self.parts:
                if part.runs:
                    part.kill()
            self.close()
        proof.left_behind += left_behind(self.parts, self.root, self.shared)
        return proof

    def _wait_for(self, fault: Fault) -> bool:
        """Wait for its moment; False where the run was over before."""
        wanted = self.journaled() + fault.after * self.step_bytes
        self._wait_until(lambda: self.is_over() or self.journaled() >= wanted, "the journals grow")
        deadline = time.monotonic() + fault.pause
        self._wait_until(lambda: self.is_over() or time.monotonic() >= deadline, "a moment passes")
        return not self.is_over()

    def _wait_until(self, holds, what: str) -> None:
        deadline, size = time.monotonic() + LIMIT, -1
        while not holds():
            self.tend()
            if (now := self.journaled()) != size:
                size, deadline = now, time.monotonic() + LIMIT
            assert time.monotonic() < deadline, f"not so after {LIMIT:.0f} s: {what}\n" + "\n".join(
                part.said() for part in self.parts
            )
            time.sleep(0.03)

    def tend(self) -> None:
        """Start parts again that a fault ended.

        Raises:
            AssertionError: a part ended with an error, and nothing had happened to it.
        """
        for part in self.parts:
            if not part.starts or part.poll() in (None, 0) or self._has_finished(part):
                continue
            assert self._excused & self.bound_to(part), f"ended though nothing had happened to it: {part.said()}"
            self.counts["ended with an error"] += 1
            self.restart(part)

    def bound_to(self, part: Part) -> set[Part]:
        """Parts that cannot go on without each other: what happens to one ends all."""
        return {part}

    def restart(self, part: Part) -> None:
        """Start a part again that has ended."""
        self._excused.discard(part)
        part.start()

    def journaled(self) -> int:
        """Bytes in all journals of the run; looked at often, so that it looks nowhere else."""
        return sum(size for path, size in self._files(skipped=WITHOUT_JOURNALS) if path.endswith(".journal"))

    def _files(self, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, int]]:
        """Paths and sizes of the run's files outside of ``skipped`` directories; some may go at any moment."""
        for directory, inner, names in os.walk(self.root):
            inner[:] = [name for name in inner if name not in skipped]
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    yield (path := os.path.join(directory, name)), os.stat(path).st_size

    # -- what happens to it --------------------------------------------------------------------------------------------

    def _make(self, fault: Fault) -> None:
        living = [part for part in self.parts if part.runs]
        if not living:
            return
        part = living[fault.part % len(living)]
        part.look()
        self.shared |= shared_memory_of(self.root) if fault.kills else set()
        self.counts[fault.kind] += 1
        if fault.kills:
            part.kill()
            if part.status != -signal.SIGKILL:  # it had just ended
                self.counts[fault.kind] -= 1
            if fault.kind == "tail":
                self.torn_tokens += damage_tail(self.directory_of(part) / "journal", self.generator)
            elif fault.kind == "checkpoint" and not self._has_finished(part):
                damage_checkpoint(self.directory_of(part) / "recover", self.generator)
            if not self._has_finished(part):
                self.restart(part)
        elif fault.kind == "stop":
            part.stop_for(fault.size)
        elif fault.kind == "disk":
            self._excused.add(part)
            largest = max((size for _, size in self._files()), default=0)
            with part.full_disk(int(fault.size * largest)):
                part.wait(4 * fault.size)
        elif self.proxies:
            proxy = self.proxies[fault.part % len(self.proxies)]
            self._excused.update(living)
            if fault.kind == "drop":
                proxy.drop(fault.size)
            else:
                proxy.slow(0.2 * fault.size, 2 * fault.size)
