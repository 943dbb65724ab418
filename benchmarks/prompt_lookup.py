"""What prompt lookup gains: the built-in engine with and without ``prompt_lookup_tokens``, on replies that repeat tool text and on prose.

    python benchmarks/prompt_lookup.py [--sizes 26M,135M] [--rows 1,4,16] [--drafted 8] [--rounds 3] [--json FILE]

Prompts contain a tool result, a piece of this repository's code. Replies are scripted. An ``agent`` explains in a few words what it will
do, then writes the piece again with edits, one in about 25 tokens. A ``prose`` reply is text of the documentation, which repeats only what prose
repeats. Models have random weights of the given shapes; after each forward pass the score of the scripted token is raised, so that the
engine computes and samples as it would for a model that writes this text. A token is a word or a character of punctuation.

Rounds are interleaved. Figures are sampled tokens per second, the best of the rounds; ``prompt_lookup/SIZE-TEXT-ROWS`` is the ratio with and
without, for that number of requests at a time. ``accepted`` is the share of drafted tokens that were drawn, ``wide`` that of steps with drafts.
"""

from __future__ import annotations

import argparse
import os
import re
import zlib
from pathlib import Path
from typing import Any

import generation
import numpy as np
import torch
from generation import CLOCKS, SIZES, qwen3
from real_sizes import SHAPES
from report import Report

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.batch import DecodeBatch
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

ROOT = Path(__file__).parents[1]
TOOL_TOKENS, THOUGHT_TOKENS, REPLY_TOKENS, EDIT_EVERY = 300, 25, 160, 25


def tokens_of(paths: list[Path], vocabulary: int) -> list[int]:
    """The words and punctuation of text files, as ids by their checksum."""
    words = (word for path in paths for word in re.findall(r"\w+|[^\w\s]|\n *", path.read_text()))
    return [10 + zlib.crc32(word.encode()) % (vocabulary - 10) for word in words]


def workload(text: str, requests: int, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and scripted replies, the same in every run."""
    generator = np.random.default_rng(7)
    code = tokens_of(sorted((ROOT / "src/rollwright/inference").rglob("*.py")), vocabulary)
    prose = tokens_of([ROOT / "docs/rollout.md", ROOT / "docs/determinism.md", ROOT / "docs/scale.md"], vocabulary)
    prompts, replies = [], []
    for _ in range(requests):
        begin = int(generator.integers(len(code) - TOOL_TOKENS))
        tool = code[begin : begin + TOOL_TOKENS]
        begin = int(generator.integers(len(prose) - 400))
        prompts.append([*prose[begin : begin + 80], *tool])
        reply = prose[begin + 100 : begin + 100 + REPLY_TOKENS]
        if text == "agent":
            again = tool[-(REPLY_TOKENS - THOUGHT_TOKENS) - 40 : -40]
            for place in range(int(generator.integers(EDIT_EVERY)), len(again), EDIT_EVERY):
                again[place] = int(generator.integers(10, vocabulary))
            reply = reply[:THOUGHT_TOKENS] + again
        replies.append(reply)
    return prompts, replies


class Scripted:
    """A forward pass whose decode steps make the scripted token the likely one. The first token of a reply is not scripted.

    Args:
        engine: the engine whose forward pass it replaces.
        texts: prompt and reply of each request, by seed.
    """

    def __init__(self, engine: BuiltinEngine, texts: dict[int, list[int]]) -> None:
        self._forward, self._scheduler, self._texts = engine._runner.forward, engine._stepper.scheduler, texts
        engine._runner.forward = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __call__(self, batch: Any, cache: Any) -> torch.Tensor:
        logits = self._forward(batch, cache)
        if isinstance(batch, DecodeBatch) or batch.scores_all:
            running = self._scheduler.running
            places = zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)
            following = [self._texts[running[row].seed][column + 1] for row, column in places]
            logits[torch.arange(len(following)), torch.tensor(following)] += 1000.0
        return logits


def seconds(engine: BuiltinEngine, prompts: list[list[int]], replies: list[list[int]]) -> float:
    """Seconds for all requests without their prompts, which an earlier request has left in the cache."""
    requests = [
        ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=len(reply), ignore_eos=True), seed=index)
        for index, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    engine.flush_cache()
    engine.generate([ModelRequest(request.input_ids, request.gconfig.new(max_new_tokens=1), seed=0) for request in requests])
    begun = generation.clock()
    responses = engine.generate(requests)
    taken = generation.clock() - begun
    for response, reply in zip(responses, replies, strict=True):
        assert response.output_tokens[1:] == reply[1:]
    return taken


def new_model(size: str) -> Any:
    """A random model in float32."""
    if size in SIZES:
        return qwen3(**SIZES[size])
    import transformers

    shape = {name: value for name, value in SHAPES[size].items() if name != "architecture"}
    config = transformers.AutoConfig.for_model(SHAPES[size]["architecture"], **shape, tie_word_embeddings=True)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def measure(size: str, arguments: argparse.Namespace, report: Report) -> None:
    """Measure one size in interleaved rounds."""
    model = new_model(size)
    for rows in map(int, arguments.rows.split(",")):
        settings: dict[str, Any] = {"max_running_requests": rows, "kv_cache_bytes": 1 << 30, "threads": arguments.threads}
        for text in arguments.texts.split(","):
            prompts, replies = workload(text, max(arguments.requests, rows), model.config.vocab_size)
            texts = {
                index: prompt + reply + [0] * 64 for index, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
            }
            rates: dict[str, list[float]] = {"without": [], "with": []}
            engines = {"without": BuiltinEngine(model, **settings)}
            engines["with"] = BuiltinEngine(model, prompt_lookup_tokens=arguments.drafted, **settings)
            for engine in engines.values():
                Scripted(engine, texts)
                seconds(engine, prompts[:rows], [reply[:8] for reply in replies[:rows]])
            for _ in range(arguments.rounds):
                for side, engine in engines.items():
                    rates[side].append(sum(map(len, replies)) / seconds(engine, prompts, replies))
            stats = engines["with"].stats()
            for engine in engines.values():
                engine.destroy()
            best = {side: max(values) for side, values in rates.items()}
            report.row(
                model=size,
                text=text,
                rows=rows,
                without=best["without"],
                **{"with": best["with"]},
                ratio=best["with"] / best["without"],
                accepted=stats["accepted_tokens"] / max(1, stats["drafted_tokens"]),
                wide=stats["wide_steps"] / stats["steps"],
                rounds=" ".join(f"{w / o:.2f}" for w, o in zip(rates["with"], rates["without"], strict=True)),
            )
            report.ratio(f"prompt_lookup/{size}-{text}-{rows}", best["with"] / best["without"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="26M,135M", help="comma-separated, of: " + ", ".join([*SIZES, *SHAPES]))
    parser.add_argument("--rows", default="1,4,16", help="comma-separated numbers of requests at a time")
    parser.add_argument("--texts", default="agent,prose", help="comma-separated, of: agent, prose")
    parser.add_argument("--requests", type=int, default=8, help="number of requests, unless there are more rows")
    parser.add_argument("--drafted", type=int, default=8, help="prompt_lookup_tokens")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repeats; the best of each side counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of both sides (default: all cores)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: processor seconds, with --threads 1")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    arguments = parser.parse_args()
    if arguments.clock == "processor" and arguments.threads != 1:
        parser.error("--clock processor compares work on one thread: use --threads 1")
    generation.clock = CLOCKS[arguments.clock]
    torch.set_num_threads(arguments.threads)
    report = Report("Prompt lookup: sampled tokens per second")
    for size in arguments.sizes.split(","):
        measure(size, arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
