"""The backward kernel of `mosaic`: all gradients of global attention over few tokens, for Hopper.

A program owns one head of several successive examples. All its tokens are in shared memory, loaded
by the copy engine with zeros past the last token. Queries and keys are turned there once.

Each warpgroup owns 64 keys and keeps the gradients of these and of their values in registers, while
all loop over blocks of 64 queries. The gradients of a block's logits go through shared memory to
the warpgroup that owns these tokens as queries, so that no product is computed twice: five for each
pair of blocks. Logits are transposed, keys by queries, because weights and gradients of logits then
are operands of the next products as they leave the matrix units.

While a block is computed, the engine writes the gradients of earlier ones, and reads those of the
next example's output.

Registers are what limits the kernel: 128 for each of 512 threads, of which the sums take 64. So
rows are in pieces of 32 channels, which lets products take 32 queries at a time, and numbers that
pass `opaque` hide from the compiler that addresses are the same in each round of a loop; otherwise
it would keep them all.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention import mosaic_program
from rope_jax_kernels.attention.arithmetic import LOG2E
from rope_jax_kernels.attention.kernel import Needs, Operands
from rope_jax_kernels.attention.mosaic_global import MOST_GROUPS, tokens_of_blocks
from rope_jax_kernels.attention.mosaic_program import (
    COLUMN,
    ROWS,
    TILE,
    Program,
    add_products,
    angle_gradient,
    buffer,
    divide_examples,
    join,
    launch,
    load_rows,
    most_groups,
    opaque,
    product,
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
from rope_jax_kernels.mosaic import in_sets, repeat, store

WIDTH = 32  # channels of a piece, and queries of a step
CHUNK = 8  # pairs that turn at a time: more would need more registers
SLOTS = 2  # for gradients of logits: one block of queries is written while another is read


def serves(task: Task) -> bool:
    """True if a program can hold a head's tokens: 256, or 128 in heads of 128."""
    return task.tokens <= ROWS * MOST_GROUPS[task.head_dim]


@dataclasses.dataclass(frozen=True)
class Plan(mosaic_program.Plan):
    """The programs of a task, one for each head. Static.

    Attributes:
        blocks: of 64 tokens.
        pieces: of a row of channels.
    """

    blocks: int
    pieces: int


def plan(task: Task, batch: int, sets: int) -> Plan:
    """The plan for `batch` examples in `sets` that turn alike."""
    blocks = pl.cdiv(task.tokens, ROWS)
    examples = divide_examples(task, 1, batch, sets)
    pieces = task.head_dim // WIDTH
    return Plan(most_groups(task, blocks), **examples, blocks=blocks, pieces=pieces)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, None]:
    """The backward pass of `Kernel`, of a task that it `serves`."""
    (*data, lse, out), turning, _ = operands
    tokens = tokens_of_blocks(task, pl.cdiv(task.tokens, ROWS))
    table = turning_table(turning, tokens)
    run = functools.partial(launch_backward, task, needs)
    results = in_sets(run, (*data, out, lse), table, apart=needs.freqs)
    if not needs.freqs:
        return results, (), None
    *gradients, sums = results
    return tuple(gradients), (sum_freqs_gradient(sums, turning[2], tokens[None]),), None


def launch_backward(
    task: Task, needs: Needs, arrays: tuple, table: tuple, sets: int
) -> tuple[Array, ...]:
    """The gradients of the data and, where needed, sums of those of the angles, for `in_sets`."""
    q = arrays[0]
    cut = plan(task, q.shape[0], sets)
    rows = cut.blocks, cut.pieces, ROWS, WIDTH
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)] * (1 if task.packed else 3)
    if needs.freqs:
        outputs.append(cut.sums(task, cut.blocks * ROWS, task.pairs))
    dlogits = (SLOTS, cut.blocks, ROWS, ROWS)
    # The output is read before the first gradients of logits are written.
    if task.interpret:
        shared = [plgpu.SMEM(dlogits, q.dtype), plgpu.SMEM(rows, q.dtype)]
    else:
        transforms = swizzle_transforms(WIDTH, q.dtype, tiled=True)
        dlogits_buffer = plgpu.SMEM(dlogits, q.dtype, transforms=transforms)
        shared = [plgpu.RefUnion(dlogits_buffer, *buffer(task, rows, q.dtype).refs)]
    scratch = [
        *[buffer(task, rows, q.dtype)] * 4,
        *shared,
        *[plgpu.SMEM((cut.blocks, ROWS), jnp.float32)] * 2,
        plgpu.Barrier(num_arrivals=5 * cut.pieces + 1, num_barriers=cut.blocks),
        plgpu.Barrier(num_arrivals=cut.groups),
    ]
    program, name = functools.partial(Backward, needs=needs), "attention_mosaic_backward"
    operands = arrays, table, outputs, scratch
    return launch(program, name, task, cut, *operands, synchronized=True)


class Backward(Program):
    """Gradients of q, k and v from these, the output's gradient, the output and lse.

    [B, L, N, D], or packed in one array; and where needed the sum of that of the angles by slot.
    """

    plan: Plan

    def __init__(self, refs: tuple, task: Task, plan: Plan, needs: Needs):
        super().__init__(refs, task, plan, sources=6)
        take = self.take
        targets = [take() for _ in range(1 if task.packed else 3)]
        self.targets = targets * 3 if task.packed else targets
        self.sums = take() if needs.freqs else None
        # Of q, k, v, the output's gradient, the output: for the copy engine and the matrix units.
        self.rows = [self.take_memory() for _ in range(4)]
        if task.interpret:
            self.dlogits = take()
            self.rows.append(self.take_memory())
        else:
            self.dlogits, *views = take()
            self.rows.append(tuple(views))
        self.held_lse, self.delta, self.ready, self.meeting = (take() for _ in range(4))

    def blocks(self) -> list[Array]:
        """The blocks of this warpgroup."""
        return [opaque(x) for x in self.own_blocks(self.plan.blocks)]

    def parts(self, operand: int, ref: Any, i: Array | int, block: Array) -> list[Any]:
        """The pieces of a block of the i-th example in an array of operand 0 to 4."""
        head = opaque(self.head) + (*self.task.offsets(), 0, 0)[operand]
        place = self.first + i, slice_block(block), head
        return [ref.at[*place, pl.ds(n * WIDTH, WIDTH)] for n in range(self.plan.pieces)]

    def fetch(self, operand: int, i: Array | int, block: Array) -> None:
        """Starts the copy of a block of rows of the i-th example."""
        for number, part in enumerate(self.parts(operand, self.sources[operand], i, block)):
            held = self.rows[operand][0].at[block, number]
            plgpu.copy_gmem_to_smem(part, held, self.ready.at[block])

    def fetch_rows(self, i: Array | int) -> None:
        """Starts the copies of the blocks of this warpgroup, except the output's gradient."""

        def copies() -> None:
            for block in self.blocks():
                for operand in (0, 1, 2, 4):
                    self.fetch(operand, i, block)

        self.by_one_warp(0, copies)

    def fetch_gradient(self, i: Array | int, block: Array) -> None:
        """Starts the copies of the output's gradient and lse."""

        def copies() -> None:
            self.fetch(3, i, block)
            source = self.sources[5].at[self.first + i, self.head, slice_block(block)]
            plgpu.copy_gmem_to_smem(source, self.held_lse.at[block], self.ready.at[block])

        self.by_one_warp(1, copies)

    def write(self, operand: int, i: Array, block: Array, x: Float[Array, "64 D"]) -> None:
        """Replaces the rows of q, k or v by their gradient and starts copying it out."""
        store_rows(self.rows[operand][1].at[block], x)
        plgpu.commit_smem()

        def copies() -> None:
            for number, part in enumerate(self.parts(operand, self.targets[operand], i, block)):
                plgpu.copy_smem_to_gmem(self.rows[operand][0].at[block, number], part)

        self.by_one_warp(2, copies)

    def turn(
        self, rows: list[Float[Array, "64 D"]], block: Array, *, back: bool = False
    ) -> list[Float[Array, "64 D"]]:
        """Turns rows of a block (or turns them back) and rounds them once, to the data's dtype."""
        pairs = self.task.pairs
        members = [([], []) for _ in rows]
        for pair in range(0, pairs, CHUNK):
            angles = self.turns(slice_block(block), first=pair, pairs=CHUNK)
            for x, (first, second) in zip(rows, members, strict=True):
                some = join([x[:, n : n + CHUNK] for n in (pair, pairs + pair)])
                turned = turn(some, angles, self.dtype, back=back)
                first.append(turned[:, :CHUNK])
                second.append(turned[:, CHUNK:])
        if 2 * pairs < self.task.head_dim:
            for x, (_, second) in zip(rows, members, strict=True):
                second.append(x[:, 2 * pairs :].astype(self.dtype))
        return [join([*first, *second]) for first, second in members]

    def add_angles(
        self, operand: int, block: Array, gradient: Float[Array, "64 D"], *, begins: Any
    ) -> None:
        """Adds the gradient of a block's angles to this program's sums, or starts the sums.

        Computed from the turned queries or keys (0 or 1) and their gradient. No two threads add to
        the same number.
        """
        for pair in range(0, self.task.pairs, CHUNK) if self.sums is not None else ():
            block, members = opaque(block), (pair, self.task.pairs + pair)
            held = self.rows[operand][1].at[block]
            rows = [plgpu.load(held.at[first // WIDTH], layout=TILE) for first in members]
            starts = [first % WIDTH for first in members]
            x = [y[:, start : start + CHUNK] for y, start in zip(rows, starts, strict=True)]
            g = join([gradient[:, first : first + CHUNK] for first in members])
            total = self.select_program(self.sums).at[slice_block(block), pl.ds(pair, CHUNK)]
            before = plgpu.load(total, layout=TILE, optimized=False)
            total_now = jnp.where(begins, 0, before) + angle_gradient(join(x), g, CHUNK)
            store(total, total_now, interpret=self.task.interpret)

    def prepare(self, block: Array) -> None:
        """Computes delta of a block's queries, and turns its queries and keys."""
        out, dout = (
            load_rows(self.rows[operand][1].at[block]).astype(jnp.float32) for operand in (4, 3)
        )
        self.delta.at[block][...] = jnp.sum(out * dout, axis=1)
        if self.table is not None:
            turned = self.turn(
                [load_rows(self.rows[operand][1].at[block]) for operand in (0, 1)], block
            )
            for operand, x in enumerate(turned):
                store_rows(self.rows[operand][1].at[block], x)

    def products(
        self, pairs: list[tuple[int, int]], keys: Array, queries: Array, half: Any
    ) -> list[Float[Array, "64 32"]]:
        """Products of a block of keys (values) with half a block of queries (their gradient)."""
        views = [(self.rows[a][1].at[keys], self.rows[b][1].at[queries]) for a, b in pairs]
        if self.task.interpret:
            return [
                sum(product(a[i], b[i, half].T) for i in range(self.plan.pieces)) for a, b in views
            ]

        def multiply(*totals: Any) -> list[Array]:
            for total, (a, b) in zip(totals, views, strict=True):
                for i in range(self.plan.pieces):
                    plgpu.wgmma(total, a.at[i], b.at[i, half].transpose((1, 0)))
            return [total[...] for total in totals]

        return pl.run_scoped(multiply, *[plgpu.ACC((ROWS, WIDTH), jnp.float32)] * len(pairs))

    def query_products(self, slot: Array) -> Float[Array, "64 D"]:
        """Gradients of the logits of a block of queries times all keys."""

        def body(block: Array, sums: list[Array]) -> list[Array]:
            dlogits = self.dlogits.at[slot, block].transpose((1, 0))
            (sums,) = add_products(self.task, [sums], [(dlogits, self.rows[1][1].at[block])])
            return sums

        return join(repeat(self.plan.blocks, body, self.zeros()))

    def zeros(self) -> list[Float[Array, "64 32"]]:
        """The pieces of a sum before its first term."""
        return [zeros(WIDTH)] * self.plan.pieces

    def step(self, queries: Array, slot: Array, keys: Array, sums: list) -> list:
        """Adds the part of a block of queries to the gradients of a block of keys and values.

        Writes the gradients of the logits for those of the queries.
        """

        def body(number: Array, sums: list) -> list:
            half, here = pl.ds(number * WIDTH, WIDTH), opaque(keys)

            def spread_by_query(ref: Any) -> Float[Array, "64 32"]:
                x = plgpu.load(ref.at[queries, half], layout=COLUMN, optimized=False)
                return spread(x, WIDTH, 1)

            logits, dweights = self.products([(1, 0), (2, 3)], here, queries, half)
            logits = logits * np.float32(self.task.scale * LOG2E) - spread_by_query(self.held_lse)
            if self.task.tokens % ROWS:
                # For keys past the last token, which are zeros, any weight will do whose product
                # with delta is finite. All other weights are at most one.
                logits = jnp.minimum(logits, 0)
            weights = jnp.exp2(logits)
            dlogits = (weights * (dweights - spread_by_query(self.delta))).astype(self.dtype)
            dout, q = (self.rows[operand][1].at[queries] for operand in (3, 0))
            terms = [(weights.astype(self.dtype), dout), (dlogits, q)]
            sums = add_products(self.task, sums, terms, half)
            self.dlogits.at[slot, here, :, half][...] = dlogits
            return sums

        return repeat(ROWS // WIDTH, body, sums)

    def finish_queries(self, i: Array, block: Array, slot: Array) -> None:
        """Writes the gradient of a block of queries; refills what is no longer read."""
        block = opaque(block)
        dq = self.query_products(slot) * np.float32(self.task.scale)
        self.add_angles(0, block, dq, begins=i == 0)
        self.write(0, i, block, *self.turn([dq], block, back=True))

        pl.when(i + 1 < self.items)(lambda: self.fetch_gradient(i + 1, block))

    def example(self, i: Array) -> None:
        """Computes all gradients of the i-th example."""
        for block in range(self.plan.blocks):
            plgpu.barrier_wait(self.ready.at[block])
        for block in self.blocks():
            self.prepare(block)
        self.meet()

        def body(queries: Array, carry: list) -> list:
            _, slot = divide(queries, SLOTS)
            carry = [
                self.step(queries, slot, keys, sums)
                for keys, sums in zip(self.blocks(), carry, strict=True)
            ]
            self.meet()
            owner, _ = divide(queries, self.plan.blocks // self.plan.groups)
            pl.when(owner == self.group)(functools.partial(self.finish_queries, i, queries, slot))
            return carry

        carry = [[self.zeros(), self.zeros()] for _ in self.blocks()]
        if self.plan.blocks == 1:
            carry = body(jnp.int32(0), carry)
        else:
            carry = repeat(self.plan.blocks, body, carry)
        self.meet()  # the keys have been read
        for block, (dv, dk) in zip(self.blocks(), carry, strict=True):
            self.write(2, i, block, join(dv).astype(self.dtype))
            dk = join(dk) * np.float32(self.task.scale)
            self.add_angles(1, block, dk, begins=False)
            self.write(1, i, block, *self.turn([dk], block, back=True))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(i + 1 < self.items)(lambda: self.fetch_rows(i + 1))

    def run(self) -> None:
        """Computes all examples of the program."""
        self.fetch_rows(0)
        for block in self.blocks():
            self.fetch_gradient(0, block)
        pl.loop(0, self.items)(self.example)
        plgpu.wait_smem_to_gmem(0)
