"""What the experience store costs: writing and drawing experiences, on SQLite.

    python benchmarks/experience_store.py [--experiences 10000] [--json FILE]

Experiences of 80 or 1,024 tokens in groups of 8, written as an explorer writes them (a claim, then group and finished task in
one transaction) and drawn as a trainer draws them (64 groups a batch, a commit after each batch). The peer ``sqlite3`` writes and
reads the same bytes, serialised beforehand, with the standard library alone and one transaction a group: what a database
of this kind can do at best. Rates are experiences in a second of processor time; ratios are ours over the peer's.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from report import Report

from rollwright.experience.experience import Experience
from rollwright.store import ExperienceStore, Sampling

GROUP, BATCH = 8, 64


def make(count: int, tokens: int) -> list[list[Experience]]:
    """Groups of experiences; half of the tokens are the prompt."""
    response = tokens - tokens // 2
    return [
        [
            Experience(
                tokens=list(range(tokens)),
                prompt_length=tokens // 2,
                logprobs=[-0.5] * response,
                versions=[group] * response,
                reward=float(index % 2),
                info={"task": group},
            )
            for index in range(GROUP)
        ]
        for group in range(count // GROUP)
    ]


class Seconds(NamedTuple):
    """What a call took: processor time, which neighbours on the machine hardly change, and time on the wall."""

    processor: float
    wall: float


def seconds(function: Callable[[], None]) -> Seconds:
    """How long a call takes."""
    processor, wall = time.process_time(), time.perf_counter()
    function()
    return Seconds(time.process_time() - processor, time.perf_counter() - wall)


def write_claimed(store: ExperienceStore, groups: list[list[Experience]]) -> None:
    """As an explorer does."""
    left = iter(groups)
    while claims := store.tasks.claim("explorer", 32):
        for claim in claims:
            store.tasks.finish(claim, next(left))


def draw(store: ExperienceStore, sampling: Sampling, commit: str | None) -> None:
    """As a trainer does."""
    number = 0
    while store.sample(groups=BATCH, sampling=sampling, partial_batch=True) is not None:
        if commit is not None:
            store.commit(f"{commit}-{number}")
        number += 1


def plain_write(connection: sqlite3.Connection, blobs: list[list[bytes]]) -> None:
    """The peer writes."""
    for number, group in enumerate(blobs):
        with connection:
            connection.executemany(
                "INSERT INTO rows (grp, part, data) VALUES (?, ?, ?)", [(number, part, data) for part, data in enumerate(group)]
            )


def plain_read(connection: sqlite3.Connection, groups: int) -> None:
    """The peer reads and makes experiences of what it read."""
    for start in range(0, groups, BATCH):
        rows = connection.execute(
            "SELECT data FROM rows WHERE grp >= ? AND grp < ? ORDER BY grp, part", (start, start + BATCH)
        ).fetchall()
        for (data,) in rows:
            Experience.deserialize(data)


def main() -> None:
    """Measures both sizes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experiences", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = Report("experience store")
    for tokens in (80, 1024):
        groups = make(arguments.experiences, tokens)
        count = len(groups) * GROUP
        blobs: list[list[bytes]] = []
        serialising = seconds(lambda groups=groups, blobs=blobs: blobs.extend([each.serialize() for each in g] for g in groups))
        with tempfile.TemporaryDirectory() as directory, ExperienceStore(f"sqlite:///{directory}/store.db") as store:
            store.tasks.declare(len(groups))
            writing = seconds(lambda store=store, groups=groups: write_claimed(store, groups))
            reading = seconds(lambda store=store: draw(store, Sampling(), "fifo"))
            store.recover(None)
            drawn = {}
            for order in ("freshest", "uniform", "priority"):
                sampling = Sampling(order=order)
                drawn[order] = seconds(lambda store=store, sampling=sampling: draw(store, sampling, None))
                store.recover(None)
            exporting = seconds(lambda store=store: store.export_parquet(f"{directory}/all.parquet") and None)
            size = Path(directory, "store.db").stat().st_size

            plain = sqlite3.connect(f"{directory}/plain.db")
            plain.execute("PRAGMA journal_mode=WAL")
            plain.execute("PRAGMA synchronous=NORMAL")
            plain.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, grp INTEGER, part INTEGER, data BLOB)")
            plain.execute("CREATE INDEX by_group ON rows (grp, part)")
            plain_writing = (
                seconds(lambda plain=plain, blobs=blobs: plain_write(plain, blobs)).processor + serialising.processor
            )
            plain_reading = seconds(lambda plain=plain, groups=groups: plain_read(plain, len(groups))).processor
            plain.close()
        measured = {
            "claim, write, finish": (writing, plain_writing),
            "draw fifo, commit": (reading, plain_reading),
            **{f"draw {order}": (spent, None) for order, spent in drawn.items()},
            "export to Parquet": (exporting, None),
        }
        for what, (ours, peer) in measured.items():
            report.row(
                what=f"{what}, {tokens} tokens",
                rate=count / ours.processor,
                sqlite3_rate=None if peer is None else count / peer,
                wall_seconds=ours.wall,
            )
        report.row(what=f"one in the file, {tokens} tokens", bytes=size // count)
        report.ratio(f"sqlite3/write-{tokens}", plain_writing / writing.processor)
        report.ratio(f"sqlite3/read-{tokens}", plain_reading / reading.processor)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
