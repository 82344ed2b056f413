"""Integer arithmetic of tile indices."""

import jax
import numpy as np
from jaxtyping import Array, Int


def divide(index: Int[Array, "*n"], count: int) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """Quotient and remainder of `index >= 0`.

    `//` and `%` would spend instructions on the signs of negative numbers.
    """
    return jax.lax.div(index, np.int32(count)), jax.lax.rem(index, np.int32(count))


def power_of_two(n: int, at_least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `at_least`."""
    return max(at_least, 1 << (n - 1).bit_length())
