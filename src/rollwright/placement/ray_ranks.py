"""Controls the ranks that train on a Ray cluster, from the controller process, which is not a rank itself.

The ranks execute the same calls as ranks that torchrun starts (``rollwright.placement.ranks``), but the controller sends the calls instead
of rank 0. The controller divides each batch, packs it (``experience.packed``), and sends each rank its rows with the call. The values that
a step computes for each token are returned in the format in which the journal stores them.

If a rank is lost, the call raises ``LostRankError``, which ends the attempt: ``trainers.stages`` closes the trainer and opens it again,
and the run resumes from its newest recovery checkpoint and its journal, as after a kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollwright.config.experiment import FinetuneSpec, section_of
from rollwright.errors import EngineError, LostProcessError, LostRankError, RollwrightError
from rollwright.experience.packed import WRITTEN, as_packed, pack_bytes, parts_of
from rollwright.experience.trajectory import Trajectory, select_rows
from rollwright.inference.weights.files import read_stream, write_files
from rollwright.placement.capacity import demands_of
from rollwright.placement.ranks import CALLS, TRAINED
from rollwright.placement.ray_cluster import RayCluster
from rollwright.placement.ray_rank import PackedShare
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.micro_batches import MINIBATCH_IDS, all_tokens
from rollwright.training.publish_and_audit import Publication
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

logger = getLogger("ranks")

#: Longest wait for the processes of the ranks to start and import torch.
START_SECONDS = 600.0
#: After a rank has failed, seconds to wait for other failures, because the cause may be that another rank was lost.
_CAUSE_SECONDS = 3.0
#: Longest wait for an answer that rank 0 can give while it executes a call.
_ANSWER_SECONDS = 10.0


class PolicyProxy:
    """The trained policy as the controller sees it: its version and dtype, but none of its weights."""

    def __init__(self, ranks: RayRanks) -> None:
        self._ranks = ranks
        self.version = 0
        self.publication: Publication | None = None  # the latest
        self.compute_dtype = torch.float32  # until the ranks report theirs

    def connect_engine(self, engine: Any) -> None:
        """Connect rank 0 to the servers of the rollout engine."""
        self._ranks.connect(engine)

    def destroy(self) -> None:
        """End the ranks and all other processes of the run on the cluster."""
        self._ranks.close()


class RayRanks:
    """The ranks that train on a Ray cluster; see ``placement.Ranks``.

    Args:
        config: the training stage's config.
        spec: the stage's length.
        directory: the stage's directory; all nodes must see it.

    Attributes:
        engine: this process's view of the policy.
        model: None, because no engine in this process can share the weights.
        cluster: the cluster of the ranks; the rollout engine also places its processes there.
        demands: the resources of each role.
        recover: the recovery checkpoints of the run, which the ranks write.
    """

    model = None

    def __init__(self, config: Any, spec: FinetuneSpec, directory: RunDirectory) -> None:
        self._config, self._spec = config, spec
        self.recover = RecoverCheckpoints(directory.recover, keep=config.recover.keep)
        self.engine = PolicyProxy(self)
        self._published: tuple[int, list[str]] | None = None  # the latest version, and the servers that took it
        self._is_connected = False
        self._gang: list[Any] = []
        self.cluster = RayCluster(config.cluster, directory.logs)
        try:
            nodes = self.cluster.nodes
            self.demands = {demand.role: demand for demand in demands_of(config, any(node.gpus for node in nodes))}
            room = self.cluster.fit(list(self.demands.values()), config.cluster.nodes, is_waited_for=directory.resumed)
            for process, address in room:
                logger.info("%s fits on %s", process, address)
            self._opening = ThreadPoolExecutor(1).submit(self._start_gang)  # while servers and workers start
        except BaseException:
            self.cluster.close()
            raise

    # -- see ``placement.Ranks`` -----------------------------------------------------------------------------------------

    @property
    def awaits_proof(self) -> bool:
        """See ``placement.Ranks``; False while rank 0 is lost or busy."""
        with contextlib.suppress(RollwrightError, TimeoutError):
            return self._gang[0].call("awaits_proof").result(_ANSWER_SECONDS)
        return False

    def prepare(self, batch: Trajectory) -> Trajectory:
        """Return the batch unchanged: it is divided in this process."""
        return batch

    def with_weights(self, use: Callable[[Any], None], scratch: Path) -> None:
        """See ``Ranks``. Rank 0 writes the weights to files, because the processes share no memory."""
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
        scratch.mkdir()
        try:
            self.call("use_weights", first_rank={"use": partial(write_files, scratch)})
            use(read_stream(scratch))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def save(self, path: Any, tokenizer: Any = None) -> None:
        """Write the model in Hugging Face form, with the tokenizer of the config."""
        self.call("save", path=os.fspath(Path(path).absolute()))

    def finish(self) -> None:
        """Do nothing: the ranks wait for calls until ``close``."""

    def call(
        self, name: str, batch: Trajectory | None = None, *, first_rank: dict[str, Any] | None = None, **arguments: Any
    ) -> Any:
        """See ``Ranks.call``.

        Raises:
            LostRankError: the process of a rank has ended.
        """
        self._opening.result()
        own = dict(first_rank or {})
        if (before_visible := own.pop("before_visible", None)) is not None:
            before_visible()  # the journal that the checkpoint refers to must be on disk first
        batch_rows: list[list[int]] = []
        shares: list[PackedShare | None] = [None] * len(self._gang)
        if batch is not None:
            sent, batch_rows = CALLS[name].divided(batch, section_of(self._config), len(self._gang), all_tokens)
            shares = [*_packed_shares([as_packed(select_rows(sent, rows)) for rows in batch_rows])]
        answers = _together(
            [
                process.call("call", name, share, {**arguments, **(own if rank == 0 else {})})
                for rank, (process, share) in enumerate(zip(self._gang, shares, strict=True))
            ]
        )
        result, _, (self.engine.version, self.engine.publication) = answers[0]
        if name in ("publish", "republish", "prove_publication") and self.engine.publication is not None:
            self._published = self.engine.version, self.engine.publication.engines
        computed = [*itertools.chain.from_iterable(rows for _, rows, _ in answers)]
        if batch is not None and computed:
            of_row = dict(zip(itertools.chain(*batch_rows), computed, strict=True))
            batch[TRAINED] = [of_row[row] for row in range(len(of_row))]
        return result

    def connect(self, rollout: Any) -> None:
        """Connect rank 0 to the servers of a rollout engine."""
        self._opening.result()
        addresses = list(rollout.watch.addresses or rollout.client.addresses)
        self._is_connected = True
        _together([process.call("connect", rollout.config, addresses) for process in self._gang])
        if (running := rollout.watch.addresses) and running != addresses:  # a server joined while rank 0 connected
            self.use_servers(running)

    def use_servers(self, addresses: list[str]) -> None:
        """Make rank 0 publish to these servers from now on, even while it executes a call. No-op before ``connect``."""
        if self._is_connected:
            with contextlib.suppress(LostProcessError):  # the next call reports the loss
                self._gang[0].call("use_servers", addresses).result(60.0)

    def holders(self) -> tuple[int, list[str]]:
        """Return the latest published version and the servers that hold it, as rank 0 last reported them.

        Raises:
            EngineError: nothing has been published yet.
        """
        if self._published is None:
            raise EngineError("no weights have been published yet")
        with contextlib.suppress(RollwrightError, TimeoutError):  # rank 0 is lost or busy: its last report still holds
            reported = self._gang[0].call("holders").result(_ANSWER_SECONDS)
            if reported is not None and reported[0] >= self._published[0]:
                return reported
        return self._published

    def close(self) -> None:
        """End the ranks and all other processes of the run on the cluster. Idempotent."""
        self.cluster.close()

    def _start_gang(self) -> None:
        demand = self.demands["rank"]
        with _losses_as_lost_ranks():
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


@contextlib.contextmanager
def _losses_as_lost_ranks() -> Iterator[None]:
    """Convert ``LostProcessError`` to ``LostRankError``."""
    try:
        yield
    except LostProcessError as error:
        raise LostRankError(str(error)) from error


def _packed_shares(shares: Sequence[Trajectory]) -> list[PackedShare]:
    """Pack each rank's rows for sending. A rank without rows gets a part of another rank's data, which tells it the columns."""
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


@_losses_as_lost_ranks()
def _together(answers: Sequence[Any]) -> list[Any]:
    """Wait for the answers of all ranks. Raise a failure soon, because the other ranks may wait forever for the rank that failed."""
    done, left = wait(answers, return_when=FIRST_EXCEPTION)
    if any(answer.exception() is not None for answer in done):
        done, _ = wait(answers, _CAUSE_SECONDS) if left else (done, left)
        failed = [error for answer in done if (error := answer.exception()) is not None]
        raise min(failed, key=lambda error: (not isinstance(error, LostProcessError), isinstance(error, LostRankError)))
    return [answer.result() for answer in answers]
