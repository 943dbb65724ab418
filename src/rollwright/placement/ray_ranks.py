"""The ranks of a training on a cluster, as the process that is none of them sees them and tells them what to do.

The ranks make the same calls as those that torchrun starts (``rollwright.placement.ranks``), told by the controller instead of the first
of them. The controller divides a packed batch (``experience.packed_batch``) and sends each rank its rows with the call. What the step
computed of each token comes back as the journal has it.

A rank that is lost takes the gang with it: all are placed again, load the newest recover checkpoint, and make the calls since then once
more, on the same rows. Servers, workers and running episodes do not notice; no version is published twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rollwright.config.experiment import FinetuneSpec, section_of
from rollwright.config.sections import RolloutConfig
from rollwright.errors import CheckpointError, EngineError, LostProcessError, LostRankError, RollwrightError
from rollwright.experience.packed import pack_bytes
from rollwright.experience.packed_batch import WRITTEN, as_packed, parts_of
from rollwright.experience.trajectory import Trajectory, select_rows
from rollwright.inference.weights.files import read_weights, write_files
from rollwright.placement.capacity import demands_of
from rollwright.placement.ranks import CALLS, TRAINED, TrainedRow, sent_columns
from rollwright.placement.ranks import shares as divided
from rollwright.placement.ray_cluster import RayCluster
from rollwright.placement.ray_rank import PackedShare, RankState
from rollwright.processes.supervisor import RESTARTS
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.micro_batches import MINIBATCH_IDS, all_tokens
from rollwright.training.publish_and_audit import Publication
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

logger = getLogger("ranks")

_Result = TypeVar("_Result")
#: Longest start of a gang: interpreters, torch, the model.
START_SECONDS = 600.0
#: Seconds in which a rank that failed may turn out to have failed because another one is lost.
_CAUSE_SECONDS = 3.0
#: Longest wait for what the first rank answers beside its calls.
_ANSWER_SECONDS = 10.0
#: Calls that change what the ranks hold; they are made again after a gang was lost.
_CHANGES = ("policy_step", "supervised_step", "preference_step", "publish", "skip_publication")


class PlacedPolicy:
    """The trained policy as the controller sees it: its version and its type, and nothing of its weights."""

    def __init__(self, ranks: PlacedRanks) -> None:
        self._ranks = ranks
        self.version = 0
        self.publication: Publication | None = None  # the last
        self.compute_dtype = torch.float32  # until the ranks have said

    def connect_engine(self, engine: Any) -> None:
        """Connect the first rank to the servers of the rollout engine."""
        self._ranks.connect(engine)

    def destroy(self) -> None:
        """End the ranks, and the cluster's other processes with them."""
        self._ranks.close()


class PlacedRanks:
    """The ranks of a training on a cluster, with the face of ``TrainRanks``.

    Args:
        config: of a stage of the run, whose ``cluster.kind`` is ``ray``.
        spec: how long it is.
        directory: of the run, which all nodes see.
        part: name of the trained engine in a recover checkpoint.

    Attributes:
        engine: the policy, as far as this process knows it.
        model: None: no engine in this process can share it.
        cluster: where the ranks are; the rollout engine places its processes there, too.
        recover: the recover checkpoints of the run, which the ranks write.
    """

    model = None

    def __init__(self, config: Any, spec: FinetuneSpec, directory: RunDirectory, part: str) -> None:
        self._part = part
        self._config, self._spec = config, spec
        self.recover = RecoverCheckpoints(directory.recover, keep=config.recover.keep)
        self.engine = PlacedPolicy(self)
        self._since: list[
            tuple[str, list[PackedShare]]
        ] = []  # calls since the newest recover checkpoint, and what each rank took
        self._checkpoint: int | None = None  # its step; None: there is none
        self._published: tuple[int, list[str]] | None = None  # the version, and the servers that took it
        self._has_trained = self._is_closed = self._connects = False
        self._connection: Callable[[], tuple[RolloutConfig, list[str]]] | None = None
        self._gang: list[Any] = []
        self.cluster = RayCluster(config.cluster, directory.logs)
        try:
            nodes = self.cluster.nodes
            self.demands = {demand.role: demand for demand in demands_of(config, any(node.gpus for node in nodes))}
            room = self.cluster.fit(list(self.demands.values()), config.cluster.nodes, is_waited_for=directory.resumed)
            for process, address in room:
                logger.info("%s fits on %s", process, address)
            self._opening = ThreadPoolExecutor(1).submit(  # while servers and workers start
                self._unless_lost, "start", self._start_gang, lambda: self.cluster.remove(self._gang)
            )
        except BaseException:
            self.cluster.close()
            raise

    # -- the face of TrainRanks ------------------------------------------------------------------------------------------

    def prepare(self, batch: Trajectory) -> Trajectory:
        """The batch itself: it is divided in this process."""
        return batch

    def with_weights(self, use: Callable[[Any], None], scratch: Path) -> None:
        """See ``Ranks``: the first rank writes the weights to files, because memory is not shared."""
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
        scratch.mkdir()
        try:
            self.call("use_weights", here={"use": partial(write_files, scratch)})
            use(dict(read_weights(scratch)))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def save(self, path: Any, tokenizer: Any = None) -> None:
        """Write the model in Hugging Face form, with the tokenizer of the config."""
        self.call("save", path=os.fspath(Path(path).absolute()))

    def finish(self) -> None:
        """Nothing is left to do: the ranks wait for calls, and end with ``close``."""

    def call(self, name: str, batch: Trajectory | None = None, *, here: dict[str, Any] | None = None, **arguments: Any) -> Any:
        """Make a call of ``CALLS`` on all ranks; see ``TrainRanks.call``. ``here`` reaches the first rank alone."""
        self._opening.result()
        own = dict(here or {})
        if (before := own.pop("before_visible", None)) is not None:
            before()  # what the checkpoint builds on is written first
        if batch is None:
            return self._call(name, [], own, arguments)[0]
        call = CALLS[name]
        assert call.units is not None
        minibatches = call.minibatches(section_of(self._config))
        sent = sent_columns(batch, minibatches)
        batch_rows = divided(sent, call.units(batch), len(self._gang), minibatches, all_tokens)
        shares = [as_packed(select_rows(sent, rows)) for rows in batch_rows]
        result, computed = self._call(name, _packed_shares(shares), own, arguments)
        if any(computed):
            of_row = dict(zip(itertools.chain(*batch_rows), itertools.chain(*computed), strict=True))
            batch[TRAINED] = [of_row[row] for row in range(len(of_row))]
        return result

    def connect(self, rollout: Any) -> None:
        """Connect the first rank to the servers that ``rollout`` asks."""
        self._opening.result()
        told: list[str] = []

        def connection() -> tuple[RolloutConfig, list[str]]:
            told[:] = rollout.watch.addresses or rollout.client.addresses
            return rollout.config, list(told)

        self._connects = True
        self._unless_lost("connect", lambda: self._ask_all("connect", *connection()), lambda: self._replace_gang("connect"))
        self._connection = connection
        if (running := rollout.watch.addresses) and running != told:  # one came before there was a client to tell it
            self.use_servers(running)

    def use_servers(self, addresses: list[str]) -> None:
        """Tell the first rank which servers there are, beside what it does; none that is not connected."""
        if not self._connects:
            return
        with contextlib.suppress(LostProcessError):  # the next one is told when it connects
            self._gang[0].call("use_servers", addresses).result(60.0)

    def holders(self) -> tuple[int, list[str]]:
        """The version that was published last, and the servers that hold it by now, as the first rank knows them.

        Raises:
            EngineError: nothing was published yet.
        """
        held = self._published
        if held is None:
            raise EngineError("no weights have been published yet")
        with contextlib.suppress(RollwrightError, TimeoutError):  # it is placed again: what it told last is still true
            told = self._gang[0].call("holders").result(_ANSWER_SECONDS)
            if told is not None and told[0] >= held[0]:
                held = told
        return held

    def close(self) -> None:
        """End the ranks, and all else on the cluster. Idempotent."""
        self._is_closed = True
        self.cluster.close()

    # -- a gang ----------------------------------------------------------------------------------------------------------

    def _start_gang(self) -> None:
        demand = self.demands["rank"]
        self._gang = self.cluster.gang(
            "rank", "rollwright.placement.ray_rank:TrainRank", demand.count, cpus=demand.cpus, gpus=demand.gpus
        )
        for process in self._gang:
            process.wait_started(START_SECONDS)
        meeting = self._gang[0].call("meeting_place").result(60.0)
        spec, recover = dataclasses.asdict(self._spec), str(self.recover.directory.absolute())
        world = len(self._gang)
        opened = [
            process.call("open", self._config, spec, recover, rank, world, meeting) for rank, process in enumerate(self._gang)
        ]
        self.engine.compute_dtype = getattr(torch, _together(opened)[0])

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return _together([process.call(method, *arguments) for process in self._gang])

    def _call(
        self, name: str, shares: Sequence[PackedShare], own: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Any, list[list[TrainedRow]]]:
        """Make a call; where the gang is lost, with another one, which first gets to where this one was."""
        answers = self._unless_lost(
            f"call {name}",
            lambda: self._make(name, shares, own, arguments),
            lambda: self._replace_gang(name, arguments.get("step")),
        )
        if name == "save_recover":
            self._since.clear()
            self._checkpoint = arguments["step"]
        elif name == "load_recover":
            self._checkpoint = answers[0][0][0]
        elif name in _CHANGES:
            self._has_trained = True
            if self._config.recover.mode != "off":
                self._since.append((name, list(shares)))
        result, _, (self.engine.version, self.engine.publication) = answers[0]
        if name in ("publish", "republish") and self.engine.publication is not None:
            self._published = self.engine.version, self.engine.publication.engines
        return result, [computed for _, computed, _ in answers]

    def _unless_lost(self, what: str, make: Callable[[], _Result], replace: Callable[[], None]) -> _Result:
        """What ``make`` returns; where the gang is lost, it is called again after ``replace``.

        Raises:
            LostRankError: the gang cannot be replaced, or was lost too often.
        """
        lost, began = 0, time.monotonic()
        while True:
            try:
                if lost:
                    replace()
                result = make()
                break
            except (LostProcessError, LostRankError) as error:
                if self._is_closed:
                    raise
                lost += 1
                if self._has_trained and self._config.recover.mode == "off":
                    raise LostRankError(f"{error}; with recover.mode off there is no checkpoint to go on from.") from error
                if lost > RESTARTS:
                    raise LostRankError(f"the ranks were lost {lost} times in {what}; the last time: {error}") from error
                logger.error("%s: all ranks are placed again and go on from the newest checkpoint", error)
        if lost:
            logger.info("the ranks are where they were %.1f s ago", time.monotonic() - began)
        return result

    def _make(
        self, name: str, shares: Sequence[PackedShare], own: dict[str, Any], arguments: dict[str, Any]
    ) -> list[tuple[Any, list[TrainedRow], RankState]]:
        """Make a call on all ranks; ``shares`` are the rows of each, if the call takes rows."""
        return _together(
            [
                process.call("call", name, share, {**arguments, **(own if rank == 0 else {})})
                for rank, (process, share) in enumerate(zip(self._gang, shares or [None] * len(self._gang), strict=True))
            ]
        )

    def _replace_gang(self, name: str, being_saved: int | None = None) -> None:
        """Place the ranks again and have them get to where the lost ones were.

        Args:
            name: of the call in which they were lost.
            being_saved: the step whose checkpoint it wrote.
        """
        self.cluster.remove(self._gang)
        self._start_gang()
        is_saved = name == "save_recover" and being_saved in self.recover.steps()
        if self._checkpoint is not None or is_saved:
            (step, _), _, _ = self._make("load_recover", [], {}, {"part": self._part})[0]
            if is_saved and step == being_saved:
                self._since.clear()
            elif step != self._checkpoint:
                raise CheckpointError(
                    f"the newest whole recover checkpoint is of step {step}, and the batches since step {self._checkpoint} are at hand: "
                    "start the run again, which goes on from there."
                )
            self._checkpoint = step
        for call, shares in self._since:  # what was published stays published: the servers hold it
            self._make("skip_publication" if call == "publish" else call, shares, {}, {})
        if self._connection is not None:
            self._ask_all("connect", *self._connection())
        if self._published is not None:
            self._make("republish", [], {}, {})  # so that a server that comes back can be given them


def _packed_shares(shares: Sequence[Trajectory]) -> list[PackedShare]:
    """The rows of each rank in the form that is sent; a rank without rows gets a part of another one, for its columns."""
    divided = [parts_of(share) for share in shares]
    example = next((parts[:1] for parts, _ in divided if parts), [])
    return [
        (
            [np.frombuffer(part, np.uint8) for part in parts or example],  # arrays are sent without a copy
            places,
            pack_bytes({key: share[key] for key in (*WRITTEN, MINIBATCH_IDS) if key in share}, {}),
        )
        for share, (parts, places) in zip(shares, divided, strict=True)
    ]


def _together(answers: Sequence[Any]) -> list[Any]:
    """What all ranks answer. A failure is raised soon: the others may wait for ever for the rank that failed."""
    done, left = wait(answers, return_when=FIRST_EXCEPTION)
    if any(answer.exception() is not None for answer in done):
        done, _ = wait(answers, _CAUSE_SECONDS) if left else (done, left)
        failed = [error for answer in done if (error := answer.exception()) is not None]
        raise min(failed, key=lambda error: (not isinstance(error, LostProcessError), isinstance(error, LostRankError)))
    return [answer.result() for answer in answers]
