"""Arithmetic of all kernels: tile indices, and the cosines and sines of angles."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def divide(index: Int[Array, "*n"], count: int) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """Quotient and remainder of `index >= 0`.

    `//` and `%` would spend instructions on the signs of negative numbers.
    """
    return jax.lax.div(index, np.int32(count)), jax.lax.rem(index, np.int32(count))


def power_of_two(n: int, at_least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `at_least`."""
    return max(at_least, 1 << (n - 1).bit_length())


def cos_sin(
    theta: Float[Array, "*n"],
    nearest: Callable[[Array], Array] = lambda x: jnp.floor(x + np.float32(0.5)),
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Cosine and sine of float32 radians, within 2e-7 of the exact values up to 10^4 radians.

    The compiler's versions are two functions of twice the length, with a branch for huge angles
    that keeps an array in local memory. Here the nearest multiple of pi/2 is subtracted in three
    parts whose products are exact (Cody and Waite), and the polynomials are those of Cephes.

    Args:
        theta: radians.
        nearest: rounds to whole numbers, by an operation of the backend.
    """
    turns = nearest(theta * np.float32(2 / np.pi))
    r = (
        theta
        - turns * np.float32(1.5703125)
        - turns * np.float32(4.837512969970703125e-4)
        - turns * np.float32(7.549789948768648e-8)
    )
    square = r * r
    sin = r + r * square * (
        np.float32(-1.6666654611e-1)
        + square * (np.float32(8.3321608736e-3) + square * np.float32(-1.9515295891e-4))
    )
    even = np.float32(4.166664568298827e-2) + square * (
        np.float32(-1.388731625493765e-3) + square * np.float32(2.443315711809948e-5)
    )
    cos = 1 - np.float32(0.5) * square + square * square * even
    quarter = turns.astype(jnp.int32) & 3
    odd = (quarter & 1) != 0
    cos, sin = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    return jnp.where((quarter == 1) | (quarter == 2), -cos, cos), jnp.where(quarter >= 2, -sin, sin)
