"""A shop: one catalogue and one index, read-only, shared by all its sessions."""

from __future__ import annotations

from functools import lru_cache

from rollwright.environments.bm25 import BM25Retriever
from rollwright.environments.shop.catalogue import Catalogue, Product, make_catalogue
from rollwright.environments.shop.session import ShopSession
from rollwright.errors import DataError

MAX_RESULTS = 50


class Shop:
    """Search over a catalogue, and sessions in it.

    Args:
        catalogue: products and goals.
        page_size: results on a page.
    """

    def __init__(self, catalogue: Catalogue, page_size: int = 10) -> None:
        self.catalogue = catalogue
        self.page_size = page_size
        self._index = BM25Retriever.build(f"{product.title}\n{product.description}" for product in catalogue.products)

    def search(self, query: str) -> list[Product]:
        """The best products for a query, at most ``MAX_RESULTS``."""
        [hits] = self._index.search([query], MAX_RESULTS)
        return [self.catalogue.products[row] for row in hits.rows.tolist()]

    def session(self, session_id: int, *, rich: bool = False) -> ShopSession:
        """A fresh session for goal ``session_id``.

        Args:
            session_id: which of the catalogue's goals.
            rich: observations mark buttons.

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
    """The shop of a seed; the same arguments give the same object, so that sessions share its index."""
    return Shop(make_catalogue(seed, products, goals), page_size)
