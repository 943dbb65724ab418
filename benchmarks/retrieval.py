"""Throughput of the retrieval service over HTTP: one query a request, 32 clients, on a procedural corpus.

    python benchmarks/retrieval.py [--passages 100000] [--clients 32] [--seconds 10] [--json FILE]

The clients run in a process of their own, on the same cores as the service. Beside it, in the same run and on the same
queries: bm25s alone, in this process, with its NumPy and its Numba back end and all queries in one call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from report import Report  # benchmarks/report.py

TOPK = 3
QUERY_WORDS = 6


def make_corpus(path: Path, passages: int, seed: int = 1) -> list[str]:
    """Passages of 60 to 140 words whose frequencies follow Zipf's law over 60,000 words; returns queries drawn from them."""
    random = np.random.default_rng(seed)
    syllables = [first + vowel for first in "bcdfghjklmnprstvz" for vowel in "aeiou"]
    words = np.array(["".join(random.choice(syllables, 2 + i % 3)) + str(i % 10) * (i % 7 == 0) for i in range(60_000)])
    shares = 1.0 / np.arange(10, len(words) + 10)
    shares /= shares.sum()
    queries = []
    with path.open("w") as file:
        for index in range(passages):
            text = words[random.choice(len(words), random.integers(60, 140), p=shares)]
            file.write(json.dumps({"id": str(index), "wikipedia_title": " ".join(text[:2]), "contents": " ".join(text)}) + "\n")
            if index % max(1, passages // 4000) == 0:
                queries.append(" ".join(random.choice(text, QUERY_WORDS, replace=False)))
    return queries


class Connection(asyncio.Protocol):
    """One client: sends a request, reads the whole answer, sends the next. No HTTP library, so that clients cost little."""

    def __init__(self, requests: list[bytes], start: int, step: int, latencies: list[float]) -> None:
        self.requests, self.position, self.step, self.latencies = requests, start, step, latencies
        self.buffer = bytearray()
        self.stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.requests[self.position % len(self.requests)])
        self.position += self.step

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        if not self.buffer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self.buffer.decode())
        length_at = self.buffer.find(b"content-length: ") + 16
        length = int(self.buffer[length_at : self.buffer.find(b"\r", length_at)])
        if len(self.buffer) < head + 4 + length:
            return
        self.latencies.append(time.perf_counter() - self.sent)
        self.buffer.clear()
        if not self.stopped:
            self.send()


async def drive(port: int, queries: list[str], clients: int, seconds: float) -> dict[str, float]:
    """Keep ``clients`` connections busy; queries a second and latencies after one second of warm-up."""
    requests = []
    for query in queries:
        body = json.dumps({"queries": [query], "topk": TOPK, "return_scores": False}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(lambda i=i: Connection(requests, i, clients, latencies), "127.0.0.1", port))[1]
        for i in range(clients)
    ]
    await asyncio.sleep(1.0)
    latencies.clear()
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed, measured = time.perf_counter() - started, sorted(latencies)
    for connection in connections:
        connection.stopped = True
    return {
        "queries_per_second": len(measured) / elapsed,
        "p50_ms": 1000 * measured[len(measured) // 2],
        "p99_ms": 1000 * measured[int(len(measured) * 0.99)],
    }


def measure_service(corpus: Path, queries: list[str], clients: int, seconds: float) -> dict[str, float]:
    """Start the service and drive it from a process of its own."""
    serve = "import typer; from rollwright.cli.serve import retrieve; typer.run(retrieve)"
    service = subprocess.Popen(
        [sys.executable, "-c", serve, "--corpus", str(corpus), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(service.stdout.readline().split(":")[-1].split()[0])
        driver = [sys.executable, __file__, "--drive", str(port), "--clients", str(clients), "--seconds", str(seconds)]
        return json.loads(subprocess.run(driver, input=json.dumps(queries), capture_output=True, text=True, check=True).stdout)
    finally:
        service.terminate()
        service.wait(10)


def measure_bm25s(corpus: Path, queries: list[str], backend: str) -> float:
    """Queries a second of bm25s alone, all queries in one call."""
    import bm25s

    from rollwright.environments.bm25 import terms
    from rollwright.environments.corpus import Corpus

    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)] for text in Corpus.from_file(corpus).texts()]
    index = bm25s.BM25(backend=backend)
    index.index((ids, vocabulary), show_progress=False, create_empty_token=False)
    asked = queries if backend == "numba" else queries[:400]
    tokens = [[vocabulary[term] for term in terms(query)] for query in asked]
    index.retrieve(tokens[:2], k=TOPK, show_progress=False)
    started = time.perf_counter()
    index.retrieve(tokens, k=TOPK, show_progress=False)
    return len(tokens) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        import uvloop

        result = uvloop.run(drive(arguments.drive, json.load(sys.stdin), arguments.clients, arguments.seconds))
        print(json.dumps(result))
        return

    report = Report("retrieval")
    size = f"{arguments.passages // 1000}k"
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        queries = make_corpus(corpus, arguments.passages)
        service = measure_service(corpus, queries, arguments.clients, arguments.seconds)
        report.row(what=f"rollwright retrieve, HTTP, {arguments.clients} clients", passages=arguments.passages, **service)
        for backend in ("numpy", "numba"):
            alone = measure_bm25s(corpus, queries, backend)
            report.row(what=f"bm25s alone, {backend}, one call", passages=arguments.passages, queries_per_second=alone)
            report.ratio(f"bm25s-{backend}/{size}", service["queries_per_second"] / alone)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
