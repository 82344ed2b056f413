"""Launches the kernels of `mosaic`: their grid, their shared memory, and their rule for vmap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels.attention import mosaic_backward
from rope_jax_kernels.attention.mosaic_kernel import ROWS, Program, plan
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.device import vary_alike
from rope_jax_kernels.mosaic import merge_mapped


def forward(
    task: Task, arrays: tuple, rotation: tuple
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """The output and lse of q, k, v [B, L, heads, D]; lse has room for whole tiles of tokens.

    The rotation is (coords [L, A], freqs [N or 1, A, R]) or ().
    """
    return in_sets(functools.partial(launch, task), arrays, tuple(x[None] for x in rotation))


def backward(task: Task, arrays: tuple, tables: tuple, coords: tuple) -> tuple[tuple, tuple]:
    """Gradients of q, k and v, packed as these are, and of freqs.

    Args:
        task: one that `mosaic_backward.serves`.
        arrays: q, k and v [B, L, heads, D], the output's gradient, the output, and lse.
        tables: (cosines, sines) [N or 1, L, R], or () where nothing turns.
        coords: ([L, A],), or () where freqs need no gradient.

    Returns:
        The gradients, and () or that of freqs [1, 1, N, A, R], for each head even where heads share
        them.
    """
    table = ()
    if tables:
        cos_sin, missing = jnp.concatenate(tables, axis=2), -task.tokens % ROWS
        table = (jnp.pad(cos_sin, ((0, 0), (0, missing), (0, 0)))[None],)
    run = functools.partial(launch_backward, task, bool(coords))
    results = in_sets(run, arrays, table, apart=bool(coords))
    if not coords:
        return results, ()
    *gradients, sums = results
    dtheta = sums.sum((0, 1))[:, None, : task.tokens]
    by_axis = coords[0].astype(jnp.float32).T[None, :, :, None] * dtheta
    return tuple(gradients), (by_axis.sum(2)[None, None],)


def in_sets(
    launch: Callable[[tuple, tuple], tuple],
    arrays: tuple,
    tables: tuple,
    *,
    apart: bool = False,
) -> tuple:
    """A launch with tables [S, ...] of S sets, equal parts of the examples, and a rule for vmap.

    Examples that share their tables become one set, unless something is summed over those of a set:
    then sets stay `apart`.
    """

    @jax.custom_batching.custom_vmap
    def run(arrays: tuple, tables: tuple) -> tuple:
        return launch(arrays, tables)

    @run.def_vmap
    def _run_batched(
        size: int, is_batched: Any, arrays: tuple, tables: tuple
    ) -> tuple[tuple, tuple]:
        arrays_batched, tables_batched = is_batched
        if any(tables_batched) or any(x.shape[0] > 1 for x in tables) or apart:
            tables = merge_mapped(size, tables, tables_batched)
        arrays = merge_mapped(size, arrays, arrays_batched)
        out = in_sets(launch, arrays, tables, apart=apart)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True,) * len(out)

    return run(arrays, tables)


def launch(
    task: Task, arrays: tuple, rotation: tuple
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """The output and lse, for `in_sets`."""
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
        coords_shape = (ROWS, axes) if task.interpret else (ROWS * axes,)
        scratch += [
            plgpu.SMEM((groups, *coords_shape), jnp.float32),
            plgpu.SMEM((slots, groups, *coords_shape), jnp.float32),
        ]
        rotation = (coords.reshape((-1, axes) if task.interpret else -1), freqs)
    query_copies = cut.pieces + (copies if cut.tiles > 1 else 0)
    scratch += [
        plgpu.Barrier(num_arrivals=query_copies, num_barriers=groups),
        plgpu.Barrier(num_arrivals=cut.pieces + copies, num_barriers=(slots, groups)),
        plgpu.Barrier(num_arrivals=groups * cut.pieces, num_barriers=slots),
        plgpu.Barrier(num_arrivals=groups),
    ]
    program = functools.partial(Program, task=task, plan=cut, rotated=bool(rotation))
    outputs = [
        jax.ShapeDtypeStruct((batch, task.tokens, task.heads, task.head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch, task.heads, cut.tiles * groups * ROWS), jnp.float32),
    ]
    grid = task.heads * cut.tiles * pl.cdiv(batch, cut.items)
    run = program_grid(program, "attention_mosaic", outputs, scratch, grid)
    return vary_alike(arrays, tuple(run(*arrays, *rotation)))[1]


def launch_backward(task: Task, sums_angles: bool, arrays: tuple, table: tuple) -> tuple:
    """The gradients of the arrays and, with `sums_angles`, of the angles, for `in_sets`.

    The latter is [S, _, N, >= L, R]: partial sums over examples, for the tokens of whole blocks.
    """
    q = arrays[0]
    sets = table[0].shape[0] if table else 1
    cut = mosaic_backward.plan(task, q.shape[0], sets)
    blocks, width = cut.blocks, mosaic_backward.WIDTH
    tokens, rows = blocks * ROWS, (blocks, cut.pieces, ROWS, width)
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)] * (1 if task.packed else 3)
    if sums_angles:
        sums = (sets, cut.chunks, task.heads, tokens, task.pairs)
        outputs.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    dlogits = (mosaic_backward.SLOTS, blocks, ROWS, ROWS)
    # The output is read before the first gradients of logits are written.
    if task.interpret:
        shared = [plgpu.SMEM(dlogits, q.dtype), plgpu.SMEM(rows, q.dtype)]
    else:
        dlogits_buffer = plgpu.SMEM(
            dlogits, q.dtype, transforms=swizzle_transforms(width, q.dtype, tiled=True)
        )
        shared = [plgpu.RefUnion(dlogits_buffer, *buffer(task, rows, q.dtype).refs)]
    scratch = [
        *[buffer(task, rows, q.dtype)] * 4,
        *shared,
        *[plgpu.SMEM((blocks, ROWS), jnp.float32)] * 2,
        plgpu.Barrier(num_arrivals=5 * cut.pieces + 1, num_barriers=blocks),
        plgpu.Barrier(num_arrivals=cut.groups),
    ]
    program = functools.partial(
        mosaic_backward.Program,
        task=task,
        plan=cut,
        rotated=bool(table),
        summed=sums_angles,
    )
    grid = task.heads * sets * cut.chunks
    run = program_grid(program, "attention_mosaic_backward", outputs, scratch, grid)
    return vary_alike(arrays, tuple(run(*arrays, *table)))[1]


def program_grid(
    program: functools.partial,
    name: str,
    outputs: list,
    scratch: list,
    programs: int,
    *,
    synchronized: bool = True,
) -> Callable[..., list]:
    """A kernel on a grid of programs, each of whose warpgroups is a `Program`.

    Its results do not vary over manual mesh axes, whatever the types of its outputs say.

    Args:
        program: makes a `Program` of the kernel's refs.
        name: of the kernel.
        outputs: shapes of its results.
        scratch: its shared memory and barriers.
        programs: size of the grid.
        synchronized: whether the compiler orders the accesses of a warpgroup to shared memory;
            otherwise `plgpu.commit_smem` does, where the program has it.
    """
    task, groups = program.keywords["task"], program.keywords["plan"].groups
    return plgpu.kernel(
        lambda *refs: program(refs).run(),
        out_type=outputs,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=not synchronized,
        ),
        interpret=plgpu.InterpretGPUParams() if task.interpret else None,
        kernel_name=name,
    )


def buffer(task: Task, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles [..., 64, width], as views for the copy engine and the matrix units.

    Both views hold rows one after the other and swizzle them alike. They are two because the engine
    divides the array in memory as its view is tiled, which needs a number of tokens that eight rows
    divide.
    """
    if task.interpret:
        return plgpu.SMEM(shape, dtype)
    return plgpu.RefUnion(
        *(
            plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(shape[-1], dtype, tiled=tiled))
            for tiled in (False, True)
        )
    )


def swizzle_transforms(width: int, dtype: Any, *, tiled: bool) -> tuple:
    """Transforms of shared memory for rows of pieces of `width`."""
    swizzle = plgpu.SwizzleTransform(width * dtype.itemsize)
    return (plgpu.TilingTransform((8, width)), swizzle) if tiled else (swizzle,)
