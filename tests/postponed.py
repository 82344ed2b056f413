"""Annotations that are stored as text, as some modules of users have them."""

# ruff: noqa: UP045
from __future__ import annotations

import dataclasses
from typing import Literal, Optional

from rope_jax.models.registry import Options
from rope_jax.names.options import Count


@dataclasses.dataclass(frozen=True)
class PostponedOptions(Options):
    scale: float | None = None
    old: Optional[float] = None
    join: Literal["add", "concat"] | None = None
    count: Count | None = None


def measure(keep, *, table: Literal["4.4", "D.1"] | None = None, sizes: list[int] | None = None):
    """Measures."""
    keep(got=[table, sizes])
