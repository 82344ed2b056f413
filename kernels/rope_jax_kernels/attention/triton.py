"""Attention as Pallas-Triton kernels, with the rotation inside.

q, k and v are read directly from the projection and rotated in registers, by tables of cosines and
sines that XLA computes before (`tables`). The backward pass needs only the operands, the output,
and the logarithm of each query's sum of exponentials (lse).

A program computes a tile of queries of one head and one example, over the blocks of keys that
`tiles` lists, with an online softmax (FlashAttention, arXiv 2205.14135). Rotated queries and
keys are rounded once, to the data's dtype; logits and softmax are float32.

Backward, if a tile holds all queries that attend to its keys (windows of up to 64 tokens), one
kernel computes all gradients. Otherwise one loops over keys (dq) and one over queries (dk, dv).
There are no atomics, so results are deterministic. The gradient of the frequencies is computed from
the rotated queries and keys and their gradients, which are then in registers; that of a bias needs
a separate kernel.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels import choices, device
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pattern, Window
from rope_jax_kernels.attention.slots import Tiles
from rope_jax_kernels.attention.task import Launch, Task
from rope_jax_kernels.attention.tiles import cut
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
PROGRAMS = 1024  # of the gradient of a bias: several for each of a GPU's multiprocessors
Sizes = tuple[int, int, int, int]  # rows, columns, warps, stages
SMALLEST = 16  # side of a tile, for the matrix instructions

# From planned sizes to others that are measured.
CHANGES: tuple[Callable[..., Sizes], ...] = (
    lambda rows, columns, warps, _: (rows, columns, warps, 2),
    lambda rows, columns, warps, _: (rows, columns, 2 * warps, 1),
    lambda rows, columns, warps, _: (max(SMALLEST, rows // 2), columns, warps, 1),
    lambda rows, columns, warps, _: (rows, max(SMALLEST, columns // 2), warps, 1),
    lambda rows, columns, warps, _: (rows, 2 * columns, warps, 1),
)


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


def planned_sizes(task: Task, itemsize: int, part: str) -> Sizes:
    """Rows and columns of a tile, warps and stages: the fewest instructions that were found.

    Counted for compute capability 9.0a, 8.9 and 8.0 (`benchmarks.machine_code`). Registers spill in
    the backward kernel of windows before Hopper, and in float32 with heads of 128. Arguments as in
    `plan`.
    """
    if itemsize == 4 or task.head_dim > 64:
        return (*_wide_size(task, itemsize, part), 1)
    # On Ampere, Ada and consumer Blackwell (12.x, not compiled for yet), all operands of matrix
    # instructions are in registers.
    older = device.capability() // 10 in (8, 12)
    if part == "forward" and isinstance(task.pattern, Global):
        # Tall tiles turn keys fewer times.
        return 128, 32 if older or task.biased else 64, 4, 1
    if older and task.head_dim > 32 and part in ("queries", "keys"):
        return (32, 32, 4, 1) if part == "keys" else (64, 16, 4, 1)
    whole = isinstance(task.pattern, Window) and task.pattern.rotated_tokens(task.places) <= 64
    if whole and (part == "forward" or not older):
        return 64, 64, 4, 1  # a window is one block
    return 64, 32, 4, 1


def plan(task: Task, itemsize: int, part: str) -> Launch:
    """Tiles, warps and stages of a kernel: measured ones, or else planned ones.

    Args:
        task: of the kernel.
        itemsize: bytes of a number of q, k and v.
        part: "forward", "queries", "keys" or "bias".
    """
    sizes = dict(task.tile).get(part) or planned_sizes(task, itemsize, part)
    rows, columns, warps, stages = sizes
    tiles = cut(task.pattern, task.places, rows=rows, columns=columns)
    return Launch(task, tiles, warps, stages)


def other_tiles(training: bool, arguments: dict[str, Any]) -> list[choices.Tile]:
    """Tiles worth measuring for a call beside the planned ones: near them, one part at a time.

    Args:
        training: whether gradients are taken.
        arguments: of the call, by name; shapes suffice.
    """
    terms = {name: arguments[name] for name in ("pattern", "rotation", "bias", "scale")}
    arrays = tuple(arguments[name] for name in ("qkv", "q", "k", "v") if name in arguments)
    task, itemsize = task_of(arrays, "triton", **terms), arrays[0].dtype.itemsize
    parts = [("forward",), ("queries", "keys")] if training else [("forward",)]
    found = {}
    for together in parts:
        planned = {part: planned_sizes(task, itemsize, part) for part in together}
        for change in CHANGES:
            tile = tuple((part, change(*sizes)) for part, sizes in planned.items())
            changed = dataclasses.replace(task, tile=tile)
            launches = [plan(changed, itemsize, part) for part in together]
            same = [plan(task, itemsize, part) for part in together]
            # Small patterns cut several sizes into the same tiles.
            launches, same = (
                tuple((x.tiles, x.warps, x.stages) for x in some) for some in (launches, same)
            )
            if launches != same:
                found.setdefault(launches, tile)
    return list(found.values())


def _wide_size(task: Task, itemsize: int, part: str) -> tuple[int, int, int]:
    """Rows, columns and warps where a row of channels takes many registers."""
    everywhere = isinstance(task.pattern, Global)
    if part == "bias" or (part == "forward" and itemsize == 4 and task.head_dim > 32):
        return 32, 16, 8
    if part == "forward":
        return 64, 32, 4
    if itemsize == 4 and not everywhere:
        return 16 if part == "keys" else 32, 16, 16
    return (16, 16, 4 if itemsize == 4 else 8) if part == "keys" else (32, 16, 8)


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
    launch, turning = plan(task, q.dtype.itemsize, "forward"), tables(rotation)
    batch, tokens = q.shape[:2]
    kernel = functools.partial(
        forward_kernel, launch=launch, rotated=len(turning), biased=len(bias)
    )
    shapes = [
        ((batch, tokens, task.heads, task.head_dim), q.dtype),
        ((batch, task.heads, tokens), jnp.float32),
    ]
    grid = task.heads, launch.tiles.tiles, batch
    operands = (q, k, v, *turning, *map(launch.tiles.by_slot, bias))
    out, lse = run(kernel, launch, grid, shapes, operands)
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
    launch = plan(task, q.dtype.itemsize, "queries")
    tiles, batch = launch.tiles, q.shape[0]
    turning = (*tables(rotation), *(rotation[:1] if wanted.freqs else ()))
    options = {"rotated": len(turning), "biased": len(bias)}
    gradient = [(q.shape, q.dtype)]

    def grid(tiles: Tiles) -> tuple[int, int, int]:
        return task.heads, tiles.tiles, batch

    def sums(tiles: Tiles) -> list[tuple]:
        if not wanted.freqs:
            return []
        return [((batch, tiles.tiles, task.heads, *rotation[1].shape[1:]), jnp.float32)]

    if launch.closed:
        kernel = functools.partial(closed_kernel, launch=launch, **options)
        shapes = gradient * (1 if task.packed else 3) + sums(tiles)
        operands = (q, k, v, dout, lse, out, *turning, *(tiles.by_slot(x).mT for x in bias))
        gradients = run(kernel, launch, grid(tiles), shapes, operands)
        partial = [gradients.pop()] if wanted.freqs else []
    else:
        kernel = functools.partial(query_kernel, launch=launch, **options)
        shapes = [*gradient, (lse.shape, jnp.float32), *sums(tiles)]
        operands = (q, k, v, dout, lse, out, *turning, *map(tiles.by_slot, bias))
        dq, delta, *partial = run(kernel, launch, grid(tiles), shapes, operands)
        turned = plan(task, q.dtype.itemsize, "keys")
        turned = dataclasses.replace(turned, tiles=turned.tiles.transposed())
        kernel = functools.partial(key_kernel, launch=turned, **options)
        operands = (
            q,
            k,
            v,
            dout,
            lse,
            delta,
            *turning,
            *(turned.tiles.by_slot(x).mT for x in bias),
        )
        shapes, aliases = gradient * (1 if task.packed else 2) + sums(turned.tiles), {}
        if task.packed:
            aliases, operands = {len(operands): 0}, (*operands, dq)
        found = run(kernel, turned, grid(turned.tiles), shapes, operands, aliases=aliases)
        partial += [found.pop()] if wanted.freqs else []
        gradients = found if task.packed else [dq, *found]
    gradients = tuple(g.reshape(x.shape) for g, x in zip(gradients, arrays, strict=True))
    operands = (q, k, v, dout, lse, out, *turning)
    of_rotation = _rotation_gradients(rotation, partial)
    return gradients, of_rotation, _bias_gradient(task, operands, bias, wanted, options)


def _rotation_gradients(rotation: tuple, partial: list[Array]) -> tuple:
    """(None, gradient of freqs), from partial sums; None for both where there are none."""
    if not partial:
        return (None,) * len(rotation)
    _, freqs = rotation
    dfreqs = sum(x.sum((0, 1)) for x in partial)
    dfreqs = dfreqs.sum(0, keepdims=True) if freqs.shape[0] == 1 else dfreqs
    return None, dfreqs.astype(freqs.dtype)


def _bias_gradient(
    task: Task, operands: tuple, bias: tuple, wanted: Wanted, options: dict
) -> tuple:
    """The gradient of the bias, ([N, entries],), (None,) where it is not wanted, or ()."""
    if not wanted.bias:
        return (None,) * len(bias)
    launch = plan(task, operands[0].dtype.itemsize, "bias")
    tiles, heads = launch.tiles, task.heads
    shares = tiles.tiles // tiles.repeats
    items = operands[0].shape[0] * tiles.repeats
    groups = min(items, max(1, PROGRAMS // (heads * shares * tiles.blocks)))
    kernel = functools.partial(bias_kernel, launch=launch, items=items, groups=groups, **options)
    shape = ((groups, heads, shares * tiles.rows, tiles.blocks * tiles.columns), jnp.float32)
    operands = (*operands, *map(tiles.by_slot, bias))
    (partial,) = run(kernel, launch, (heads, shares * tiles.blocks, groups), [shape], operands)
    return (tiles.fold(partial.sum(0)).astype(bias[0].dtype),)


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


def task_of(
    arrays: tuple,
    implementation: str,
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N ..."] | None,
    scale: float | None,
) -> Task:
    """The task of (qkv,) or (q, k, v), with the tile in force."""
    packed = len(arrays) == 1
    heads, head_dim = arrays[0].shape[-2:]
    return Task(
        pattern=pattern,
        places=arrays[0].shape[1 : -3 if packed else -2],
        heads=heads,
        head_dim=head_dim,
        packed=packed,
        pairs=0 if rotation is None else rotation.freqs.shape[2],
        pairing="half" if rotation is None else rotation.pairing,
        biased=bias is not None,
        scale=head_dim**-0.5 if scale is None else float(scale),
        interpret=device.interpreted(),
        implementation=implementation,
        tile=choices.tile_in_force(),
    )


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
