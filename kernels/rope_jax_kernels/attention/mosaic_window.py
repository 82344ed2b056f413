"""Attention inside windows by Pallas kernels for Mosaic GPU on Hopper.

A program owns one head and one place of a window on the map. Forward, cosines, sines and, with one
tile, the bias stay in registers. The copy engine loads the boxes of the window (`window_boxes`).
Each warpgroup owns a tile of 64 slots, as queries and as keys; most windows of up to 64 tokens have
one. What a query does not see, also past the end of the map, is part of the bias.

While one example is computed, the engine loads the next and writes the previous one.

Backward, one kernel computes all gradients. A warpgroup computes weights and gradients of logits of
its queries and one tile of keys at a time, each warpgroup another one, and leaves them in shared
memory to the owner of these keys.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import kernel, mosaic_program
from rope_jax_kernels.attention.arithmetic import LOG2E, MASKED, bounded_bias
from rope_jax_kernels.attention.kernel import Needs, Operands
from rope_jax_kernels.attention.mosaic_program import (
    MOST_ITEMS,
    ROW,
    ROWS,
    TILE,
    add_products,
    angle_gradient,
    buffer,
    divide_examples,
    join,
    launch,
    load_rows,
    most_groups,
    opaque,
    row_products,
    slice_block,
    spread,
    store_rows,
    sum_freqs_gradient,
    swizzle_transforms,
    turn,
    turning_table,
    zeros,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.attention.window_boxes import Box, WindowBoxes, make_boxes
from rope_jax_kernels.mosaic import in_sets, repeat, store

STAGES = 2  # examples in shared memory: one is computed while the next is loaded
MOST_SUMMED = 16  # examples of one program that writes sums of gradients


@dataclasses.dataclass(frozen=True)
class Plan(mosaic_program.Plan):
    """The programs of a task, one for each window. Static.

    Attributes:
        boxes: of the windows.
        grid: (H, W) of maps in the kernel: in interpret mode, which has no copies beyond the end,
            of whole windows and of the rows below that copies read.
    """

    boxes: WindowBoxes
    grid: tuple[int, int]


def plan(task: Task, batch: int, sets: int, most: int = MOST_ITEMS, sums: int = 0) -> Plan:
    """The plan for `batch` examples in `sets`; `most` and `sums` as in `divide_examples`."""
    boxes, grid = make_task_boxes(task), task.places
    examples = divide_examples(task, boxes.count, batch, sets, most, sums)
    if task.interpret:
        height, width = boxes.padded
        grid = height + max(box.rows_read - box.size[0] for box in boxes.boxes()), width
    return Plan(most_groups(task, boxes.tiles), **examples, boxes=boxes, grid=grid)


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
    """Arrays [B, T, _, D] as maps of the kernel."""
    shaped = tuple(x.reshape(x.shape[0], *task.places, *x.shape[2:]) for x in arrays)
    if plan.grid == task.places:
        return shaped
    missing = [(0, n - m) for n, m in zip(plan.grid, task.places, strict=True)]
    return tuple(jnp.pad(x, ((0, 0), *missing, (0, 0), (0, 0))) for x in shaped)


def tokens_of(task: Task, x: Float[Array, "B H W N D"]) -> Float[Array, "B T N D"]:
    """The tokens of a map that a kernel has written."""
    height, width = task.places
    return x[:, :height, :width].reshape(x.shape[0], task.tokens, *x.shape[3:])


def launch_forward(task: Task, arrays: tuple, tables: tuple, sets: int) -> tuple[Array, Array]:
    """The output and lse, for `in_sets`."""
    dtype, batch = arrays[0].dtype, arrays[0].shape[0]
    cut = plan(task, batch, sets)
    scratch = [
        buffer(task, (STAGES, 3, cut.boxes.slots, task.head_dim), dtype),
        buffer(task, (1, cut.boxes.slots, task.head_dim), dtype),
        plgpu.Barrier(num_arrivals=3 * copies(task, cut), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=cut.groups),
    ]
    outputs = [
        jax.ShapeDtypeStruct((batch, *cut.grid, task.heads, task.head_dim), dtype),
        jax.ShapeDtypeStruct((batch, task.heads, cut.boxes.count, cut.boxes.slots), jnp.float32),
    ]
    operands = maps(task, cut, arrays), tables, outputs, scratch
    out, lse = launch(Forward, "attention_mosaic_window", task, cut, *operands)
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
        task, plan, sources: as the base has them.
    """

    plan: Plan

    def __init__(self, refs: tuple, task: Task, plan: Plan, *, sources: int):
        super().__init__(refs, task, plan, sources=sources)
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
        return self.own_blocks(self.plan.boxes.tiles)

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
        set_index, head = self.select_shared(self.bias, 2)
        return plgpu.load(
            self.bias.at[set_index, kind, head, slice_block(tile), keys],
            layout=TILE,
            optimized=False,
        )


class Forward(Program):
    """The output [B, H, W, N, D] and lse [B, N, windows, slots] of q, k and v."""

    def __init__(self, refs: tuple, task: Task, plan: Plan):
        super().__init__(refs, task, plan, sources=3)
        self.out, self.lse = self.take(), self.take()
        self.held, self.result = self.take_memory(), self.take_memory()
        self.ready, self.meeting = self.take(), self.take()

    def start(self, i: Array | int) -> None:
        """Starts the copies of the i-th example."""
        stage = divide(jnp.int32(i), STAGES)[1]
        heads = tuple(self.head + offset for offset in self.task.offsets())
        target = self.held[0].at[stage], self.ready.at[stage]
        self.by_one_warp(0, lambda: self.fetch(self.first + i, *target, heads), once=True)

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
        if self.plan.boxes.tiles > 1:
            carry = repeat(self.plan.boxes.tiles - 1, lambda i, carry: add(i + 1, carry), carry)
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
        self.by_one_warp(1, lambda: self.finish(i), once=True)

    def run(self) -> None:
        """Computes all examples of the program."""
        self.clear(self.held[1])
        self.meet()
        self.start(0)
        turns = [self.turns(slice_block(tile)) for tile in self.tiles()]
        bias = self.load_bias(0, pl.ds(0, ROWS)) if self.plan.boxes.tiles == 1 else None
        pl.loop(0, self.items)(lambda i: self.example(i, turns, bias))
        plgpu.wait_smem_to_gmem(0)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`."""
    (*data, lse, out), turning, bias = operands
    tables = make_tables(task, turning, bias, queries=True)
    run = functools.partial(launch_backward, task, needs)
    results = in_sets(run, (*data, out, lse), tables, apart=needs.freqs or needs.bias)
    count = 1 if task.packed else 3
    gradients, sums = results[:count], results[count:]
    partial, boxes = (), make_task_boxes(task)
    if needs.freqs:
        partial = (sum_freqs_gradient(sums[-1], turning[2], token_of_slots(boxes)[None]),)
    return gradients, partial, boxes.fold(sums[0].sum((0, 1, 2))) if needs.bias else None


def launch_backward(
    task: Task, needs: Needs, arrays: tuple, tables: tuple, sets: int
) -> tuple[Array, ...]:
    """The gradients of the data, and partial sums of those of the bias by slot and the angles.

    For `in_sets`; the sums are those of `Plan.sums`.
    """
    *arrays, lse = arrays
    dtype, batch = arrays[0].dtype, lse.shape[0]
    sums = make_task_boxes(task).slots ** 2 if needs.bias else 0
    cut = plan(task, batch, sets, MOST_SUMMED, sums)
    heads = [3 * task.heads] if task.packed else [task.heads] * 3
    outputs = [jax.ShapeDtypeStruct((batch, *cut.grid, n, task.head_dim), dtype) for n in heads]
    outputs += [
        cut.sums(task, cut.boxes.slots, size)
        for size, needed in ((cut.boxes.slots, needs.bias), (task.pairs, needs.freqs))
        if needed
    ]
    as_others = swizzle_transforms(task.head_dim, dtype, tiled=True)  # one form for all operands
    transforms = () if task.interpret else as_others
    scratch = [
        buffer(task, (STAGES, 5, cut.boxes.slots, task.head_dim), dtype),
        plgpu.Barrier(num_arrivals=5 * copies(task, cut) + 1, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=cut.groups),
        plgpu.SMEM((STAGES, cut.boxes.slots), jnp.float32),
        plgpu.SMEM((2, cut.boxes.tiles, ROWS, ROWS), dtype, transforms=transforms),
    ]
    program, name = functools.partial(Backward, needs=needs), "attention_mosaic_window_backward"
    arrays = *maps(task, cut, tuple(arrays)), lse
    results = launch(program, name, task, cut, arrays, tables, outputs, scratch)
    return *(tokens_of(task, x) for x in results[: len(heads)]), *results[len(heads) :]


class Backward(Program):
    """Gradients of q, k and v, from these, the output's gradient, the output and lse.

    Also sums over examples of the gradients of the angles and the bias by slot, where needed.
    """

    def __init__(self, refs: tuple, task: Task, plan: Plan, needs: Needs):
        super().__init__(refs, task, plan, sources=6)
        take, self.needs = self.take, needs
        targets = [take() for _ in range(1 if task.packed else 3)]
        self.targets = targets * 3 if task.packed else targets
        self.bias_sums = take() if needs.bias else None
        self.angle_sums = take() if needs.freqs else None
        self.held = self.take_memory()
        self.ready, self.meeting, self.held_lse, self.logits = (take() for _ in range(4))

    def start(self, i: Array | int) -> None:
        """Starts the copies of the i-th example."""
        stage, item = divide(jnp.int32(i), STAGES)[1], self.first + i
        heads = tuple(self.head + offset for offset in (*self.task.offsets(), 0, 0))
        ready = self.ready.at[stage]

        def copy() -> None:
            self.fetch(item, self.held[0].at[stage], ready, heads)
            lse = self.sources[5].at[item, self.head, self.place]
            plgpu.copy_gmem_to_smem(lse, self.held_lse.at[stage], ready)

        self.by_one_warp(0, copy, once=True)

    def finish(self, i: Array, stage: Array) -> None:
        """Starts copying the gradients of the i-th example."""
        for operand, offset in enumerate(self.task.offsets()):
            held = self.held[0].at[stage, operand]
            self.send(held, self.targets[operand], self.first + i, self.head + offset)
        plgpu.commit_smem_to_gmem_group()

    def are_filled(self, tile: Array) -> Bool[Array, "64 D"]:
        """True for slots of a tile that copies fill."""
        slot = tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        spans = [(x.slot, x.rows_read * x.size[1]) for x in self.plan.boxes.boxes()]
        filled = [(slot >= first) & (slot < first + size) for first, size in spans]
        filled = functools.reduce(jnp.logical_or, filled)
        return jax.lax.broadcast_in_dim(filled, (ROWS, self.task.head_dim), (0,))

    def add_bias(
        self, total: Any, gradient: Array, tile: Array | int, keys: Any, begins: Any
    ) -> Any:
        """Adds the gradient of the bias of a tile of queries and a slice of keys.

        In registers if there is a sum, otherwise in memory that only this thread uses.
        """
        if self.bias_sums is None:
            return None
        if total is not None:
            return total + gradient
        place = slice_block(tile), keys
        target = self.select_program(self.bias_sums).at[place]
        before = plgpu.load(target, layout=TILE, optimized=False)
        gradient += jnp.where(begins, 0, before)
        store(target, gradient, interpret=self.task.interpret)
        return total

    def logit_gradients(self, rows: tuple, held: Any, tile: Array | int, keys: Any) -> tuple:
        """Weights of a tile of queries for keys, and the gradients of their logits, [64, keys].

        Args:
            rows: of the queries: turned, their output's gradient, lse and delta.
            held: the maps in shared memory.
            tile: of queries.
            keys: slice of slots.
        """
        q, dout, lse, delta = rows
        k, v = (held.at[pl.ds(operand, 1), keys] for operand in (1, 2))
        logits, dweights = row_products(self.task, [(q, k), (dout, v)])
        # Read for each example: there are no registers for it.
        logits = logits * np.float32(self.task.scale * LOG2E) + self.load_bias(opaque(tile), keys)
        weights = jnp.exp2(logits - spread(lse, keys.size))
        dlogits = weights * (dweights - spread(delta, keys.size))
        return weights, dlogits

    def prepare(self, held: Any, stage: Array, tile: Array) -> tuple:
        """Turns queries and keys of a tile; the queries, their output's gradient, lse and delta."""
        refs = [self.rows(held.at[pl.ds(operand, 1)], tile) for operand in (0, 1, 3, 4)]
        q, k, dout, out = (load_rows(ref) for ref in refs)
        delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1)
        place = self.held_lse.at[stage, slice_block(tile)]
        lse = plgpu.load(place, layout=ROW, optimized=False)
        if self.table is not None:
            angles = self.turns(slice_block(opaque(tile)))
            q, k = (turn(x, angles, self.dtype) for x in (q, k))
            for ref, x in zip(refs[:2], (q, k), strict=True):
                store_rows(ref, x)
        return q, dout, lse, delta

    def example(self, i: Array, carry: tuple) -> tuple:
        """Computes the gradients of the i-th example and adds to the sums."""
        angle_sums, bias_sum = carry
        stage = divide(i, STAGES)[1]
        held, tiles, count = self.held[1].at[stage], self.tiles(), self.plan.boxes.tiles
        plgpu.barrier_wait(self.ready.at[stage])
        rows = [self.prepare(held, stage, tile) for tile in tiles]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous example
        self.meet()
        pl.when(i + 1 < self.items)(lambda: self.start(i + 1))
        zero = zeros(self.task.head_dim)
        sums = [[[zero]] * 3 for _ in tiles]  # the gradients of q, k and v
        width = ROWS if count < 3 else ROWS // 2  # of keys: three warpgroups have fewer registers

        def add(step: Any, sums: list) -> list:
            """Adds the part of a tile of keys to the gradients of each tile of queries."""
            nonlocal bias_sum
            dlogits, added = [], []
            for number, tile in enumerate(tiles):
                block, parts = divide(tile + step, count)[1], []
                q, dout, *others = rows[number]
                if count > 1:  # not kept in registers
                    refs = [self.rows(held.at[pl.ds(operand, 1)], tile) for operand in (0, 3)]
                    q, dout = (load_rows(ref) for ref in refs)
                for first in range(0, ROWS, width):
                    keys = pl.ds(block * ROWS + first, width)
                    weights, gradient = self.logit_gradients((q, dout, *others), held, tile, keys)
                    bias_sum = self.add_bias(bias_sum, gradient, tile, keys, i == 0)
                    parts.append(gradient.astype(self.dtype))
                    for operand, x in enumerate((weights.astype(self.dtype), parts[-1])):
                        self.logits.at[operand, block, :, pl.ds(first, width)][...] = x
                dlogits.append(join(parts))
            self.meet()
            for number, tile in enumerate(tiles):
                block, queries = (divide(tile + n, count)[1] for n in (step, count - step))
                part = lambda operand, tile: self.rows(held.at[pl.ds(operand, 1)], tile)
                by_key = [self.logits.at[operand, tile].transpose((1, 0)) for operand in (1, 0)]
                terms = [
                    (dlogits[number], part(1, block)),
                    (by_key[0], part(0, queries)),
                    (by_key[1], part(3, queries)),
                ]
                added.append(add_products(self.task, sums[number], terms))
            self.meet()
            return added

        sums = add(0, sums) if count == 1 else repeat(count, add, sums)
        for number, tile in enumerate(tiles):
            (dq,), (dk,), (dv,) = sums[number]
            dq, dk = (x * np.float32(self.task.scale) for x in (dq, dk))
            refs = [self.rows(held.at[pl.ds(operand, 1)], tile) for operand in range(3)]
            if self.angle_sums is not None:
                for ref, x in zip(refs[:2], (dq, dk), strict=True):
                    angle_sums[number] += angle_gradient(load_rows(ref), x, self.task.pairs)
            angles, filled = self.turns(slice_block(opaque(tile))), self.are_filled(tile)
            for ref, x, turns in zip(refs, (dq, dk, dv), (angles, angles, None), strict=True):
                # The others stay zeros: a NaN there would reach the stage's next example.
                x = turn(jnp.where(filled, x, zero), turns, self.dtype, back=True)
                store_rows(ref, x)
        self.meet()
        self.by_one_warp(1, lambda: self.finish(i, stage), once=True)
        return angle_sums, bias_sum

    def run(self) -> None:
        """Computes all examples of the program."""
        self.clear(self.held[1])
        self.meet()
        self.start(0)
        tiles = self.tiles()
        angle_sums = [zeros(self.task.pairs) for _ in tiles if self.needs.freqs]
        # Wide heads, or several tiles, leave no registers for it.
        few = self.plan.boxes.tiles == 1 and self.task.head_dim <= 32
        bias_sum = zeros(ROWS) if self.needs.bias and few else None
        angle_sums, bias_sum = repeat(self.items, self.example, (angle_sums, bias_sum))
        if bias_sum is not None:
            store(self.select_program(self.bias_sums), bias_sum, interpret=self.task.interpret)
        for tile, x in zip(tiles, angle_sums, strict=False):
            target = self.select_program(self.angle_sums).at[slice_block(tile)]
            store(target, x, interpret=self.task.interpret)
        plgpu.wait_smem_to_gmem(0)
