"""The four papers: numbers, runs, tables, figures, claims; see `rope_jax reproduce`."""

from rope_jax.papers.published import Cell, find_published, published, recipes

__all__ = ["Cell", "find_published", "published", "recipes"]
