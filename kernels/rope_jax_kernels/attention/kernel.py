"""The common base of the attention kernels: their operands, gradients and operations.

The backward pass needs only the operands, the output, and the logarithm of each query's sum of
exponentials (lse). Queries and keys are rotated by tables of cosines and sines that XLA computes
before (`tables`), or by coordinates and frequencies.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.attention.task import Task, task_of
from rope_jax_kernels.device import vary_alike, without_symbolic_zeros
from rope_jax_kernels.dispatch import TileSizes
from rope_jax_kernels.rotation import Rotation


@dataclasses.dataclass(frozen=True)
@jax.tree_util.register_static
class Wanted:
    """The operands, beside the data, whose gradient is wanted."""

    freqs: bool
    bias: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The attention operations by the kernels of a forward and a backward pass.

    Attributes:
        name: of the implementation, for errors.
        forward: `forward(task, operands, rotation, bias)` computes the output [B, T, N, D] and lse
            [B, N, T], or more for whole tiles of tokens. Operands are q, k and v [B, T, heads, D],
            three times the same array if packed; the rotation (coords, freqs) or (); the bias
            ([N, entries],) or ().
        backward: `backward(task, wanted, operands, turning, bias)` computes the gradients of the
            data, three or a packed one; partial sums of that of freqs, each [_, _, N, A, R], or ()
            where it is not wanted; and that of the bias, or None. Operands are q, k,
            v, the output's gradient, lse and the output; turning are cosines and sines, and coords
            where the gradient of freqs is wanted.
    """

    name: str
    forward: Callable
    backward: Callable

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
        tile: TileSizes = (),
    ) -> Float[Array, "B *places N D"]:
        """Attention of (qkv,) or (q, k, v) in the shapes of the public functions."""
        terms = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
        task = task_of(arrays, tile=tile, **terms)
        turning = () if rotation is None else (rotation.coords, rotation.freqs)
        added = () if bias is None else (bias.reshape(task.heads, -1),)
        out = attend(self, task, *vary_alike(arrays, turning, added))
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

        once = jax.custom_jvp(functools.partial(launch, *static))
        once.defjvp(refuse)
        return once


def views(task: Task, arrays: tuple) -> tuple:
    """q, k and v as [B, T, heads, D], three times the same array if packed."""
    shaped = [x.reshape(x.shape[0], task.tokens, -1, task.head_dim) for x in arrays]
    return tuple(shaped * 3 if task.packed else shaped)


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
def attend(
    kernel: Kernel, task: Task, arrays: tuple, rotation: tuple, bias: tuple
) -> Float[Array, "B T N D"]:
    """Attention of (qkv,) or (q, k, v), with (coords, freqs) or (), and ([N, entries],) or ()."""
    return kernel.once(kernel.forward, task)(views(task, arrays), rotation, bias)[0]


def attend_forward(
    kernel: Kernel, task: Task, arrays: tuple, rotation: tuple, bias: tuple
) -> tuple[Array, tuple]:
    """Saves the operands, the output and lse."""
    if rotation and rotation[0].perturbed:
        raise ValueError(
            f"implementation={kernel.name!r} of attention has no gradient of rotation.coords; use "
            "implementation='xla' for that"
        )
    wanted = Wanted(
        freqs=bool(rotation) and rotation[1].perturbed, bias=bool(bias) and bias[0].perturbed
    )
    arrays, rotation, bias = (tuple(x.value for x in group) for group in (arrays, rotation, bias))
    out, lse = kernel.once(kernel.forward, task)(views(task, arrays), rotation, bias)
    return out, (arrays, rotation, bias, out, lse, wanted)


def attend_backward(kernel: Kernel, task: Task, residuals: tuple, dout: Any) -> tuple:
    """The gradients of the data, the frequencies and the bias."""
    arrays, rotation, bias, out, lse, wanted = residuals
    _, dout = vary_alike(arrays, without_symbolic_zeros(dout))  # new zeros do not vary yet
    turning = (*tables(rotation), *(rotation[:1] if wanted.freqs else ()))
    operands = (*views(task, arrays), dout, lse, out)
    backward = kernel.once(kernel.backward, task, wanted)
    gradients, partial, of_bias = backward(operands, turning, bias)
    gradients = tuple(g.reshape(x.shape) for g, x in zip(gradients, arrays, strict=True))
    of_rotation = (None,) * len(rotation)
    if wanted.freqs:
        freqs = rotation[1]
        dfreqs = sum(x.sum((0, 1)) for x in partial)
        dfreqs = dfreqs.sum(0, keepdims=True) if freqs.shape[0] == 1 else dfreqs
        of_rotation = None, dfreqs.astype(freqs.dtype)
    of_bias = (of_bias.astype(bias[0].dtype),) if wanted.bias else (None,) * len(bias)
    return gradients, of_rotation, of_bias


attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)
