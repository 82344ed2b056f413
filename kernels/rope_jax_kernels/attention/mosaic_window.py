"""Attention inside windows by Pallas kernels for Mosaic GPU on Hopper: forward.

A program owns one head and one place of a window on the map. Forward, cosines, sines and, with one
tile, the bias stay in registers. The copy engine loads the boxes of the window (`window_boxes`).
Each warpgroup owns a tile of 64 slots, as queries and as keys; most windows of up to 64 tokens have
one. What a query does not see, also past the end of the map, is part of the bias.

While one example is computed, the engine loads the next and writes the previous one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import kernel, mosaic_program
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED, bounded_bias
from rope_jax_kernels.attention.kernel import Operands
from rope_jax_kernels.attention.mosaic_program import (
    MOST_ITEMS,
    ROWS,
    TILE,
    add_products,
    buffer,
    divide_examples,
    launch,
    load_rows,
    most_groups,
    opaque,
    row_products,
    slice_block,
    spread,
    store_rows,
    turn,
    turning_table,
    zeros,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.attention.window_boxes import Box, WindowBoxes, make_boxes
from rope_jax_kernels.mosaic import in_sets, repeat

STAGES = 2  # examples in shared memory: one is computed while the next is loaded


@dataclasses.dataclass(frozen=True)
class Plan(mosaic_program.Plan):
    """The programs of a task, one for each window. Static.

    Attributes:
        boxes: of the windows.
        tiles: of 64 slots of a window.
    """

    boxes: WindowBoxes
    tiles: int

    @property
    def slots(self) -> int:
        """Slots of a window."""
        return self.tiles * ROWS


def plan(task: Task, batch: int, sets: int, most: int = MOST_ITEMS, sums: int = 0) -> Plan:
    """The plan for `batch` examples in `sets`; `most` and `sums` as in `items_per_program`."""
    boxes = make_task_boxes(task)
    examples = divide_examples(task, boxes.count, batch, sets, most, sums)
    groups = most_groups(task, boxes.tiles)
    return Plan(groups, **examples, boxes=boxes, tiles=boxes.tiles)


def make_task_boxes(task: Task) -> WindowBoxes:
    """The boxes of the task's windows."""
    return make_boxes(task.pattern, task.places, task.head_dim)


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N windows slots"]]:
    """`Kernel.forward`; lse is by slot, for `backward`."""
    arrays, turning, bias = operands
    tables = make_tables(task, kernel.tables(turning), bias, queries=False)
    return in_sets(functools.partial(launch_forward, task), arrays, tables)


def make_tables(task: Task, turning: tuple, bias: tuple, *, queries: bool) -> tuple:
    """`turning_table`, if q and k turn, and the bias [1, kinds, N or 1, slots, slots].

    The bias is in units of log 2; see `WindowBoxes.masked_bias`.
    """
    boxes = make_task_boxes(task)
    (table,) = [bounded_bias(x) for x in bias] or [None]
    added = boxes.masked_bias(table, float(MASKED), queries=queries)
    return *turning_table(turning, token_of_slots(boxes)), added[None]


def token_of_slots(boxes: WindowBoxes) -> np.ndarray:
    """A token of the window for each slot; any where there is none."""
    h, w = boxes.window.size
    return np.minimum(boxes.tokens(), h * w - 1)


def maps(task: Task, plan: Plan, arrays: tuple) -> tuple[Float[Array, "B H W _ D"], ...]:
    """Arrays [B, T, _, D] as maps, padded in interpret mode, which has no copies beyond the end."""
    shaped = tuple(x.reshape(x.shape[0], *task.places, *x.shape[2:]) for x in arrays)
    if not task.interpret:
        return shaped
    sizes = _interpreted_grid(plan)
    missing = [(0, n - m) for n, m in zip(sizes, task.places, strict=True)]
    return tuple(jnp.pad(x, ((0, 0), *missing, (0, 0), (0, 0))) for x in shaped)


def _interpreted_grid(plan: Plan) -> tuple[int, int]:
    """(H, W) of maps in interpret mode: of whole windows, and of the row below that copies read."""
    height, width = plan.boxes.padded
    return height + max(box.rows_read - box.size[0] for box in plan.boxes.boxes()), width


def outputs_of(task: Task, plan: Plan, batch: int, heads: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of a map that a kernel writes."""
    grid = _interpreted_grid(plan) if task.interpret else task.places
    return jax.ShapeDtypeStruct((batch, *grid, heads, task.head_dim), dtype)


def tokens_of(task: Task, x: Float[Array, "B H W N D"]) -> Float[Array, "B T N D"]:
    """The tokens of a map that a kernel has written."""
    height, width = task.places
    return x[:, :height, :width].reshape(x.shape[0], task.tokens, *x.shape[3:])


def launch_forward(task: Task, arrays: tuple, tables: tuple) -> tuple[Array, Array]:
    """The output and lse, for `in_sets`."""
    dtype, batch = arrays[0].dtype, arrays[0].shape[0]
    cut = plan(task, batch, tables[-1].shape[0])
    scratch = [
        buffer(task, (STAGES, 3, cut.slots, task.head_dim), dtype),
        buffer(task, (1, cut.slots, task.head_dim), dtype),
        plgpu.Barrier(num_arrivals=3 * copies(task, cut), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=cut.groups),
    ]
    outputs = [
        outputs_of(task, cut, batch, task.heads, dtype),
        jax.ShapeDtypeStruct((batch, task.heads, cut.boxes.count, cut.slots), jnp.float32),
    ]
    program = functools.partial(Forward, task=task, plan=cut)
    shaped = maps(task, cut, arrays)
    out, lse = launch(program, "attention_mosaic_window", shaped, tables, outputs, scratch)
    return tokens_of(task, out), lse


def copies(task: Task, plan: Plan) -> int:
    """Copies of one array's part of a window."""
    boxes = plan.boxes.boxes()
    return sum(box.rows_read for box in boxes) if task.interpret else len(boxes)


class Program(mosaic_program.Program):
    """One warpgroup of one program.

    Args:
        refs: maps [B, H, W, N or 3 N, D] and other arrays with examples; where queries and keys
            turn, cosines and sines; the bias [S, kinds, N or 1, slots, slots]; results; shared
            memory for maps; and what a subclass adds.
        **terms: of the base.
    """

    plan: Plan

    def __init__(self, refs: tuple, **terms: Any):
        super().__init__(refs, **terms)
        self.bias = self.take()
        down, across = self.plan.boxes.windows
        self.row, self.column = divide(self.place, across)
        self.last = self.row == down - 1, self.column == across - 1

    def rows(self, held: Any, tile: Array | int) -> Any:
        """A tile of slots of an array [1, slots, D] in shared memory."""
        return held.at[:, slice_block(tile)]

    def begins(self, box: Box) -> tuple[Array, Array]:
        """The first row and column of a box on the map."""
        boxes, places = self.plan.boxes, []
        for axis, index in enumerate((self.row, self.column)):
            size, shift = boxes.window.size[axis], boxes.window.shift[axis]
            place = index * size + (box.place[axis] + shift)
            if box.carried[axis]:
                place = jnp.where(self.last[axis], place - boxes.padded[axis], place)
            places.append(place)
        return places[0], places[1]

    def parts(self, array: Any, item: Array, head: Array, *, read: bool) -> list[tuple]:
        """The parts of a map and their slots, as (ref, first slot, shape), to be read or written.

        Interpret mode has no reshaped refs: one row of a box at a time.
        """
        parts, channels = [], pl.ds(0, self.task.head_dim)
        for box in self.plan.boxes.boxes():
            row, column = self.begins(box)
            rows, columns = box.rows_read if read else box.size[0], box.size[1]
            step = 1 if self.task.interpret else rows
            for i in range(0, rows, step):
                down = row + i if self.task.interpret else pl.ds(row, rows)
                part = array.at[item, down, pl.ds(column, columns), head, channels]
                shape = (step, columns, self.task.head_dim)
                parts.append((part, box.slot + i * columns, shape))
        return parts

    def slots_of(self, held: Any, first: int, shape: tuple[int, int, int]) -> Any:
        """The slots of a part of a map [slots, D], in its shape."""
        rows, columns, _ = shape
        ref = held.at[pl.ds(first, rows * columns)]
        return ref if self.task.interpret else ref.reshape(shape)

    def by_one_warp(self, number: int, start: Callable[[], None]) -> None:
        """Starts copies by one warp of the first warpgroup."""
        run = functools.partial(super().by_one_warp, number, start)
        return run() if self.plan.groups == 1 else pl.when(self.group == 0)(run)

    def fetch(self, item: Array, held: Any, ready: Any, heads: tuple) -> None:
        """Starts the copies of the window of all maps, at these heads."""
        for operand, head in enumerate(heads):
            source = self.sources[operand]
            for part, first, shape in self.parts(source, item, head, read=True):
                slots = self.slots_of(held.at[operand], first, shape)
                plgpu.copy_gmem_to_smem(part, slots, ready)

    def send(self, held: Any, target: Any, item: Array, head: Array) -> None:
        """Starts the copies of the window to a map."""
        for part, first, shape in self.parts(target, item, head, read=False):
            plgpu.copy_smem_to_gmem(self.slots_of(held, first, shape), part, commit_group=False)

    def tiles(self) -> list[Array]:
        """The tiles of this warpgroup."""
        return self.own_blocks(self.plan.tiles)

    def clear(self, held: Any) -> None:
        """Zeroes a warpgroup's slots: those without a token take part in products, weighing 0."""
        stages, operands, _, _ = held.shape
        empty = zeros(self.task.head_dim, self.dtype)
        for stage, operand, tile in itertools.product(range(stages), range(operands), self.tiles()):
            store_rows(self.rows(held.at[stage, pl.ds(operand, 1)], tile), empty)

    def load_bias(self, tile: Array | int, keys: Any) -> Float[Array, "64 keys"]:
        """The bias of a tile of queries and a slice of keys, with the mask."""
        windows, (rows, columns) = self.plan.boxes.windows, self.plan.boxes.kinds
        row = jnp.maximum(self.row - (windows[0] - rows), 0)
        kind = row * columns + jnp.maximum(self.column - (windows[1] - columns), 0)
        place = self.set, kind, self.select_head(self.bias, 2), slice_block(tile), keys
        return plgpu.load(self.bias.at[place], layout=TILE, optimized=False)


class Forward(Program):
    """The output [B, H, W, N, D] and lse [B, N, windows, slots] of q, k and v."""

    def __init__(self, refs: tuple, **terms: Any):
        super().__init__(refs, sources=3, **terms)
        self.out, self.lse = self.take(), self.take()
        self.held, self.result = self.take_memory(), self.take_memory()
        self.ready, self.meeting = self.take(), self.take()

    def start(self, i: Array | int) -> None:
        """Starts the copies of the i-th example."""
        stage = divide(jnp.int32(i), STAGES)[1]
        heads = tuple(self.head + offset for offset in self.task.offsets())
        target = self.held[0].at[stage], self.ready.at[stage]
        self.by_one_warp(0, lambda: self.fetch(self.first + i, *target, heads))

    def finish(self, i: Array) -> None:
        """Starts copying the output of the i-th example."""
        self.send(self.result[0].at[0], self.out, self.first + i, self.head)
        plgpu.commit_smem_to_gmem_group()

    def attend(
        self, q: Array, held: Any, bias: Array | None, tile: Array
    ) -> tuple[Float[Array, "64 D"], Float[Array, " 64"]]:
        """The output and lse of a tile of queries."""

        def add(block: Any, carry: tuple | None) -> tuple:
            """Adds a tile of keys to the online softmax, or begins it."""
            k, v = (self.rows(held.at[pl.ds(i, 1)], block) for i in (1, 2))
            keys = slice_block(block)
            (logits,) = row_products(self.task, [(q, k)])
            added = self.load_bias(opaque(tile), keys) if bias is None else bias
            logits = logits * np.float32(self.task.scale * LOG2E) + added
            top = jnp.max(logits, axis=1)
            out = zeros(q.shape[1])
            if carry is not None:
                top = jnp.maximum(top, carry[0])
            weights = jnp.exp2(logits - spread(top, ROWS))
            total = jnp.sum(weights, axis=1)
            if carry is not None:
                shrink = jnp.exp2(carry[0] - top)
                total, out = total + carry[1] * shrink, carry[2] * spread(shrink, q.shape[1])
            ((out,),) = add_products(self.task, [[out]], [(weights.astype(self.dtype), v)])
            return top, total, out

        carry = add(0, None)
        if self.plan.tiles > 1:
            carry = repeat(self.plan.tiles - 1, lambda i, carry: add(i + 1, carry), carry)
        top, total, out = carry
        return (out * spread(1 / total, q.shape[1])).astype(self.dtype), top + jnp.log2(total)

    def example(self, i: Array, turns: list, bias: Array | None) -> None:
        """Computes the window of the i-th example."""
        stage = divide(i, STAGES)[1]
        held, tiles = self.held[1].at[stage], self.tiles()
        plgpu.barrier_wait(self.ready.at[stage])
        queries = []
        for tile, angles in zip(tiles, turns, strict=True):
            q, k = (self.rows(held.at[pl.ds(operand, 1)], tile) for operand in (0, 1))
            queries.append(turn(load_rows(q), angles, self.dtype))
            if angles is not None:
                store_rows(k, turn(load_rows(k), angles, self.dtype))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        self.meet()
        pl.when(i + 1 < self.items)(lambda: self.start(i + 1))
        for tile, q in zip(tiles, queries, strict=True):
            out, lse = self.attend(q, held, bias, tile)
            store_rows(self.rows(self.result[1], tile), out)
            place = slice_block(tile)
            self.lse.at[self.first + i, self.head, self.place, place][...] = lse
        self.meet()
        self.by_one_warp(1, lambda: self.finish(i))

    def run(self) -> None:
        """Computes all examples of the program."""
        self.clear(self.held[1])
        self.meet()
        self.start(0)
        turns = [self.turns(slice_block(tile)) for tile in self.tiles()]
        bias = self.load_bias(0, pl.ds(0, ROWS)) if self.plan.tiles == 1 else None
        pl.loop(0, self.items)(lambda i: self.example(i, turns, bias))
        plgpu.wait_smem_to_gmem(0)
