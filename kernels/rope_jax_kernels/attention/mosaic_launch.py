"""Launches the kernel of `mosaic_kernel.py`: its grid, its shared memory, and its rule for vmap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels.attention.mosaic_kernel import ROWS, forward_kernel, plan
from rope_jax_kernels.attention.task import Task


def forward(
    task: Task, arrays: tuple, rotation: tuple
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """The output and lse of q, k, v [B, L, heads, D]; lse has room for whole tiles of tokens.

    The rotation is (coords [L, A], freqs [N or 1, A, R]) or ().
    """
    return forward_sets(task, 1, arrays, tuple(x[None] for x in rotation))


def forward_sets(
    task: Task, sets: int, arrays: tuple, rotation: tuple
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """`forward` with S rotations [S, ...] of S parts of the examples, and a rule for vmap."""

    @jax.custom_batching.custom_vmap
    def run(arrays: tuple, rotation: tuple) -> tuple[Array, Array]:
        return launch(task, arrays, rotation)

    @run.def_vmap
    def _run_batched(
        size: int, is_batched: Any, arrays: tuple, rotation: tuple
    ) -> tuple[tuple, tuple]:
        def merged(some: tuple, batched: tuple) -> tuple:
            wide = [
                x if b else jnp.broadcast_to(x, (size, *x.shape))
                for x, b in zip(some, batched, strict=True)
            ]
            return tuple(x.reshape(-1, *x.shape[2:]) for x in wide)

        of_arrays, of_rotation = is_batched
        if any(of_rotation) or sets > 1:
            rotation = merged(rotation, of_rotation)
        total = len(rotation) and rotation[0].shape[0]
        out = forward_sets(task, total, merged(arrays, of_arrays), rotation)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True, True)

    return run(arrays, rotation)


def launch(
    task: Task, arrays: tuple, rotation: tuple
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """`forward_sets` without its rule for vmap."""
    q = arrays[0]
    batch = q.shape[0]
    cut = plan(task, batch)
    groups, slots = cut.groups, cut.slots
    tile = (cut.pieces, ROWS, cut.width)
    counts = [(groups,), (slots, groups), (slots, groups), (groups,)]  # q, k, v and the output
    scratch = [buffer(task, (*count, *tile), q.dtype) for count in counts]
    copies = 0
    if rotation:
        coords, freqs = (x.astype(jnp.float32) for x in rotation)
        axes = coords.shape[-1]
        copies = 1 if task.interpret else axes
        held = (ROWS, axes) if task.interpret else (ROWS * axes,)
        scratch += [
            plgpu.SMEM((groups, *held), jnp.float32),
            plgpu.SMEM((slots, groups, *held), jnp.float32),
        ]
        rotation = (coords.reshape((-1, axes) if task.interpret else -1), freqs)
    query_copies = cut.pieces + (copies if cut.tiles > 1 else 0)
    scratch += [
        plgpu.Barrier(num_arrivals=query_copies, num_barriers=groups),
        plgpu.Barrier(num_arrivals=cut.pieces + copies, num_barriers=(slots, groups)),
        plgpu.Barrier(num_arrivals=groups * cut.pieces, num_barriers=slots),
        plgpu.Barrier(num_arrivals=groups),
    ]
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    kernel = plgpu.kernel(
        functools.partial(forward_kernel, task=task, plan=cut, rotated=bool(rotation)),
        out_type=[
            typed((batch, task.tokens, task.heads, task.head_dim), q.dtype),
            typed((batch, task.heads, cut.tiles * groups * ROWS), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(task.heads * cut.tiles * pl.cdiv(batch, cut.items),),
        grid_names=("program",),
        num_threads=groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
        interpret=plgpu.InterpretGPUParams() if task.interpret else None,
        kernel_name="attention_mosaic",
    )
    return tuple(kernel(*arrays, *rotation))


def buffer(task: Task, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles [..., 64, width], as views for the copy engine and the matrix units.

    Both views hold rows one after the other and swizzle them alike. They are two because the engine
    divides the array in memory as its view is tiled, which needs a number of tokens that eight rows
    divide.
    """
    if task.interpret:
        return plgpu.SMEM(shape, dtype)
    swizzle = plgpu.SwizzleTransform(shape[-1] * dtype.itemsize)
    tiling = plgpu.TilingTransform((8, shape[-1]))
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(swizzle,)),
        plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle)),
    )
