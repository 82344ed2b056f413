"""The four papers: numbers, runs, tables, figures, claims; see `rope_jax reproduce`."""

from rope_jax.papers.published import PAPERS, Cell, find_published, published, recipes

__all__ = ["PAPERS", "Cell", "find_published", "published", "recipes"]
