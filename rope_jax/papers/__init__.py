"""The four papers that this library implements: what they published."""

from rope_jax.papers.published import Cell, find_published, published, recipes

__all__ = ["Cell", "find_published", "published", "recipes"]
