"""The tokens that each token attends to: all of them, those of its window, or the nearest ones.

Patterns are hashable settings, static under jit, and hold no arrays. Sizes, shifts and dilations
are (rows, columns). `places` is the shape of the tokens of one example: (L,) or (H, W).
"""

import abc
import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

Pair = tuple[int, int]
Places = tuple[int, ...]


def to_pair(name: str, value: Any, lowest: int) -> Pair:
    """Converts one integer for both, or a sequence of two, to two of at least `lowest`."""
    value = (value, value) if isinstance(value, numbers.Integral) else value
    fits = (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(x, numbers.Integral) and x >= lowest for x in value)
    )
    if not fits:
        raise ValueError(
            f"{name}={value!r} must be one integer or two (rows, columns), each at least {lowest}"
        )
    return int(value[0]), int(value[1])


class _Pattern(abc.ABC):
    """The interface of all patterns.

    Attributes:
        bias_layout: the dimensions of the bias, in error messages.
    """

    bias_layout: ClassVar[str]

    def rotated_tokens(self, places: Places) -> int:
        """Length of `rotation.coords` for an example of this shape."""
        return math.prod(places)

    @abc.abstractmethod
    def bias_shape(self, heads: int, places: Places) -> tuple[int, ...]:
        """Shape of the bias for an example of this shape."""


@dataclasses.dataclass(frozen=True)
class Global(_Pattern):
    """Every token attends to every token of its image (ViT, arXiv 2010.11929).

    For arrays [B, L, N, D], prefix tokens included. The bias is a matrix [N, L, L], indexed
    (head, query, key).

    Example:
        >>> from rope_jax_kernels import Global
        >>> Global().bias_shape(heads=6, places=(197,))
        (6, 197, 197)
    """

    bias_layout = "[N, L, L]"

    def bias_shape(self, heads: int, places: Places) -> tuple[int, int, int]:
        (tokens,) = places
        return heads, tokens, tokens


@dataclasses.dataclass(frozen=True)
class Window(_Pattern):
    """Every token attends to the tokens of its window (Swin, arXiv 2103.14030).

    For maps [B, H, W, N, D]. Windows of `size` divide the map from its top left corner. With a
    shift (dy, dx) the map is first rolled by (-dy, -dx) and afterwards rolled back; tokens that the
    roll brought together from opposite sides of the map do not attend to each other. A map that
    the windows do not divide is padded at the bottom and right before the roll, and no token
    attends to padding. `fit` returns the window for maps smaller than `size`.

    `rotation.coords` places the tokens of one fitted window. The bias is a table
    [N, (2h-1) * (2w-1)] over offsets query - key, columns fastest, of the fitted window.

    Example:
        >>> from rope_jax_kernels import Window
        >>> window = Window(size=(7, 7), shift=(3, 3))
        >>> window.fit((7, 14))
        Window(size=(7, 7), shift=(0, 3))
        >>> window.bias_shape(heads=3, places=(56, 56))
        (3, 169)

    Attributes:
        size: (h, w) of a window in tokens; one number stands for both, as in all sizes.
        shift: (dy, dx) in tokens, smaller than the size.
    """

    size: Pair
    shift: Pair = (0, 0)
    bias_layout = "[N, (2h-1)*(2w-1)]"

    def __post_init__(self):
        object.__setattr__(self, "size", to_pair("size", self.size, 1))
        object.__setattr__(self, "shift", to_pair("shift", self.shift, 0))
        if any(shift >= size for size, shift in zip(self.size, self.shift, strict=True)):
            raise ValueError(
                f"shift={self.shift} must be smaller than size={self.size} along both axes; half "
                "the size is usual"
            )

    def fit(self, grid: Pair) -> "Window":
        """The window as used on a map of `grid` tokens.

        Along an axis on which the map is no larger than the window, the window spans the map and
        the shift is 0.
        """
        axes = [
            (n, 0) if n <= size else (size, shift)
            for n, size, shift in zip(grid, self.size, self.shift, strict=True)
        ]
        (h, dy), (w, dx) = axes
        return Window((h, w), (dy, dx))

    def rotated_tokens(self, places: Places) -> int:
        return math.prod(self.fit(places).size)

    def bias_shape(self, heads: int, places: Places) -> tuple[int, int]:
        h, w = self.fit(places).size
        return heads, (2 * h - 1) * (2 * w - 1)


@dataclasses.dataclass(frozen=True)
class Neighborhood(_Pattern):
    """Every token attends to the nearest tokens (NAT, arXiv 2204.07143; DiNAT, arXiv 2209.15001).

    For maps [B, H, W, N, D]. Along each axis of n tokens, with kernel K and dilation q, token i
    attends to {r + q (s + t): 0 <= t < K}, where r = i mod q,
    s = clamp(floor(i / q) - K // 2, 0, n_r - K) and n_r = ceil((n - r) / q): at a border the
    neighbourhood keeps its size and moves inwards. A residue class r of fewer than K members is
    its own neighbourhood.

    The bias is a table [N, 2kh-1, 2kw-1] over offsets (key - query) / dilation, whatever the size
    of the map.

    Tokens share blocks of keys, of which those outside a neighbourhood weigh 0. So a NaN or an
    infinity in v, which times 0 is NaN, can reach all tokens whose block holds it: the whole map if
    it is small.

    Example:
        >>> from rope_jax_kernels import Neighborhood
        >>> Neighborhood(size=(7, 7), dilation=(2, 2)).bias_shape(heads=2, places=(56, 56))
        (2, 13, 13)

    Attributes:
        size: (kh, kw) of the neighbourhood in tokens, or one number for both; even sizes reach one
            token further up and left than down and right.
        dilation: (qy, qx), distance of neighbours in tokens.
    """

    size: Pair
    dilation: Pair = (1, 1)
    bias_layout = "[N, 2kh-1, 2kw-1]"

    def __post_init__(self):
        object.__setattr__(self, "size", to_pair("size", self.size, 1))
        object.__setattr__(self, "dilation", to_pair("dilation", self.dilation, 1))

    def bias_shape(self, heads: int, places: Places) -> tuple[int, int, int]:
        kh, kw = self.size
        return heads, 2 * kh - 1, 2 * kw - 1


Pattern = Global | Window | Neighborhood
