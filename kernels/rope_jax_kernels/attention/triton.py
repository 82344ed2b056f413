"""Attention as Pallas-Triton kernels, with the rotation inside.

q, k and v are read directly from the projection and rotated in registers, by tables of cosines and
sines that XLA computes before (`tables`). The backward pass needs only the operands, the output,
and the logarithm of each query's sum of exponentials (lse).

A program computes a tile of queries of one head and one example, or of a small window several
examples, over the blocks of keys that `tiles` lists, with an online softmax (FlashAttention, arXiv
2205.14135). `plans` has the sizes of programs. Rotated queries and keys are rounded once, to the
data's dtype; logits and softmax are float32.

Backward, if a tile holds all queries that attend to its keys (windows of up to 64 tokens), one
kernel computes all gradients. Otherwise one loops over keys (dq) and one over queries (dk, dv).
There are no atomics, so results are deterministic. The gradient of the frequencies is computed from
the rotated queries and keys and their gradients, which are then in registers. That of a bias needs
a separate kernel, unless a window is one block, heads are narrow and maps are small
(`_closed_backward`): then a program adds up the gradients of logits of several examples.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention.patterns import Neighborhood, Pattern
from rope_jax_kernels.attention.plans import bias_groups, plan, with_examples
from rope_jax_kernels.attention.plans import other_tiles as other_tiles  # for `measure`
from rope_jax_kernels.attention.task import Launch, Task, task_of
from rope_jax_kernels.attention.triton_kernels import (
    bias_kernel,
    closed_kernel,
    forward_kernel,
    key_kernel,
    query_kernel,
)
from rope_jax_kernels.device import vary_alike, without_symbolic_zeros
from rope_jax_kernels.rotary.kernel import named_angles
from rope_jax_kernels.rotation import Rotation

HEAD_DIMS = (16, 128)  # smallest and largest
# Most neighbours along one axis. A tile is at least half as long, and has at most 64 queries then.
NEIGHBORS = 16
SUMS = 4096  # most gradients of a bias that programs add up: 64 MiB for windows of 7


def run(
    kernel: Any,
    launch: Launch,
    grid: tuple,
    outputs: list[tuple],
    operands: tuple,
    *,
    aliases: dict | None = None,
) -> list[Array]:
    """Launches a kernel; outputs are (shape, dtype)."""
    varying = jax.typeof(operands[0]).manual_axis_type
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype in outputs
    ]
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=launch.task.interpret,
        name=f"attention_{kernel.func.__name__}",
    )
    return list(differentiated_once(call, launch.task)(*operands))


def differentiated_once(call: Callable, task: Task) -> Callable:
    """A kernel whose derivative raises an error.

    The attention around it has one, so the error comes from a second derivative.
    """

    def refuse(primals: tuple, tangents: tuple) -> None:
        name = task.implementation
        raise ValueError(
            f"implementation={name!r} of attention has first derivatives only; use "
            "implementation='xla' for second ones"
        )

    once = jax.custom_jvp(call)
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


def forward(task: Task, arrays: tuple, rotation: tuple, bias: tuple) -> tuple[Array, Array]:
    """The output [B, T, N, D] and lse [B, N, T] ([B, N, >= T] from `mosaic`: whole tiles)."""
    q, k, v = views(task, arrays)
    if task.implementation == "mosaic":
        # Here, because Mosaic GPU takes a second to import and Triton does not need it.
        from rope_jax_kernels.attention import mosaic_launch

        by_mosaic = functools.partial(mosaic_launch.forward, task)
        return differentiated_once(by_mosaic, task)((q, k, v), rotation)
    launch, turning = plan(task, q.dtype.itemsize, "forward", q.shape[0]), tables(rotation)
    batch, tokens = q.shape[:2]
    kernel = functools.partial(
        forward_kernel, launch=launch, rotated=len(turning), biased=len(bias)
    )
    shapes = [
        ((batch, tokens, task.heads, task.head_dim), q.dtype),
        ((batch, task.heads, tokens), jnp.float32),
    ]
    operands = (q, k, v, *turning, *map(launch.tiles.by_slot, bias))
    out, lse = run(kernel, launch, launch.grid(batch), shapes, operands)
    return out, lse


@dataclasses.dataclass(frozen=True)
@jax.tree_util.register_static
class Wanted:
    """The operands, beside the data, whose gradient is wanted."""

    freqs: bool
    bias: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(task: Task, arrays: tuple, rotation: tuple, bias: tuple) -> Float[Array, "B T N D"]:
    """Attention of (qkv,) or (q, k, v), with (coords, freqs) or (), and ([N, entries],) or ()."""
    return forward(task, arrays, rotation, bias)[0]


def attend_forward(task: Task, arrays: tuple, rotation: tuple, bias: tuple) -> tuple[Array, tuple]:
    """Saves the operands, the output and lse."""
    if rotation and rotation[0].perturbed:
        name = task.implementation
        raise ValueError(
            f"implementation={name!r} of attention has no gradient of rotation.coords; use "
            "implementation='xla' for that"
        )
    wanted = Wanted(
        freqs=bool(rotation) and rotation[1].perturbed, bias=bool(bias) and bias[0].perturbed
    )
    arrays, rotation, bias = (tuple(x.value for x in group) for group in (arrays, rotation, bias))
    out, lse = forward(task, arrays, rotation, bias)
    return out, (arrays, rotation, bias, out, lse, wanted)


def attend_backward(task: Task, residuals: tuple, dout: Any) -> tuple:
    """The gradients of the data, the frequencies and the bias, by one to three kernels."""
    arrays, rotation, bias, out, lse, wanted = residuals
    q, k, v = views(task, arrays)
    dout = without_symbolic_zeros(dout)
    _, dout = vary_alike(arrays, dout)  # new zeros do not vary yet
    if task.implementation == "mosaic":
        from rope_jax_kernels.attention import mosaic_backward, mosaic_launch

        if mosaic_backward.serves(task):
            by_mosaic = functools.partial(mosaic_launch.backward, task)
            operands = (q, k, v, dout, out, lse), tables(rotation), rotation[: wanted.freqs]
            gradients, partial = differentiated_once(by_mosaic, task)(*operands)
            gradients = tuple(g.reshape(x.shape) for g, x in zip(gradients, arrays, strict=True))
            return gradients, _rotation_gradients(rotation, partial), ()
    turning = (*tables(rotation), *(rotation[:1] if wanted.freqs else ()))
    launch = plan(task, q.dtype.itemsize, "queries", q.shape[0])
    backward = _closed_backward if launch.closed else _open_backward
    operands = (q, k, v, dout, lse, out)
    gradients, partial, of_bias = backward(launch, operands, turning, bias, wanted)
    if wanted.bias and of_bias is None:
        of_bias = _bias_gradient(task, operands, turning, bias)
    gradients = tuple(g.reshape(x.shape) for g, x in zip(gradients, arrays, strict=True))
    of_bias = (of_bias.astype(bias[0].dtype),) if wanted.bias else (None,) * len(bias)
    return gradients, _rotation_gradients(rotation, partial), of_bias


def _closed_backward(
    launch: Launch, operands: tuple, turning: tuple, bias: tuple, wanted: Wanted
) -> tuple[list[Array], list[Array], Array | None]:
    """Gradients of the data, partial ones of the frequencies, and that of the bias, by one kernel.

    None for the bias where it is not wanted, a window has several blocks, or its sums would need
    too many registers or, for a map of many windows, too much memory.
    """
    task, tiles, q = launch.task, launch.tiles, operands[0]
    batch = q.shape[0]
    shapes = [(q.shape, q.dtype)] * (1 if task.packed else 3)
    count, many = len(shapes), with_examples(launch, batch, batch)
    heads, *groups = many.grid(batch)
    fits = task.head_dim <= 32 and heads * math.prod(groups) <= SUMS
    summed = wanted.bias and tiles.blocks == 1 and fits
    if summed:
        launch = many
        shapes.append(((*groups, heads, tiles.columns, tiles.rows), jnp.float32))
    shapes += _sums(q, launch, turning, wanted)
    options = {"rotated": len(turning), "biased": len(bias), "summed": summed}
    kernel = functools.partial(closed_kernel, launch=launch, **options)
    by_key = (tiles.by_slot(x).mT for x in bias)
    found = run(kernel, launch, launch.grid(batch), shapes, (*operands, *turning, *by_key))
    partial = [found.pop()] if wanted.freqs else []
    of_bias = tiles.fold(found.pop().sum((0, 1)).mT) if summed else None
    return found[:count], partial, of_bias


def _open_backward(
    launch: Launch, operands: tuple, turning: tuple, bias: tuple, wanted: Wanted
) -> tuple[list[Array], list[Array], None]:
    """The same by two kernels, and nothing of the bias."""
    task, (q, k, v, dout, lse, _) = launch.task, operands
    options = {"rotated": len(turning), "biased": len(bias)}
    kernel = functools.partial(query_kernel, launch=launch, **options)
    gradient = (q.shape, q.dtype)
    shapes = [gradient, (lse.shape, jnp.float32), *_sums(q, launch, turning, wanted)]
    by_query = map(launch.tiles.by_slot, bias)
    dq, delta, *partial = run(
        kernel, launch, launch.grid(q.shape[0]), shapes, (*operands, *turning, *by_query)
    )
    launch = plan(task, q.dtype.itemsize, "keys", q.shape[0])
    launch = dataclasses.replace(launch, tiles=launch.tiles.transposed())
    kernel = functools.partial(key_kernel, launch=launch, **options)
    by_key = (launch.tiles.by_slot(x).mT for x in bias)
    operands = (q, k, v, dout, lse, delta, *turning, *by_key)
    shapes = [gradient] * (1 if task.packed else 2) + _sums(q, launch, turning, wanted)
    aliases = {}
    if task.packed:
        aliases, operands = {len(operands): 0}, (*operands, dq)
    found = run(kernel, launch, launch.grid(q.shape[0]), shapes, operands, aliases=aliases)
    partial += [found.pop()] if wanted.freqs else []
    return found if task.packed else [dq, *found], partial, None


def _sums(q: Array, launch: Launch, turning: tuple, wanted: Wanted) -> list[tuple]:
    """The output of partial gradients of the frequencies, if they are wanted."""
    if not wanted.freqs:
        return []
    cos, _, coords = turning
    of_tile = launch.task.heads, coords.shape[1], cos.shape[2]
    _, tiles, groups = launch.grid(q.shape[0])
    return [((groups, tiles, *of_tile), jnp.float32)]


def _rotation_gradients(rotation: tuple, partial: list[Array]) -> tuple:
    """(None, gradient of freqs), from partial sums; None for both where there are none."""
    if not partial:
        return (None,) * len(rotation)
    _, freqs = rotation
    dfreqs = sum(x.sum((0, 1)) for x in partial)
    dfreqs = dfreqs.sum(0, keepdims=True) if freqs.shape[0] == 1 else dfreqs
    return None, dfreqs.astype(freqs.dtype)


def _bias_gradient(
    task: Task, operands: tuple, turning: tuple, bias: tuple
) -> Float[Array, "N entries"]:
    """The gradient of the bias, by a kernel of its own."""
    q = operands[0]
    launch = plan(task, q.dtype.itemsize, "bias", q.shape[0])
    tiles = launch.tiles
    shares, items = tiles.tiles // tiles.repeats, q.shape[0] * tiles.repeats
    groups = bias_groups(launch, items)
    options = {"rotated": len(turning), "biased": len(bias), "items": items, "groups": groups}
    kernel = functools.partial(bias_kernel, launch=launch, **options)
    shape = ((groups, task.heads, shares * tiles.rows, tiles.blocks * tiles.columns), jnp.float32)
    grid, by_query = (task.heads, shares * tiles.blocks, groups), map(tiles.by_slot, bias)
    (partial,) = run(kernel, launch, grid, [shape], (*operands, *turning, *by_query))
    return tiles.fold(partial.sum(0))


attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)


def attend_all(
    arrays: tuple,
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N ..."] | None,
    scale: float | None,
    implementation: str = "triton",
) -> Float[Array, "B *places N D"]:
    """Attention of (qkv,) or (q, k, v) in the shapes of the public functions."""
    terms = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
    task = task_of(arrays, implementation, **terms)
    turning = () if rotation is None else (rotation.coords, rotation.freqs)
    added = () if bias is None else (bias.reshape(task.heads, -1),)
    arrays, turning, added = vary_alike(arrays, turning, added)
    out = attend(task, arrays, turning, added)
    return out.reshape(arrays[0].shape[0], *task.places, task.heads, task.head_dim)


def attention(
    q: Float[Array, "B *places N D"],
    k: Float[Array, "B *places N D"],
    v: Float[Array, "B *places N D"],
    **terms: Any,
) -> Float[Array, "B *places N D"]:
    """`rope_jax_kernels.attention`."""
    return attend_all((q, k, v), **terms)


def attention_qkv(
    qkv: Float[Array, "B *places 3 N D"], **terms: Any
) -> Float[Array, "B *places N D"]:
    """`rope_jax_kernels.attention_qkv`, read from the packed array, with a packed gradient."""
    return attend_all((qkv,), **terms)


def refusal(
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: Any,
    **arrays: Float[Array, "..."],
) -> str | None:
    """Why these kernels cannot serve a call with these arguments, or None."""
    dtypes = {name: x.dtype for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        return "q, k and v have different dtypes: " + ", ".join(
            f"{name} {dtype}" for name, dtype in dtypes.items()
        )
    angles = {} if rotation is None else named_angles(rotation)
    if reason := device.refusal_of_arrays(
        arrays | angles | ({} if bias is None else {"bias": bias})
    ):
        return reason
    smallest, largest = HEAD_DIMS
    head_dim = next(iter(arrays.values())).shape[-1]
    if not smallest <= head_dim <= largest:
        return f"the head dimension is {head_dim}; {smallest} to {largest} are served"
    if isinstance(pattern, Neighborhood) and max(pattern.size) > NEIGHBORS:
        return f"the neighbourhood is {pattern.size}; up to ({NEIGHBORS}, {NEIGHBORS}) are served"
    if not isinstance(scale, numbers.Real | None):
        return "scale is an array; numbers are served"
    return device.refusal()
