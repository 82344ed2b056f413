"""The common base of the attention kernels: their operands, gradients and operations.

The backward pass needs only the operands, the output, and the logarithm of each query's sum of
exponentials (lse); `dispatch.BACKWARD` names the implementation. Queries and keys are rotated by
tables of cosines and sines that XLA computes before (`tables`).
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import dispatch
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.attention.task import Task, make_task
from rope_jax_kernels.device import (
    DTYPES,
    refusal_of_arrays,
    vary_alike,
    without_symbolic_zeros,
)
from rope_jax_kernels.rotary.kernel import angle_arrays
from rope_jax_kernels.rotation import Rotation


@dataclasses.dataclass(frozen=True)
@jax.tree_util.register_static
class Needs:
    """The operands, besides the data, that need a gradient."""

    freqs: bool
    bias: bool


class Operands(NamedTuple):
    """The arrays that a pass reads; also their refs in a kernel.

    Attributes:
        data: q, k and v [B, T, heads, D], three times the same array if packed; in a backward pass
            also the output's gradient, lse and the output.
        turning: coords and freqs; in a backward pass cosines and sines of the angles, and coords
            where freqs need a gradient. () without rotation.
        bias: ([N, entries],) or ().
    """

    data: tuple
    turning: tuple
    bias: tuple


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The attention operations by the kernels of an implementation, and of its backward pass.

    Attributes:
        name: of the implementation.
        forward: `forward(task, operands)` computes the output [B, T, N, D] and lse [B, N, T], or
            more for whole tiles of tokens.

    The backward pass is a function of the module that `dispatch.BACKWARD` has for the task:
    `backward(task, needs, operands)` computes the gradients of the data, three or a packed one;
    partial sums of that of freqs, each [_, _, N, A, R], or () where it is not needed; and that of
    the bias, or None.
    """

    name: str
    forward: Callable

    def attention(
        self,
        q: Float[Array, "B *places N D"],
        k: Float[Array, "B *places N D"],
        v: Float[Array, "B *places N D"],
        **terms: Any,
    ) -> Float[Array, "B *places N D"]:
        """`rope_jax_kernels.attention`."""
        return self._attend((q, k, v), **terms)

    def attention_qkv(
        self, qkv: Float[Array, "B *places 3 N D"], **terms: Any
    ) -> Float[Array, "B *places N D"]:
        """`rope_jax_kernels.attention_qkv`, read from the packed array, with a packed gradient."""
        return self._attend((qkv,), **terms)

    def _attend(
        self,
        arrays: tuple,
        *,
        pattern: Pattern,
        rotation: Rotation | None,
        bias: Float[Array, "N ..."] | None,
        scale: float | None,
        tile: dispatch.TileSizes = (),
    ) -> Float[Array, "B *places N D"]:
        """Attention of (qkv,) or (q, k, v) in the shapes of the public functions."""
        terms = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
        task = make_task(arrays, tile=tile, **terms)
        turning = () if rotation is None else (rotation.coords, rotation.freqs)
        biases = () if bias is None else (bias.reshape(task.heads, -1),)
        out = attend(self, task, Operands(*vary_alike(arrays, turning, biases)))
        return out.reshape(arrays[0].shape[0], *task.places, task.heads, task.head_dim)

    def once(self, launch: Callable, *static: Any) -> Callable:
        """A pass of this problem, whose derivative raises an error.

        The attention around it has one, so the error comes from a second derivative.
        """

        def refuse(primals: tuple, tangents: tuple) -> None:
            raise ValueError(
                f"implementation={self.name!r} of attention has first derivatives only; use "
                "implementation='xla' for second ones"
            )

        # Around the operands rather than the pass: refs in it, as of what a kernel writes in place,
        # cannot be inside a function with a derivative of its own.
        operands_once = jax.custom_jvp(lambda operands: operands)
        operands_once.defjvp(refuse)
        return lambda operands: launch(*static, operands_once(operands))


def views(task: Task, operands: Operands, *others: Array) -> Operands:
    """The operands with q, k and v [B, T, heads, D], followed by others, as their data."""
    shaped = [x.reshape(x.shape[0], task.tokens, -1, task.head_dim) for x in operands.data]
    return operands._replace(data=(*(shaped * 3 if task.packed else shaped), *others))


def tables(
    rotation: tuple,
) -> tuple[Float[Array, "heads T R"], Float[Array, "heads T R"]] | tuple[()]:
    """Cosines and sines of the angles of (coords, freqs), float32, N or 1 heads; () of ().

    8 N T R bytes, the same for all examples, read by all programs through the L2 cache: for ViT-S
    with 197 tokens, 6 heads and 16 pairs 0.15 MB, where q, k, v and the output of a batch of 256
    are 155 MB. Inside the kernels, each block of keys of each program would compute them again, and
    the compiler repeats the computation for every layout in registers that uses them.
    """
    if not rotation:
        return ()
    theta = Rotation(*rotation).angles()
    return jnp.cos(theta), jnp.sin(theta)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(kernel: Kernel, task: Task, operands: Operands) -> Float[Array, "B T N D"]:
    """Attention of (qkv,) or (q, k, v), the data, in the shapes of the public functions."""
    return kernel.once(kernel.forward, task)(views(task, operands))[0]


def attend_forward(kernel: Kernel, task: Task, operands: Operands) -> tuple[Array, tuple]:
    """Saves the operands, the output and lse."""
    _, rotation, bias = operands
    if rotation and rotation[0].perturbed:
        raise ValueError(
            f"implementation={kernel.name!r} of attention has no gradient of rotation.coords; use "
            "implementation='xla' for that"
        )
    needs = Needs(
        freqs=bool(rotation) and rotation[1].perturbed, bias=bool(bias) and bias[0].perturbed
    )
    operands = Operands(*(tuple(x.value for x in group) for group in operands))
    out, lse = kernel.once(kernel.forward, task)(views(task, operands))
    return out, (operands, out, lse, needs)


def attend_backward(kernel: Kernel, task: Task, residuals: tuple, dout: Any) -> tuple:
    """The gradients of the data, the frequencies and the bias."""
    operands, out, lse, needs = residuals
    arrays, rotation, bias = operands
    _, dout = vary_alike(arrays, without_symbolic_zeros(dout))  # new zeros do not vary yet
    turning = (*tables(rotation), *(rotation[:1] if needs.freqs else ()))
    inputs = views(task, operands._replace(turning=turning), dout, lse, out)
    backward = dispatch.backward_pass(kernel.name, task)
    gradients, partial, dbias = kernel.once(backward, task, needs)(inputs)
    gradients = tuple(g.reshape(x.shape) for g, x in zip(gradients, arrays, strict=True))
    drotation = (None,) * len(rotation)
    if needs.freqs:
        freqs = rotation[1]
        dfreqs = sum(x.sum((0, 1)) for x in partial)
        dfreqs = dfreqs.sum(0, keepdims=True) if freqs.shape[0] == 1 else dfreqs
        drotation = None, dfreqs.astype(freqs.dtype)
    dbias = (dbias.astype(bias[0].dtype),) if needs.bias else (None,) * len(bias)
    return (Operands(gradients, drotation, dbias),)


attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)


def refusal_of_call(
    arrays: Mapping[str, Array],
    rotation: Rotation | None,
    bias: Array | None,
    scale: Any,
    dtypes: Sequence = DTYPES,
) -> str | None:
    """The reason why no kernel for q, k and v of these dtypes can serve a call, or None.

    Args:
        arrays: q, k and v, or qkv.
        rotation, bias, scale: of the call.
        dtypes: of the arrays.
    """
    if len({x.dtype for x in arrays.values()}) > 1:
        return "q, k and v have different dtypes: " + ", ".join(
            f"{name} {x.dtype}" for name, x in arrays.items()
        )
    if not isinstance(scale, numbers.Real | None):
        return "scale is an array; numbers are served"
    others = {} if rotation is None else angle_arrays(rotation)
    others |= {} if bias is None else {"bias": bias}
    return refusal_of_arrays(arrays, dtypes) or refusal_of_arrays(others)
