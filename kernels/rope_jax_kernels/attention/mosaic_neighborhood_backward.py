"""Gradients of neighbourhood attention by kernels for Mosaic GPU: of queries, then of keys.

Both are made like the forward kernel (`mosaic_neighborhood`). The first has tiles of queries and
boxes of keys, and also computes delta and the gradient of the bias by slot. The second has tiles of
keys and boxes of the queries that attend to them, with lse and delta of these; logits are
transposed there, keys by queries, because weights then are operands of the next products as they
leave the matrix units. At a border more rows of queries attend to a key: each warp loops over as
many as its keys have.

A program adds up over its examples what freqs need, in registers, and what the bias needs, in
shared memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.arithmetic import LOG2E
from rope_jax_kernels.attention.kernel import Needs, Operands
from rope_jax_kernels.attention.mosaic_neighborhood import (
    Plan,
    Program,
    cut,
    launch,
    make_tables,
    map_of_numbers,
)
from rope_jax_kernels.attention.mosaic_program import (
    COLUMN,
    TILE,
    angle_gradient,
    spread,
    sum_freqs_gradient,
    zeros,
)
from rope_jax_kernels.attention.neighborhood_boxes import KEYS, QUERIES, ROWS
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.mosaic import in_sets, repeat, store

PIECE = 8  # columns of a row of keys


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`."""
    (*data, lse, out), turning, bias = operands
    run = functools.partial(in_sets, apart=needs.freqs or needs.bias)
    tables = make_tables(task, QUERIES, turning, bias)
    by_query = functools.partial(launch_queries, task, needs)
    dq, delta, *sums = run(by_query, (*data, out, lse), tables)
    tables = make_tables(task, KEYS, turning, bias)
    by_key = functools.partial(launch_keys, task, needs)
    # A kernel cannot write in place what varies over axes of `jax.shard_map`.
    in_place = task.packed and not jax.typeof(dq).manual_axis_type.varying
    results = run(by_key, (*data, lse, delta, *[dq] * in_place), tables)
    count = 1 if in_place else 2
    gradients, key_sums = results[:count], results[count:]
    if not task.packed:
        gradients = dq, *gradients
    elif not in_place:
        for first, x in zip(task.offsets()[1:], gradients, strict=True):
            dq = dq.at[:, :, first : first + task.heads].set(x)
        gradients = (dq,)
    partial, dbias = (), None
    if needs.freqs:
        of_angles = (QUERIES, sums[-1]), (KEYS, key_sums[0])
        partial = tuple(
            sum_freqs_gradient(x, turning[2], cut(part, task).tokens()[0]) for part, x in of_angles
        )
    if needs.bias:
        boxes, by_slot = cut(QUERIES, task), sums[0]
        by_slot = by_slot.sum((0, 1)).reshape(boxes.classes, boxes.tiles, *by_slot.shape[3:])
        dbias = boxes.fold(by_slot.sum(0).swapaxes(3, 4))
    return gradients, partial, dbias


def launch_queries(task: Task, needs: Needs, arrays: tuple, tables: tuple, sets: int) -> tuple:
    """The gradient of the queries, delta, and sums of the angles' and the bias', for `in_sets`."""
    q, boxes = arrays[0], cut(QUERIES, task)
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype), map_of_numbers(task, q.shape[0])]
    held_sums = [(boxes.reach, boxes.width // PIECE, ROWS, PIECE)] * needs.bias
    terms = task, needs, arrays, tables, sets, outputs
    return launch(Queries, QUERIES, *terms, held_sums=held_sums)


def launch_keys(task: Task, needs: Needs, arrays: tuple, tables: tuple, sets: int) -> tuple:
    """The gradients of keys and values, and sums of the angles', for `in_sets`."""
    data, written = arrays[:6], arrays[6:]  # with lse and delta
    out = jax.ShapeDtypeStruct(
        (len(data[0]), task.tokens, task.heads, task.head_dim), data[0].dtype
    )
    return launch(
        Keys, KEYS, task, needs, data, tables, sets, [] if written else [out] * 2, written
    )


class Queries(Program):
    """The gradient of a tile of queries."""

    def __init__(self, refs: tuple, task: Task, plan: Plan, needs: Needs):
        super().__init__(refs, task, plan, needs)
        self.warp_starts = self.starts()

    def pieces(self, row: Any) -> list[Any]:
        """The sums of the gradient of the bias of a row of keys, 8 columns each.

        As rows of 32 bytes, which threads of a warp read and write at once.
        """
        return [self.held_sums[0].at[row, i] for i in range(self.boxes.width // PIECE)]

    def example(self, i: Array, angles: Any) -> Any:
        """Computes the gradient of the i-th example and adds to the sums."""
        _, stage = divide(i, self.plan.stages)
        plgpu.barrier_wait(self.ready.at[stage])
        q, dout, out = (self.load(operand, stage) for operand in (0, 3, 4))
        lse = self.load_numbers(stage)
        delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1)
        q = self.turn_tile(q)
        self.turn_box(1, stage)
        q_factor, dout = self.factor(q), self.factor(dout)
        unit, width = np.float32(self.task.scale * LOG2E), self.boxes.width

        def body(row: Array, dq: Array) -> Array:
            rows = [x + row for x in self.warp_starts]
            added = self.load_added(self.boxes.row_kind(row))
            logits = self.multiply(added, q_factor, 1, stage, rows, by_token=True)
            dweights = self.sum(zeros(width))
            dweights = self.multiply(dweights, dout, 2, stage, rows, by_token=True)
            logits, dweights = self.total(logits), self.total(dweights)
            weights = jnp.exp2(logits * unit - spread(lse, width))
            dlogits = weights * (dweights - spread(delta, width))
            for i, piece in enumerate(self.pieces(row) if self.needs.bias else ()):
                total = plgpu.load(piece, layout=TILE, optimized=False)
                total += dlogits[:, PIECE * i : PIECE * (i + 1)]
                store(piece, total, interpret=self.task.interpret)
            return self.multiply(dq, self.factor(dlogits.astype(self.dtype)), 1, stage, rows)

        dq = repeat(self.boxes.reach, body, self.sum(zeros(self.task.head_dim)))
        dq = self.total(dq) * np.float32(self.task.scale)
        if self.needs.freqs:
            angles += angle_gradient(q, dq, self.task.pairs)
        dq = self.turn_tile(dq, back=True)
        self.finish(i, stage, [(self.targets[0], 0, dq), (self.targets[1], 0, delta)])
        return angles

    def run_examples(self) -> None:
        """Computes all examples, and writes the sums."""
        rows = range(self.boxes.reach if self.needs.bias else 0)
        for piece in (piece for row in rows for piece in self.pieces(row)):
            store(piece, zeros(PIECE), interpret=self.task.interpret)
        super().run_examples()
        for row in rows:
            for i, piece in enumerate(self.pieces(row)):
                total = plgpu.load(piece, layout=TILE, optimized=False)
                target = self.select_program(self.targets[2]).at[row, i]
                store(target, total, interpret=self.task.interpret)


class Keys(Program):
    """The gradients of a tile of keys and values."""

    def __init__(self, refs: tuple, task: Task, plan: Plan, needs: Needs):
        super().__init__(refs, task, plan, needs)
        _, *heads = self.task.offsets()
        if len(self.targets) - self.needs.freqs == 1:  # the packed gradient, in place
            self.gradients = [(self.targets[0], head) for head in heads]
        else:
            self.gradients = [(target, 0) for target in self.targets[:2]]
        # The rows of queries of this warp; interpreted, all: the table masks those of other warps.
        self.rows = jnp.int32(0), self.boxes.height - 1
        if not self.task.interpret:
            self.rows = self.boxes.rows_of_queries(self.start[0], *self.warps())

    def example(self, i: Array, angles: Any) -> Any:
        """Computes the gradients of the i-th example and adds to the sum."""
        _, stage = divide(i, self.plan.stages)
        plgpu.barrier_wait(self.ready.at[stage])
        k = self.turn_tile(self.load(1, stage))
        self.turn_box(0, stage)
        k_factor, v_factor = self.factor(k), self.factor(self.load(2, stage))
        unit, (first, last) = np.float32(self.task.scale * LOG2E), self.rows

        def body(step: Array, carry: tuple) -> tuple:
            (dk, dv), row = carry, first + step
            added, zero = self.load_added(row), self.sum(zeros(self.boxes.width))
            logits = self.multiply(added, k_factor, 0, stage, [row], by_token=True)
            dweights = self.multiply(zero, v_factor, 3, stage, [row], by_token=True)
            logits, dweights = self.total(logits), self.total(dweights)
            lse, delta = (
                spread(
                    plgpu.load(x[0].at[stage, row], layout=COLUMN, optimized=False),
                    self.boxes.width,
                    1,
                )
                for x in self.held_maps
            )
            weights = jnp.exp2(logits * unit - lse)
            dlogits = weights * (dweights - delta)
            dv = self.multiply(dv, self.factor(weights.astype(self.dtype)), 3, stage, [row])
            dk = self.multiply(dk, self.factor(dlogits.astype(self.dtype)), 0, stage, [row])
            return dk, dv

        start = self.sum(zeros(self.task.head_dim)), self.sum(zeros(self.task.head_dim))
        dk, dv = repeat(last + 1 - first, body, start)
        dk, dv = self.total(dk) * np.float32(self.task.scale), self.total(dv)
        if self.needs.freqs:
            angles += angle_gradient(k, dk, self.task.pairs)
        dk = self.turn_tile(dk, back=True)
        targets = zip(self.gradients, (dk, dv), strict=True)
        self.finish(i, stage, [(*target, x) for target, x in targets])
        return angles
