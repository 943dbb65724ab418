"""What a run's journals, store and metrics say of it: what was trained, how often, and what was sampled in vain."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rollwright.experience.journal.reading import Gap, RecordPosition, journal_files, read_file
from rollwright.experience.journal.records import (
    Begin,
    Checkpoint,
    Closed,
    DurableResult,
    End,
    Files,
    GroupEnd,
    ModelCall,
    Trained,
    tokens_in,
    unpack_value,
)
from rollwright.rollout.task_group import SAMPLE_BITS

Sample = tuple[int, int]  # ordinal and index
Writer = tuple[int, int]  # number of its directory, and its own there

MARK_BYTES = 8  # that a journal file begins with
HOW_LONG = "how_long"  # durable call by which a workflow draws how many calls an episode has


@dataclass
class Proof:
    """What a run is judged by; those of several runs add up."""

    lost: int = 0  # samples that had to be trained and were not
    duplicated: int = 0  # trained once more
    lost_tokens: int = 0  # that had been answered, and were sampled again
    in_flight_tokens: int = 0  # of calls that were in flight at a kill, and of records that the suite damaged
    left_behind: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what else did not hold
    lengths: list[tuple[int, int]] = field(default_factory=list)  # calls and tokens of the trained episodes
    first_drawn: list[int] = field(default_factory=list)  # calls that these were to have when they first began
    measured: list[dict[str, Any]] = field(default_factory=list)  # of each run, where it is compared with others

    def __add__(self, other: Proof) -> Proof:
        return Proof(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def holds(self) -> bool:
        """True where nothing was lost, repeated or left behind."""
        is_exact = not (self.lost or self.duplicated or self.left_behind or self.wrong)
        return is_exact and self.lost_tokens <= self.in_flight_tokens

    def report(self) -> dict[str, Any]:
        """Its fields, with means in place of the lengths."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lengths, drawn, measured = (fields.pop(name) for name in ("lengths", "first_drawn", "measured"))
        fields |= {"measured": measured} if measured else {}
        if lengths:
            calls, tokens = zip(*lengths, strict=True)
            fields["episodes"] = {"trained": len(lengths), "calls": mean(calls), "tokens": mean(tokens)}
            fields["episodes"] |= {"first_drawn": mean(drawn)} if drawn else {}
        return fields


class History:
    """All that the processes of a run wrote to their journals, in the order in which they began.

    Args:
        directories: of the journals, the older ones first.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        self.calls: dict[Sample, dict[tuple[int, int], list[tuple[Writer, float, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.opened: dict[Writer, set[Sample]] = defaultdict(set)  # episodes that a process began
        self.ended: dict[Writer, set[Sample]] = defaultdict(set)
        self.delivered: dict[Writer, dict[int, int]] = defaultdict(dict)  # group -> ordinal
        self.last_seen: dict[Writer, float] = defaultdict(float)  # seconds since the epoch
        self.given_up: Counter[str] = Counter()  # groups by what ended them
        self.trained: dict[Writer, dict[int, list[Trained]]] = defaultdict(lambda: defaultdict(list))
        self.lengths: dict[Writer, dict[Sample, tuple[int, int]]] = defaultdict(dict)  # calls and tokens of episodes that ended
        self.first_drawn: dict[Sample, int] = {}  # what its first durable call HOW_LONG said
        for number, directory in enumerate(directories):
            for path in journal_files(directory):
                self._read(number, path)

    def _read(self, directory: int, path: Path) -> None:
        begun: dict[int, Begin] = {}
        made: dict[int, list[int]] = {}  # calls and tokens of episodes
        for place, record in read_file(path):
            if isinstance(record, Gap):
                begun.clear()  # who goes on takes no more of those that were open there
            if isinstance(record, Gap | Files | Closed):
                continue
            writer = (directory, place.writer)
            if isinstance(record, Begin | ModelCall | End | GroupEnd):
                seen = record.finished if isinstance(record, ModelCall) else record.time
                self.last_seen[writer] = max(self.last_seen[writer], seen)
            if isinstance(record, Begin):
                begun[record.episode], made[record.episode] = record, [0, 0]
                if not record.is_eval:
                    self.opened[writer].add((record.ordinal, record.index))
            elif isinstance(record, ModelCall | DurableResult | End) and record.episode in begun:
                begin = begun[record.episode]
                if not begin.is_eval:
                    self._note(writer, (begin.ordinal, begin.index), record, made[record.episode])
            elif isinstance(record, GroupEnd) and not record.is_eval:
                if record.state == "delivered":
                    self.delivered[writer][record.group] = record.ordinal
                else:
                    self.given_up[f"{record.state}: {record.reason}"] += 1
            elif isinstance(record, Trained):
                self.trained[writer][record.step].append(record)

    def _note(self, writer: Writer, sample: Sample, record: ModelCall | DurableResult | End, made: list[int]) -> None:
        if isinstance(record, ModelCall):
            tokens = tokens_in(record.output)
            self.calls[sample][record.conversation, record.turn].append((writer, record.started, tokens))
            made[:] = made[0] + 1, made[1] + tokens
        elif isinstance(record, DurableResult):
            if record.name == HOW_LONG and record.value is not None:
                self.first_drawn.setdefault(sample, unpack_value(record.value))
        elif record.outcome not in ("cut", "diverged"):
            self.ended[writer].add(sample)
            self.lengths[writer][sample] = (made[0], made[1])

    def surviving(self) -> dict[int, list[Sample]]:
        """What each step trained on, as the last process that made it says."""
        steps: dict[int, list[Sample]] = {}
        for writer in sorted(self.trained):
            for step, records in self.trained[writer].items():
                names = self.delivered[writer]
                steps[step] = [(names.get(each.group, -1), each.sample & ((1 << SAMPLE_BITS) - 1)) for each in records]
        return dict(sorted(steps.items()))

    def trained_lengths(self) -> dict[Sample, tuple[int, int]]:
        """Calls and tokens of the episodes that the surviving steps trained on.

        The last episode counts that had ended when its step was made: what a recovery checkpoint has whole does not run again.
        """
        made: dict[int, Writer] = {}
        for writer in sorted(self.trained):
            made.update(dict.fromkeys(self.trained[writer], writer))
        lengths = {}
        for step, samples in self.surviving().items():
            for sample in samples:
                ends = [writer for writer in sorted(self.lengths) if writer <= made[step] and sample in self.lengths[writer]]
                lengths[sample] = self.lengths[ends[-1]][sample]
        return lengths

    def sampled_again(self) -> int:
        """Tokens that were answered in one process and sampled again in another."""
        tokens = 0
        for places in self.calls.values():
            for answers in places.values():
                made: dict[float, tuple[Writer, int]] = {}
                for writer, started, count in answers:
                    made.setdefault(started, (writer, count))  # a later one is its copy
                last, _ = made[max(made)]
                tokens += sum(count for writer, count in made.values() if writer != last)
        return tokens

    def in_flight(self) -> int:
        """Tokens of calls that may have been in flight when their process ended: the first new one of each open episode."""
        tokens = 0
        for writer, opened in self.opened.items():
            for sample in opened - self.ended[writer]:
                firsts = [min((started, count) for _, started, count in answers) for answers in self.calls[sample].values()]
                new = [(started, count) for started, count in firsts if started > self.last_seen[writer]]
                tokens += min(new)[1] if new else 0
        return tokens


def compare(history: History, *, steps: int, batch: int, samples: int, slack: int) -> Proof:
    """The proof of a run of mode ``both``.

    Args:
        history: of its journal.
        steps, batch, samples: of the run.
        slack: steps that a group may be behind when the run ends: groups of the last of them need not be trained.
    """
    proof = Proof(lost_tokens=history.sampled_again(), in_flight_tokens=history.in_flight())
    surviving = history.surviving()
    if sorted(surviving) != list(range(1, steps + 1)):
        proof.wrong.append(f"steps {sorted(surviving)} were trained, not 1 to {steps}")
    trained = Counter(sample for step in surviving.values() for sample in step)
    wanted = {(ordinal, index) for ordinal in range(batch * (steps - slack)) for index in range(samples)}
    proof.lost = len(wanted - trained.keys())
    proof.duplicated = sum(count - 1 for count in trained.values())
    if sum(trained.values()) != steps * batch * samples:
        proof.wrong.append(f"{sum(trained.values())} rows were trained, not {steps * batch * samples}")
    if history.given_up:
        proof.wrong.append(f"groups were given up: {dict(history.given_up)}")
    return proof


def curve(run: Path) -> list[tuple[float, ...]]:
    """What a deterministic run has to repeat: step, reward, lengths, loss and gradient of each step, also of a critic."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    always = ("step", "reward", "response_tokens")
    trained = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "critic/values/mean")
    return [
        tuple(record[name] for name in (*always, *(name for name in trained if name in record)))
        for record in records
        if "reward" in record
    ]


def difference(curve: list[tuple[float, ...]], reference: list[tuple[float, ...]]) -> str:
    """Where two curves part, in words; empty where they are the same, bit for bit."""
    if len(curve) != len(reference):
        return f"{len(curve)} steps, and {len(reference)} in the undisturbed run"
    return next((f"{mine}, and {its}" for mine, its in zip(curve, reference, strict=True) if mine != its), "")


# -- damage ------------------------------------------------------------------------------------------------------------


def damage_tail(directory: Path, generator: random.Random) -> int:
    """Tear a journal's last records, as a disk does that did not get all of them; nothing from before a checkpoint.

    Returns:
        How many tokens were in them.
    """
    paths = journal_files(directory)
    if not paths or paths[-1].stat().st_size <= MARK_BYTES:
        return 0
    records: list[tuple[RecordPosition, Any]] = list(read_file(paths[-1]))
    flushed = max((number for number, (_, record) in enumerate(records) if isinstance(record, Checkpoint)), default=-1) + 1
    torn = min(generator.randint(1, 3), len(records) - flushed)
    start = records[-torn - 1][0].end if torn < len(records) else MARK_BYTES
    size = paths[-1].stat().st_size
    with paths[-1].open("r+b") as file:
        if torn < 1:
            start = size
        if torn < 1 or generator.random() < 0.5:  # what a block that was never written leaves
            file.seek(start + generator.randrange(max(1, size - start)))
            file.write(bytes(generator.randrange(1, 40)))
        else:
            file.truncate(start + generator.randrange(size - start))
    left: dict[int, set[int]] = {}  # by episode that is open, where its records that are taken end
    for place, record in read_file(paths[-1]):
        if isinstance(record, Gap):
            left.update((episode, ends | {-1}) for episode, ends in left.items())  # nothing behind is taken of it
        elif isinstance(record, Begin):
            left[record.episode] = set()
        elif isinstance(record, ModelCall) and -1 not in left.get(record.episode, set()):
            left.setdefault(record.episode, set()).add(place.end)
    calls = [(place, record) for place, record in records if isinstance(record, ModelCall)]
    return sum(tokens_in(record.output) for place, record in calls if place.end not in left.get(record.episode, ()))


def damage_checkpoint(directory: Path, generator: random.Random) -> bool:
    """Cut or change the newest recovery checkpoint's largest file, where there is one before it to go back to."""
    checkpoints = sorted(path for path in directory.glob("step_*") if path.is_dir())
    if len(checkpoints) < 2:
        return False
    file = max((path for path in checkpoints[-1].rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    if generator.random() < 0.5:
        content[generator.randrange(len(content) // 2, len(content))] ^= 1
    else:
        del content[-generator.randrange(1, len(content) // 2) :]
    file.write_bytes(content)
    return True
