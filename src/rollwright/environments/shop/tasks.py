"""Tasks of the shop, demonstration episodes by a scripted clerk, and a small vocabulary for both."""

from __future__ import annotations

import random
from typing import Any

from rollwright.data.splits import check_split
from rollwright.environments.shop import catalogue as goods
from rollwright.environments.shop.catalogue import Goal, Product
from rollwright.environments.shop.shop import BACK, BUY, NEXT, PREVIOUS, SUB_PAGES, Shop, purchase_reward, shop
from rollwright.errors import DataError

#: Share of a catalogue's goals, at its end, that is held out.
HELD_OUT_SHARE = 0.2


def tasks(
    split: str = "train",
    size: int | None = None,
    seed: int = 1,
    products: int = 1000,
    goals: int = 500,
    page_size: int = 10,
    worked: bool = False,
    careless: float = 0.0,
    pages: bool = False,
) -> list[dict[str, Any]]:
    """Return sessions of one shop as a taskset. Train has the first four fifths of the goals; valid and test share the rest.

    Args:
        split: train, valid or test.
        size: number of tasks. None returns all tasks of the split.
        seed, products, goals, page_size: arguments of the shop; the workflow needs the same values.
        worked: add ``segments``, a demonstration episode by a scripted clerk, for supervised training.
        careless: probability that the clerk draws the search words, the product or an option at random. A model that learns from such
            demonstrations knows the shop but does not yet choose well.
        pages: train on the shop's pages as well as on the clerk's actions. A page repeats much of the page before it, so a small model
            learns to copy words faster than from the few copied words in the actions.

    Raises:
        DataError: there is no such split, or it has fewer tasks than ``size``.
    """
    held_out = int(goals * HELD_OUT_SHARE)
    first_held_out = goals - held_out
    ranges = {
        "train": range(first_held_out),
        "valid": range(first_held_out, first_held_out + held_out // 2),
        "test": range(first_held_out + held_out // 2, goals),
    }
    check_split("shop", split, ranges)
    sessions = ranges[split]
    if size is not None and size > len(sessions):
        raise DataError(f"shop: {size} tasks of split {split!r} were asked for, it has {len(sessions)}; raise goals.")
    opened = shop(seed, products, goals, page_size)
    rows = []
    for session_id in sessions[:size]:
        goal = opened.catalogue.goals[session_id]
        row = {
            "session_id": session_id,
            "messages": [{"role": "user", "content": goal.instruction}],
            "answer": goal.product.id,
            "query_id": f"shop-{seed}-{session_id}",
        }
        if worked:
            row["segments"] = _segments(worked_steps(opened, session_id, careless), pages)
        rows.append(row)
    return rows


def worked_steps(shop: Shop, session_id: int, careless: float = 0.0) -> list[tuple[str, str]]:
    """Return ``(observation, action)`` pairs of a clerk who searches, picks the first page's best product, chooses options and buys.

    Args:
        shop: the shop.
        session_id: session of the customer.
        careless: probability that each choice is made at random.
    """
    session = shop.session(session_id)
    goal = session.goal
    draw = random.Random(f"clerk {session_id}")
    steps = []

    def act(action: str) -> None:
        steps.append((session.observation(), action))
        result = session.step(action)
        assert result.info["valid"], action

    sought = draw.choice(shop.catalogue.goals) if draw.random() < careless else goal
    act(f"search[{' '.join(sought.attributes)} {sought.product.kind}]")
    first_page = shop.search(session.query)[: shop.page_size]
    product = max(first_page, key=lambda each: purchase_reward(each, _choices(each, goal), goal))
    if draw.random() < careless:
        product = draw.choice(first_page)
    act(f"click[{product.id}]")
    wanted = _choices(product, goal)
    for name, values in product.options.items():
        if draw.random() < careless:
            act(f"click[{draw.choice(values)}]")
        elif name in wanted:
            act(f"click[{wanted[name]}]")
    act(f"click[{BUY.lower()}]")
    return steps


def _choices(product: Product, goal: Goal) -> dict[str, str]:
    return {name: value for name, value in goal.options.items() if value in product.options.get(name, ())}


def _segments(steps: list[tuple[str, str]], pages: bool) -> list[dict[str, Any]]:
    """Render an episode as ``data.tokenizer.CHAT_TEMPLATE`` does: observations are user messages, actions are replies."""
    segments = []
    for observation, action in steps:
        segments.append({"text": f"<|user|>{observation}<|end|><|assistant|>", "train": pages})
        segments.append({"text": f"<think>{_thought(action)}</think><action>{action}</action><|end|>", "train": True})
    return segments


def _thought(action: str) -> str:
    if action.startswith("search"):
        return "look"
    return "buy" if action == f"click[{BUY.lower()}]" else "choose"


def vocabulary() -> list[str]:
    """Return strings that should be single tokens of a small model: the catalogue's words, buttons, fields and tags."""
    kinds = [kind for aisles in goods.DEPARTMENTS.values() for kinds in aisles.values() for kind in kinds]
    words = [*kinds, *goods.ATTRIBUTES, *goods.COLORS, *goods.SIZES, *goods.BRANDS, "color", "size"]
    fields = [
        "Instruction: find a ", ", price at most ", " dollars", "Search", "Page ", " results", " of ", "Price: $", ".99",
        "Thank you for shopping with us!",
    ]  # fmt: skip
    buttons = [BACK, NEXT, PREVIOUS, BUY, *SUB_PAGES]
    actions = ["search[", "click[", BUY.lower(), "look", "choose", "buy"]
    tags = ["<think>", "</think>", "<action>", "</action>", " [SEP] "]
    return list(dict.fromkeys([*words, *fields, *buttons, *actions, *tags]))
