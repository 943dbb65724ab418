"""A shop for agents, who search, look, choose options and buy. The reward says how well the purchase fits the instruction.

The interface follows WebShop (Yao et al., arXiv 2207.01206), but code and seeded catalogue are our own, so scores are not comparable with
WebShop's. ``WebShopPackageSession`` wraps the real WebShop, if it is installed.
"""

from rollwright.environments.shop.catalogue import Catalogue, Goal, Product, make_catalogue
from rollwright.environments.shop.shop import Shop, ShopSession, parse_shop_action

__all__ = ["Catalogue", "Goal", "Product", "Shop", "ShopSession", "make_catalogue", "parse_shop_action"]
