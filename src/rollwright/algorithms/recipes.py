"""Named recipes. The table is config (it sets nothing but keys) and lives there; this is where a reader looks for it."""

from __future__ import annotations

from rollwright.config.recipes import ALIASES, RECIPES, Recipe, apply_recipe, find_recipe

__all__ = ["ALIASES", "RECIPES", "Recipe", "apply_recipe", "find_recipe"]
