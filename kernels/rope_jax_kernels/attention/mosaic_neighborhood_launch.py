"""Launches the kernels of `mosaic` for neighbourhoods: their programs, tables and shared memory."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from rope_jax_kernels.attention import mosaic_program, neighborhood_boxes
from rope_jax_kernels.attention.arithmetic import LOG2E, bounded_bias
from rope_jax_kernels.attention.mosaic_program import (
    divide_examples,
    swizzle_transforms,
    turning_table,
)
from rope_jax_kernels.attention.neighborhood_boxes import KEYS, ROWS, STEP, Boxes, Part
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.device import vary_alike

# Bias in units of log 2 that stands for lower ones. Bias and product are scaled together, by a
# product and a difference that is rounded once, so that their error grows with the bias.
LOWEST = -(2.0**20)


@dataclasses.dataclass(frozen=True)
class Plan(mosaic_program.Plan):
    """The programs of a kernel, each one warpgroup for a tile. Static.

    Attributes:
        part: the kernel.
        boxes: its tiles.
        stages: examples in shared memory at a time.
        held_sums: sums in shared memory.
    """

    part: Part
    boxes: Boxes
    stages: int
    held_sums: int


def cut(part: Part, task: Task) -> Boxes:
    """The tiles of a kernel."""
    return neighborhood_boxes.cut(
        part, task.pattern, task.places, task.head_dim, biased=task.biased
    )


def map_of_numbers(task: Task, batch: int) -> jax.ShapeDtypeStruct:
    """A map of lse or delta [B, H, N classes, W].

    The copy engine needs rows of whole 16 bytes. There are so many maps that the next row of one is
    farther than a box is wide: Mosaic GPU would take rows that follow one another for a run of
    bytes, and copy it without stopping at the end of the map.
    """
    dilation = task.pattern.dilation
    height, width = (n // step for n, step in zip(task.places, dilation, strict=True))
    width = -(-width // 4) * 4
    maps = max(task.heads * math.prod(dilation), 1 + cut(KEYS, task).width // width)
    return jax.ShapeDtypeStruct((batch, height, maps, width), jnp.float32)


def make_tables(task: Task, part: Part, turning: tuple, bias: tuple) -> tuple:
    """Tables of one set for the tiles of a kernel.

    `turning_table` of each tile's tokens followed by those of its box, if q and k turn;
    `Boxes.table`, if there is a bias.
    """
    boxes, unit = cut(part, task), task.scale * float(LOG2E)
    tokens = jnp.concatenate(boxes.tokens(), axis=1).reshape(-1, 1 + boxes.blocks, ROWS)
    added = (boxes.table(bounded_bias(x, LOWEST), unit)[None] for x in bias)
    return *turning_table(turning, tokens), *added


def launch(
    program: Callable,
    part: Part,
    task: Task,
    arrays: tuple,
    tables: tuple,
    outputs: list[jax.ShapeDtypeStruct],
    sums: Sequence[tuple[int, ...]] = (),
    written: tuple = (),
    held_sums: Sequence[tuple[int, ...]] = (),
) -> tuple:
    """Launches a kernel on a grid of programs, for `in_sets`.

    Args:
        program: the class of its programs.
        part, task: the kernel and the problem.
        arrays: operands [B, T, heads, D] in their order, then maps of numbers.
        tables: of S sets.
        outputs: those with examples, like the arrays.
        sums: shapes of what each program adds up over its examples, in float32.
        written: an array like the operands, some of whose heads the kernel replaces.
        held_sums: shapes of sums in shared memory.

    Returns:
        What was written; the outputs; the sums [S, chunks, tiles, N, *shape].
    """
    batch, dtype = arrays[0].shape[0], arrays[0].dtype
    boxes, sets = cut(part, task), tables[0].shape[0] if tables else 1
    summed = sum(map(math.prod, sums))
    examples = divide_examples(task, boxes.classes * boxes.tiles, batch, sets, sums=summed)
    stages = min(part.stages(boxes, task.head_dim), examples["items"])
    own = {"part": part, "boxes": boxes, "stages": stages, "held_sums": len(held_sums)}
    plan = Plan(groups=1, **examples, **own)
    if not task.biased:
        tables = *tables, boxes.table(None, task.scale)[None]
    tile, box = (boxes.down.tile, boxes.columns), (boxes.height, boxes.width)
    of_map = box if part.transposed else tile
    turned = boxes.whole_height if task.pairs else boxes.height, boxes.width
    held = [tile] * len(part.tiles) + [turned] + [box] * (len(part.boxes) - 1)
    scratch = [
        *(rows_buffer(task, (stages, *size), dtype) for size in held),
        *[numbers_buffer(task, (stages, *of_map))] * part.maps,
        *[rows_buffer(task, (1, *tile), dtype)] * part.results,
        *[numbers_buffer(task, (1, *tile))] * part.result_maps,
    ]
    copies = [*held, *[of_map] * part.maps]
    arrivals = sum(rows for rows, _ in copies) if task.interpret else len(copies)
    scratch.append(plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages))
    scratch += [plgpu.SMEM(shape, jnp.float32) for shape in held_sums]
    shapes = [jax.eval_shape(functools.partial(widen, task, boxes), x) for x in outputs]
    shapes += [plan.sums(task, *shape) for shape in sums]
    arrays, tables, written = vary_alike(arrays, tables, written)
    changed = [jax.new_ref(widen(task, boxes, x)) for x in written]
    wide = tuple(widen(task, boxes, x) for x in arrays)
    make = functools.partial(program, task=task, plan=plan)
    results = mosaic_program.launch(make, part.name, wide, (*tables, *changed), shapes, scratch)
    results, summed = results[: len(outputs)], results[len(outputs) :]
    results = [
        narrow(task, boxes, x, like.shape)
        for x, like in zip([*map(jax.freeze, changed), *results], [*written, *outputs], strict=True)
    ]
    return (*results, *summed)


def widen(task: Task, boxes: Boxes, x: Array) -> Array:
    """An array [B, T, heads, D] as the copy engine sees it; maps of numbers stay as they are.

    [B, rows, dy, columns, dx * heads * D] has the classes of a dilation apart, in the five
    dimensions that the engine has at most. Interpret mode has no engine that stops at the end of an
    array: there are zeros after it, which `narrow` removes.
    """
    down, across, (dy, dx) = boxes.down, boxes.across, boxes.dilation
    if x.dtype != jnp.float32:
        x = x.reshape(x.shape[0], down.members, dy, across.members, dx * x.shape[2] * x.shape[3])
    if not task.interpret:
        return x
    room = [(0, 0)] * x.ndim
    room[1] = 0, max(down.tile, boxes.whole_height)
    room[3] = 0, max(across.tile, boxes.width)
    return jnp.pad(x, room)


def narrow(task: Task, boxes: Boxes, x: Array, shape: tuple[int, ...]) -> Array:
    """Undoes `widen` for an array that had this shape."""
    if x.dtype == jnp.float32:
        return x[:, : shape[1], :, : shape[3]]
    return x[:, : boxes.down.members, :, : boxes.across.members].reshape(shape)


def rows_buffer(task: Task, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for boxes [stages, rows, columns] of tokens' channels, and views of it.

    For the copy engine; as blocks of 64 slots, if it has whole ones; and as rows of a box, for the
    matrix units. See `mosaic_program.buffer`.
    """
    stages, rows, columns = shape
    if task.interpret:
        return plgpu.SMEM((*shape, task.head_dim), dtype)
    views = [(shape, False)]
    if rows * columns % ROWS == 0:
        views.append(((stages, rows * columns // ROWS, ROWS), True))
    if columns % STEP == 0:
        views.append((shape, True))
    return plgpu.RefUnion(
        *(
            plgpu.SMEM(
                (*size, task.head_dim),
                dtype,
                transforms=swizzle_transforms(task.head_dim, dtype, tiled=tiled),
            )
            for size, tiled in views
        )
    )


def numbers_buffer(task: Task, shape: tuple[int, ...]) -> Any:
    """Shared memory for boxes [stages, rows, columns] of numbers, also as [stages, slots]."""
    if task.interpret:
        return plgpu.SMEM(shape, jnp.float32)
    flat = shape[0], shape[1] * shape[2]
    return plgpu.RefUnion(*(plgpu.SMEM(x, jnp.float32) for x in (shape, flat)))
