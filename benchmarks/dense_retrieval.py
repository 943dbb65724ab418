"""Recall of BM25, dense and hybrid search on real questions, with encoders that are trained here in about a minute each.

    python benchmarks/dense_retrieval.py DATA [--folds 4] [--only N] [--steps 120] [--save DIR] [--json FILE]

DATA holds ``corpus.jsonl`` (id, contents, wikipedia_title) and ``train.jsonl`` and ``valid.jsonl`` (question, passage_id). The questions
are divided into folds. Those of each fold are searched with an encoder that was trained on the questions of the other folds, and on
made-up questions about all passages. No encoder has seen a question that it is measured on. Nor has the weight of BM25's list in the last
row: of several weights, each fold is searched with the one that has the best mean reciprocal rank on the other folds.

The encoder is minimal: token vectors, a layer norm and their mean, saved as a BERT without layers. Without attention, the vector of a
text is a sparse product, which makes it cheap to compare the questions of every step with all passages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Report  # benchmarks/report.py
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from rollwright.environments.corpus import Corpus
from rollwright.environments.encoders import encoder_settings
from rollwright.environments.retrieval import RETRIEVERS, open_retriever

MAX_TOKENS = 256
CUTS = (1, 3, 10)
WEIGHTS = (1.0, 2.0, 4.0, 8.0, 16.0)  # of BM25's list in hybrid search
CHOSEN = "hybrid, weight chosen on the other folds"


class Texts:
    """Passages and questions as token ids, and what made-up questions are drawn from."""

    def __init__(self, corpus: Corpus, vocabulary: int) -> None:
        words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        words.normalizer = normalizers.BertNormalizer(lowercase=True)
        words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]"]
        words.train_from_iterator(
            corpus.texts(), trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
        )
        self.tokenizer = words
        self.passages = [self.ids(text) for text in corpus.texts()]
        self.titles = [self.ids(corpus.document(row).get("wikipedia_title", "")) for row in range(len(corpus))]
        held = np.zeros(words.get_vocab_size())
        for ids in self.passages:
            held[list(set(ids))] += 1
        self.rarity = np.log(len(corpus) / np.maximum(held, 1))
        self.is_common = held > 0.05 * len(corpus)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids[:MAX_TOKENS]

    def made_up(self, row: int, question: list[int], random: np.random.Generator) -> list[int]:
        """Replace the rare words of a real question by words of a passage, which are mostly rare as well."""
        size = max(2, sum(not self.is_common[token] for token in question))
        passage = self.passages[row]
        if random.random() < 0.5:  # words that stand close together
            start = random.integers(max(1, len(passage) - 20))
            passage = passage[start : start + 25]
        shares = self.rarity[passage] + 0.05
        drawn = random.choice(passage, min(size, len(passage)), p=shares / shares.sum(), replace=False).tolist()
        if random.random() < 0.6:
            drawn = drawn[: max(1, len(drawn) - len(self.titles[row]))]
            drawn += [token for token in self.titles[row] if random.random() < 0.8]
        return drawn + [token for token in question if self.is_common[token]]


def train(texts: Texts, pairs: list[tuple[str, int]], arguments: argparse.Namespace, folder: Path) -> None:
    """Train an encoder on pairs of a question and its passage's row, and save it."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    size = texts.tokenizer.get_vocab_size()
    config = BertConfig(
        vocab_size=size,
        hidden_size=arguments.dimensions,
        num_hidden_layers=0,
        num_attention_heads=1,
        max_position_embeddings=MAX_TOKENS,
        layer_norm_eps=0.0025,  # of the size of the first vectors' variance, so that common words can keep short vectors
    )
    model = BertModel(config)
    embeddings = model.embeddings
    with torch.no_grad():
        embeddings.word_embeddings.weight.normal_(std=0.05)  # times the rarity: a random projection of TF-IDF to begin with
        embeddings.word_embeddings.weight.mul_(torch.from_numpy(texts.rarity / texts.rarity.mean()).float()[:, None])
        embeddings.position_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight.zero_()
    weights = [embeddings.word_embeddings.weight, *embeddings.LayerNorm.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=arguments.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.02, 1 - step / arguments.steps)
    )

    def vectors(batch: list[list[int]]) -> torch.Tensor:
        rows = np.repeat(np.arange(len(batch)), [len(ids) for ids in batch])
        kept = (random.random(len(rows)) >= 0.1).astype(np.float32)
        places = torch.from_numpy(np.stack([rows, np.concatenate(batch)]))
        counts = torch.sparse_coo_tensor(places, torch.from_numpy(kept), (len(batch), size), check_invariants=False)
        return torch.nn.functional.normalize(torch.sparse.mm(counts, embeddings.LayerNorm(weights[0])), dim=-1)

    questions = [(texts.ids(question), row) for question, row in pairs]
    real = arguments.batch // 4
    for _ in range(arguments.steps):
        batch = [questions[number] for number in random.choice(len(questions), real, replace=False)]
        for row in random.choice(len(texts.passages), arguments.batch - real, replace=False).tolist():
            like = questions[random.integers(len(questions))][0]
            batch.append((texts.made_up(row, like, random), row))
        scores = vectors([ids for ids, _ in batch]) @ vectors(texts.passages).T / arguments.temperature
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor([row for _, row in batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=texts.tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def ranks(retriever: Any, questions: list[str], rows: list[int]) -> list[float]:
    """Rank of each question's passage, from 1; infinite if it is not among the first 100."""
    found = [hits.rows.tolist() for hits in retriever.search(questions, 100)]
    again = [hits.rows.tolist() for hits in retriever.search(questions[::-1], 100)][::-1]
    if found != again:
        raise SystemExit(f"{retriever.name}: the order depends on what is searched together")
    return [hits.index(row) + 1 if row in hits else float("inf") for hits, row in zip(found, rows, strict=True)]


def figures(ranks: np.ndarray) -> dict[str, Any]:
    """Recall and mean reciprocal rank."""
    recalls = {f"recall@{cut}": float(np.mean(ranks <= cut)) for cut in CUTS}
    return {"questions": len(ranks), **recalls, "mean_reciprocal_rank": float(np.mean(1 / ranks))}


def chosen(found: dict[str, list[np.ndarray]], report: Report) -> list[np.ndarray]:
    """Ranks of each fold with the weight that is best on the other folds; of equal ones, the smallest."""
    weighted = {weight: found["hybrid" if weight == 1.0 else f"hybrid, weight {weight:g}"] for weight in WEIGHTS}
    picked = []
    for fold in range(len(found["hybrid"])):
        others = {weight: np.mean(1 / np.concatenate(each[:fold] + each[fold + 1 :])) for weight, each in weighted.items()}
        best = max(others, key=others.__getitem__)
        report.row(what=f"weight for fold {fold + 1}", weight=best)
        picked.append(weighted[best][fold])
    return picked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--only", type=int, help="Measure the first folds only.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--save", type=Path, help="Keep the first encoder here.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    report = Report("dense_retrieval")
    corpus = Corpus.from_file(arguments.data / "corpus.jsonl")
    row_of = {corpus.document(row)["id"]: row for row in range(len(corpus))}
    lines = [line for name in ("train", "valid") for line in (arguments.data / f"{name}.jsonl").read_text().splitlines()]
    pairs = [(row["question"], row_of[row["passage_id"]]) for row in map(json.loads, lines)]
    fold_of = np.random.default_rng(0).permutation(len(pairs)) % arguments.folds
    texts = Texts(corpus, arguments.vocabulary)
    found: dict[str, list[np.ndarray]] = {}  # of each fold
    trained = 0.0
    folds = range(arguments.only or arguments.folds)
    with tempfile.TemporaryDirectory() as work:
        for fold in folds:
            folder = arguments.save if arguments.save and fold == 0 else Path(work) / f"encoder-{fold}"
            started = time.process_time()
            train(texts, [pair for pair, own in zip(pairs, fold_of, strict=True) if own != fold], arguments, folder)
            trained += time.process_time() - started
            held_out = [pair for pair, own in zip(pairs, fold_of, strict=True) if own == fold]
            questions, rows = [question for question, _ in held_out], [row for _, row in held_out]
            for name, weight in [*((name, None) for name in RETRIEVERS), *(("hybrid", weight) for weight in WEIGHTS[1:])]:
                encoder = None if name == "bm25" else encoder_settings(folder, "plain", max_tokens=MAX_TOKENS)
                _, retriever = open_retriever(
                    arguments.data / "corpus.jsonl", name, encoder, Path(work) / "index", bm25_weight=weight
                )
                found.setdefault(name if weight is None else f"hybrid, weight {weight:g}", []).append(
                    np.asarray(ranks(retriever, questions, rows))
                )
    if len(folds) > 1:
        found[CHOSEN] = chosen(found, report)
    for fold in folds if len(folds) > 1 else ():
        for name in ("bm25", "dense", "hybrid", CHOSEN):
            report.row(what=f"fold {fold + 1}: {name}", **figures(found[name][fold]))
    for name, each in found.items():
        report.row(what=name, **figures(np.concatenate(each)))
    report.row(what=f"training an encoder ({arguments.steps} steps)", cpu_seconds=trained / len(folds))
    shares = {name: figures(np.concatenate(each)) for name, each in found.items()}
    for name in [name for name in ("hybrid", CHOSEN) if name in shares]:
        for cut in CUTS:
            best = max(shares["bm25"][f"recall@{cut}"], shares["dense"][f"recall@{cut}"])
            report.ratio(f"{name} over the better of the two/recall@{cut}", shares[name][f"recall@{cut}"] / best)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
