"""All gradients of attention inside windows by one kernel for Mosaic GPU on Hopper.

Made like the forward kernel (`mosaic_window`). A warpgroup computes weights and gradients of logits
of its queries and one tile of keys at a time, each warpgroup another one, and leaves them in shared
memory to the owner of these keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.arithmetic import LOG2E
from rope_jax_kernels.attention.kernel import Needs, Operands
from rope_jax_kernels.attention.mosaic_program import (
    ROW,
    ROWS,
    TILE,
    add_products,
    angle_gradient,
    buffer,
    join,
    launch,
    load_rows,
    opaque,
    row_products,
    slice_block,
    spread,
    store_rows,
    sum_freqs_gradient,
    swizzle_transforms,
    turn,
    zeros,
)
from rope_jax_kernels.attention.mosaic_window import (
    STAGES,
    Program,
    copies,
    make_tables,
    make_task_boxes,
    maps,
    outputs_of,
    plan,
    token_of_slots,
    tokens_of,
)
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.mosaic import in_sets, repeat, store

MOST_ITEMS = 16  # examples of one program, which writes sums of gradients


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


def launch_backward(task: Task, needs: Needs, arrays: tuple, tables: tuple) -> tuple[Array, ...]:
    """The gradients of the data, and partial sums of those of the bias by slot and the angles.

    For `in_sets`; the sums are those of `Plan.sums`.
    """
    *arrays, lse = arrays
    dtype, batch = arrays[0].dtype, lse.shape[0]
    sums = (make_task_boxes(task).tiles * ROWS) ** 2 if needs.bias else 0
    cut = plan(task, batch, tables[-1].shape[0], MOST_ITEMS, sums)
    heads = [3 * task.heads] if task.packed else [task.heads] * 3
    outputs = [outputs_of(task, cut, batch, n, dtype) for n in heads]
    outputs += [
        cut.sums(task, cut.slots, size)
        for size, needed in ((cut.slots, needs.bias), (task.pairs, needs.freqs))
        if needed
    ]
    transforms = swizzle_transforms(task.head_dim, dtype, tiled=True)  # as of the other operands
    transforms = () if task.interpret else transforms
    scratch = [
        buffer(task, (STAGES, 5, cut.slots, task.head_dim), dtype),
        plgpu.Barrier(num_arrivals=5 * copies(task, cut) + 1, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=cut.groups),
        plgpu.SMEM((STAGES, cut.slots), jnp.float32),
        plgpu.SMEM((2, cut.tiles, ROWS, ROWS), dtype, transforms=transforms),
    ]
    name = "attention_mosaic_window_backward"
    program = functools.partial(Backward, needs=needs, task=task, plan=cut)
    arrays = *maps(task, cut, tuple(arrays)), lse
    results = launch(program, name, arrays, tables, outputs, scratch)
    return *(tokens_of(task, x) for x in results[: len(heads)]), *results[len(heads) :]


class Backward(Program):
    """Gradients of q, k and v, from these, the output's gradient, the output and lse.

    Also sums over examples of the gradients of the angles and the bias by slot, where needed.
    """

    def __init__(self, refs: tuple, *, needs: Needs, **terms: Any):
        super().__init__(refs, sources=6, **terms)
        take, task = self.take, self.task
        self.needs = needs
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

        self.by_one_warp(0, copy)

    def finish(self, i: Array, stage: Array) -> None:
        """Starts copying the gradients of the i-th example."""
        for operand, offset in enumerate(self.task.offsets()):
            held = self.held[0].at[stage, operand]
            self.send(held, self.targets[operand], self.first + i, self.head + offset)
        plgpu.commit_smem_to_gmem_group()

    def are_filled(self, tile: Array) -> Bool[Array, "64 D"]:
        """Which slots of a tile copies fill."""
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
        held, tiles, count = self.held[1].at[stage], self.tiles(), self.plan.tiles
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
        self.by_one_warp(1, lambda: self.finish(i, stage))
        return angle_sums, bias_sum

    def run(self) -> None:
        """Computes all examples of the program."""
        self.clear(self.held[1])
        self.meet()
        self.start(0)
        tiles = self.tiles()
        angle_sums = [zeros(self.task.pairs) for _ in tiles if self.needs.freqs]
        few = self.plan.tiles == 1 and self.task.head_dim <= 32  # registers for the other sums
        bias_sum = zeros(ROWS) if self.needs.bias and few else None
        angle_sums, bias_sum = repeat(self.items, self.example, (angle_sums, bias_sum))
        if bias_sum is not None:
            store(self.select_program(self.bias_sums), bias_sum, interpret=self.task.interpret)
        for tile, x in zip(tiles, angle_sums, strict=False):
            target = self.select_program(self.angle_sums).at[slice_block(tile)]
            store(target, x, interpret=self.task.interpret)
        plgpu.wait_smem_to_gmem(0)
