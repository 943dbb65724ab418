"""A shop: search over a catalogue, sessions in which an agent searches, looks, chooses and buys, and the reward of a purchase.

A shop consists of a catalogue and an index, which are read-only and shared by all its sessions. A session stores only a page name, a query
with its results, a page number, a product and the chosen options. ``WebShopPackageSession`` offers the same interface to the real WebShop,
if it is installed. Rollwright contains no part of WebShop, which needs Python 3.8 to 3.10, Java and its own data, and is licensed for
academic use only; install it from https://github.com/princeton-nlp/WebShop into the environment that runs the workflow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rollwright.environments.bm25 import BM25Retriever, terms
from rollwright.environments.shop.catalogue import Catalogue, Goal, Product, make_catalogue
from rollwright.environments.text_environment import StepResult
from rollwright.errors import ConfigError, DataError, WorkflowError

MAX_RESULTS = 50
SEPARATOR = " [SEP] "
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
_ACTION = re.compile(r"(search|click)\s*\[(.+)\]", re.DOTALL | re.IGNORECASE)


class Shop:
    """Search over a catalogue, and sessions in it.

    Args:
        catalogue: products and goals.
        page_size: number of results per page.
    """

    def __init__(self, catalogue: Catalogue, page_size: int = 10) -> None:
        self.catalogue = catalogue
        self.page_size = page_size
        self._index = BM25Retriever.build(f"{product.title}\n{product.description}" for product in catalogue.products)

    def search(self, query: str) -> list[Product]:
        """Return the best products for a query, at most ``MAX_RESULTS``."""
        [hits] = self._index.search([query], MAX_RESULTS)
        return [self.catalogue.products[row] for row in hits.rows.tolist()]

    def session(self, session_id: int, *, rich: bool = False) -> ShopSession:
        """Create a session for goal ``session_id``.

        Args:
            session_id: index of the goal in the catalogue.
            rich: whether to mark buttons in observations.

        Raises:
            DataError: there is no such goal.
        """
        if not 0 <= session_id < len(self.catalogue.goals):
            raise DataError(
                f"shop: there is no session {session_id}; the catalogue has goals 0 to {len(self.catalogue.goals) - 1}."
            )
        return ShopSession(self, self.catalogue.goals[session_id], rich=rich)


@lru_cache(maxsize=8)
def shop(seed: int = 1, products: int = 1000, goals: int = 500, page_size: int = 10) -> Shop:
    """Return the shop generated from a seed. The same arguments return the same object, so that sessions share its index."""
    return Shop(make_catalogue(seed, products, goals), page_size)


def parse_shop_action(text: str) -> tuple[str, str] | None:
    """Parse ``search[words]`` to ``("search", words)`` and ``click[target]`` to ``("click", target)``; return None for other text.

    Words and targets are converted to lower case.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None or not match[2].strip():
        return None
    return match[1].lower(), match[2].strip().lower()


@dataclass
class ShopSession:
    """One visit to a shop, created by ``shop.session(...)``.

    Attributes:
        shop: the shop.
        goal: the customer's goal.
        rich: whether to mark buttons in observations.
        done: True after the purchase, when no further actions are possible.
        options: chosen values by option name.
    """

    shop: Shop = field(repr=False)
    goal: Goal
    rich: bool = False
    page: str = "search"
    query: str = ""
    page_number: int = 1
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)
    done: bool = False
    _results: list[Product] = field(default_factory=list, repr=False)

    def get_available_actions(self) -> dict[str, Any]:
        """Return ``{"has_search_bar": bool, "clickables": [str]}``, with targets in lower case."""
        buttons = [text.lower() for kind, text in self._fields() if kind in ("button", "clicked")]
        searching = self.page == "search" and not self.done
        return {"has_search_bar": searching, "clickables": ["search"] * searching + buttons}

    def observation(self) -> str:
        """Return the page as text: its fields joined by `` [SEP] `` or, if ``rich``, one per line with marked buttons."""
        if not self.rich:
            return SEPARATOR.join(text for _, text in self._fields())
        marks = {"button": "[button] {} [button_]", "clicked": "[clicked button] {} [clicked button_]", "text": "{}"}
        return "\n".join(marks[kind].format(text) for kind, text in self._fields())

    def step(self, action: str) -> StepResult:
        """Perform ``search[words]`` or ``click[target]``.

        A malformed or unavailable action changes nothing and has reward 0; ``info["valid"]`` is then False.

        Returns:
            The observation after the action, the reward (0 except for a purchase), whether the session is over, and ``info``.
        """
        kind, argument = parse_shop_action(action) or ("", "")
        available = self.get_available_actions()
        reward = 0.0
        if kind == "search" and available["has_search_bar"]:
            self.query, self._results, self.page, self.page_number = argument, self.shop.search(argument), "results", 1
        elif kind == "click" and argument in available["clickables"] and argument != "search":
            reward = self._click(argument)
        else:
            return StepResult(self.observation(), 0.0, self.done, {"valid": False})
        return StepResult(self.observation(), reward, self.done, {"valid": True})

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the visit as plain values, which JSON can hold."""
        product = None if self.product is None else self.product.id
        plain = {name: getattr(self, name) for name in ("page", "query", "page_number", "done")}
        return {**plain, "product": product, "options": dict(self.options)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot of a visit to this shop with the same goal."""
        for name in ("page", "query", "page_number", "done"):
            setattr(self, name, snapshot[name])
        self.product = None if snapshot["product"] is None else self.shop.catalogue.product(snapshot["product"])
        self.options = dict(snapshot["options"])
        self._results = self.shop.search(self.query) if self.query else []

    def _click(self, target: str) -> float:
        if target == BACK.lower():
            self.page, self.product, self.options = "search", None, {}
        elif target == NEXT.lower():
            self.page_number += 1
        elif target == PREVIOUS.lower() and self.page == "results":
            self.page_number -= 1
        elif target == PREVIOUS.lower() and self.page == "item":
            self.page, self.product, self.options = "results", None, {}
        elif target == PREVIOUS.lower():
            self.page = "item"
        elif target == BUY.lower():
            assert self.product is not None
            self.done, self.page = True, "done"
            return purchase_reward(self.product, self.options, self.goal)
        elif target in (name.lower() for name in SUB_PAGES):
            self.page = target
        elif self.page == "results":
            self.product, self.options, self.page = self.shop.catalogue.product(target), {}, "item"
        else:
            assert self.product is not None
            name = next(name for name, values in self.product.options.items() if target in values)
            self.options[name] = target
        return 0.0

    def _fields(self) -> list[tuple[str, str]]:
        """Return kind (``text``, ``button`` or ``clicked``) and text of each field of the page, from top to bottom."""
        if self.done:
            return [("text", "Thank you for shopping with us!")]
        fields = [("text", f"Instruction: {self.goal.instruction}")]
        if self.page == "search":
            return [*fields, ("text", "Search")]
        fields.append(("button", BACK))
        if self.page == "results":
            return fields + self._result_fields()
        fields.append(("button", PREVIOUS))
        assert self.product is not None
        if self.page == "item":
            return fields + self._item_fields(self.product)
        lines = {"description": (self.product.description,), "features": self.product.features, "reviews": self.product.reviews}
        return fields + [("text", line) for line in lines[self.page]]

    def _result_fields(self) -> list[tuple[str, str]]:
        size = self.shop.page_size
        pages = max(1, -(-len(self._results) // size))
        fields = [("text", f"Page {self.page_number} of {pages}, {len(self._results)} results")]
        if self.page_number > 1:
            fields.append(("button", PREVIOUS))
        if self.page_number < pages:
            fields.append(("button", NEXT))
        for product in self._results[(self.page_number - 1) * size : self.page_number * size]:
            fields += [("button", product.id), ("text", product.title), ("text", f"${product.price:.2f}")]
        return fields

    def _item_fields(self, product: Product) -> list[tuple[str, str]]:
        fields = []
        for name, values in product.options.items():
            fields.append(("text", name))
            fields += [("clicked" if self.options.get(name) == value else "button", value) for value in values]
        fields += [("text", product.title), ("text", f"Price: ${product.price:.2f}")]
        return [*fields, *(("button", name) for name in SUB_PAGES), ("button", BUY)]


def type_score(bought: Product, wanted: Product) -> float:
    """Return 1 for the same kind of product, 0.5 for the same aisle and a common title word, 0.1 for one of these two, else 0."""
    if bought.kind == wanted.kind:
        return 1.0
    same_aisle = bought.category[:2] == wanted.category[:2]
    common_word = bool(set(terms(bought.title)) & set(terms(wanted.title)))
    return {2: 0.5, 1: 0.1, 0: 0.0}[same_aisle + common_word]


def purchase_reward(bought: Product, chosen: dict[str, str], goal: Goal) -> float:
    """Return ``type · (attribute hits + option hits + [price ≤ limit]) / (attributes + options + 1)``, from 0 to 1.

    ``type`` is the ``type_score``. An option is a hit if the goal's value was chosen for it, so there are at most as many hits as the goal
    has options.

    Args:
        bought: the purchased product.
        chosen: chosen values by option name.
        goal: the customer's goal.
    """
    text = set(terms(f"{bought.title} {bought.description}")) | set(bought.attributes)
    hits = sum(attribute in text for attribute in goal.attributes)
    hits += sum(chosen.get(name) == value for name, value in goal.options.items())
    hits += bought.price <= goal.price_limit
    return type_score(bought, goal.product) * hits / (len(goal.attributes) + len(goal.options) + 1)


class WebShopPackageSession:
    """One session of ``web_agent_site.envs.WebAgentTextEnv``.

    Args:
        session_id: the goal, as ``session`` of the environment's ``reset``.
        rich: whether to mark buttons in observations (``text_rich``).
        environment: environment to use. None creates an environment from ``options``.
        options: arguments of ``WebAgentTextEnv``, such as ``num_products``.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, session_id: int, *, rich: bool = False, environment: Any = None, **options: Any) -> None:
        if environment is None:
            try:
                from web_agent_site.envs import WebAgentTextEnv
            except ImportError as error:
                raise ConfigError(
                    f"the WebShop package cannot be imported ({error}); install it, or leave out `package: true` to use the "
                    "shop that comes with Rollwright."
                ) from error
            environment = WebAgentTextEnv(observation_mode="text_rich" if rich else "text", **options)
        self.environment = environment
        self.environment.reset(session=session_id)
        self.done = False

    def observation(self) -> str:
        """Return the page as text."""
        return self.environment.observation

    def get_available_actions(self) -> dict[str, Any]:
        """Return ``{"has_search_bar": bool, "clickables": [str]}``."""
        return self.environment.get_available_actions()

    def step(self, action: str) -> StepResult:
        """Perform an action in the environment."""
        observation, reward, self.done, info = self.environment.step(action)
        return StepResult(observation, float(reward), bool(self.done), info or {})

    def snapshot(self) -> Any:
        """Raise an error: WebShop cannot return to an earlier page.

        Raises:
            WorkflowError: always.
        """
        raise WorkflowError(
            "WebShop's own environment has no snapshots; the shop that comes with Rollwright has (package: false)."
        )

    def restore(self, snapshot: Any) -> None:
        """Raise an error; see :meth:`snapshot`."""
        self.snapshot()
