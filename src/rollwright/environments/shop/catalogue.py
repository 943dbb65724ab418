"""Products and customer goals of the shop, both generated from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property

from rollwright.errors import DataError

#: Product types by department and aisle.
DEPARTMENTS = {
    "home": {"kitchen": ["mug", "kettle", "teapot"], "bedroom": ["lamp", "pillow", "blanket"]},
    "clothing": {"tops": ["shirt", "jacket", "sweater"], "accessories": ["scarf", "belt", "hat"]},
    "outdoors": {"camping": ["tent", "lantern", "flask"], "travel": ["backpack", "suitcase", "umbrella"]},
}
ATTRIBUTES = ("cotton", "wool", "steel", "bamboo", "light", "sturdy", "foldable", "washable", "handmade", "organic")
COLORS = ("red", "blue", "green", "black", "white", "yellow")
SIZES = ("small", "medium", "large")
BRANDS = ("acorn", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath")
_REVIEWS = ("does what it should.", "arrived in two days.", "better than the old one.", "the color is as shown.")


@dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
        id: text to click in the results.
        title: name in the results.
        kind: product type, the last part of the category.
        category: department, aisle and kind.
        attributes: properties that a customer may ask for.
        options: values by option name, such as ``{"color": ("red", "blue")}``.
        price: price in dollars.
    """

    id: str
    title: str
    kind: str
    category: tuple[str, str, str]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: float
    description: str
    features: tuple[str, ...]
    reviews: tuple[str, ...]


@dataclass(frozen=True)
class Goal:
    """What a customer wants. ``product`` meets the goal, and other products may meet it, too."""

    instruction: str
    product: Product
    attributes: tuple[str, ...]
    options: dict[str, str]
    price_limit: float


@dataclass(frozen=True)
class Catalogue:
    """Products and goals."""

    products: tuple[Product, ...]
    goals: tuple[Goal, ...] = field(repr=False)

    @cached_property
    def _by_id(self) -> dict[str, Product]:
        return {product.id: product for product in self.products}

    def product(self, product_id: str) -> Product | None:
        """Return the product with an id, ignoring case, or None if there is none."""
        return self._by_id.get(product_id.lower())


def make_catalogue(seed: int = 1, products: int = 1000, goals: int = 500) -> Catalogue:
    """Generate a catalogue. The same arguments return an equal catalogue.

    Args:
        seed: seed of everything in the catalogue.
        products: number of products.
        goals: number of goals, each for a random product.

    Raises:
        DataError: a number is below 1.
    """
    if products < 1 or goals < 1:
        raise DataError(f"shop: {products} products and {goals} goals; there is at least one of each.")
    generator = random.Random(f"shop {seed}")
    kinds = [
        (department, aisle, kind) for department, aisles in DEPARTMENTS.items() for aisle in aisles for kind in aisles[aisle]
    ]
    made = tuple(_make_product(generator, number, kinds[number % len(kinds)]) for number in range(products))
    return Catalogue(made, tuple(_make_goal(generator, generator.choice(made)) for _ in range(goals)))


def _make_product(generator: random.Random, number: int, category: tuple[str, str, str]) -> Product:
    brand, kind = generator.choice(BRANDS), category[2]
    attributes = tuple(generator.sample(ATTRIBUTES, 2))
    options: dict[str, tuple[str, ...]] = {"color": tuple(sorted(generator.sample(COLORS, 3)))}
    if category[0] == "clothing":
        options["size"] = tuple(generator.sample(SIZES, 2))
    price = generator.randrange(5, 95) + 0.99
    return Product(
        id=f"b{number:04d}",
        title=f"{brand} {attributes[0]} {attributes[1]} {kind}",
        kind=kind,
        category=category,
        attributes=attributes,
        options=options,
        price=price,
        description=f"a {attributes[0]} and {attributes[1]} {kind} by {brand}, from our {category[1]} aisle.",
        features=tuple(f"it is {attribute}" for attribute in attributes),
        reviews=tuple(generator.sample(_REVIEWS, 2)),
    )


def _make_goal(generator: random.Random, product: Product) -> Goal:
    attributes = product.attributes if generator.random() < 0.5 else (generator.choice(product.attributes),)
    options = {name: generator.choice(values) for name, values in product.options.items()}
    limit = float(int(product.price / 10) * 10 + 10 * generator.randint(1, 2))
    wishes = ", ".join(f"{name} {value}" for name, value in options.items())
    return Goal(
        instruction=f"find a {' '.join(attributes)} {product.kind}, {wishes}, price at most {limit:.0f} dollars",
        product=product,
        attributes=attributes,
        options=options,
        price_limit=limit,
    )
