"""How well a purchase fits a goal."""

from __future__ import annotations

from rollwright.environments.shop.catalogue import Goal, Product
from rollwright.environments.text_analysis import terms


def type_score(bought: Product, wanted: Product) -> float:
    """1 for the same kind of product; 0.5 for the same aisle and a title word in common; 0.1 for one of the two; else 0."""
    if bought.kind == wanted.kind:
        return 1.0
    same_aisle = bought.category[:2] == wanted.category[:2]
    common_word = bool(set(terms(bought.title)) & set(terms(wanted.title)))
    return {2: 0.5, 1: 0.1, 0: 0.0}[same_aisle + common_word]


def purchase_reward(bought: Product, chosen: dict[str, str], goal: Goal) -> float:
    """``type · (attribute hits + option hits + [price ≤ limit]) / (attributes + options + 1)``, from 0 to 1.

    An option is hit where the goal's value was chosen under its name, so there are never more hits than the goal has options.

    Args:
        bought: the product.
        chosen: option name -> value, as chosen before buying.
        goal: what was wanted.
    """
    text = set(terms(f"{bought.title} {bought.description}")) | set(bought.attributes)
    attribute_hits = sum(attribute in text for attribute in goal.attributes)
    option_hits = sum(chosen.get(name) == value for name, value in goal.options.items())
    hits = attribute_hits + option_hits + (bought.price <= goal.price_limit)
    return type_score(bought, goal.product) * hits / (len(goal.attributes) + len(goal.options) + 1)
