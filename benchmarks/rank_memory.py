"""Memory of each rank that trains: loading, an update, a checkpoint, a publication and an export, as a table.

    python benchmarks/rank_memory.py [--quick] [--ranks 1,2,4] [--json FILE]

Ranks are processes of this machine over Gloo, with the sharded model of ``actor.shard: always`` in float32. Memory is anonymous
memory (``RssAnon``) above that of the rank after its imports, read every two milliseconds, so that it is the peak of each phase;
the *state* is what stays between updates. Pages of files that are mapped (the checkpoint that is read, weights shared with a
server) belong to the system and are not counted. The C library is told to return what is freed at once, or what it keeps for later
would be counted, too. The largest of all ranks is shown. Ratios are against one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import Report

#: Of glibc: what is freed is returned to the system.
RETURNED_AT_ONCE = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}

#: Hidden size, layers and vocabulary: 104 and 15 million parameters.
FULL, QUICK = (768, 12, 16384), (384, 6, 8192)
PHASES = ("load", "probe", "update", "state", "checkpoint", "in background", "resume", "publish", "export")


def anonymous() -> int:
    """Bytes of this process's own memory."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Peaks:
    """The largest memory of each phase, and its time."""

    def __init__(self) -> None:
        self.base = anonymous()
        self.found: dict[str, tuple[float, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch what runs in the block."""
        largest, ended = anonymous(), threading.Event()

        def watch() -> None:
            nonlocal largest
            while not ended.wait(0.002):
                largest = max(largest, anonymous())

        thread = threading.Thread(target=watch)
        thread.start()
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        ended.set()
        thread.join()
        self.found[name] = (max(largest, anonymous()) - self.base) / 2**20, seconds


def rank_main(path: str, directory: str) -> None:
    """What each rank does; writes its peaks to ``directory``."""
    import torch

    from rollwright.config.experiment import FinetuneSpec
    from rollwright.config.sections import MicroBatchSpec, OptimizerConfig, PPOActorConfig
    from rollwright.inference.weights.group import buckets
    from rollwright.inference.weights.stream import WeightStream
    from rollwright.training import engine, parallel
    from rollwright.training.actor import FSDPPPOActor
    from rollwright.training.fsdp import with_whole_weights
    from rollwright.training.model import load_model  # noqa: F401 - imports transformers' part
    from rollwright.training.recovery_checkpoint import RecoverCheckpoints

    torch.set_num_threads(1)
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    parallel.join_processes(torch.device("cpu"), also_alone=True)
    torch.ones(64, 64) @ torch.ones(64, 64)
    config = PPOActorConfig(
        path=path,
        device="cpu",
        shard="always",
        optimizer=OptimizerConfig(lr=1e-5),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=64),
    )
    actor, peaks, root = FSDPPPOActor(config), Peaks(), Path(directory)
    probe, engine.refuse_unless_causal = engine.refuse_unless_causal, lambda *_: None  # a forward pass: a phase of its own
    with peaks.phase("load"):
        actor.initialize(None, FinetuneSpec(1, 100, 10))
    with peaks.phase("probe"):
        probe(actor.model, actor._probe_scores)
    rows, length = 2, 32
    batch = {
        "input_ids": torch.randint(1, 1000, (rows, length)),
        "attention_mask": torch.ones(rows, length, dtype=torch.bool),
        "loss_mask": torch.ones(rows, length, dtype=torch.int32),
        "logprobs": -torch.rand(rows, length),
        "versions": torch.zeros(rows, length, dtype=torch.int32),
        "rewards": torch.tensor([0.0, 1.0]),
        "group_ids": torch.zeros(rows, dtype=torch.long),
    }
    with peaks.phase("update"):
        actor.ppo_update(actor.compute_advantages(batch))
    with peaks.phase("state"):
        pass
    checkpoints = RecoverCheckpoints(root / "recover", keep=1)
    with peaks.phase("checkpoint"):
        checkpoints.save(1, {"actor": actor.state_dict()})
    checkpoints.in_background = True
    with peaks.phase("in background"):
        checkpoints.save(2, {"actor": actor.state_dict()})
        checkpoints.wait()
    with peaks.phase("resume"):
        actor.load_state_dict(checkpoints.load()[1]["actor"])

    def send(weights: WeightStream) -> None:
        for bucket in buckets(weights, 64 << 20):
            torch.cat([tensor.reshape(-1) for _, tensor in bucket])

    with peaks.phase("publish"):
        with_whole_weights(actor.weights(), send)
    with peaks.phase("export"):
        actor.save(root / "export")
    (root / f"rank{parallel.rank()}.json").write_text(json.dumps(peaks.found))
    parallel.wait_for_all()
    torch.distributed.destroy_process_group()


def run(path: str, ranks: int, directory: Path) -> dict[str, tuple[float, float]]:
    """Start the ranks; the largest memory and time of each phase."""
    import socket

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--as-rank", path, str(directory)],
            env={**os.environ, **world, **RETURNED_AT_ONCE, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"a rank of {ranks} failed")
    found = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {phase: tuple(max(each[phase][place] for each in found) for place in (0, 1)) for phase in PHASES}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 15 million parameters")
    parser.add_argument("--ranks", default="1,2,4", help="separated by commas")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        return rank_main(*arguments.as_rank)
    hidden, layers, vocabulary = QUICK if arguments.quick else FULL
    report = Report("memory of each rank")
    with tempfile.TemporaryDirectory() as directory:
        size = write_model(Path(directory) / "model", hidden, layers, vocabulary)
        report.machine["parameters"] = size
        first: dict[str, Any] = {}
        for ranks in map(int, arguments.ranks.split(",")):
            place = Path(directory) / f"ranks{ranks}"
            place.mkdir()
            found = run(f"{directory}/model", ranks, place)
            for phase, (mebibytes, seconds) in found.items():
                bytes_each = mebibytes * 2**20 / size
                report.row(
                    ranks=ranks,
                    phase=phase,
                    MiB=round(mebibytes, 1),
                    bytes_a_parameter=round(bytes_each, 2),
                    seconds=round(seconds, 2),
                )
                first.setdefault(phase, mebibytes)
                report.ratio(f"{phase}/{ranks} ranks", mebibytes / max(first[phase], 1e-9))
    report.finish(arguments.json)
    return None


def write_model(path: Path, hidden: int, layers: int, vocabulary: int, **more: int) -> int:
    """Write a model in a process of its own, whose memory does not count; returns its size. ``more`` are further keys of its config."""
    code = (
        "import sys; from rollwright.training.model import new_model, parameter_count\n"
        f"print(parameter_count(new_model(sys.argv[1], vocab_size={vocabulary}, hidden_size={hidden}, num_hidden_layers={layers}, "
        f"num_attention_heads={hidden // 64}, head_dim=64, **{more!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
