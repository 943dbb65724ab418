"""How long new weights take to an engine, by each way: to one in this process, and to a server on this machine.

    python benchmarks/publication.py [--quick] [--repeats 3] [--device cuda] [--json FILE]

A model of 104 million parameters in float32 (``--quick``: 15 million) goes to the built-in engine in this process (``memory``) and to one
``rollwright serve-model`` (``shared`` memory, ``disk`` below /dev/shm or the temporary directory, and ``xccl`` over Gloo, in buckets of
64 MiB). The seconds are those of ``update_weights`` alone: from the pause to the server that confirms the version and goes on,
without the audit that follows every publication in a run. The first publication by each way makes its file or its group and is shown
apart; the others are the least of ``--repeats``. The ratio of a way is its time against ``memory``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rank_memory import FULL, QUICK, write_model
from report import Report


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 15 million parameters")
    parser.add_argument("--repeats", type=int, default=3, help="publications by each way, beside the first")
    parser.add_argument("--device", default="cpu", help="of the weights and of the engine in this process")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from rollwright.config.sections import RolloutConfig
    from rollwright.data.tokenizer import load_tokenizer
    from rollwright.inference.backends.builtin.engine import BuiltinEngine
    from rollwright.inference.backends.sglang import BuiltinServersBackend
    from rollwright.inference.remote import RemoteInferenceEngine
    from rollwright.inference.weights.transfer import WeightUpdateMeta
    from rollwright.placement.local_servers import LocalServers

    torch.set_num_threads(1)
    report = Report("publication of weights")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        hidden, layers, vocabulary = QUICK if arguments.quick else FULL
        report.machine["parameters"] = size = write_model(path, hidden, layers, vocabulary)

        def load():
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(arguments.device)

        model = load()
        weights = dict(model.state_dict())
        seconds: dict[str, float] = {}

        def measure(way: str, engine, meta: WeightUpdateMeta, first_version: int) -> None:
            took = []
            for number in range(arguments.repeats + 1):
                started = time.perf_counter()
                engine.update_weights(meta, version=first_version + number, weights=weights)
                took.append(time.perf_counter() - started)
            seconds[way] = min(took[1:])
            report.row(
                way=way,
                MB=round(size * 4 / 1e6),
                first_seconds=round(took[0], 2),
                seconds=round(seconds[way], 3),
                GB_a_second=round(size * 4 / 1e9 / seconds[way], 2),
            )

        engine = BuiltinEngine(load(), load_tokenizer(str(path)))
        measure("memory", engine, WeightUpdateMeta.memory(), 1)
        engine.destroy()
        rollout = RolloutConfig(backend="builtin_process", setup_timeout=600)
        with LocalServers(rollout, model_path=str(path), logs=Path(directory) / "logs", threads=1) as servers:
            client = RemoteInferenceEngine(BuiltinServersBackend, rollout, addresses=servers.addresses)
            client.initialize()
            ways = {
                "shared": WeightUpdateMeta.shared(servers.weights_root / "shared"),
                "disk": WeightUpdateMeta.from_disk(servers.weights_root / "disk"),
                "xccl": WeightUpdateMeta("xccl", backend="gloo", bucket_bytes=64 << 20),
            }
            for number, (way, meta) in enumerate(ways.items()):
                measure(way, client, meta, 100 * (number + 1))
            client.destroy()
        for way, took in seconds.items():
            report.ratio(f"memory/{way}", took / seconds["memory"])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
