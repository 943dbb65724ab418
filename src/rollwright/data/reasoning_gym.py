"""Tasks of the reasoning-gym package, by name (``pip install 'rollwright[reasoning-gym]'``)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rollwright.data.splits import check_split, split_of
from rollwright.errors import DataError
from rollwright.registry import nearest

#: Maximum number of entries drawn for each requested task, because a generator may run out of new questions.
DRAWS_PER_TASK = 50


def reasoning_gym_tasks(
    name: str, split: str = "train", size: int = 1000, seed: int = 1, **config: Any
) -> list[dict[str, Any]]:
    """Make tasks with one generator.

    Args:
        name: the generator's name, such as ``chain_sum``.
        split: train, valid or test. A hash assigns each question to one split, so splits share no question.
        size: number of tasks.
        seed: seed of the generator.
        **config: further settings of the generator, such as ``min_terms``.

    Returns:
        Rows with ``messages``, ``answer``, ``query_id`` and ``entry``, which ``score`` needs.

    Raises:
        DataError: the package is missing, the name or a setting is unknown, or the generator has too few questions.
    """
    check_split(f"reasoning_gym:{name}", split)
    dataset = _dataset(name, size * DRAWS_PER_TASK, seed, tuple(sorted(config.items())))
    rows: dict[str, dict[str, Any]] = {}
    for index in range(size * DRAWS_PER_TASK):
        if len(rows) == size:
            break
        entry = dataset[index]
        question = entry["question"]
        if split_of(question) == split and question not in rows:
            rows[question] = {
                "messages": [{"role": "user", "content": question}],
                "answer": entry["answer"],
                "query_id": f"{name}/{seed}/{index}",
                "entry": {**entry, "reasoning_gym": name},
            }
    if len(rows) < size:
        raise DataError(
            f"reasoning_gym:{name}: only {len(rows)} different questions of split {split!r} found; lower size ({size})."
        )
    return list(rows.values())


def score(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Score the answer (between ``<answer>`` tags, or the whole text) with the generator, from 0 to 1. A reward function."""
    entry = data["entry"]
    answer = completion.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0]
    return float(_dataset(entry["reasoning_gym"], 1, 1, ()).score_answer(answer.strip(), entry))


@lru_cache(maxsize=64)
def _dataset(name: str, size: int, seed: int, config: tuple[tuple[str, Any], ...]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise DataError("reasoning_gym tasks need a package: pip install 'rollwright[reasoning-gym]'.") from error
    if name not in DATASETS:
        raise DataError(f"reasoning_gym has no generator {name!r}; {nearest(name, DATASETS) if len(name) > 2 else ''}")
    try:
        return create_dataset(name, size=size, seed=seed, **dict(config))
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"reasoning_gym:{name}: {error}.") from error
