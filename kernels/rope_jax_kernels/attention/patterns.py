"""Which tokens a token attends to: all of them, those of its window, or those nearest to it.

Patterns are hashable settings, static under jit, and hold no arrays. Sizes, shifts and dilations are (rows, columns).
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

Pair = tuple[int, int]


def pair_of(name: str, value: Any, lowest: int) -> Pair:
    """Two integers, also from a list or of NumPy; refuses anything but two of at least `lowest`."""
    fits = isinstance(value, Sequence) and len(value) == 2 and all(isinstance(x, numbers.Integral) and x >= lowest for x in value)
    if not fits:
        raise ValueError(f"{name}={value!r} must be two integers (rows, columns), each at least {lowest}")
    return int(value[0]), int(value[1])


@dataclasses.dataclass(frozen=True)
class Global:
    """Every token attends to every token of its image, prefix tokens included (ViT, arXiv 2010.11929). For arrays [B, L, N, D]."""

    def bias_shape(self, heads: int, tokens: int) -> tuple[int, int, int]:
        """Shape of the bias matrix: [N, L, L], indexed (head, query, key)."""
        return heads, tokens, tokens


@dataclasses.dataclass(frozen=True)
class Window:
    """Every token attends to the tokens of its own window (Swin, arXiv 2103.14030). For maps [B, H, W, N, D].

    The map is cut into windows of `size` from its top left corner. With a shift (dy, dx) it is first rolled by (-dy, -dx), and
    afterwards rolled back; tokens that the roll brought together from opposite sides of the map do not attend to each other. A map
    that the windows do not divide is padded at the bottom and right before the roll, and no token attends to padding.

    Attributes:
        size: (h, w) of a window in tokens.
        shift: (dy, dx) in tokens, smaller than the size.
    """

    size: Pair
    shift: Pair = (0, 0)

    def __post_init__(self):
        object.__setattr__(self, "size", pair_of("size", self.size, 1))
        object.__setattr__(self, "shift", pair_of("shift", self.shift, 0))
        if any(shift >= size for size, shift in zip(self.size, self.shift, strict=True)):
            raise ValueError(f"shift={self.shift} must be smaller than size={self.size} along both axes; half the size is usual")

    def fit(self, grid: Pair) -> "Window":
        """The window as used on a map of `grid` tokens: along an axis where the map is no larger, it is the map and not shifted."""
        axes = [(n, 0) if n <= size else (size, shift) for n, size, shift in zip(grid, self.size, self.shift, strict=True)]
        (h, dy), (w, dx) = axes
        return Window((h, w), (dy, dx))

    def bias_shape(self, heads: int) -> tuple[int, int]:
        """Shape of the bias table: [N, (2h-1)*(2w-1)], one entry for each offset query - key, columns fastest. Call `fit` first."""
        h, w = self.size
        return heads, (2 * h - 1) * (2 * w - 1)


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """Every token attends to the tokens nearest to it (NAT, arXiv 2204.07143; DiNAT, arXiv 2209.15001). For maps [B, H, W, N, D].

    Along each axis of n tokens, with kernel K and dilation q, token i attends to {r + q (s + t): 0 <= t < K}, where r = i mod q,
    s = clamp(floor(i / q) - K // 2, 0, n_r - K) and n_r = ceil((n - r) / q): the neighbourhood keeps its size at the borders and
    moves inwards. Where a residue class r has fewer than K members, it is its own neighbourhood as a whole.

    Attributes:
        size: (kh, kw) of the neighbourhood in tokens; even sizes reach one further up and left than down and right.
        dilation: (qy, qx) distance of neighbours in tokens.
    """

    size: Pair
    dilation: Pair = (1, 1)

    def __post_init__(self):
        object.__setattr__(self, "size", pair_of("size", self.size, 1))
        object.__setattr__(self, "dilation", pair_of("dilation", self.dilation, 1))

    def bias_shape(self, heads: int) -> tuple[int, int, int]:
        """Shape of the bias table: [N, 2kh-1, 2kw-1], one entry for each offset (key - query) / dilation, whatever the map's size."""
        kh, kw = self.size
        return heads, 2 * kh - 1, 2 * kw - 1


Pattern = Global | Window | Neighborhood
