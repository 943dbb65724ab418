"""Two explorers and a trainer on one store, under faults; with PostgreSQL, their connections go through a proxy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import sqlalchemy
from store_databases import new_postgresql_database

from .parts import Part
from .proof import History, Proof
from .proxy import Proxy
from .run import BATCH, SAMPLES, Run, Tool


class ExploreTrain(Run):
    """Synchronous, so that each batch has to be the next four tasks, whoever was killed in between.

    Args:
        postgresql: URL of a server; empty: the store is SQLite's.
    """

    kinds = ("kill", "early", "tail", "checkpoint", "stop", "disk", "drop", "delay")
    steps = 8
    lease_seconds = 6.0

    def __init__(self, *arguments: Any, postgresql: str = "") -> None:
        super().__init__(*arguments)
        self.postgresql = postgresql

    def open(self) -> None:
        """Three parts, the tool that the workflow asks, and the database."""
        self.tool = Tool()
        self.proxies = [self.tool.proxy]
        self.database = f"sqlite:///file:{self.trial}/experiences.db?mode=ro&uri=true"
        store = f"lease_seconds: {self.lease_seconds}"
        if self.postgresql:
            self.database = new_postgresql_database(self.postgresql)
            url = sqlalchemy.make_url(self.database)
            between = Proxy(url.port or 5432)
            self.proxies = [between, self.tool.proxy]
            store += f", url: '{url.set(port=between.port).render_as_string(hide_password=False)}'"
        self.write_config(self.steps, f"{{port: {self.tool.proxy.port}}}", f"store: {{{store}}}\n")
        names = {"explorer-a": "explore", "explorer-b": "explore", "trainer": "train"}
        self.parts = [Part(self.warm, name, ["run", "config.yaml", f"mode={mode}"], self.root) for name, mode in names.items()]

    def close(self) -> None:
        """End the tool and the proxies."""
        super().close()
        self.tool.close()

    @property
    def trial(self) -> Path:
        """The directory that the parts share."""
        return self.root / "runs/faults/trial"

    def directory_of(self, part: Part) -> Path:
        """The run directory of a part as it was started last."""
        if part.name == "trainer":
            return self.trial / "trainer"
        return next(self.trial.glob(f"explorer-*-{part.pid}"), self.trial / "none")

    def prove(self) -> Proof:
        """The store says which group each batch had, the explorers' journals what was sampled in vain."""
        history = History(path / "journal" for path in sorted(self.trial.glob("explorer-*")))
        proof = Proof(lost_tokens=history.sampled_again(), in_flight_tokens=history.in_flight())
        uses = self._rows("select uses.batch, groups.ordinal, groups.id from uses join groups on groups.id = uses.group_id")
        rows = self._rows("select group_id, sample, reward from experiences where part = 0")
        samples = Counter(group for group, *_ in rows)
        trained: Counter[int] = Counter()
        for _, ordinal, group in uses:
            trained[ordinal] += samples[group]
            if samples[group] != SAMPLES:
                proof.wrong.append(f"group {ordinal} has {samples[group]} samples")
        proof.lost = sum(max(0, SAMPLES - trained[ordinal]) for ordinal in range(BATCH * self.steps))
        proof.duplicated = sum(max(0, count - SAMPLES) for count in trained.values())
        batches: dict[int, list[int]] = {}
        for batch, ordinal, _ in uses:
            batches.setdefault(batch, []).append(ordinal)
        for batch, ordinals in batches.items():
            if sorted(ordinals) != list(range(BATCH * batch, BATCH * (batch + 1))):
                proof.wrong.append(f"batch {batch} had the tasks {sorted(ordinals)}")
        self._compare_rewards(proof, uses, rows)
        return proof

    def _compare_rewards(self, proof: Proof, uses: list[tuple], rows: list[tuple]) -> None:
        """The steps' rewards are those of the groups that the store says they had."""
        rewards: dict[int, list[float]] = {}
        batch_of = {group: batch for batch, _, group in uses}
        for group, _, reward in rows:
            if group in batch_of:
                rewards.setdefault(batch_of[group] + 1, []).append(reward)
        lines = (self.trial / "trainer/metrics.jsonl").read_text().splitlines()
        said = {record["step"]: record["reward"] for record in map(json.loads, lines) if "actor/loss" in record}
        for step, each in rewards.items():
            if abs(said.get(step, -1.0) - sum(each) / len(each)) > 1e-6:
                proof.wrong.append(f"step {step} says reward {said.get(step)}, and the store's is {sum(each) / len(each)}")

    def _rows(self, statement: str) -> list[tuple]:
        engine = sqlalchemy.create_engine(self.database)
        try:
            with engine.connect() as connection:
                return [tuple(row) for row in connection.execute(sqlalchemy.text(statement))]
        finally:
            engine.dispose()
