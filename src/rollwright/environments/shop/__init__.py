"""A shop for agents: search, look, choose options, buy; rewarded by how well the purchase fits the instruction.

It follows the interface that WebShop (Yao et al., arXiv 2207.01206) made known, with code and a seeded catalogue of its own.
Scores are not comparable with WebShop's; ``WebShopPackageSession`` wraps the real one for those who have it.
"""

from rollwright.environments.shop.catalogue import Catalogue, Goal, Product, make_catalogue
from rollwright.environments.shop.shop import Shop, ShopSession, StepResult, parse_shop_action

__all__ = ["Catalogue", "Goal", "Product", "Shop", "ShopSession", "StepResult", "make_catalogue", "parse_shop_action"]
