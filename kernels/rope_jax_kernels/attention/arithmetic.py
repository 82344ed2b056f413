"""Arithmetic inside the attention kernels, in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels.attention.task import Task

LOG2E = np.float32(np.log2(np.e))
# The logit of a masked pair; finite, so that rows without any key stay finite.
MASKED = np.float32(-1e30)


def _round(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.floor(x + np.float32(0.5))


def cos_sin(
    theta: Float[Array, "*n"], nearest: Callable[[Array], Array] = _round
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Cosine and sine of float32 radians, within 2e-7 of the exact values up to 10^4 radians.

    The compiler's own are two functions of twice the length, with a branch for huge angles that
    keeps an array in local memory. Here the nearest multiple of pi/2 is subtracted in three parts
    whose products are exact (Cody and Waite), and the polynomials are those of Cephes.

    Args:
        theta: radians.
        nearest: rounds to whole numbers, by an operation that the backend has.
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


def dot(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], contract: tuple[int, int]
) -> Float[Array, "_ _"]:
    """The matrix product over one axis of each, in float32 (not rounded to TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def fma(task: Task, a: Any, b: Any, c: Any) -> Float[Array, "*n"]:
    """a * b + c, rounded once; the compiler would keep two instructions. Float32, broadcast."""
    if task.interpret:
        return a * b + c
    (result,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=jnp.broadcast_arrays(*(jnp.asarray(x, jnp.float32) for x in (a, b, c))),
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[
            jax.ShapeDtypeStruct(jnp.broadcast_shapes(*map(jnp.shape, (a, b, c))), jnp.float32)
        ],
    )
    return result


def exp2(task: Task, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """2 to the power x in one instruction; results under 2^-126 are 0."""
    if task.interpret:
        return jnp.exp2(x)
    (result,) = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result
