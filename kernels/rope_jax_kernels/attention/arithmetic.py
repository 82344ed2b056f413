"""Arithmetic inside the attention kernels, in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels.attention.task import Task

LOG2E = np.float32(np.log2(np.e))
# Where the running maximum of a row's logits begins; in `mosaic`, except neighbourhoods, also the
# logit of a masked pair. Finite, so that differences with it are not NaN.
MASKED = np.float32(-1e30)


def bounded_bias(bias: Float[Array, "*n"], lowest: float = MASKED / 2) -> Float[Array, "*n"]:
    """A bias in units of log 2, float32, and finite even where it is -inf."""
    return jnp.maximum(bias.astype(jnp.float32) * LOG2E, np.float32(lowest))


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


def negative(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """-x, as a product that the next operation takes in; Triton writes `-x` as 0 - x."""
    return x * np.float32(-1)


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


def keep(arrays: list[Array]) -> list[Array]:
    """Passes arrays through a loop of one round, if they are used both transposed and as they are.

    XLA's pass over Triton's code moves a transpose before the operations that compute its operand,
    which are then done twice, but not before a loop.
    """
    zeros = [jnp.zeros_like(x) for x in arrays]
    return jax.lax.fori_loop(0, 1, lambda _, __: arrays, zeros)
