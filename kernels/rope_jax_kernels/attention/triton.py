"""Attention as Pallas-Triton kernels, with the rotation inside: q, k and v are read where the projection left them, once rotated in
registers, and nothing but the output and the logarithm of each query's sum of exponentials (lse) is kept for the backward pass.

A program computes a tile of queries of one head and one example, over the blocks of keys that `tiles` gives it (online softmax: Dao et
al., arXiv 2205.14135). Rotated queries and keys are rounded once, to the data's dtype, logits and softmax are float32.

Backward, where a tile holds all queries that see its keys (windows of up to 64 tokens), one kernel computes all gradients; elsewhere
one walks over keys (dq) and one over queries (dk, dv). No atomics: two runs are bit-equal. The gradient of the frequencies comes from
the rotated queries and keys and their gradients, which are in registers then; that of a bias from a pass of its own.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pattern
from rope_jax_kernels.attention.tiles import cut
from rope_jax_kernels.attention.triton_kernels import Launch, Task, bias_kernel, closed_kernel, forward_kernel, key_kernel, query_kernel
from rope_jax_kernels.rotary import device
from rope_jax_kernels.rotary.in_place import vary_alike
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
HEAD_DIMS = (16, 128)  # least and most
NEIGHBORS = 16  # most along one axis: a tile, which is half as long at least, has no more than 64 queries then
PROGRAMS = 1024  # of the gradient of a bias: several for each of a GPU's multiprocessors


def run(kernel: Any, launch: Launch, grid: tuple, outputs: list[tuple], operands: tuple, *, aliases: dict | None = None) -> list[Array]:
    """Starts a kernel; outputs are (shape, dtype)."""
    varying = jax.typeof(operands[0]).manual_axis_type
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype in outputs],
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=launch.warps, num_stages=1),
        interpret=launch.task.interpret,
        name=f"attention_{kernel.func.__name__}",
    )
    return list(differentiated_once(call, launch.task)(*operands))


def differentiated_once(call: Callable, task: Task) -> Callable:
    """A kernel that refuses its derivative: it is asked for only where the attention around it, which has one, is differentiated twice."""

    def refuse(primals: tuple, tangents: tuple) -> None:
        name = task.implementation
        raise ValueError(f"implementation={name!r} of attention has first derivatives only; use implementation='xla' for second ones")

    once = jax.custom_jvp(call)
    once.defjvp(refuse)
    return once


def plan(task: Task, itemsize: int, part: str) -> Launch:
    """How a part, "forward", "queries", "keys" or "bias", is cut: as coarsely as registers allow without spilling (compiled for sm_90a)."""
    wide, everywhere = itemsize == 4 or task.head_dim > 64, isinstance(task.pattern, Global)
    if part == "forward":
        # Tall tiles turn keys fewer times.
        size = (32, 16, 8) if itemsize == 4 and task.head_dim > 32 else (128, 64, 8) if everywhere and not wide else (64, 32, 4)
    elif part == "bias":
        size = (32, 16, 8) if wide else (64, 32, 4)
    elif wide:
        size = (16 if part == "keys" else 32, 16, 16 if itemsize == 4 and not everywhere else 8)
    else:
        size = (32 if part == "keys" else 64, 64, 8) if everywhere else (64, 32, 8)
    rows, columns, warps = size
    return Launch(task, cut(task.pattern, task.places, rows=rows, columns=columns), warps)


def views(task: Task, arrays: tuple) -> tuple:
    """q, k and v as the kernels see them, [B, T, heads, D]."""
    shaped = [x.reshape(x.shape[0], task.tokens, -1, task.head_dim) for x in arrays]
    return tuple(shaped * 3 if task.packed else shaped)


def forward(task: Task, arrays: tuple, rotation: tuple, bias: tuple) -> tuple[Array, Array]:
    """The output [B, T, N, D] and lse [B, N, T] (by `mosaic` with room for whole tiles, [B, N, >= T])."""
    q, k, v = views(task, arrays)
    if task.implementation == "mosaic":
        from rope_jax_kernels.attention import mosaic_kernel  # Mosaic GPU is a quarter of this package's import time

        return differentiated_once(functools.partial(mosaic_kernel.forward, task), task)((q, k, v), rotation)
    launch = plan(task, q.dtype.itemsize, "forward")
    batch, tokens = q.shape[:2]
    kernel = functools.partial(forward_kernel, launch=launch, rotated=len(rotation), biased=len(bias))
    shapes = [((batch, tokens, task.heads, task.head_dim), q.dtype), ((batch, task.heads, tokens), jnp.float32)]
    out, lse = run(kernel, launch, (task.heads, launch.tiles.tiles, batch), shapes, (q, k, v, *rotation, *bias))
    return out, lse


@dataclasses.dataclass(frozen=True)
@jax.tree_util.register_static
class Wanted:
    """Of which operands beside the data the gradient is wanted."""

    freqs: bool
    bias: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(task: Task, arrays: tuple, rotation: tuple, bias: tuple) -> Array:
    """Attention [B, T, N, D] of (qkv,) or (q, k, v), with (coords, freqs) or (), and a bias ([N, entries],) or ()."""
    return forward(task, arrays, rotation, bias)[0]


def attend_forward(task: Task, arrays: tuple, rotation: tuple, bias: tuple) -> tuple[Array, tuple]:
    """Saves the operands, the output and lse."""
    if rotation and rotation[0].perturbed:
        name = task.implementation
        raise ValueError(f"implementation={name!r} of attention has no gradient of rotation.coords; use implementation='xla' for that")
    wanted = Wanted(freqs=bool(rotation) and rotation[1].perturbed, bias=bool(bias) and bias[0].perturbed)
    arrays, rotation, bias = (tuple(x.value for x in group) for group in (arrays, rotation, bias))
    out, lse = forward(task, arrays, rotation, bias)
    return out, (arrays, rotation, bias, out, lse, wanted)


def attend_backward(task: Task, residuals: tuple, dout: Any) -> tuple:
    """The gradients of the data, the frequencies and the bias, by one or two kernels and, for a bias, one more."""
    arrays, rotation, bias, out, lse, wanted = residuals
    q, k, v = views(task, arrays)
    dout = jnp.zeros(dout.shape, dout.dtype) if isinstance(dout, SymbolicZero) else dout
    _, dout = vary_alike(arrays, dout)  # zeros made here do not vary yet
    launch = plan(task, q.dtype.itemsize, "queries")
    tiles, batch, options = launch.tiles, q.shape[0], {"rotated": len(rotation), "biased": len(bias)}
    terms = (*rotation, *bias)
    gradient = [(q.shape, q.dtype)]
    sums = lambda tiles: [((batch, tiles.tiles, task.heads, *rotation[1].shape[1:]), jnp.float32)] if wanted.freqs else []
    grid = lambda tiles: (task.heads, tiles.tiles, batch)
    options_freqs = options | {"freqs": wanted.freqs}
    if launch.closed:
        kernel = functools.partial(closed_kernel, launch=launch, **options_freqs)
        shapes = gradient * (1 if task.packed else 3) + sums(tiles)
        gradients = run(kernel, launch, grid(tiles), shapes, (q, k, v, dout, lse, out, *terms))
        partial = [gradients.pop()] if wanted.freqs else []
    else:
        kernel = functools.partial(query_kernel, launch=launch, **options_freqs)
        shapes = [*gradient, (lse.shape, jnp.float32), *sums(tiles)]
        dq, delta, *partial = run(kernel, launch, grid(tiles), shapes, (q, k, v, dout, lse, out, *terms))
        turned = plan(task, q.dtype.itemsize, "keys")
        turned = dataclasses.replace(turned, tiles=turned.tiles.transposed())
        kernel = functools.partial(key_kernel, launch=turned, **options_freqs)
        operands = (q, k, v, dout, lse, delta, *terms)
        shapes, aliases = gradient * (1 if task.packed else 2) + sums(turned.tiles), {}
        if task.packed:
            aliases, operands = {len(operands): 0}, (*operands, dq)
        found = run(kernel, turned, grid(turned.tiles), shapes, operands, aliases=aliases)
        partial += [found.pop()] if wanted.freqs else []
        gradients = found if task.packed else [dq, *found]
    gradients = tuple(g.reshape(x.shape) for g, x in zip(gradients, arrays, strict=True))
    return gradients, _of_rotation(rotation, partial), _of_bias(task, (q, k, v, dout, lse, out, *terms), bias, wanted, options)


def _of_rotation(rotation: tuple, partial: list[Array]) -> tuple:
    """The gradients of (coords, freqs): None of coords, and of freqs where there are no `partial` sums."""
    if not partial:
        return (None,) * len(rotation)
    _, freqs = rotation
    dfreqs = sum(x.sum((0, 1)) for x in partial)
    dfreqs = dfreqs.sum(0, keepdims=True) if freqs.shape[0] == 1 else dfreqs
    return None, dfreqs.astype(freqs.dtype)


def _of_bias(task: Task, operands: tuple, bias: tuple, wanted: Wanted, options: dict) -> tuple:
    """The gradient of the bias [N, entries], None where it is not wanted."""
    if not wanted.bias:
        return (None,) * len(bias)
    launch = plan(task, operands[0].dtype.itemsize, "bias")
    tiles, heads = launch.tiles, task.heads
    shares = tiles.tiles // tiles.repeats
    items = operands[0].shape[0] * tiles.repeats
    groups = min(items, max(1, PROGRAMS // (heads * shares * tiles.blocks)))
    kernel = functools.partial(bias_kernel, launch=launch, items=items, groups=groups, **options)
    shape = ((groups, heads, shares * tiles.rows, tiles.blocks * tiles.columns), jnp.float32)
    (by_slot,) = run(kernel, launch, (heads, shares * tiles.blocks, groups), [shape], operands)
    return (tiles.fold(by_slot.sum(0)).astype(bias[0].dtype),)


attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)


def attend_all(
    arrays: tuple,
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Array | None,
    scale: float | None,
    implementation: str = "triton",
) -> Array:
    """Attention of (qkv,) or (q, k, v) in the shapes of the public functions."""
    packed = len(arrays) == 1
    heads, head_dim = arrays[0].shape[-2:]
    places = arrays[0].shape[1 : -3 if packed else -2]
    task = Task(
        pattern=pattern,
        places=places,
        heads=heads,
        head_dim=head_dim,
        packed=packed,
        pairs=0 if rotation is None else rotation.freqs.shape[2],
        pairing="half" if rotation is None else rotation.pairing,
        scale=head_dim**-0.5 if scale is None else float(scale),
        interpret=device.interpreted(),
        implementation=implementation,
    )
    turning = () if rotation is None else (rotation.coords, rotation.freqs)
    added = () if bias is None else (bias.reshape(heads, -1),)
    arrays, turning, added = vary_alike(arrays, turning, added)
    return attend(task, arrays, turning, added).reshape(arrays[0].shape[0], *places, heads, head_dim)


def attention(q: Array, k: Array, v: Array, **terms: Any) -> Array:
    """See `rope_jax_kernels.attention`."""
    return attend_all((q, k, v), **terms)


def attention_qkv(qkv: Array, **terms: Any) -> Array:
    """See `rope_jax_kernels.attention_qkv`. Reads q, k and v where they lie, and writes one packed gradient."""
    return attend_all((qkv,), **terms)


def refusal(arrays: dict[str, Array], *, pattern: Pattern, rotation: Rotation | None, bias: Array | None, scale: Any) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    dtypes = {name: x.dtype for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        return "q, k and v have different dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    beside = {} if rotation is None else {"rotation.coords": rotation.coords, "rotation.freqs": rotation.freqs}
    for name, x in (arrays | beside | ({} if bias is None else {"bias": bias})).items():
        if x.dtype not in DTYPES:
            return f"{name} has dtype {x.dtype}, and it computes in float32 (float16, bfloat16 and float32 are served)"
        if x.size == 0:
            return f"{name} has shape {x.shape}, so there is nothing to compute"
    least, most = HEAD_DIMS
    head_dim = next(iter(arrays.values())).shape[-1]
    if not least <= head_dim <= most:
        return f"the head dimension is {head_dim}; {least} to {most} are served"
    if isinstance(pattern, Neighborhood) and max(pattern.size) > NEIGHBORS:
        return f"the neighbourhood is {pattern.size}; up to ({NEIGHBORS}, {NEIGHBORS}) are served"
    if not isinstance(scale, numbers.Real | None):
        return "scale is an array; numbers are served"
    return device.refusal()


def refuses_attention(q: Array, k: Array, v: Array, **terms: Any) -> str | None:
    """Why `attention` cannot serve this call, or None."""
    return refusal({"q": q, "k": k, "v": v}, **terms)


def refuses_attention_qkv(qkv: Array, **terms: Any) -> str | None:
    """Why `attention_qkv` cannot serve this call, or None."""
    return refusal({"qkv": qkv}, **terms)
