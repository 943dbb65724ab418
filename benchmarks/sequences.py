"""SequenceProcessor against a plain transformers loop: responses with log-probabilities and entropies, speed and memory.

    python benchmarks/sequences.py [--sizes 1M,5M] [--parts speed,memory,long] [--threads N] [--json FILE]

**speed**: 32 prompts of 24 to 40 tokens, 8 responses each, at temperature 1. The end token is made likely enough that lengths
spread as those of trained models do (geometric, mean about 48, cut at 200). The loop is what people write: pad on the left,
``model.generate``, then a full forward, ``log_softmax`` over all positions, gather and entropy, in batches of the same sizes
as ours; it is run at several batch sizes and its best counts. Useful tokens are those up to the end token. Rounds are
interleaved and the best of each side counts.

**memory**: the same at 0.5 M parameters without the head and a vocabulary of 32,768, each side in a process of its own: the
peak of the resident memory above what the loaded model takes, at equal batch sizes.

**long**: 8,192 generations written in shards, and the resident memory along the way.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from report import Report

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor

PROMPTS, GROUP, MOST, MEAN = 32, 8, 200, 48
SIZES = {
    "1M": {"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocabulary": 2048},
    "5M": {"hidden_size": 256, "layers": 5, "heads": 4, "kv_heads": 2, "vocabulary": 4096},
    "32k": {"hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocabulary": 32768},
}
#: ``--clock processor`` counts processor seconds: with one thread they say what a busy machine's wall clock cannot.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def tokenizer_of(vocabulary: int):
    """Every token a character, so that texts and ids correspond."""
    return build_character_tokenizer([chr(0x4E00 + i) if i < 20000 else chr(0x20000 + i) for i in range(vocabulary - 6)])


def model_of(size: str):
    """A random Qwen3 that ends with probability 1/48 at each token: the head's row of the end token follows a constant
    direction of the hidden state, which the final norm's weights carry."""
    s = SIZES[size]
    tokenizer = tokenizer_of(s["vocabulary"])
    config = transformers.Qwen3Config(
        vocab_size=s["vocabulary"],
        hidden_size=s["hidden_size"],
        intermediate_size=3 * s["hidden_size"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["hidden_size"] // s["heads"],
        tie_word_embeddings=False,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # One coordinate of every embedding is large and positive, so that the normalised hidden state has it everywhere.
        model.model.embed_tokens.weight[:, 0] = 8 * model.model.embed_tokens.weight[:, 1:].norm(dim=1).mean()
        model.lm_head.weight[:, 0] = 0.0
        hidden = model.model(torch.arange(10, 58)[None]).last_hidden_state[0, :, 0].mean()
        wanted = torch.log(torch.tensor(s["vocabulary"] / (MEAN - 1.0)))
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = wanted / hidden
    return model, tokenizer


def prompts_of(tokenizer, count: int = PROMPTS) -> list[str]:
    generator = np.random.default_rng(7)
    return [tokenizer.decode(generator.integers(10, len(tokenizer), generator.integers(24, 41))) for _ in range(count)]


def ours(model, tokenizer, prompts: list[str], gen_batch: int, tf_batch: int) -> int:
    """One run; the number of useful tokens."""
    config = GenerationConfig(max_new_tokens=MOST, gen_batch_size=gen_batch, tf_batch_size=tf_batch)
    sequences, results = SequenceProcessor(model, tokenizer, config, progress=False).generate_with_logprobs(prompts, GROUP)
    assert all(
        len(e) == n for x, y in zip(results.entropies, sequences.gen_lens, strict=True) for e, n in zip(x, y, strict=True)
    )
    return sum(map(sum, sequences.gen_lens))


@torch.no_grad()
def transformers_loop(model, tokenizer, prompts: list[str], gen_batch: int, tf_batch: int) -> int:
    """The same with ``generate`` and a full forward; the number of useful tokens."""
    tokenizer.padding_side = "left"
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    rows: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for start in range(0, len(repeated), gen_batch):
        inputs = tokenizer(repeated[start : start + gen_batch], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MOST)
        width = inputs["input_ids"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, width:])], 1)
        rows += [(ids, keep, width) for ids, keep in zip(output, mask, strict=True)]
    useful = 0
    for start in range(0, len(rows), tf_batch):
        batch = rows[start : start + tf_batch]
        length = max(len(ids) for ids, _, _ in batch)
        ids = torch.stack([torch.nn.functional.pad(i, (0, length - len(i)), value=tokenizer.pad_token_id) for i, _, _ in batch])
        mask = torch.stack([torch.nn.functional.pad(m, (0, length - len(m))) for _, m, _ in batch])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        for index, (tokens, _, width) in enumerate(batch):
            ends = (tokens[width:] == tokenizer.eos_token_id).nonzero()
            count = int(ends[0]) + 1 if len(ends) else len(tokens) - width
            assert torch.isfinite(chosen[index, width - 1 : width - 1 + count]).all()
            assert torch.isfinite(entropy[index, width - 1 : width - 1 + count]).all()
            useful += count
    return useful


def measure_speed(size: str, arguments: argparse.Namespace, report: Report) -> None:
    """Interleaved rounds of both sides at each batch size."""
    model, tokenizer = model_of(size)
    prompts, clock = prompts_of(tokenizer, arguments.prompts), CLOCKS[arguments.clock]
    rates: dict[tuple[str, int], list[float]] = {}
    ours(model, tokenizer, prompts[:4], 32, 64)
    for _ in range(arguments.rounds):
        for batch in arguments.batches:
            for name, run in (("rollwright", ours), ("transformers loop", transformers_loop)):
                gc.collect()
                start = clock()
                useful = run(model, tokenizer, prompts, batch, 2 * batch)
                rates.setdefault((name, batch), []).append(useful / (clock() - start))
                print(f"{size}, gen {batch}: {name} {rates[name, batch][-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    best: dict[str, float] = {}
    for (name, batch), values in rates.items():
        best[name] = max(best.get(name, 0.0), *values)
        report.row(
            part=f"speed, {size}",
            side=f"{name}, gen {batch}, tf {2 * batch}",
            useful_tokens_per_second=max(values),
            rounds=" ".join(f"{value:,.0f}" for value in values),
        )
    report.ratio(f"transformers_loop/{size}", best["rollwright"] / best["transformers loop"])


def _resident(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _memory_of(side: str, threads: int, answer) -> None:
    torch.set_num_threads(threads)
    quiet()
    model, tokenizer = model_of("32k")
    prompts = prompts_of(tokenizer, 16)
    run = ours if side == "rollwright" else transformers_loop
    run(model, tokenizer, prompts[:1], 8, 8)  # what libraries allocate at their first use is not the point
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _resident("VmRSS")
    run(model, tokenizer, prompts, 32, 64)
    answer.put((before, _resident("VmHWM")))


def measure_memory(arguments: argparse.Namespace, report: Report) -> None:
    """Peak above the loaded model, each side in a process of its own."""
    context, above = multiprocessing.get_context("spawn"), {}
    for side in ("rollwright", "transformers loop"):
        answer = context.Queue()
        process = context.Process(target=_memory_of, args=(side, arguments.threads, answer))
        process.start()
        before, peak = answer.get(timeout=280)
        process.join()
        above[side] = peak - before
        report.row(part="memory, vocabulary 32k", side=side, above_model_mib=(peak - before) / 2**20, peak_mib=peak / 2**20)
    report.ratio("peak_memory", above["rollwright"] / above["transformers loop"])


def measure_long_run(arguments: argparse.Namespace, report: Report) -> None:
    """8,192 generations in shards; resident memory after each quarter."""
    model, tokenizer = model_of("1M")
    config = GenerationConfig(max_new_tokens=MOST, gen_batch_size=128, tf_batch_size=128)
    processor = SequenceProcessor(model, tokenizer, config, progress=False)
    resident: list[float] = []
    shard = processor.shard

    def shard_and_look(*args):
        gc.collect()
        resident.append(_resident("VmRSS") / 2**20)
        return shard(*args)

    processor.shard = shard_and_look  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        experiment = processor.generate_to_shards(
            Path(directory) / "x", prompts_of(tokenizer, 1024), GROUP, seed=1, prompts_per_shard=64
        )
        seconds = time.perf_counter() - start
        rows = tokens = 0
        for row in experiment.rows():
            rows, tokens = rows + 1, tokens + len(row["response_ids"])
    assert rows == 1024 * GROUP
    quarters = [resident[len(resident) * part // 4] for part in (1, 2, 3)] + [resident[-1]]
    report.row(
        part="long, 1M",
        side="rollwright, 8,192 generations",
        useful_tokens_per_second=tokens / seconds,
        rounds="resident MiB at each quarter: " + " ".join(f"{value:,.0f}" for value in quarters),
    )
    report.row(
        part="long, 1M", side="growth from the second shard to the last, MiB", above_model_mib=resident[-1] - resident[1]
    )


def measure_share_changed(report: Report) -> None:
    """How many responses another generation batch size changes, with one seed."""
    model, tokenizer = model_of("1M")
    processor = SequenceProcessor(model, tokenizer, GenerationConfig(max_new_tokens=MOST), progress=False)
    prompts = prompts_of(tokenizer)
    first = processor.generate_batched(prompts, GROUP, seed=1, gen_batch_size=256)
    other = processor.generate_batched(prompts, GROUP, seed=1, gen_batch_size=48)
    share = first.share_changed(other)
    report.row(part="batch size, 1M", side=f"responses changed by gen 48 in place of 256: {share:.2%} of {PROMPTS * GROUP}")


def quiet() -> None:
    """Notes of libraries do not belong in the table."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1M,5M", help="comma-separated, of: 1M, 5M")
    parser.add_argument("--parts", default="speed,memory,long", help="comma-separated, of: speed, memory, long")
    parser.add_argument("--batches", type=lambda t: [int(w) for w in t.split(",")], default=[64, 128, 256])
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"prompts of a round, {GROUP} responses each")
    parser.add_argument("--rounds", type=int, default=2, help="interleaved repeats; the best counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every side")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: processor seconds, for --threads 1")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    arguments = parser.parse_args()
    if arguments.clock == "processor" and arguments.threads != 1:
        parser.error("--clock processor compares work on one thread: use --threads 1")
    torch.set_num_threads(arguments.threads)
    quiet()
    report = Report("Sequences with log-probabilities and entropies")
    for part in arguments.parts.split(","):
        if part == "speed":
            for size in arguments.sizes.split(","):
                measure_speed(size, arguments, report)
        elif part == "memory":
            measure_memory(arguments, report)
        elif part == "long":
            measure_long_run(arguments, report)
            measure_share_changed(report)
        else:
            parser.error(f"--parts: {part} is none of speed, memory, long")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
