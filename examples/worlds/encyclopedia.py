"""A small generated encyclopedia: invented people, towns and works, and questions that can only be answered by searching.

Every name is three syllables, such as ``baloki``. An article states a few facts about its subject, and an answer is a name in
an article; a two-hop question names neither the article that holds the answer nor the answer itself. A seed makes a world,
and a model that has not read a world's articles cannot know its names, so a held-out world measures searching.

    world = World(seed=1)
    world.articles[0]      # {"id", "wikipedia_title", "contents", "url"}: a row of a corpus
    world.questions(100)   # tasks: {"question", "answer", "messages", "hops", "query_id"}
    episode(task)          # the worked episode of a task, for a supervised warm-up
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.environments.bm25 import BM25Retriever
from rollwright.environments.corpus import Corpus
from rollwright.environments.retrieval import SEARCH_TOOLS, LocalSearchTool
from rollwright.errors import DataError

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
#: Number of worlds without common names: each has its own part of the name space.
DISJOINT_WORLDS = 80
_NAMES = len(SYLLABLES) ** 3
_NAMES_PER_WORLD = _NAMES // DISJOINT_WORLDS

PROMPT_TEMPLATE = "{question}\n<think>"
INFORMATION_TEMPLATE = "<information>{documents}</information>\n<think>"
DOCUMENT_TEMPLATE = "{contents}"


@dataclass(frozen=True)
class Relation:
    """A fact about a subject, as it is stated and as it is asked.

    Attributes:
        subject, target: kinds of thing: person, town, work.
        statement: text between subject and target in the article.
        question: text of a one-hop question, ``{}`` for the subject.
        inner: how a two-hop question names the target by the subject, ``{}`` for the subject.
    """

    subject: str
    target: str
    statement: str
    question: str
    inner: str


RELATIONS = {
    "birthplace": Relation("person", "town", " was born in ", "where was {} born?", "the town where {} was born"),
    "teacher": Relation("person", "person", " learned from ", "who taught {}?", "the teacher of {}"),
    "founder": Relation("town", "person", " was founded by ", "who founded {}?", "the founder of {}"),
    "river": Relation("town", "river", " lies on the river ", "on which river is {}?", ""),
    "author": Relation("work", "person", " was written by ", "who wrote {}?", "the author of {}"),
    "printer": Relation("work", "town", " was printed in ", "where was {} printed?", "the town where {} was printed"),
}
_SUBJECTS = ("person", "town", "work")

Worlds = int | str | Sequence[int]


@dataclass(frozen=True)
class Chain:
    """The steps from a question to its answer: which article is read, and for which relation."""

    subjects: tuple[str, ...]
    relations: tuple[str, ...]
    answer: str


class World:
    """People, towns, rivers and works with the facts that hold among them.

    Args:
        seed: which world. Seeds that differ modulo ``DISJOINT_WORLDS`` share no name.
        size: articles of each kind (people, towns, works).

    Raises:
        DataError: ``size`` is more than a world has names for.
    """

    def __init__(self, seed: int, size: int = 300) -> None:
        if size < 2 or 4 * size > _NAMES_PER_WORLD:
            raise DataError(f"encyclopedia: size is {size}; a world has 2 to {_NAMES_PER_WORLD // 4} things of each kind.")
        self.seed = seed
        self.size = size
        generator = random.Random(f"world {seed}")
        numbers = generator.sample(range(_NAMES_PER_WORLD), 4 * size)
        names = [_name(number * DISJOINT_WORLDS + seed % DISJOINT_WORLDS) for number in numbers]
        self.names = {kind: names[i * size : (i + 1) * size] for i, kind in enumerate((*_SUBJECTS, "river"))}
        self.facts = {
            subject: {
                key: self._target(generator, relation.target, subject)
                for key, relation in RELATIONS.items()
                if relation.subject == kind
            }
            for kind in _SUBJECTS
            for subject in self.names[kind]
        }

    def _target(self, generator: random.Random, kind: str, subject: str) -> str:
        """A name of a kind that is not the subject's own."""
        while (name := generator.choice(self.names[kind])) == subject:
            pass
        return name

    @cached_property
    def articles(self) -> list[dict[str, str]]:
        """Rows of a corpus, one for each person, town and work."""
        rows = []
        for subject, facts in self.facts.items():
            sentences = [f"{subject}{RELATIONS[key].statement}{target}." for key, target in facts.items()]
            address = f"http://encyclopedia/{self.seed}/{subject}"
            rows.append(
                {"id": f"{self.seed}-{len(rows)}", "wikipedia_title": subject, "contents": " ".join(sentences), "url": address}
            )
        return rows

    def questions(self, count: int, two_hop_share: float = 0.5, seed: int | str = 1) -> list[dict[str, Any]]:
        """Distinct tasks. A share of ``two_hop_share``, spread evenly, needs two searches.

        Raises:
            DataError: the world has fewer questions, or the share is not between 0 and 1.
        """
        if not 0.0 <= two_hop_share <= 1.0:
            raise DataError(f"encyclopedia: two_hop_share is {two_hop_share}; it is between 0 and 1.")
        generator = random.Random(f"questions {self.seed} {seed}")
        hops = [1 + int((index + 1) * two_hop_share) - int(index * two_hop_share) for index in range(count)]
        pools = {hop: self._chains(hop) for hop in (1, 2)}
        for hop, pool in pools.items():
            generator.shuffle(pool)
            if hops.count(hop) > len(pool):
                raise DataError(
                    f"encyclopedia: {hops.count(hop)} questions of {hop} hops were asked for, world {self.seed} has {len(pool)}; "
                    "raise world_size, or name more worlds."
                )
        return [self._task(pools[hop].pop()) for hop in hops]

    def _chains(self, hops: int) -> list[Chain]:
        chains = [Chain((subject,), (key,), target) for subject, facts in self.facts.items() for key, target in facts.items()]
        if hops == 1:
            return chains
        return [
            Chain((*chain.subjects, chain.answer), (*chain.relations, key), target)
            for chain in chains
            if RELATIONS[chain.relations[0]].inner
            for key, target in self.facts[chain.answer].items()
            if target not in chain.subjects
        ]

    def _task(self, chain: Chain) -> dict[str, Any]:
        described = chain.subjects[0]
        for key in chain.relations[:-1]:
            described = RELATIONS[key].inner.format(described)
        question = RELATIONS[chain.relations[-1]].question.format(described)
        return {
            "question": question,
            "answer": [chain.answer],
            "messages": [{"role": "user", "content": question}],
            "hops": len(chain.relations),
            "searches": list(chain.subjects),
            "evidence": [_article_text(subject, self.facts[subject]) for subject in chain.subjects],
            "query_id": f"{self.seed}:{question}",
        }


def _name(number: int) -> str:
    syllables = []
    for _ in range(3):
        number, index = divmod(number, len(SYLLABLES))
        syllables.append(SYLLABLES[index])
    return "".join(syllables)


def _article_text(subject: str, facts: dict[str, str]) -> str:
    return " ".join(f"{subject}{RELATIONS[key].statement}{target}." for key, target in facts.items())


def episode(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The worked episode of a task, as ``segments``: ``[{"text", "train"}]``, in the form that the search agent runs.

    The thought states how many articles remain to be read; the search copies a name from the question or from the last article.
    """
    segments = [{"text": PROMPT_TEMPLATE.format(question=task["question"]), "train": False}]
    steps = len(task["searches"])
    for step, (name, article) in enumerate(zip(task["searches"], task["evidence"], strict=True)):
        segments.append({"text": f"{_thought(steps - step)}</think><search>{name}</search>", "train": True})
        segments.append({"text": INFORMATION_TEMPLATE.format(documents=article), "train": False})
    segments.append({"text": f"{_thought(0)}</think><answer>{task['answer'][0]}</answer>", "train": True})
    return segments


def _thought(remaining: int) -> str:
    return ("known", "one step", "two steps")[remaining]


def vocabulary() -> list[str]:
    """Strings that are one token each for a small model: syllables, the phrases of questions and articles, and the tags."""
    phrases = [relation.statement for relation in RELATIONS.values()]
    for relation in RELATIONS.values():
        phrases += [part for template in (relation.question, relation.inner) for part in template.split("{}") if len(part) > 1]
    thoughts = [_thought(remaining) for remaining in range(3)]
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
    other = ["Nothing was found.", "The search was empty.", "No search engine is connected."]
    return [*SYLLABLES, *dict.fromkeys([*phrases, ". ", *thoughts, *tags, *other])]


@DATASET_REGISTRY.register("encyclopedia_questions")
def questions(
    split: str = "train",
    size: int = 2000,
    worlds: Worlds = 1,
    world_size: int = 300,
    two_hop_share: float = 0.5,
    seed: int = 1,
    worked: bool = False,
) -> list[dict[str, Any]]:
    """A taskset over one or several worlds.

    Args:
        split: only part of the random seed; to keep splits disjoint, give them different ``worlds``.
        size: number of tasks, shared evenly among the worlds.
        worlds: the worlds' seeds; see ``world_seeds``. Many small worlds teach copying, one large world can be learned by heart.
        world_size: articles of each kind in a world.
        two_hop_share: share of questions that need two searches, in each world.
        seed: which questions.
        worked: add ``segments``, the worked episode, for supervised training.
    """
    seeds = world_seeds(worlds)
    tasks = []
    for index, world_seed in enumerate(seeds):
        count = size // len(seeds) + (index < size % len(seeds))
        tasks += World(world_seed, world_size).questions(count, two_hop_share, seed=f"{split} {seed}")
    if worked:
        tasks = [{**task, "segments": episode(task)} for task in tasks]
    return tasks


@SEARCH_TOOLS.register("encyclopedia")
def tool(worlds: Worlds = 1, world_size: int = 300) -> LocalSearchTool:
    """A search tool in this process over the articles of the given worlds."""
    seeds = world_seeds(worlds)
    corpus = Corpus.from_rows((row for seed in seeds for row in World(seed, world_size).articles), name="encyclopedia")
    return LocalSearchTool(corpus, BM25Retriever.build(corpus.texts()))


def write_corpus(path: str | Path, worlds: Worlds = 1, world_size: int = 300) -> int:
    """Write the articles of some worlds as a corpus for ``rollwright retrieve``; returns the number of rows."""
    seeds = world_seeds(worlds)
    rows = [row for seed in seeds for row in World(seed, world_size).articles]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def world_seeds(worlds: Worlds) -> list[int]:
    """The seeds that ``worlds`` names: a seed, a list of them, or text such as ``"1-40"`` or ``"1-40,50"``.

    Raises:
        DataError: it is none of these, or two of the worlds would share names.
    """
    if isinstance(worlds, int):
        return [worlds]
    try:
        if isinstance(worlds, str):
            ranges = [(part.split("-") * 2)[:2] for part in worlds.split(",")]
            seeds = [seed for first, last in ranges for seed in range(int(first), int(last) + 1)]
        else:
            seeds = [int(seed) for seed in worlds]
    except (TypeError, ValueError):
        raise DataError(
            f"encyclopedia: worlds is {worlds!r}; give a seed, a list of seeds, or text such as '1-40,50'."
        ) from None
    if not seeds or len({seed % DISJOINT_WORLDS for seed in seeds}) < len(seeds):
        raise DataError(f"encyclopedia: worlds {worlds} would share names; give seeds that differ modulo {DISJOINT_WORLDS}.")
    return seeds
